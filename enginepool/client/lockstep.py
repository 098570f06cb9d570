"""Trainer ranks in step: before the collectives of a gather rank 0 says whether they come, and then all say how it went.

So nobody enters a collective that others have left: an update that rank 0 gives up ends on every rank before the next one, and
a rank that fails makes all of them give up. The group is a torch process group that the caller made for this alone.
"""

import contextlib
import importlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from enginepool.protocol.messages import Failure
from enginepool.protocol.updates import Published

torch: Any = importlib.import_module("torch")

_END = -1
_outcome: "msgspec.json.Decoder[Published | Failure]" = msgspec.json.Decoder(Published | Failure)


class RankFailed(Exception):
    """Another trainer rank could not do its part, or is gone."""


class Lockstep:
    """Rank 0's side; with no group, or one of a single rank, there is nobody to tell."""

    def __init__(self, group: Any = None) -> None:
        self._group = group if group is not None and group.size() > 1 else None

    @property
    def alone(self) -> bool:
        """Nobody else takes tensors when this rank does."""
        return self._group is None

    def together(self, count: int, step: Callable[[], object]) -> None:
        """All ranks take `count` tensors from their source, this one by `step`.

        Raises:
            RankFailed: one of the others failed, or is gone. Else whatever `step` raises, when all have been told.
        """
        if self._group is None:
            step()
            return
        with _reachable():
            _tell(self._group, [count, 0])
        try:
            step()
        except BaseException:
            # Whatever it is, and it is raised again, the other ranks wait for this one's word.
            with _reachable():
                _failures(self._group, 1)
            raise
        with _reachable():
            failed = _failures(self._group, 0)
        if failed:
            raise RankFailed("another trainer rank could not give its part of the weights; its own log says why")

    def end(self, outcome: Published | Failure) -> None:
        """How the update ended: the last word, which every update has. Where a rank is gone, torch tells the others."""
        if self._group is not None:
            text = msgspec.json.encode(outcome)
            with contextlib.suppress(RankFailed), _reachable():
                _tell(self._group, [_END, len(text)])
                _move(self._group, torch.tensor(list(text), dtype=torch.uint8))


def follow(group: Any, tensors: Callable[[], Iterator[object]]) -> tuple[Published | Failure, Exception | None]:
    """What the ranks above 0 do: take tensors when rank 0 says so, until it says how the update ended.

    Returns that, and what went wrong with this rank's own source.
    """
    own: Exception | None = None
    source: Iterator[object] | None = None
    while True:
        count, length = _heard(group, [0, 0], torch.int64)
        if count == _END:
            return _outcome.decode(bytes(_heard(group, [0] * length, torch.uint8))), own
        try:
            if own is None:
                source = tensors() if source is None else source
                for _ in range(count):
                    next(source, None)
        except BaseException as error:
            # Whatever it is, rank 0 waits for this one's word. It is raised when all ranks have left the update.
            own = as_error(error)
        _failures(group, int(own is not None))


@contextlib.contextmanager
def _reachable() -> Generator[None]:
    """Collectives of the trainer's group that rank 0 begins. Raises RankFailed: it is broken."""
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(f"another trainer rank is gone, or its process group is broken: {error}") from error


def _tell(group: Any, numbers: list[int]) -> None:
    _move(group, torch.tensor(numbers, dtype=torch.int64))


def _heard(group: Any, like: list[int], dtype: Any) -> list[int]:
    return _move(group, torch.tensor(like, dtype=dtype)).tolist()


def _move(group: Any, tensor: Any) -> Any:
    tensor = tensor.to(_device(group))
    group.broadcast(tensor, 0).wait()
    return tensor


def _failures(group: Any, mine: int) -> int:
    """How many ranks failed."""
    tensor = torch.tensor([mine], dtype=torch.int64, device=_device(group))
    group.allreduce(tensor).wait()
    return int(tensor.item())


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
