"""The load of the scoring benchmark: runs the phases named on its stdin against one contestant, and reports each outcome.

    python -m bench.score.load {pool,http} ADDRESS

A command is a JSON line. `closed` keeps so many requests unanswered; `open` sends them at random moments (Poisson) drawn from
a fixed seed, without waiting for answers, and counts latency from the moment at which a request was due; `check` returns
scores.
"""

import asyncio
import gc
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import IO

import msgspec
import numpy as np
import uvloop

from bench.score.callers import Answer, Caller, HttpCaller, PoolCaller
from bench.score.workloads import STRIDE, VARIANTS, Shape

#: A phase whose last answer is later than this after its last question has failed.
PATIENCE_S = 120.0
#: The part of a closed phase that does not count: in it the contestant is not full yet.
RAMP = 0.2


class Command(msgspec.Struct, tag_field="phase", forbid_unknown_fields=True):
    """What all phases have."""

    shape: Shape


class Closed(Command, tag="closed"):
    """As many requests in flight as `in_flight`, a new one for each answer."""

    seconds: float
    in_flight: int


class Open(Command, tag="open"):
    """Requests at `rate` a second on average, `high_share` of them with priority `high`, the others with 0.

    `seed` selects the arrivals: two loads with the same seed, rate and length send at the same moments.
    """

    seconds: float
    rate: float
    seed: int = 0
    high: int = 0
    high_share: float = 0.0


class Check(Command, tag="check"):
    """The scores of one request, to be compared between contestants."""


class Latency(msgspec.Struct, frozen=True):
    """Of one priority: requests answered in all and within the phase, and their latencies."""

    answered: int
    in_time: int
    p50_ms: float
    p90_ms: float
    p99_ms: float


class Measured(msgspec.Struct, frozen=True):
    """The outcome of a phase.

    per_second: requests answered a second, within the phase and after its ramp; items: the same of rows. queued_ms, run_ms:
    medians of what the pool says of each request.
    late_ms: how late the load itself was with a question, 99th percentile. counters: what the pool counted meanwhile.
    split: answers with a batch of more than one forward. failed: requests with another answer than scores, and one of those.
    """

    priorities: dict[int, Latency]
    per_second: float
    items: float
    queued_ms: float = 0.0
    run_ms: float = 0.0
    late_ms: float = 0.0
    split: int = 0
    counters: dict[str, int] = {}
    failed: int = 0
    failure: str = ""

    @property
    def all(self) -> Latency:
        """The one priority of a phase without priorities."""
        return self.priorities[0]


class _Done(msgspec.Struct, frozen=True):
    """One request: when it was due and answered (seconds since the phase began), and with what."""

    priority: int
    due: float
    at: float
    late: float
    answer: Answer | None
    failure: str = ""


