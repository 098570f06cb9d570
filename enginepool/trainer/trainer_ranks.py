"""Trainer ranks in step: before the collectives of a gather rank 0 says whether they come, and then all say how it went.

So no rank enters a collective that others have left: an update that rank 0 aborts ends on every rank before the next one, and
a rank that fails makes all of them give up. The group is a torch process group that the caller made for this alone.

A rank whose source fails while the others are in the collective of that very tensor leaves their threads there for as long as
the caller's own process group lets them; so does a rank that dies, where that process group does not notice. Heartbeats tell
the callers of all ranks within seconds; the next update can only begin when the threads are back.
"""

import importlib
import logging
import threading
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

_END, _BEGIN = -1, -2
_ELSEWHERE = "another trainer rank could not give its part of the weights; its own log says why"
#: After so long somebody is told what is waited for: a source, a gather, or the other ranks.
_LONG_S = 3.0
#: what the ranks call the version of a caller that leaves it to the pool
_NEXT = -1


class RoundEnd(msgspec.Struct):
    """How an update ended. `again_s`: all ranks try it again after so many seconds."""

    outcome: Published | ErrorReply
    again_s: float | None = None


_end = msgspec.json.Decoder(RoundEnd)


class TrainerRanks:
    """Rank 0's side of the update to `version`; with no group, or one of a single rank, no other rank is told.

    Args:
        version: that the caller named, or None.
        heartbeats: of this rank in this update, started.
    """

    def __init__(self, group: Any = None, version: int | None = 0, heartbeats: Heartbeats | None = None) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._version = _NEXT if version is None else version
        self._heartbeats = heartbeats
        #: the tensor that the source is asked for, or that is gathered, and since when
        self._reading = ("", 0.0)

    @property
    def alone(self) -> bool:
        """No other rank takes tensors when this rank does."""
        return self._group is None

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
        if self._group is None:
            return
        if self._heartbeats is not None:
            self._heartbeats.wait_for_all()
        with _named(self._heartbeats):
            _tell(self._group, [_BEGIN, plan.sharded])
            wrong = _other_version(self._group, self._version)
            failures = _failures(self._group, wrong)
        if wrong is not None:
            raise wrong
        if failures:
            raise self._elsewhere()

    def together(self, count: int, step: Callable[[], object]) -> None:
        """All ranks take `count` tensors from their source, this one by `step`.

        Raises:
            RankFailed: one of the others failed, or is gone. Else whatever `step` raises, when all have been told.
        """
        if self._group is None:
            step()
            return
        with _named(self._heartbeats):
            _tell(self._group, [count, 0])
            try:
                step()
            except BaseException as error:
                # The other ranks wait for this rank. The error is raised again.
                if self._heartbeats is not None:
                    self._heartbeats.fail(as_error(error))
                _failures(self._group, error)
                raise
            failures = _failures(self._group, None)
        if failures:
            raise self._elsewhere()

    def _elsewhere(self) -> RankFailed:
        """Another rank said that it failed."""
        return RankFailed((self._heartbeats.why(broken=False) if self._heartbeats is not None else "") or _ELSEWHERE)

    def end(self, outcome: Published | ErrorReply, again_s: float | None = None) -> None:
        """How the update ended: the last word, which every update has."""
        if self._group is None:
            return
        text = msgspec.json.encode(RoundEnd(outcome, again_s))
        untold = ""
        try:
            if self._heartbeats is not None:
                self._heartbeats.wait_for_all()
            _tell(self._group, [_END, len(text)])
            _move(self._group, torch.tensor(list(text), dtype=torch.uint8))
        except RankFailed as error:
            log.warning("the other trainer ranks cannot be told how the update ended: %s", error)
            untold = outcome.message if isinstance(outcome, ErrorReply) else str(error)
        finally:
            if self._heartbeats is not None:
                self._heartbeats.end(untold)


def follow(
    group: Any, plan: SendPlan | Exception, version: int | None = 0, heartbeats: Heartbeats | None = None
) -> tuple[RoundEnd, Exception | None]:
    """What the ranks above 0 do: take tensors when rank 0 says so, until it says how the update ended.

    Args:
        plan: of this rank, or why it has none.
        version: that this rank brings, which is to be rank 0's; None: rank 0 says.
        heartbeats: as of `TrainerRanks`.

    Returns the end, and what is wrong with this rank's own part. Raises RankFailed: rank 0 is gone.
    """
    own = plan if isinstance(plan, Exception) else None
    if heartbeats is None:
        return _follow(group, plan, version, own, None)
    if own is not None:
        heartbeats.fail(own)
    untold = ""
    try:
        heartbeats.wait_for_all()
        with _named(heartbeats):
            return _follow(group, plan, version, own, heartbeats)
    except RankFailed as error:
        untold = str(error)
        raise
    finally:
        heartbeats.end(untold)


