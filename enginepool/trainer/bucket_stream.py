"""The bytes of one update into buckets, and the buckets into the process group: rank 0's part.

Two buffers take turns: while one is broadcast the other is filled. Both are filled, and their digest is computed, before the
group has formed. On a GPU all of it runs on a stream of its own, behind the work of the caller's stream when the update began.
Only a bucket that is two ahead waits for the device.
"""

from collections.abc import Callable
from typing import Any

from enginepool.trainer.buffers import Buffers, Filling
from enginepool.trainer.tensor_feed import Stopped, TensorFeed
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import TrainerRanks
from enginepool.transfer.digest import Digest
from enginepool.transfer.process_group import Broadcast, ProcessGroup

#: Buckets that are filled before the first is sent: one for each buffer.
_AHEAD = 2


class BucketStream:
    """The bytes of one update, on the thread that sends them.

    Args:
        ranks: the other trainer ranks.
        stopped: whether the update was aborted.
        after: a CUDA event to wait for before anything is read.
    """

    def __init__(
        self,
        plan: SendPlan,
        buffers: Buffers,
        bucket_bytes: int,
        ranks: TrainerRanks,
        stopped: Callable[[], bool],
        after: Any = None,
    ) -> None:
        self._plan, self._buffers, self._bucket_bytes = plan, buffers, bucket_bytes
        self._ranks, self._stopped, self._after = ranks, stopped, after
        self._digest = Digest()
        self._fillings: list[Filling] = []
        self._feed: TensorFeed | None = None

    def prepare(self) -> None:
        """Fill the buffers. Raises BadRequest, RankFailed and Stopped as `TensorFeed.fill`."""
        with self._buffers.aside(self._after):
            cut = self._buffers.cut(self._plan.manifest, self._bucket_bytes)
            self._fillings = cut.fillings
            self._feed = TensorFeed(self._plan, cut.expected, self._ranks, self._stopped)
            self._ranks.begin(self._plan)
            for filling in self._fillings[:_AHEAD]:
                self._feed.fill(filling)
                self._digest.add(filling.bytes, filling.at)

    def send(self, group: ProcessGroup, timeout_s: float, progress: Callable[[int], None]) -> tuple[str, int]:
        """Broadcast all buckets, until no other rank needs this one. Returns the digest, and the bytes that were sent.

        Args:
            timeout_s: seconds for each broadcast.
            progress: called with the bytes that are sent so far.

        Raises:
            BadRequest, RankFailed, Stopped: as `prepare`.
            CollectiveError: the group cannot be used again.
        """
        assert self._feed is not None, "prepare comes first"
        with self._buffers.aside():
            sent = self._broadcast(self._feed, group, timeout_s, progress)
            if self._buffers.stream is not None:
                self._buffers.stream.synchronize()
        return sent

    def _broadcast(
        self, feed: TensorFeed, group: ProcessGroup, timeout_s: float, progress: Callable[[int], None]
    ) -> tuple[str, int]:
        broadcasts: list[Broadcast] = []
        sent = settled = 0

        def settle(most: int) -> None:
            """Wait until at most so many broadcasts are under way."""
            nonlocal sent, settled
            while len(broadcasts) - settled > most:
                broadcasts[settled].wait(timeout_s)
                sent += self._fillings[settled].bytes.numel()
                settled += 1
                progress(sent)

        for k, filling in enumerate(self._fillings):
            if k >= _AHEAD:
                feed.fill(filling, lambda k=k: broadcasts[k - _AHEAD].order(timeout_s))
            elif self._stopped():
                raise Stopped
            broadcasts.append(group.begin(filling.bytes))
            if k >= _AHEAD:
                self._digest.add(filling.bytes, filling.at)
            # One more bucket is filled on the device while the last of these is sent.
            settle(_AHEAD)
        feed.end()
        # The digest's stream waits for all broadcasts but the last two, so it is known before those are complete.
        digest = self._digest.text()
        settle(0)
        group.finish(timeout_s)
        return digest, sent
