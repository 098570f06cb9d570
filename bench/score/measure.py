"""One contestant through all phases of a plan, and its numbers by name."""

import time
from collections.abc import Callable, Iterator

import msgspec

from bench.processes import Child, cpu_seconds
from bench.score.contestants import Running
from bench.score.gpu import GpuShare
from bench.score.load import PATIENCE_S, Check, Closed, Latency, Measured, Open
from bench.score.workloads import Head, Plan, Shape, Workload

#: The first forward of each shape may compile kernels, which takes more than a minute.
COMPILE_S = 600.0
#: A phase before the ones that count, in parts of one.
WARM = 0.3


class Number(msgspec.Struct, frozen=True):
    """One measured number of one contestant."""

    value: float
    unit: str


#: what was measured -> the number
Numbers = dict[str, Number]


class Contest:
    """Drives one running contestant. `say` tells whoever waits; `gpu` is sampled all the while."""

    def __init__(self, running: Running, plan: Plan, vocab: int, gpu: GpuShare, say: Callable[[str], None]) -> None:
        self._running = running
        self._plan = plan
        self._vocab = vocab
        self._gpu = gpu
        self._say = say
        #: scores of one request of each workload, to be compared between contestants
        self.scores: dict[str, list[list[float]]] = {}

    def numbers(self, head: Head) -> Numbers:
        """Everything that the plan asks of a model with this head."""
        found: Numbers = {}
        for workload in self._plan.of(head):
            for name, number in self._workload(workload):
                found[f"{workload.name}, {name}"] = number
        return found

    def _workload(self, workload: Workload) -> Iterator[tuple[str, Number]]:
        shape = msgspec.structs.replace(workload.shape, vocab=self._vocab)
        seconds = self._plan.seconds
        load = self._running.load
        self.scores[workload.name] = msgspec.convert(load.ask(_question(Check(shape)), COMPILE_S), list[list[float]])
        in_flight = workload.saturated * self._running.engines
        drive(load, Closed(shape, WARM * seconds, in_flight))
        if self._running.engines > 1:  # what one request meets is the same as with one engine
            yield from self._saturate(shape, in_flight)
            return
        alone = drive(load, Closed(shape, WARM * seconds, 1))
        yield from self._latency("1 in flight", alone.all)
        yield from self._inside("1 in flight", alone)
        for rate in workload.rates:
            phase = drive(load, Open(shape, seconds, rate))
            name = f"{rate:g} requests/s"
            yield from self._latency(name, phase.all)
            yield f"{name}: answered in time", Number(phase.all.in_time / seconds, "requests/s")
            yield from self._inside(name, phase)
        saturated = 0.0
        for name, number in self._saturate(shape, in_flight):
            yield name, number
            if name == "saturation":
                saturated = number.value / shape.items
        mix = self._plan.mix
        if mix is not None and self._plan.of_mix == workload.name:
            yield from self._mixed(shape, saturated, alone.all)

    def _latency(self, name: str, latency: Latency) -> Iterator[tuple[str, Number]]:
        self._say(f"  {name}: p50 {latency.p50_ms:.1f} p99 {latency.p99_ms:.1f} ms, {latency.answered} answered")
        yield f"{name}: p50", Number(latency.p50_ms, "ms")
        yield f"{name}: p90", Number(latency.p90_ms, "ms")
        yield f"{name}: p99", Number(latency.p99_ms, "ms")

    def _inside(self, name: str, phase: Measured) -> Iterator[tuple[str, Number]]:
        """What only the pool knows: whether its batches were whole, and where the time went."""
        if phase.failed:
            self._say(f"  {name}: {phase.failed} requests failed: {phase.failure}")
            yield f"{name}: failed", Number(phase.failed, "requests")
        counted = phase.counters
        if counted.get("batches"):
            yield f"{name}: forwards per batch", Number(counted["forwards"] / counted["batches"], "")
            yield f"{name}: batches of more than one forward", Number(counted["split batches"], "")
            yield f"{name}: requests per batch", Number(counted["answered"] / counted["batches"], "")
            yield f"{name}: queued, p50", Number(phase.queued_ms, "ms")
            yield f"{name}: in the engine, p50", Number(phase.run_ms, "ms")

    def _saturate(self, shape: Shape, in_flight: int) -> Iterator[tuple[str, Number]]:
        roles = self._running.roles()
        before = {role: cpu_seconds(pids) for role, pids in roles.items()}
        began = time.monotonic()
        phase = drive(self._running.load, Closed(shape, self._plan.seconds, in_flight))
        ended = time.monotonic()
        spent = {role: cpu_seconds(pids) - before[role] for role, pids in roles.items()}
        self._say(f"  saturation: {phase.items:.0f} items/s, {phase.tokens:.0f} tokens/s")
        yield "saturation", Number(phase.items, "items/s")
        yield "saturation: tokens", Number(phase.tokens, "tokens/s")
        yield from self._inside("saturation", phase)
        share = self._gpu.between(began + 0.2 * self._plan.seconds, began + self._plan.seconds)
        if share is not None:
            yield "saturation: GPU share of time", Number(share, "%")
        for role, seconds in spent.items():
            yield f"saturation: CPU of the {role}", Number(100 * seconds / (ended - began), "% of a core")

    def _mixed(self, shape: Shape, saturated: float, alone: Latency) -> Iterator[tuple[str, Number]]:
        mix, seconds = self._plan.mix, self._plan.seconds
        assert mix is not None
        phase = drive(self._running.load, Open(shape, seconds, mix.load * saturated, mix.high, mix.high_share))
        name = f"{mix.name} at {100 * mix.load:.0f} % of saturation"
        low, high = phase.priorities[0], phase.priorities.get(mix.high)
        if high is not None:
            yield from self._latency(f"{name}, high", high)
            yield f"{name}, high: p99 / p50 of 1 in flight", Number(high.p99_ms / alone.p50_ms, "x")
        yield f"{name}, low: p50", Number(low.p50_ms, "ms")
        yield f"{name}, low: answered in time", Number(low.in_time / seconds, "requests/s")
        yield from self._inside(name, phase)


def _question(command: Check | Closed | Open) -> dict[str, object]:
    return msgspec.to_builtins(command)


def drive(load: Child, command: Closed | Open) -> Measured:
    """Run one phase in a load. Raises RuntimeError when nothing was answered."""
    phase = msgspec.convert(load.ask(_question(command), command.seconds + PATIENCE_S + 30), Measured, strict=False)
    if not phase.priorities[0].answered:
        raise RuntimeError(f"nothing was answered in {command.seconds:g} s: {phase.failure or 'no answer'}")
    return phase
