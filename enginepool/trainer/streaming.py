"""Tensors into buckets, and buckets into the process group: what rank 0 of an update does with its bytes.

Two buffers take turns: while one is broadcast the other is filled. Both are filled, and their digest is computed, before there
is anybody to send to. On a GPU all of it runs on a stream of its own, after what the caller's stream had to do when the update
began, and nothing waits for the device but what would be more than a bucket ahead of it.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from enginepool.errors import BadRequest
from enginepool.trainer.buffers import Buffers, Expected, Filling
from enginepool.trainer.tensors import HeldTensors, SendPlan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.digest import Digest
from enginepool.transfer.process_group import Broadcast, ProcessGroup

torch: Any = importlib.import_module("torch")

#: buckets that are filled before the first is sent: those that there are buffers for
_AHEAD = 2


class Stopped(Exception):
    """The update was given up meanwhile."""


class Feed:
    """The tensors of a plan, by their places, pulled in order as buckets need them and dropped when they are through.

    Args:
        lockstep: the other trainer ranks, which pull theirs at the same time.
        stopped: whether the update was given up.
    """

    def __init__(self, plan: SendPlan, expected: list[Expected], lockstep: TrainerRanks, stopped: Callable[[], bool]) -> None:
        self._expected = expected
        self._lockstep = lockstep
        self._stopped = stopped
        self._tensors: Iterator[tuple[str, Any]] = plan.tensors()
        self._held: dict[int, Any] = {}
        self._memory = HeldTensors()
        self._pulled = 0

    def fill(self, filling: Filling, free: Callable[[], None] | None = None) -> None:
        """Write the bucket's bytes; what no tensor covers becomes zeros. `free`: waits until its memory may be written.

        Raises:
            BadRequest: a tensor is not what was announced, or there are too few.
            RankFailed: another trainer rank could not give its part.
            Stopped: the update was given up.
        """
        if self._stopped():
            raise Stopped
        self._lockstep.together(filling.until - self._pulled, lambda: self._pull(filling.until))
        if free is not None:
            free()
        if self._stopped():
            # The source may have kept this thread for long: whoever gave up does not wait for it, and has the memory again.
            raise Stopped
        held = self._held
        for targets, sources in filling.copies:
            # On a GPU many small copies are one launch. From memory of the host they are over when this returns.
            torch._foreach_copy_(targets, [held[place] if part is None else held[place][part] for place, part in sources])
        if filling.gaps:
            torch._foreach_zero_(filling.gaps)
        for place in filling.through:
            self._memory.drop(held.pop(place))

    def end(self) -> None:
        """All buckets are filled: only tensors without bytes may be left. Raises BadRequest and RankFailed as `fill`."""
        total = len(self._expected)
        self._lockstep.together(total - self._pulled + 1, lambda: (self._pull(total), self._have_no_more()))

    def _pull(self, until: int) -> None:
        """Have all tensors before place `until`. The other ranks take as many, whatever is wrong with one here: their
        collectives would wait for this one."""
        wrong: Exception | None = None
        for expected in self._expected[self._pulled : until]:
            found = self._next(expected.name)
            if found is None:
                raise wrong or BadRequest(
                    f"source: ended after {self._pulled} of {len(self._expected)} tensors; {expected.name} is missing",
                    field=f"source[{expected.name}]",
                )
            try:
                words = expected.words(*found) if wrong is None else None
                if words is not None:
                    self._memory.add(expected.name, words)
            except Exception as error:
                if self._lockstep.alone:
                    raise
                wrong, words = error, None
            if expected.nbytes and words is not None:
                self._held[self._pulled] = words
            self._pulled += 1
        if wrong is not None:
            raise wrong

    def _have_no_more(self) -> None:
        found = self._next("the end of the source")
        if found is not None:
            raise BadRequest(f"source: {found[0]} came after the last tensor that was announced", field=f"source[{found[0]}]")

    def _next(self, what: str) -> tuple[str, Any] | None:
        with self._lockstep.reading(what):
            return next(self._tensors, None)


class Sending:
    """The bytes of one update, on the thread that makes it.

    Args:
        lockstep: the other trainer ranks.
        stopped: whether the update was given up.
        after: a CUDA event to wait for before anything is read.
    """

    def __init__(
        self,
        plan: SendPlan,
        buffers: Buffers,
        bucket_bytes: int,
        lockstep: TrainerRanks,
        stopped: Callable[[], bool],
        after: Any = None,
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._bucket_bytes = bucket_bytes
        self._lockstep = lockstep
        self._stopped = stopped
        self._after = after
        self._digest = Digest()
        self._fillings: list[Filling] = []
        self._feed: Feed | None = None

    def prepare(self) -> None:
        """Read what fits the buffers, before anybody waits for it.

        Raises:
            BadRequest, RankFailed: as `send`.
            Stopped: the update was given up.
        """
        with self._buffers.aside(self._after):
            cut = self._buffers.cut(self._plan.manifest, self._bucket_bytes)
            self._fillings = cut.fillings
            self._feed = Feed(self._plan, cut.expected, self._lockstep, self._stopped)
            self._lockstep.begin(self._plan)
            for filling in self._fillings[:_AHEAD]:
                self._feed.fill(filling)
                self._digest.add(filling.bytes, filling.at)

    def send(self, group: ProcessGroup, timeout_s: float, progress: Callable[[int], None]) -> tuple[str, int]:
        """Broadcast everything until nobody needs this rank any more; returns the digest and the bytes of the space.

        Args:
            timeout_s: seconds for each broadcast.
            progress: called with the bytes that are sent so far.

        Raises:
            BadRequest: the source does not give what was announced.
            RankFailed: another trainer rank does not.
            CollectiveError: the group is of no more use.
            Stopped: the update was given up.
        """
        feed = self._feed
        assert feed is not None, "prepare comes first"
        with self._buffers.aside():
            digest, sent = self._send(feed, group, timeout_s, progress)
            if self._buffers.stream is not None:
                self._buffers.stream.synchronize()
        return digest, sent

    def _send(self, feed: Feed, group: ProcessGroup, timeout_s: float, progress: Callable[[int], None]) -> tuple[str, int]:
        ways: list[Broadcast] = []
        sent = settled = 0

        def settle(most: int) -> None:
            """Let at most so many broadcasts be on their way."""
            nonlocal sent, settled
            while len(ways) - settled > most:
                ways[settled].wait(timeout_s)
                sent += self._fillings[settled].bytes.numel()
                settled += 1
                progress(sent)

        for k, filling in enumerate(self._fillings):
            if k >= _AHEAD:
                feed.fill(filling, lambda k=k: ways[k - _AHEAD].order(timeout_s))
            elif self._stopped():
                raise Stopped
            ways.append(group.begin(filling.bytes))
            if k >= _AHEAD:
                self._digest.add(filling.bytes, filling.at)
            # One more is filled on the device while the last of these is sent.
            settle(_AHEAD)
        feed.end()
        # The last broadcasts that the digest's stream waits for are over. It is known before those that are still on their way.
        digest = self._digest.text()
        settle(0)
        group.finish(timeout_s)
        return digest, sent
