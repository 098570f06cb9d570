"""One run of the scoring benchmark: starts the contestants and measures them, one after the other or in turn."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from bench.score.contestants import Contestant, Ground
from bench.score.gpu import GpuShare
from bench.score.measure import Contest, Number, Numbers
from bench.score.model import vocabulary
from bench.score.workloads import Head, Plan
from enginepool.config import Device


class Run:
    """Measures contestants by a plan.

    Args:
        plan: what is measured.
        device: where the engines run.
        scratch: a folder for logs and state.
        gpu: samples the share of time in which the GPU runs a kernel.
        save: is called after each phase with the numbers found so far, by contestant.
        say: is told of the progress, one line at a time.
        interleave: start all contestants at once and measure them in turn; otherwise one has the device after the other.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        scratch: Path,
        gpu: GpuShare,
        save: Callable[[dict[str, Numbers]], object],
        say: Callable[[str], None],
        interleave: bool = False,
    ) -> None:
        self._plan = plan
        self._device: Device = device
        self._scratch = scratch
        self._gpu = gpu
        self._save = save
        self._say = say
        self._interleave = interleave
        #: what each contestant was started with
        self.settings: list[str] = []
        #: numbers by contestant
        self.found: dict[str, Numbers] = {}
        self._scores: dict[str, list[list[float]]] = {}

    def on(self, head: Head, model: Path, contestants: Sequence[Contestant]) -> None:
        """Measure the contestants on one model. One that fails is named with the reason; the others are measured."""
        asked = [one for one in contestants if self._asked(one).of(head)]
        for group in [asked] if self._interleave else [[one] for one in asked]:
            with ExitStack() as stack:
                contests = self._started(head, model, group, stack)
                self._warm(head, contests)
                self._measure(head, contests)

    def _asked(self, contestant: Contestant) -> Plan:
        return self._plan.only(set(contestant.workloads)) if contestant.workloads else self._plan

    def _started(self, head: Head, model: Path, group: Sequence[Contestant], stack: ExitStack) -> dict[str, Contest]:
        """Start the processes of all contestants of the group, which load the model at the same time, and wait for each."""
        contests: dict[str, Contest] = {}
        for contestant in group:
            self._say(f"{contestant.who}, {head} model: starting")
            place = self._scratch / f"{head[0]}-{contestant.name}"
            place.mkdir()
            with self._left_out(contests, contestant.who, head):
                running = contestant.start(Ground(model, self._device, place), stack)
                self.settings.append(f"{contestant.who}, {head} model: {running.settings}")
                say = partial(self._say_of, contestant.who)
                contests[contestant.who] = Contest(running, self._asked(contestant), vocabulary(model), self._gpu, say)
        for who, contest in list(contests.items()):
            with self._left_out(contests, who, head):
                contest.ready()
        return contests

    def _warm(self, head: Head, contests: dict[str, Contest]) -> None:
        for who, contest in list(contests.items()):
            self._say(f"{who}: warming up")
            with self._left_out(contests, who, head):
                contest.warm(head)
                self._add(who, self._differences(contest.scores))

    def _measure(self, head: Head, contests: dict[str, Contest]) -> None:
        """All repetitions. Each phase is measured with all contestants in turn; each repetition begins with another one."""
        for repetition in range(self._plan.repetitions):
            self._say(f"{head} model, repetition {repetition + 1} of {self._plan.repetitions}")
            first = repetition % max(1, len(contests))
            order = [*list(contests)[first:], *list(contests)[:first]]
            turns = {who: contests[who].phases(head, repetition) for who in order}
            while turns:
                for who, phases in list(turns.items()):
                    numbers: Numbers | None = None
                    with self._left_out(contests, who, head):
                        numbers = next(phases, None)
                    if numbers is None:
                        del turns[who]
                    else:
                        self._add(who, numbers)

    @contextmanager
    def _left_out(self, contests: dict[str, Contest], who: str, head: Head) -> Generator[None]:
        """Name a contestant that fails, and go on without it."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            contests.pop(who, None)
            self._say(f"left out {who} on the {head} model: {error}")

    def _say_of(self, who: str, line: str) -> None:
        self._say(f"  {who}: {line}")

    def _add(self, who: str, numbers: Numbers) -> None:
        mine = self.found.setdefault(who, {})
        for what, number in numbers.items():
            mine[what] = mine[what].and_again(number) if what in mine else number
        self._save(self.found)

    def _differences(self, scores: dict[str, list[list[float]]]) -> Numbers:
        """How far the scores of one request are from those of the contestant that was first."""
        found: Numbers = {}
        for name, mine in scores.items():
            first = self._scores.setdefault(name, mine)
            if first is not mine:
                found[f"{name}, largest difference of scores"] = Number(float(np.abs(np.subtract(mine, first)).max()), "")
        return found
