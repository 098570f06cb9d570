"""Trainer ranks in step: before the collectives of a gather rank 0 says whether they come, and then all say how it went.

So no rank enters a collective that others have left: an update that rank 0 aborts ends on every rank before the next one, and
a rank that fails makes all of them give up. The group is a torch process group that the caller made for this alone.

If a rank fails or dies while the others gather that very tensor, their threads stay in the gather for as long as the caller's
own process group lets them. Heartbeats tell the callers of all ranks within seconds. The next update can begin when the threads
are back.
"""

import importlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from enginepool.errors import BadRequest
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weights import Published
from enginepool.trainer.heartbeats import Heartbeats, RankFailed
from enginepool.trainer.tensors import SendPlan

torch: Any = importlib.import_module("torch")

log = logging.getLogger("enginepool")

_END, _BEGIN, _SENT = -1, -2, -3
_ELSEWHERE = "another trainer rank could not give its part of the weights; its own error says why"
#: After so many seconds in the caller's source or gather, errors name the tensor that is waited for.
_LONG_S = 3.0
#: what the ranks call the version of a caller that leaves it to the pool
_NEXT = -1


class RoundEnd(msgspec.Struct):
    """How an update ended. `again_s`: all ranks try it again after so many seconds."""

    outcome: Published | ErrorReply
    again_s: float | None = None


_end = msgspec.json.Decoder(RoundEnd)


class TrainerRanks:
    """Rank 0's side of the update to `version`.

    Args:
        group: the process group of the trainer's ranks.
        version: that the caller named, or None.
        heartbeats: of this rank in this update, started; None: there is no other rank.
    """

    def __init__(self, group: Any = None, version: int | None = 0, heartbeats: Heartbeats | None = None) -> None:
        self._version = _NEXT if version is None else version
        self._others = None if heartbeats is None else Collectives(group, heartbeats)
        #: the tensor that the source is asked for, or that is gathered, and since when
        self._reading = ("", 0.0)

    @property
    def alone(self) -> bool:
        """No other rank takes tensors when this rank does."""
        return self._others is None

    @contextmanager
    def reading(self, name: str) -> Generator[None]:
        """The caller's source or gather has this thread, for the tensor `name`."""
        self._reading = name, time.monotonic()
        try:
            yield
        finally:
            self._reading = "", 0.0

    @property
    def stuck_at(self) -> str:
        """The tensor that the caller's source or gather has had this thread for, for long; "" if it has not. Any thread."""
        name, since = self._reading
        return name if time.monotonic() - since > _LONG_S else ""

    def begin(self, plan: SendPlan) -> None:
        """Before the first tensor: all ranks bring the same version, can read their source, and have the same sharded tensors.

        Raises:
            BadRequest: ranks bring different versions, as every one of them hears.
            RankFailed: one of the others cannot go on.
        """
        others = self._others
        if others is None:
            return
        others.heartbeats.wait_for_all()
        others.broadcast([_BEGIN, plan.sharded])
        wrong = others.other_version(self._version)
        failures = others.failures(wrong)
        if wrong is not None:
            raise wrong
        if failures:
            raise RankFailed(others.heartbeats.why(broken=False) or _ELSEWHERE)

    def together(self, count: int, step: Callable[[], object]) -> None:
        """All ranks take `count` tensors from their source, this one by `step`.

        Raises:
            RankFailed: another rank failed, or is gone.
            Exception: the error of `step`, once all ranks know of it.
        """
        others = self._others
        if others is None:
            step()
            return
        others.broadcast([count, 0])
        try:
            step()
        except BaseException as error:
            # The other ranks wait for this rank. The error is raised again.
            others.heartbeats.fail(as_error(error))
            others.failures(error)
            raise
        if others.failures(None):
            raise RankFailed(others.heartbeats.why(broken=False) or _ELSEWHERE)

    def sent(self) -> None:
        """The source is no longer read, as the other ranks hear now: they may train before this one calls `finish`.

        Raises:
            RankFailed: a rank is gone.
        """
        if self._others is not None:
            self._others.broadcast([_SENT, 0])

    def end(self, outcome: Published | ErrorReply, again_s: float | None = None) -> None:
        """How the update ended: the last word, which every update has."""
        others = self._others
        if others is None:
            return
        text = msgspec.json.encode(RoundEnd(outcome, again_s))
        untold = ""
        try:
            others.heartbeats.wait_for_all(also_failed=True)
            others.broadcast([_END, len(text)])
            others.broadcast(list(text))
        except RankFailed as error:
            log.warning("the other trainer ranks cannot be told how the update ended: %s", error)
            untold = outcome.message if isinstance(outcome, ErrorReply) else str(error)
        finally:
            others.heartbeats.end(untold)


