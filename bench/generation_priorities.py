"""How long does a generation of a high priority wait for its first token on an overloaded engine?

    python -m bench.generation_priorities [--quick] [--json FILE]

The coordinator's pure machine, and an engine of 64 slots, in simulated time: a step costs 5 ms, 10 µs for each sequence, and
10 µs for each token of a prompt that begins in it. Requests of 512 tokens in and 256 out come at random: 120 % of what the
engine can do, a fifth of them of a high priority. A sequence that goes on after it was stopped costs its prompt again.
"""

import random
from array import array
from dataclasses import dataclass, field

import numpy as np

from bench.table import Row, Target, parser, show, write
from enginepool.config import GroupConfig, Limits, PoolConfig, Timing
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.operations.generate import GENERATE, GenerateWork
from enginepool.protocol.messages import (
    Capabilities,
    ErrorReply,
    FrameSpec,
    Generate,
    Generated,
    Idle,
    Ready,
    Sampling,
    StartGeneration,
    Step,
    StopGeneration,
    Tokens,
)

SLOTS, PROMPT, NEW = 64, 512, 256
STEP_S, ROW_S, TOKEN_S = 0.005, 1e-5, 1e-5
LOW, HIGH = 0, 100
LOAD, SHARE = 1.2, 0.2
CAN = Capabilities(
    "causal", 50_000, 32_768, batch_tokens=16_384, batch_rows=SLOTS, inflight_tokens=1 << 20, inflight_rows=SLOTS,
    operations=("generate",),
)  # fmt: skip
CLIENTS = {LOW: b"low", HIGH: b"high"}


@dataclass
class Seen:
    """What the requests of one priority got: seconds until the first token of each, and when each was answered."""

    first_s: list[float] = field(default_factory=list[float])
    answered: list[float] = field(default_factory=list[float])

    def at(self, share: float) -> float:
        return float(np.quantile(self.first_s, share))


@dataclass
class Running:
    """A sequence in the engine: position of its next token, and how many tokens of its prompt are still to be computed."""

    at: int
    end: int
    prompt: int


class Simulation:
    """One coordinator, one engine, and requests of two priorities."""

    def __init__(self, seed: int = 0) -> None:
        limits = Limits(queue_items=10**9, buffer_bytes=10**12, window_requests=10**9, window_bytes=10**12)
        group = GroupConfig(model="none", engine="sim", workers=0, operations=["generate"])
        timing = Timing(client_silence_s=1e9, silence_s=1e9)
        self._machine = Machine(PoolConfig(groups={"g": group}, limits=limits, timing=timing))
        self._random = random.Random(seed)
        self._now = 0.0
        self._running: dict[int, Running] = {}
        #: by priority and id: when it was asked
        self._asked: dict[tuple[int, int], float] = {}
        self._next = 0
        self.seen = {LOW: Seen(), HIGH: Seen()}
        self.stopped = 0
        self._do(ev.Started(0.0, 1, {}))
        for link in CLIENTS.values():
            self._do(ev.ClientHello(0.0, link, link.ljust(16), bytes(16), 0))
        self._do(ev.WorkerRegistered(0.0, b"w", "g", "w", 1, "h"))
        self._do(ev.WorkerSaid(0.0, b"w", Idle(1)))
        self._do(ev.WorkerSaid(0.0, b"w", Ready(CAN, 0)))

    def run(self, arrivals: list[tuple[float, int]], until: float) -> None:
        """Requests come at these times, with these priorities; steps follow each other while there is something to do."""
        heap = sorted(arrivals)
        heap.reverse()
        while self._now < until and (heap or self._running):
            if not self._running:
                self._arrive(*heap.pop())
                continue
            prompts = sum(one.prompt for one in self._running.values())
            begun = list(self._running)
            end = self._now + STEP_S + len(begun) * ROW_S + prompts * TOKEN_S
            while heap and heap[-1][0] <= end:
                self._arrive(*heap.pop())
            self._now = end
            self._step(begun)

    def _arrive(self, at: float, priority: int) -> None:
        self._now = max(self._now, at)
        self._next += 1
        self._asked[priority, self._next] = at
        self._do(ev.Submit(self._now, CLIENTS[priority], self._next, self._work(), priority, None))

    def _work(self) -> GenerateWork:
        prompt = array("i", (self._random.randrange(50_000) for _ in range(PROMPT))).tobytes()
        specs = [FrameSpec("items", "int32", (PROMPT,)), FrameSpec("item_lengths", "uint32", (1,))]
        sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
        message = Generate(1, specs, "g", sampling=sampling, stream=True)
        return GENERATE.open(message, [prompt, PROMPT.to_bytes(4, "little")])

    def _step(self, begun: list[int]) -> None:
        """A token for each sequence that was there when the step began, and was not stopped meanwhile."""
        steps: list[Step] = []
        for task in begun:
            if (one := self._running.get(task)) is None:
                continue
            one.at, one.prompt = one.at + 1, 0
            last = one.at == one.end
            if last:
                del self._running[task]
            steps.append(Step(task, 0, one.at - 1, 1, "length" if last else ""))
        tokens = memoryview(bytes(4 * len(steps)))
        self._do(ev.TokensGenerated(self._now, b"w", 1, 0, steps, tokens, memoryview(b""), 0))
        self._do(ev.Tick(self._now))

    def _do(self, event: ev.Event) -> None:
        for effect in self._machine.handle(event):
            if type(effect) is ToWorker:
                if type(effect.message) is StartGeneration:
                    start = effect.message
                    end = start.at + start.sampling.max_new_tokens
                    self._running[start.task[1]] = Running(start.at, end, start.frames[0].shape[0])
                elif type(effect.message) is StopGeneration:
                    self.stopped += len(effect.message.tasks)
                    for task in effect.message.tasks:
                        self._running.pop(task, None)
            elif type(effect) is ToClient:
                self._heard(effect)

    def _heard(self, effect: ToClient) -> None:
        priority = next(priority for priority, link in CLIENTS.items() if link == effect.link)
        message = effect.message
        if type(message) is Tokens:
            first = (asked for run in message.runs if (asked := self._asked.pop((priority, run.id), None)) is not None)
            self.seen[priority].first_s += [self._now - asked for asked in first]
        elif type(message) is Generated:
            self.seen[priority].answered.append(self._now)
            self._do(ev.Acked(self._now, effect.link, [message.id]))
        elif type(message) is ErrorReply:
            raise RuntimeError(f"{message.code}: {message.message}")