def _follow(
    group: Any, plan: SendPlan | Exception, version: int | None, own: Exception | None, heartbeats: Heartbeats | None
) -> tuple[RoundEnd, Exception | None]:
    mine = _NEXT if version is None else version
    source: Iterator[object] | None = None
    while True:
        count, word = _heard(group, [0, 0], torch.int64)
        if count == _END:
            return _end.decode(bytes(_heard(group, [0] * word, torch.uint8))), own
        if count == _BEGIN:
            # Also without a plan: it is a collective.
            own = _other_version(group, mine) or own
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
            if heartbeats is not None:
                heartbeats.fail(own)
        _failures(group, own)


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


def _other_version(group: Any, own: int) -> BadRequest | None:
    """What is wrong where ranks bring different versions: one of them is ahead of the others. All ranks call it together."""
    with _whole():
        mine = [own if rank == group.rank() else 0 for rank in range(group.size())]
        tensor = torch.tensor(mine, dtype=torch.int64, device=_device(group))
        group.allreduce(tensor).wait()
        versions: list[int] = tensor.tolist()
    for rank, version in enumerate(versions):
        if version != versions[0]:
            first, other = ("None" if one == _NEXT else one for one in (versions[0], version))
            text = f"version: {first} on trainer rank 0, {other} on rank {rank}; all ranks make the same calls"
            return BadRequest(text, field="version")
    return None


def _compare(plan: SendPlan, sharded: int) -> None:
    """Each tensor is gathered out of what all ranks give at its place. Raises BadRequest: they would give different ones."""
    if sharded and plan.sharded not in (0, sharded):
        raise BadRequest(
            "source: its sharded tensors differ from rank 0's in a name, shape, dtype or their order; all ranks give the same",
            field="source",
        )


def _tell(group: Any, numbers: list[int]) -> None:
    _move(group, torch.tensor(numbers, dtype=torch.int64))


def _heard(group: Any, like: list[int], dtype: Any) -> list[int]:
    return _move(group, torch.tensor(like, dtype=dtype)).tolist()


def _move(group: Any, tensor: Any) -> Any:
    with _whole():
        tensor = tensor.to(_device(group))
        group.broadcast(tensor, 0).wait()
        return tensor.cpu()


def _failures(group: Any, mine: BaseException | None) -> int:
    """How many ranks failed."""
    with _whole(), _unheard(mine):
        tensor = torch.tensor([int(mine is not None)], dtype=torch.int64, device=_device(group))
        group.allreduce(tensor).wait()
        return int(tensor.item())


@contextmanager
def _whole() -> Generator[None]:
    """What torch says of a group whose ranks are not all there any more."""
    try:
        yield
    except RuntimeError as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RankFailed(f"a trainer rank is gone: {reason}") from error


@contextmanager
def _named(heartbeats: Heartbeats | None) -> Generator[None]:
    """A collective only says that it failed; the heartbeats know of whom."""
    try:
        yield
    except RankFailed as error:
        if heartbeats is None or not (why := heartbeats.why(broken=True)):
            raise
        raise RankFailed(why) from error


@contextmanager
def _unheard(mine: BaseException | None) -> Generator[None]:
    """Log the error of this rank if the other ranks are not told of it soon: no other code reports it to the caller."""
    if mine is None:
        yield
        return
    text = "the weights' source failed on this trainer rank, and the others do not come to hear of it: they may be in a gather"
    timer = threading.Timer(_LONG_S, log.error, (text + ": %s: %s", type(mine).__name__, mine))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _device(group: Any) -> Any:
    return torch.device("cuda" if "nccl" in str(group.name()).lower() else "cpu")


def as_error(error: BaseException) -> Exception:
    """What a caller's own code raised, as somebody who awaits can be told: asyncio carries no StopIteration, and what ends a
    program (SystemExit) is not to end an event loop from a thread."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"the source raised {type(error).__name__}" + (f": {error}" if str(error) else ""))
    told.__cause__ = error
    return told
