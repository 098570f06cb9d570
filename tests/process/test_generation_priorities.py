"""Streams of a high priority through a pool whose slots are all taken by long generations of a low one."""

import asyncio
from pathlib import Path
from typing import Any

from enginepool import Pool
from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, prompt

SLOTS, LOW, HIGH = 8, 12, 10
LONG: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 400}
SHORT: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 5}


def test_high_priorities_wait_for_no_low_one_to_end_and_each_low_one_has_all_its_tokens(
    processes: Processes, tmp_path: Path
) -> None:
    """Compared in tokens, not in time: all sequences of an engine get one in each step."""
    options = {"inflight_rows": SLOTS // 2, "forward_s": 0.005}
    daemon = generating(processes, tmp_path, options=options)
    begun, some = 0, asyncio.Event()

    async def low(pool: Pool, i: int) -> None:
        nonlocal begun
        stream = pool.stream(prompt(i), **LONG)
        assert await stream.next_chunk() is not None
        begun += 1
        if begun == SLOTS:
            some.set()
        [[whole]] = await stream.result()
        assert whole.token_ids.tolist() == expected_output(prompt(i), Sampling(**LONG), vocab=VOCAB, end_every=0)[0]

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool, Pool.connect(daemon.address) as urgent:
            tasks = [asyncio.create_task(low(pool, i)) for i in range(LOW)]
            await some.wait()
            for i in range(HIGH):
                [[one]] = await urgent.generate([prompt(100 + i)], priority=100, **SHORT)
                wanted = expected_output(prompt(100 + i), Sampling(**SHORT), vocab=VOCAB, end_every=0)[0]
                assert one.token_ids.tolist() == wanted
                # Each of them has 400 steps, and this one had 5.
                assert i or not any(task.done() for task in tasks), "it waited for a low one to end"
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