def alone_s() -> float:
    """Seconds until the first token of a request when there is no other."""
    simulation = Simulation()
    simulation.run([(10.0 * i, HIGH) for i in range(3)], 100.0)
    return simulation.seen[HIGH].at(0.5)


def most(seconds: float) -> float:
    """Requests a second of a full engine."""
    simulation = Simulation()
    simulation.run([(0.0, LOW)] * int(seconds * 60), seconds)
    # The first ones end together.
    answered = [at for at in simulation.seen[LOW].answered if at >= seconds / 2]
    return len(answered) / (seconds / 2)


def mixed(rate: float, seconds: float, seed: int = 0) -> Simulation:
    """Both priorities, at random moments."""
    chance, at, arrivals = random.Random(seed), 0.0, list[tuple[float, int]]()
    while (at := at + chance.expovariate(rate)) < seconds:
        arrivals.append((at, HIGH if chance.random() < SHARE else LOW))
    simulation = Simulation(seed)
    simulation.run(arrivals, seconds)
    return simulation


def rows_of(seconds: float, seeds: int) -> list[Row]:
    """The ratio of times is to those of a request alone; of rates, to a full engine of one priority."""
    alone, full = alone_s(), most(seconds)
    rows = [Row("alone", "first token", 1000 * alone, "ms"), Row("full", "answered", full, "requests/s")]
    found = [mixed(LOAD * full, seconds, seed) for seed in range(seeds)]
    for name, priority in (("high", HIGH), ("low", LOW)):
        for share, who in ((0.5, "first token, p50"), (0.99, "first token, p99")):
            values = [1000 * one.seen[priority].at(share) for one in found]
            value = float(np.median(values))
            rows.append(Row(name, who, value, "ms", value / 1000 / alone, (min(values), max(values))))
        rate = float(np.median([len(one.seen[priority].answered) / seconds for one in found]))
        rows.append(Row(name, "answered", rate, "requests/s", rate / full))
    rows.append(Row("low", "stopped", float(np.median([one.stopped / seconds for one in found])), "times/s"))
    return rows


def main() -> None:
    args = parser("generation_priorities", "How long does a generation of a high priority wait?").parse_args()
    rows = rows_of(10.0 if args.quick else 60.0, 1 if args.quick else 5)
    title = f"two priorities at {LOAD:.0%} of a full engine, {SHARE:.0%} of them high, in simulated time"
    show(title, rows, [Target("high", "first token, p99", 3.0)])
    if args.json:
        write(args.json, rows)


if __name__ == "__main__":
    main()
