"""The load of the Python client: `python -m bench.python_load ADDRESS` runs the closed phases named on its stdin with `Pool`.

Unlike `bench.load` nothing is prepared: each call encodes its arrays and decodes its answer, which is what a caller pays.
"""

import asyncio
import gc
import sys
import time

import msgspec
import numpy as np
import uvloop

from bench import prepared
from bench.load import PATIENCE_S, Closed, Phase
from bench.workers import GROUP
from enginepool import Pool


async def run(pool: Pool, command: Closed) -> Phase:
    """`in_flight` tasks that call again as soon as they have their scores; there is one answer at least."""
    took: list[float] = []
    begin = time.perf_counter()
    end = begin + command.seconds

    async def caller(number: int) -> None:
        ids = prepared.token_ids(number)
        query, items = ids[: prepared.QUERY], list(ids[prepared.QUERY :].reshape(prepared.ITEMS, prepared.ITEM))
        while not took or time.perf_counter() < end:
            at = time.perf_counter()
            scores = await pool.score(query, items, group=GROUP, label_token_ids=list(prepared.LABELS), priority=number % 3)
            took.append(time.perf_counter() - at)
            assert scores.scores.shape == (prepared.ITEMS, len(prepared.LABELS))

    async with asyncio.timeout(command.seconds + PATIENCE_S), asyncio.TaskGroup() as callers:
        for number in range(command.in_flight):
            callers.create_task(caller(number))
    p50, p99 = (float(value) * 1000 for value in np.percentile(took, (50, 99)))
    return Phase(len(took), time.perf_counter() - begin, p50, p99)


async def main(address: str) -> None:
    """Say {} when connected, then answer each command with its phase."""
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    async with Pool.connect(address) as pool:
        sys.stdout.write("{}\n")
        sys.stdout.flush()
        gc.freeze()
        while line := await stdin.readline():
            phase = await run(pool, msgspec.json.decode(line, type=Closed))
            sys.stdout.write(msgspec.json.encode(phase).decode() + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