def follow(
    group: Any, plan: SendPlan | Exception, version: int | None, heartbeats: Heartbeats, sent: Callable[[], None]
) -> tuple[RoundEnd, Exception | None]:
    """What the ranks above 0 do: take tensors when rank 0 says so, until it says how the update ended.

    Args:
        plan: of this rank, or why it has none.
        version: that this rank brings, which is to be rank 0's; None: rank 0 says.
        heartbeats: as of `TrainerRanks`.
        sent: called when the source is no longer read; not in an update that ends before.

    Returns the end, and what is wrong with this rank's own part. Raises RankFailed: rank 0 is gone.
    """
    if isinstance(plan, Exception):
        heartbeats.fail(plan)
    untold = ""
    try:
        heartbeats.wait_for_all()
        return _follow(Collectives(group, heartbeats), plan, _NEXT if version is None else version, sent)
    except RankFailed as error:
        untold = str(error)
        raise
    finally:
        heartbeats.end(untold)


def _follow(
    others: "Collectives", plan: SendPlan | Exception, version: int, sent: Callable[[], None]
) -> tuple[RoundEnd, Exception | None]:
    own = plan if isinstance(plan, Exception) else None
    source: Iterator[object] | None = None
    while True:
        count, word = others.broadcast([0, 0])
        if count == _END:
            return _end.decode(bytes(others.broadcast([0] * word))), own
        if count == _SENT:
            sent()
            continue
        if count == _BEGIN:
            # Also without a plan: it is a collective.
            own = others.other_version(version) or own
        try:
            if isinstance(plan, SendPlan) and own is None:
                if count == _BEGIN:
                    _compare(plan, word)
                source = plan.tensors() if source is None else source
                for _ in range(count):
                    next(source, None)
        except BaseException as error:
            # Rank 0 waits for this rank. The error is raised when all ranks have left the update.
            own = as_error(error)
            others.heartbeats.fail(own)
        others.failures(own)


class Collectives:
    """The collectives by which trainer ranks go in step: all ranks call the same ones in the same order.

    Each raises RankFailed if a rank is gone. A collective only says that it failed; the heartbeats know which rank is gone.
    """

    def __init__(self, group: Any, heartbeats: Heartbeats) -> None:
        self.heartbeats = heartbeats
        self._group = group
        self._device = torch.device("cuda" if "nccl" in str(group.name()).lower() else "cpu")

    def broadcast(self, numbers: list[int]) -> list[int]:
        """The numbers of rank 0; the other ranks give as many."""
        return self._done(self._group.broadcast, numbers, 0)

    def failures(self, mine: BaseException | None) -> int:
        """How many ranks failed; `mine`: why this rank did."""
        return self._done(self._group.allreduce, [int(mine is not None)])[0]

    def other_version(self, own: int) -> BadRequest | None:
        """What is wrong if ranks bring different versions: one of them is ahead of the others."""
        group = self._group
        versions = self._done(group.allreduce, [own if rank == group.rank() else 0 for rank in range(group.size())])
        for rank, version in enumerate(versions):
            if version != versions[0]:
                first, other = ("None" if one == _NEXT else one for one in (versions[0], version))
                text = f"version: {first} on trainer rank 0, {other} on rank {rank}; all ranks make the same calls"
                return BadRequest(text, field="version")
        return None

    def _done(self, collective: Callable[..., Any], numbers: list[int], *options: int) -> list[int]:
        """What the collective makes of these numbers."""
        try:
            tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
            collective(tensor, *options).wait()
            return tensor.tolist()
        except RuntimeError as error:
            # The error of torch for a group that has lost a rank.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RankFailed(self.heartbeats.why(broken=True) or f"a trainer rank is gone: {reason}") from error


def store_of(group: Any) -> Any:
    """The store of a trainer's process group. Raises BadRequest: it has none."""
    try:
        store = torch.distributed.distributed_c10d._get_process_group_store(group)
    except (KeyError, AttributeError):
        text = "trainer_group: no process group of this program; expected one from torch.distributed.new_group"
        raise BadRequest(text, field="trainer_group") from None
    with suppress(AttributeError, NotImplementedError, RuntimeError):  # not every store can
        # Another connection: an operation that waits on the caller's own store would hold up this one.
        store = store.clone()
    return torch.distributed.PrefixStore("enginepool", store)


def _compare(plan: SendPlan, sharded: int) -> None:
    """Each tensor is gathered out of what all ranks give at its place. Raises BadRequest: they would give different ones."""
    if sharded and plan.sharded not in (0, sharded):
        raise BadRequest(
            "source: its sharded tensors differ from rank 0's in a name, shape, dtype or their order; all ranks give the same",
            field="source",
        )


def as_error(error: BaseException) -> Exception:
    """What a caller's own code raised, as an exception for a future: asyncio carries no StopIteration, and an error that ends a
    program (SystemExit) must not end an event loop from a thread."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"the source raised {type(error).__name__}" + (f": {error}" if str(error) else ""))
    told.__cause__ = error
    return told
