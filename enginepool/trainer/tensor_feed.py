"""The tensors of an update, pulled from the source in order and copied into buckets.

All trainer ranks pull the same tensors at the same time, since pulling one may gather it.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from enginepool.errors import BadRequest
from enginepool.trainer.buffers import Expected, Filling
from enginepool.trainer.tensors import HeldTensors, SendPlan
from enginepool.trainer.trainer_ranks import TrainerRanks

torch: Any = importlib.import_module("torch")


class Stopped(Exception):
    """The update was aborted meanwhile."""


class TensorFeed:
    """The tensors of a plan, by their index in the manifest: pulled when a bucket needs them, dropped when all is copied.

    Args:
        expected: the tensors of the manifest.
        ranks: the other trainer ranks, which pull their tensors at the same time.
        stopped: whether the update was aborted.
    """

    def __init__(self, plan: SendPlan, expected: list[Expected], ranks: TrainerRanks, stopped: Callable[[], bool]) -> None:
        self._expected = expected
        self._ranks = ranks
        self._stopped = stopped
        self._tensors: Iterator[tuple[str, Any]] = plan.tensors()
        self._held: dict[int, Any] = {}
        self._memory = HeldTensors()
        self._pulled = 0

    def fill(self, filling: Filling, free: Callable[[], None] | None = None) -> None:
        """Write the bytes of a bucket; bytes that no tensor covers become zeros. `free` waits until its memory may be written.

        Raises:
            BadRequest: a tensor differs from its announcement, or tensors are missing.
            RankFailed: another trainer rank could not give its part.
            Stopped: the update was aborted.
        """
        if self._stopped():
            raise Stopped
        self._ranks.together(filling.until - self._pulled, lambda: self._pull(filling.until))
        if free is not None:
            free()
        if self._stopped():
            # The source may have kept this thread for long. An abort does not wait for it, and may have freed the memory.
            raise Stopped
        held = self._held
        for targets, sources in filling.copies:
            # On a GPU many small copies are one launch. Copies from host memory are complete when this returns.
            torch._foreach_copy_(targets, [held[place] if part is None else held[place][part] for place, part in sources])
        if filling.gaps:
            torch._foreach_zero_(filling.gaps)
        for place in filling.through:
            self._memory.drop(held.pop(place))

    def end(self) -> None:
        """All buckets are filled: only tensors without bytes may be left. Raises BadRequest and RankFailed as `fill`."""
        total = len(self._expected)
        self._ranks.together(total - self._pulled + 1, lambda: (self._pull(total), self._check_end()))

    def _pull(self, until: int) -> None:
        """Pull all tensors before index `until`. An error in one tensor is raised at the end, because the other ranks pull all
        of them: their collectives would wait for this rank."""
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
                if self._ranks.alone:
                    raise
                wrong, words = error, None
            if expected.nbytes and words is not None:
                self._held[self._pulled] = words
            self._pulled += 1
        if wrong is not None:
            raise wrong

    def _check_end(self) -> None:
        found = self._next("the end of the source")
        if found is not None:
            raise BadRequest(
                f"source: {found[0]} follows the last announced tensor; expected the end", field=f"source[{found[0]}]"
            )

    def _next(self, what: str) -> tuple[str, Any] | None:
        with self._ranks.reading(what):
            return next(self._tensors, None)
