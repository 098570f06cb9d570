"""One pool of one worker, which is killed: seconds from its start to the first answer, and from each kill to the next. For
`bench.restart`, which runs this file with the packages of different trees: it imports enginepool alone."""

import asyncio
import json
import os
import signal
import sys
import time
from typing import Any

from enginepool import Pool

#: of an answer; a model may be large
ANSWER_S = 1800.0


async def restart(settings: dict[str, Any], kills: int) -> list[float]:
    """Seconds until the first answer, then of each kill until the next answer."""

    async def answered_after(began: float) -> float:
        await pool.score([5, 6], [[7, 8, 9]], label_token_ids=[1, 2], timeout=ANSWER_S)
        return time.monotonic() - began

    began = time.monotonic()
    async with Pool.start(**settings) as pool:
        seconds = [await answered_after(began)]
        for _ in range(kills):
            [worker] = (await pool.status()).groups[0].workers
            os.kill(worker.pid, signal.SIGKILL)
            seconds.append(await answered_after(time.monotonic()))
        return seconds


if __name__ == "__main__":
    found = asyncio.run(restart(json.loads(sys.argv[1]), int(sys.argv[2])))
    sys.stdout.write(f"{json.dumps(found)}\n")
