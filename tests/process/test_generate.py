"""Streams through a real coordinator and its sim workers: a fault in the middle changes no token."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Generations, Pool, WeightPublisher, errors
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.weights import TENSORS, some_weights

VOCAB = 1000
#: 32 slots, and a step of 10 ms; sequences end by their length
GENERATES: dict[str, Any] = {
    "vocab": VOCAB, "context": 4000, "forward_s": 0.01, "inflight_rows": 32, "inflight_tokens": 40_000, "tensors": TENSORS,
    "end_every": 0,
}  # fmt: skip
#: of 1 s each
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 100}
STREAMS = 40
#: of 4 s: what it meets later is sure to meet it
LONG: dict[str, Any] = {"max_new_tokens": 400}


def generating(processes: Processes, directory: Path, workers: int = 2, options: Any = None, **timing: Any) -> Daemon:
    config = sim_pool(directory, workers=workers, options={**GENERATES, **(options or {})}, generates=True, **timing)
    return ForkedDaemon(processes, config).listening()


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def workers_of(daemon: Daemon) -> list[int]:
    """The processes of its workers."""
    return [msgspec.json.decode(path.read_bytes())["pid"] for path in Path(daemon.config.state_dir).glob("workers/*.json")]


def prompt(i: int) -> list[int]:
    return [(7 * i + j) % VOCAB for j in range(3 + i % 5)]


class Streams:
    """Clients that stream, each from a prompt of its own, and what they took."""

    def __init__(self, pool: Pool, count: int, options: dict[str, Any]) -> None:
        self.options = {**SAMPLING, **options}
        self.adapter: str = self.options.get("adapter", "")
        self.n: int = self.options.get("n", 1)
        #: by stream and sample
        self.taken: dict[tuple[int, int], list[int]] = {(i, sample): [] for i in range(count) for sample in range(self.n)}
        self._more = asyncio.Condition()
        self._failures: list[Exception] = []
        self.tasks = [asyncio.create_task(self._stream(pool, i)) for i in range(count)]

    async def _stream(self, pool: Pool, i: int) -> Generations:
        stream = pool.stream(prompt(i), **self.options)
        try:
            async for chunk in stream:
                self.taken[i, chunk.sequence] += chunk.token_ids.tolist()
                async with self._more:
                    self._more.notify_all()
            return await stream.result()
        except Exception as error:
            self._failures.append(error)
            async with self._more:
                self._more.notify_all()
            raise

    async def until(self, tokens: int) -> None:
        """So many tokens were taken, of all streams together."""
        async with self._more:
            await self._more.wait_for(lambda: sum(map(len, self.taken.values())) >= tokens or self._failures)
        assert not self._failures, self._failures

    def left(self) -> list[asyncio.Task[Generations]]:
        """Those that have not ended."""
        return [task for task in self.tasks if not task.done()]

    async def check(self, digests: dict[int, str] | None = None) -> list[Generations]:
        """Every stream has the tokens of an undisturbed run, by the weights that its spans name.

        Samples that begin again elsewhere may change places.
        """
        results = await asyncio.gather(*self.tasks)
        sampling = Sampling(**{key: value for key, value in self.options.items() if key in Sampling.__struct_fields__})
        for i, result in enumerate(results):
            [group] = result
            for sample, one in enumerate(group):
                assert one.finish_reason == "length"
                allowed = [
                    expected_output(
                        prompt(i),
                        sampling,
                        sample=k,
                        spans=one.spans,
                        digests=digests,
                        vocab=VOCAB,
                        end_every=0,
                        adapter=self.adapter,
                    )[0]
                    for k in range(self.n)
                ]
                assert one.token_ids.tolist() == self.taken[i, sample] and self.taken[i, sample] in allowed
        return results


async def all_ready(pool: Pool, daemon: Daemon) -> None:
    """Wait for all workers of the group that a pool has."""
    [group] = daemon.config.groups.values()
    async with asyncio.timeout(PATIENCE_S):
        while [worker.stage for worker in (await pool.status()).groups[0].workers] != ["ready"] * group.workers:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def streaming(daemon: Daemon, count: int = STREAMS, **options: Any) -> AsyncGenerator[tuple[Pool, Streams]]:
    """A pool whose workers are all ready, and its clients once a quarter of their tokens are there."""
    async with Pool.connect(daemon.address) as pool:
        await all_ready(pool, daemon)
        streams = Streams(pool, count, options)
        try:
            await streams.until(count * streams.n * streams.options["max_new_tokens"] // 4)
            yield pool, streams
        finally:
            for task in streams.tasks:
                task.cancel()
            await asyncio.wait(streams.tasks)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_in_the_middle_changes_no_token(
    processes: Processes, tmp_path: Path, sign: signal.Signals, n: int
) -> None:
    daemon = generating(processes, tmp_path, options={"adapters": ["french"]}, silence_s=2.0)

    async def scene() -> None:
        adapter = "french" if n > 1 else ""
        async with streaming(daemon, STREAMS // n, n=n, temperature=1.0, adapter=adapter) as (_, streams):
            os.kill(workers_of(daemon)[0], sign)
            await streams.check()

    run(scene)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_a_coordinator_that_ends_in_the_middle_changes_no_token(
    processes: Processes, tmp_path: Path, sign: signal.Signals
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with streaming(daemon) as (_, streams):
            daemon.process.send_signal(sign)
            await asyncio.to_thread(daemon.process.wait, PATIENCE_S)
            await asyncio.to_thread(daemon.successor)
            await streams.check()

    run(scene)


@pytest.mark.parametrize("in_flight", ["drain", "abort"])
def test_new_weights_in_the_middle_change_the_tokens_from_a_span_on(
    processes: Processes, tmp_path: Path, in_flight: Any
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with streaming(daemon, max_new_tokens=300) as (pool, streams):
            async with WeightPublisher(pool, **OPTIONS) as publisher:
                record = await publisher.publish(some_weights(1), 1, in_flight=in_flight)
            results = await streams.check({1: record.digest})
            versions = {tuple(version for version, _ in one.spans) for [[one]] in results}
            assert versions == ({(0,)} if in_flight == "drain" else {(0, 1)})

    run(scene)


def test_a_worker_that_is_restarted_finishes_its_streams_or_others_go_on_with_them(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, drain_s=0.5)

    async def scene() -> None:
        async with streaming(daemon, max_new_tokens=300) as (pool, streams):
            assert len(await pool.restart("g")) == 2
            await streams.check()

    run(scene)


def test_a_stream_that_is_left_frees_its_slot(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, workers=1, options={"inflight_rows": 1})

    async def scene() -> None:
        async with streaming(daemon, 1, max_new_tokens=500) as (pool, streams):
            waiting = asyncio.create_task(pool.generate(prompt(9), **SAMPLING))
            streams.tasks[0].cancel()
            [[one]] = await waiting
            assert one.token_ids.tolist() == expected_output(prompt(9), Sampling(**SAMPLING), vocab=VOCAB, end_every=0)[0]
            async with asyncio.timeout(PATIENCE_S):
                while (await pool.status()).groups[0].workers[0].batches:
                    await asyncio.sleep(0.02)

    run(scene)


def test_an_engine_is_not_flushed_in_the_middle_of_a_stream_and_says_why(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, workers=1)

    async def scene() -> None:
        async with streaming(daemon, 2) as (pool, streams):
            [row] = (await pool.flush()).workers
            assert row.code == "engine_error" and row.message.startswith("2 generations run")
            await streams.check()
            [row] = (await pool.flush()).workers
            assert row.code == ""

    run(scene)


def test_a_task_that_the_engine_refuses_fails_alone(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"faults": [{"kind": "error", "on_token": 999}]})

    async def scene() -> None:
        async with streaming(daemon) as (pool, streams):
            with pytest.raises(errors.EngineFailed, match="asked for"):
                await pool.generate([[1, 2], [3, 999]], **SAMPLING)
            await streams.check()

    run(scene)


@pytest.mark.parametrize("step", [None, 30])
def test_engines_that_run_out_of_memory_with_many_sequences_run_fewer_and_no_token_changes(
    processes: Processes, tmp_path: Path, step: int | None
) -> None:
    """At the prefill that is too much, or in the middle of the streams."""
    daemon = generating(processes, tmp_path, options={"faults": [{"kind": "out_of_memory", "rows": 16, "at_step": step}]})

    async def scene() -> None:
        async with streaming(daemon) as (pool, streams):
            await streams.check()
            assert (await pool.status()).groups[0].halvings

    run(scene)
