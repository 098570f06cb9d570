"""The run behind `enginepool demo`: clients under load, a worker killed, everything counted and checked."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil

from enginepool.cli.cli_errors import CommandFailed
from enginepool.client.pool import Pool
from enginepool.config import GroupConfig, PoolConfig
from enginepool.errors import EnginepoolError
from enginepool.protocol.errors import brief
from enginepool.protocol.messages import GroupStatus, WorkerStatus

#: (name, priority, requests kept under way): two bulk jobs that always have more, two clients that wait for each answer.
CLIENTS = (("bulk-1", 0, 24), ("bulk-2", 0, 24), ("online-1", 100, 1), ("online-2", 100, 1))
#: Token ids whose probabilities are asked for; any will do.
LABELS = [60, 70]
WORDS = ("a", "pool", "of", "engines", "scores", "items", "by", "priority", "each", "batch", "in", "one", "forward", "pass")
START_S, BACK_S, FINISH_S = 300.0, 180.0, 120.0
LOOK_S = 0.1
ASKED_AGAIN = 24
#: Characters of a worker's last words that are shown.
TOLD = 60
#: Two answers to one request differ by this much at most: batches add up in another order. By more in bfloat16, of 8 bits.
RTOL, HALF_RTOL = 1e-3, 0.2

Scores = npt.NDArray[np.float32]


@dataclass
class DemoClient:
    """What one client saw, which keeps `depth` requests under way. A request is its number. `answers` holds the scores of a
    request, and when it was sent and answered. `parts`: in how many batches each answer was computed, summed up."""

    name: str
    priority: int
    depth: int = 1
    sent: int = 0
    parts: int = 0
    answers: dict[int, tuple[Scores, float, float]] = field(default_factory=dict[int, tuple[Scores, float, float]])
    errors: list[str] = field(default_factory=list[str])

    @property
    def lost(self) -> int:
        """Requests without an answer."""
        return self.sent - len(self.answers)


@dataclass
class Story:
    """What happened, for the tables and the verdict."""

    clients: list[DemoClient]
    group: GroupStatus
    open_at_kill: int
    killed: WorkerStatus
    back_s: float
    meanwhile: int
    asked_again: int
    differing: int

    @property
    def sent(self) -> int:
        """Requests of all clients."""
        return sum(client.sent for client in self.clients)

    @property
    def answered(self) -> int:
        """Answers to all clients."""
        return sum(len(client.answers) for client in self.clients)

    @property
    def rows(self) -> int:
        """Rows of all answers."""
        return sum(len(scores) for client in self.clients for scores, _, _ in client.answers.values())

    @property
    def parts(self) -> int:
        """Answers, each as often as there are batches that computed it."""
        return sum(client.parts for client in self.clients)

    def latency_ms(self, percent: float, *, urgent: bool) -> float:
        """A percentile of the latency of the clients of the highest priority, or of the others; NaN without an answer."""
        highest = max(client.priority for client in self.clients)
        mine = [client for client in self.clients if (client.priority == highest) == urgent]
        times = [1000 * (end - at) for client in mine for _, at, end in client.answers.values()]
        return float(np.percentile(times, percent)) if times else float("nan")

    def wrong(self) -> list[str]:
        """Every promise that was not kept, in a few words each."""
        said: list[str] = []
        for client in self.clients:
            if client.lost:
                said.append(f"{client.name}: {client.lost} requests lost ({'; '.join(client.errors[:1]) or 'no answer'})")
        if self.group.answered != self.answered:
            said.append(f"the coordinator gave {self.group.answered} answers, and {self.answered} arrived")
        if self.differing:
            said.append(f"{self.differing} of {self.asked_again} scores differ when asked again")
        if self.group.split_batches:
            said.append(f"{self.group.split_batches} batches took more than one forward pass")
        return said


def content(client: str, number: int) -> tuple[str, list[str]]:
    """Query and items of a request: the same for the same client and number."""
    draw = random.Random(f"{client} {number}")
    return (
        " ".join(draw.choices(WORDS, k=12)),
        [" ".join(draw.choices(WORDS, k=draw.randint(4, 16))) for _ in range(draw.randint(2, 8))],
    )


class DemoRun:
    """One run. `work_s`: how long the clients work before the worker is killed, and again after it is back."""

    def __init__(self, *, work_s: float, say: Callable[[str], None]) -> None:
        self.say = say
        self._work_s = work_s
        self._stop = asyncio.Event()
        #: what was last said of each worker
        self._said: dict[str, str] = {}
        self._rtol = RTOL

    async def run(self, group: GroupConfig, directory: Path) -> Story:
        """Start a pool of `group`, do all of it, and close the pool.

        Raises:
            CommandFailed: the workers do not start, or the killed one does not come back.
            EnginepoolError: the pool cannot be started.
        """
        began = time.monotonic()
        if group.dtype == "bfloat16":
            self._rtol = HALF_RTOL
        what = "the sim engine" if group.engine == "sim" else f"real SGLang on {group.device.upper()}"
        self.say(f"Starting a pool of {group.workers} workers ({what}) ...")
        config = PoolConfig(groups={"demo": group}, state_dir=str(directory / "state"))
        pool = await Pool.start(config=config)
        try:
            await self._ready(pool, set(), START_S)
            self.say(f"Both are ready after {time.monotonic() - began:.1f} s.\n")
            return await self._load(pool)
        finally:
            self.say("Closing the pool.\n")
            await pool.close()

    async def _load(self, pool: Pool) -> Story:
        clients = [DemoClient(*facts) for facts in CLIENTS]
        tasks = [asyncio.create_task(self._client(pool.address, client)) for client in clients]
        try:
            for one in clients:
                requests = f"{one.depth} request{'s' if one.depth > 1 else ''}"
                self.say(f"Client {one.name}: priority {one.priority}, {requests} under way at a time.")
            await self._watch(pool, self._work_s)
            self.say(f"\n{sum(len(c.answers) for c in clients)} answers so far.")
            killed = await self._kill(pool)
            killed_at = time.monotonic()
            open_at_kill = sum(c.sent - len(c.answers) for c in clients)
            self.say(f"Killed {killed.name} (process {killed.pid}) with SIGKILL: {open_at_kill} requests were unanswered.")
            await self._ready(pool, {killed.incarnation}, BACK_S)
            back_s = time.monotonic() - killed_at
            meanwhile = sum(end > killed_at for c in clients for _, _, end in c.answers.values())
            self.say(
                f"A new worker is ready in its place after {back_s:.1f} s; the other one gave {meanwhile} answers meanwhile."
            )
            await self._watch(pool, self._work_s / 2)
            self._stop.set()
            self.say("No new requests; waiting for the last answers ...")
            await asyncio.wait(tasks, timeout=FINISH_S)
            group = (await pool.status()).groups[0]
            asked, differing = await self._ask_again(pool, clients, killed_at)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return Story(clients, group, open_at_kill, killed, back_s, meanwhile, asked, differing)

    async def _client(self, address: str, client: DemoClient) -> None:
        """Keep requests under way until told to stop."""
        async with Pool.connect(address) as link:
            await asyncio.gather(*(self._one_after_another(link, client) for _ in range(client.depth)))

    async def _one_after_another(self, link: Pool, client: DemoClient) -> None:
        while not self._stop.is_set():
            number = client.sent
            client.sent += 1
            query, items = content(client.name, number)
            at = time.monotonic()
            try:
                result = await link.score(query, items, label_token_ids=LABELS, apply_softmax=True, priority=client.priority)
            except EnginepoolError as error:
                client.errors.append(f"request {number}: {error}")
                return
            client.answers[number] = (result.scores, at, time.monotonic())
            client.parts += len(result.forwards)

    async def _kill(self, pool: Pool) -> WorkerStatus:
        """SIGKILL a worker that has batches under way. Only a process that this program started is ever touched."""
        until = time.monotonic() + FINISH_S
        while time.monotonic() < until:
            ours = {child.pid for child in psutil.Process().children(recursive=True)}
            for worker in (await pool.status()).groups[0].workers:
                if worker.stage == "ready" and worker.batches and worker.pid in ours:
                    os.kill(worker.pid, signal.SIGKILL)
                    return worker
            await asyncio.sleep(LOOK_S)
        raise CommandFailed("no worker of this demo had work to be killed over")

    async def _ready(self, pool: Pool, gone: set[str], within: float) -> None:
        """Wait until every worker is ready and none of the incarnations in `gone` is left; say what they do meanwhile."""
        until = time.monotonic() + within
        while True:
            group = await self._look(pool, gone)
            if group.workers and all(w.stage == "ready" and w.incarnation not in gone for w in group.workers):
                return
            if time.monotonic() > until:
                raise CommandFailed(f"the workers were not ready within {within:.0f} s: {'; '.join(self._said.values())}")
            await asyncio.sleep(LOOK_S)

    async def _watch(self, pool: Pool, seconds: float) -> None:
        """Let the clients work for so long; say what workers do meanwhile, such as to end and to start again."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await self._look(pool, set())
            await asyncio.sleep(LOOK_S)

    async def _look(self, pool: Pool, gone: set[str]) -> GroupStatus:
        """Say what is new of the workers but those in `gone`."""
        group = (await pool.status()).groups[0]
        if group.down:
            raise CommandFailed(f"the workers cannot run: {group.down}")
        for worker in group.workers:
            told = worker.detail if worker.detail != group.model else ""
            stage = f"{worker.stage}{': ' + brief(told, TOLD) if told else ''}"
            if self._said.get(worker.name) != stage and worker.incarnation not in gone:
                self.say(f"  {worker.name} {stage}")
                self._said[worker.name] = stage
        return group

    async def _ask_again(self, pool: Pool, clients: list[DemoClient], killed_at: float) -> tuple[int, int]:
        """Repeat some requests, those that were under way at the kill first. Returns how many, and how many scores differ."""
        known = [(c.name, number, scores, at, end) for c in clients for number, (scores, at, end) in c.answers.items()]
        draw = random.Random(0)
        draw.shuffle(known)
        known.sort(key=lambda entry: not entry[3] <= killed_at <= entry[4])
        chosen = known[: ASKED_AGAIN // 2] + known[-ASKED_AGAIN // 2 :]
        differing = 0
        for name, number, scores, _, _ in chosen:
            query, items = content(name, number)
            again = await pool.score(query, items, label_token_ids=LABELS, apply_softmax=True)
            differing += not np.allclose(again.scores, scores, rtol=self._rtol, atol=1e-5)
        return len(chosen), differing
