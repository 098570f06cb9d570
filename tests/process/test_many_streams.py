"""2,000 streams at once through one real coordinator. Some of their readers stop reading."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from enginepool import Pool
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S, Daemon
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, workers_of
from tests.process.waiting import check_running

STREAMS, CLIENTS = 2000, 4
#: every tenth reader takes nothing before all others have ended
SLOW, CREDIT = 10, 8
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 32}
#: all streams have a slot
OPTIONS = {"inflight_rows": STREAMS // 2, "inflight_tokens": 100_000}
#: what the coordinator may need for a stream: its tokens have 128 bytes, and its request has a payload of 16
STREAM_BYTES = 16 << 10


def prompt(i: int) -> list[int]:
    return [i % VOCAB, i // VOCAB, 7]


def wanted(i: int) -> list[int]:
    return expected_output(prompt(i), Sampling(**SAMPLING), vocab=VOCAB, end_every=0)[0]


def memory(daemon: Daemon, what: str) -> int:
    """Bytes of the coordinator that are resident now, `VmRSS`, or were at most, `VmHWM`."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text(encoding="ascii")
    [kib] = [line.split()[1] for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(kib) << 10


class Reader:
    """One stream, and the tokens that it took."""

    def __init__(self, pool: Pool, number: int, gate: asyncio.Event) -> None:
        self.number, self.slow, self.tokens = number, number % SLOW == 0, list[int]()
        self._gate = gate
        self._stream = pool.stream(prompt(number), credit=CREDIT if self.slow else 1024, **SAMPLING)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        first = await self._stream.next_chunk()
        assert first is not None
        self.tokens += first.token_ids.tolist()
        if self.slow:
            await self._gate.wait()
        async for chunk in self._stream:
            self.tokens += chunk.token_ids.tolist()
        [[whole]] = await self._stream.result()
        np.testing.assert_array_equal(whole.token_ids, self.tokens)


@asynccontextmanager
async def all_at_once(daemon: Daemon, gate: asyncio.Event) -> AsyncGenerator[list[Reader]]:
    """The streams, when all of them have a slot: before that, the workers stand still."""
    async with AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(Pool.connect(daemon.address)) for _ in range(CLIENTS)]
        while any(worker.stage != "ready" for worker in (await pools[0].status()).groups[0].workers):
            await asyncio.sleep(0.05)
        pids = workers_of(daemon)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            readers = [Reader(pools[i % CLIENTS], i, gate) for i in range(STREAMS)]
            while sum(worker.batches for worker in (await pools[0].status()).groups[0].workers) < STREAMS:
                check_running([reader.task for reader in readers])
                await asyncio.sleep(0.05)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        yield readers


def test_readers_that_stop_slow_no_other_stream_and_no_stream_gets_tokens_of_another(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, options=OPTIONS, silence_s=60.0)

    async def scene() -> None:
        before, gate = memory(daemon, "VmRSS"), asyncio.Event()
        async with all_at_once(daemon, gate) as readers:
            slow = [reader for reader in readers if reader.slow]
            await asyncio.gather(*(reader.task for reader in readers if not reader.slow))
            assert not any(reader.task.done() for reader in slow)
            gate.set()
            await asyncio.gather(*(reader.task for reader in slow))
            for reader in readers:
                assert reader.tokens == wanted(reader.number), f"stream {reader.number}"
        grown = memory(daemon, "VmHWM") - before
        assert grown < STREAMS * STREAM_BYTES, f"{grown / STREAMS:.0f} bytes for each stream"

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
