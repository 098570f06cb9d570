"""One contestant through all phases of a plan, and its numbers by name."""

import statistics
import time
from collections.abc import Callable, Iterator

import msgspec

from bench.processes import Child, cpu_seconds
from bench.score.contestants import Running
from bench.score.gpu import GpuShare
from bench.score.load import PATIENCE_S, Check, Closed, Latency, Measured, Open
from bench.score.workloads import Head, Mix, Plan, Shape, Workload

#: The first forward of each shape may compile kernels, which takes more than a minute.
COMPILE_S = 600.0
#: The length of phases other than those under load, in parts of one of these: warm-up, one request in flight.
WARM, ALONE = 0.3, 0.25


class Number(msgspec.Struct, frozen=True):
    """One measured number of one contestant; where it was measured several times, the median of `samples`, oldest first."""

    value: float
    unit: str
    samples: tuple[float, ...] = ()

    @property
    def measured(self) -> tuple[float, ...]:
        """Every measurement of it, oldest first."""
        return self.samples or (self.value,)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest measurement; None of a single one."""
        return (min(self.samples), max(self.samples)) if len(self.samples) > 1 else None

    def and_again(self, later: "Number") -> "Number":
        """This number with the measurements of a later repetition."""
        samples = self.measured + later.measured
        return Number(statistics.median(samples), self.unit, samples)

    def over(self, other: "Number") -> float | None:
        """The median of the ratios to `other`, of pairs from the same repetition; None where `other` is 0."""
        pairs = list(zip(self.measured, other.measured, strict=False))
        return statistics.median(mine / theirs for mine, theirs in pairs) if all(theirs for _, theirs in pairs) else None


#: what was measured -> the number
Numbers = dict[str, Number]


class Contest:
    """Drives one running contestant. `say` is told of the progress; `gpu` is sampled all the while."""

    def __init__(self, running: Running, plan: Plan, vocab: int, gpu: GpuShare, say: Callable[[str], None]) -> None:
        self._running = running
        self._plan = plan
        self._vocab = vocab
        self._gpu = gpu
        self._say = say
        #: scores of one request of each workload, to be compared between contestants
        self.scores: dict[str, list[list[float]]] = {}

    def ready(self) -> None:
        """Wait until the contestant answers. Raises RuntimeError when it has ended, or takes too long."""
        self._running.ready()

    def warm(self, head: Head) -> None:
        """Take one answer of each workload, to be compared, and load the contestant until nothing is left to compile."""
        load = self._running.load
        for workload in self._plan.of(head):
            shape = self._shape(workload)
            self.scores[workload.name] = msgspec.convert(load.ask(_question(Check(shape)), COMPILE_S), list[list[float]])
            drive(load, Closed(shape, WARM * self._plan.seconds, workload.saturated * self._running.engines))
        self._running.warmed()

    def phases(self, head: Head, repetition: int) -> Iterator[Numbers]:
        """One repetition of everything that the plan asks of a model with this head; the numbers of one phase at a time."""
        for workload in self._plan.of(head):
            for phase in self._workload(workload, repetition):
                yield {f"{workload.name}, {name}": number for name, number in phase}

    def _shape(self, workload: Workload) -> Shape:
        return msgspec.structs.replace(workload.shape, vocab=self._vocab)

    def _workload(self, workload: Workload, repetition: int) -> Iterator[list[tuple[str, Number]]]:
        shape, seconds, load = self._shape(workload), self._plan.seconds, self._running.load
        phases = self._plan.phases
        if self._running.engines > 1:  # what one request meets is the same as with one engine
            phases &= {"saturation"}
        alone = None
        if "alone" in phases:
            alone = drive(load, Closed(shape, ALONE * seconds, 1))
            yield [*self._latency("1 in flight", alone.all), *self._inside("1 in flight", alone)]
        for rate in workload.rates if "rates" in phases else ():
            phase = drive(load, Open(shape, seconds, rate, repetition))
            name = f"{rate:g} requests/s"
            in_time = Number(phase.all.in_time / seconds, "requests/s")
            yield [*self._latency(name, phase.all), (f"{name}: answered in time", in_time), *self._inside(name, phase)]
        if "saturation" not in phases:
            return
        saturated = list(self._saturate(shape, workload.saturated * self._running.engines))
        yield saturated
        mix = self._plan.mix
        if mix is not None and alone is not None and self._plan.of_mix == workload.name:
            yield list(self._mixed(mix, shape, dict(saturated)["saturation"].value / shape.items, alone.all, repetition))

    def _latency(self, name: str, latency: Latency) -> Iterator[tuple[str, Number]]:
        self._say(f"{name}: p50 {latency.p50_ms:.1f} p99 {latency.p99_ms:.1f} ms, {latency.answered} answered")
        yield f"{name}: p50", Number(latency.p50_ms, "ms")
        yield f"{name}: p90", Number(latency.p90_ms, "ms")
        yield f"{name}: p99", Number(latency.p99_ms, "ms")
        yield f"{name}: answered", Number(latency.answered, "requests")

    def _inside(self, name: str, phase: Measured) -> Iterator[tuple[str, Number]]:
        """What only the pool knows: whether its batches were whole, and where the time went."""
        if phase.failed:
            self._say(f"{name}: {phase.failed} requests failed: {phase.failure}")
            yield f"{name}: failed", Number(phase.failed, "requests")
        counted = phase.counters
        if counted.get("batches"):
            yield f"{name}: forwards per batch", Number(counted["forwards"] / counted["batches"], "")
            yield f"{name}: batches of more than one forward", Number(counted["split batches"], "")
            yield f"{name}: requests per batch", Number(counted["answered"] / counted["batches"], "")
            yield f"{name}: packed batches", Number(100 * counted["packed batches"] / counted["batches"], "%")
            yield f"{name}: queued, p50", Number(phase.queued_ms, "ms")
            yield f"{name}: in the engine, p50", Number(phase.run_ms, "ms")

    def _saturate(self, shape: Shape, in_flight: int) -> Iterator[tuple[str, Number]]:
        roles, seconds = self._running.roles(), self._plan.seconds
        before = {role: cpu_seconds(pids) for role, pids in roles.items()}
        began = time.monotonic()
        phase = drive(self._running.load, Closed(shape, seconds, in_flight))
        ended = time.monotonic()
        spent = {role: cpu_seconds(pids) - before[role] for role, pids in roles.items()}
        self._say(f"saturation: {phase.items:.0f} items/s")
        yield "saturation", Number(phase.items, "items/s")
        yield from self._inside("saturation", phase)
        share = self._gpu.between(began + 0.2 * seconds, began + seconds)
        if share is not None:
            yield "saturation: GPU share of time", Number(share, "%")
        for role, took in spent.items():
            yield f"saturation: CPU of the {role}", Number(100 * took / (ended - began), "% of a core")

    def _mixed(self, mix: Mix, shape: Shape, saturated: float, alone: Latency, repetition: int) -> Iterator[tuple[str, Number]]:
        seconds = self._plan.seconds
        rate = mix.load * saturated
        phase = drive(self._running.load, Open(shape, seconds, rate, repetition, mix.high, mix.high_share))
        name = f"{mix.name} at {100 * mix.load:.0f} % of saturation"
        low, high = phase.priorities[0], phase.priorities.get(mix.high)
        if high is not None:
            yield from self._latency(f"{name}, high", high)
            yield f"{name}, high: p99 / p50 of 1 in flight", Number(high.p99_ms / alone.p50_ms, "x")
        yield f"{name}: offered", Number(rate, "requests/s")
        yield f"{name}, low: p50", Number(low.p50_ms, "ms")
        yield f"{name}, low: p99", Number(low.p99_ms, "ms")
        yield f"{name}, low: answered in time", Number(low.in_time / seconds, "requests/s")
        in_time = sum(one.in_time for one in phase.priorities.values()) / seconds
        yield f"{name}: answered in time, of saturation", Number(100 * in_time / saturated, "%")
        yield from self._inside(name, phase)


def _question(command: Check | Closed | Open) -> dict[str, object]:
    return msgspec.to_builtins(command)


def drive(load: Child, command: Closed | Open) -> Measured:
    """Run one phase in a load. Raises RuntimeError when nothing was answered."""
    phase = msgspec.convert(load.ask(_question(command), command.seconds + PATIENCE_S + 30), Measured, strict=False)
    if not phase.priorities[0].answered:
        raise RuntimeError(f"nothing was answered in {command.seconds:g} s: {phase.failure or 'no answer'}")
    return phase
