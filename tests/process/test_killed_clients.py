"""300 clients of which 150 are killed: the calls of the others all end, and nothing of the killed ones is left."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil

from enginepool import Pool
from enginepool.protocol.messages import GroupStatus
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes

#: processes that live and that are killed, of so many clients each, with so many calls at a time each
ALIVE = KILLED = 3
CLIENTS, CALLS = 50, 4
#: a process of clients: says "asked" when all its calls are under way, and at the end of its input how many were answered
SCRIPT = f"""
import asyncio, sys
from enginepool import Pool

async def client(address, rounds):
    async with Pool.connect(address) as pool:
        await pool.ready()
        for _ in range(rounds):
            asked = [pool.score([1, 2], [[3], [4, 5]], label_token_ids=[5]) for _ in range({CALLS})]
            for done in asyncio.as_completed(asked):
                await done
                yield 1

async def one(address, rounds, begun):
    answered = 0
    async for _ in client(address, rounds):
        answered += 1
        begun.set()
    return answered

async def main():
    begun = [asyncio.Event() for _ in range({CLIENTS})]
    tasks = [asyncio.create_task(one(sys.argv[1], int(sys.argv[2]), event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    print("asked", flush=True)
    print(sum(await asyncio.gather(*tasks)), flush=True)

asyncio.run(main())
"""


def test_when_half_of_the_clients_are_killed_the_others_are_served_and_nothing_is_left(
    processes: Processes, tmp_path: Path
) -> None:
    options = {"forward_s": 0.002, "row_s": 0.0, "token_s": 0.0}
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options=options, client_silence_s=5.0)).listening()

    def clients(rounds: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", SCRIPT, daemon.address, str(rounds)]
        return processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True))

    def line(process: "subprocess.Popen[str]") -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    async def left() -> GroupStatus:
        """What the coordinator has, once nothing of the killed clients is left."""
        async with Pool.connect(daemon.address) as pool:
            until = time.monotonic() + PATIENCE_S
            while True:
                status = await pool.status()
                (group,) = status.groups
                # The client that asks has not shown yet that it read the last answers to that.
                kept = (group.queued, group.running, status.answers_kept, status.answers_bytes)
                if kept == (0, 0, 0, 0) and status.clients == 1 and status.client_unread_bytes < 50_000:
                    return group
                assert time.monotonic() < until, status
                await asyncio.sleep(0.2)

    resident = psutil.Process(daemon.process.pid).memory_info().rss
    rounds = 10
    killed = [clients(1_000_000) for _ in range(KILLED)]
    alive = [clients(rounds) for _ in range(ALIVE)]
    assert [line(process) for process in (*killed, *alive)] == ["asked"] * (KILLED + ALIVE)
    for process in killed:
        process.kill()
    assert [line(process) for process in alive] == [str(CLIENTS * CALLS * rounds)] * ALIVE
    group = asyncio.run(left())
    assert group.poisoned == 0
    assert group.failed <= KILLED * CLIENTS * CALLS, "calls of the killed clients are the only ones that fail"
    assert psutil.Process(daemon.process.pid).memory_info().rss < resident + (60 << 20)
    assert daemon.process.poll() is None