class Load:
    """Runs phases against one caller."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._ready: dict[Shape, list[object]] = {}
        #: of each shape, the request with which the next phase begins
        self._first: dict[Shape, int] = {}

    async def run(self, command: Closed | Open | Check) -> Measured | list[list[float]]:
        """One phase. What is sent is made before the clock runs."""
        if command.shape not in self._ready:
            self._ready[command.shape] = [self._caller.prepare(command.shape, number) for number in range(VARIANTS)]
        if isinstance(command, Check):
            answer = await self._caller.call(self._ready[command.shape][0], 0)
            return answer.scores
        self._first[command.shape] = self._first.get(command.shape, 0) + STRIDE
        before = await self._caller.counters()
        async with asyncio.timeout(command.seconds + PATIENCE_S):
            done = await (self._closed(command) if isinstance(command, Closed) else self._open(command))
        after = await self._caller.counters()
        counted = {name: after[name] - before.get(name, 0) for name in after}
        ramp = RAMP * command.seconds if isinstance(command, Closed) else 0.0
        return summary(done, ramp, command.seconds, counted)

    async def _one(self, number: int, begin: float, due: float, priority: int, ready: list[object]) -> _Done:
        late = time.perf_counter() - begin - due
        try:
            answer = await self._caller.call(ready[number % VARIANTS], priority)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:300]
            return _Done(priority, due, time.perf_counter() - begin, late, None, failure)
        return _Done(priority, due, time.perf_counter() - begin, late, answer)

    async def _closed(self, command: Closed) -> list[_Done]:
        ready, done = self._ready[command.shape], list[_Done]()
        offset = self._first[command.shape]
        begin = time.perf_counter()

        async def again(first: int) -> None:
            number = offset + first
            while (at := time.perf_counter() - begin) < command.seconds:
                one = await self._one(number, begin, at, 0, ready)
                done.append(one)
                if one.failure:
                    return
                number += command.in_flight

        async with asyncio.TaskGroup() as callers:
            for first in range(command.in_flight):
                callers.create_task(again(first))
        return done

    async def _open(self, command: Open) -> list[_Done]:
        ready = self._ready[command.shape]
        first = self._first[command.shape]
        tasks: list[asyncio.Task[_Done]] = []
        begin = time.perf_counter()
        for number, (due, priority) in enumerate(arrivals(command), first):
            wait = begin + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(self._one(number, begin, due, priority, ready)))
        return list(await asyncio.gather(*tasks))


def arrivals(command: Open) -> list[tuple[float, int]]:
    """When each request is due, in seconds, and its priority: the same for every contestant."""
    chance = random.Random(f"{command.rate:g} {command.seconds:g} {command.seed}")
    found: list[tuple[float, int]] = []
    at = chance.expovariate(command.rate)
    while at < command.seconds:
        found.append((at, command.high if chance.random() < command.high_share else 0))
        at += chance.expovariate(command.rate)
    return found


def summary(done: list[_Done], begin: float, end: float, counters: dict[str, int]) -> Measured:
    """The numbers of a phase whose counting window is `begin` to `end`."""
    good = [(one, one.answer) for one in done if one.answer is not None]
    counted = [answer for one, answer in good if begin <= one.at < end]
    failures = [one.failure for one in done if one.failure]
    priorities: dict[int, Latency] = {}
    for priority in sorted({one.priority for one, _ in good} | {0}):
        mine = [one for one, _ in good if one.priority == priority]
        took = [(one.at - one.due) * 1000 for one in mine] or [0.0]
        p50, p90, p99 = (float(value) for value in np.percentile(took, (50, 90, 99)))
        priorities[priority] = Latency(len(mine), sum(one.at < end for one in mine), p50, p90, p99)
    return Measured(
        priorities,
        len(counted) / (end - begin),
        sum(len(answer.scores) for answer in counted) / (end - begin),
        queued_ms=_median([answer.queued_s for _, answer in good]) * 1000,
        run_ms=_median([answer.run_s for _, answer in good]) * 1000,
        late_ms=float(np.percentile([one.late for one in done] or [0.0], 99)) * 1000,
        split=sum(any(forwards != 1 for forwards in answer.forwards) for _, answer in good),
        counters=counters,
        failed=len(failures),
        failure=failures[0] if failures else "",
    )


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0


def own_voice() -> IO[str]:
    """Where answers go. What libraries print goes to the log, or it would be taken for an answer."""
    voice = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return voice


async def serve(caller: Caller, voice: IO[str], hello: object, idle: Callable[[], Awaitable[None]] | None = None) -> None:
    """Say `hello`, then answer each command on stdin until it ends."""
    stdin = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    load = Load(caller)
    decode = msgspec.json.Decoder(Closed | Open | Check).decode

    def say(what: object) -> None:
        voice.write(msgspec.json.encode(what).decode() + "\n")
        voice.flush()

    gc.collect()
    gc.freeze()
    say(hello)
    while line := await stdin.readline():
        say(await load.run(decode(line)))
    await caller.close()


async def main() -> None:
    """Drive the contestant that the command line names."""
    voice = own_voice()
    kind, address = sys.argv[1:]
    caller: Caller = await (PoolCaller if kind == "pool" else HttpCaller).connect(address)
    await serve(caller, voice, {})


if __name__ == "__main__":
    uvloop.run(main())
