"""A coordinator that runs out of descriptors or of memory goes on serving, and says what is missing."""

import asyncio
import os
import resource
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from enginepool import Pool
from enginepool.config import Limits
from enginepool.coordinator.shell.connections import shares
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

#: the least with which no burst of connections can take all descriptors
FILES = 4100


def limited(name: str, value: int) -> list[str]:
    """A command that runs another one under a limit, hard and soft."""
    code = "import os, resource, sys; resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2); "
    return [sys.executable, "-c", code + "os.execv(sys.argv[3], sys.argv[3:])", name, str(value)]


def test_a_crowd_of_connections_takes_no_core_and_leaves_descriptors(processes: Processes, tmp_path: Path) -> None:
    daemon = Daemon(processes, sim_pool(tmp_path, workers=1), limited("RLIMIT_NOFILE", FILES)).listening()
    assert any(f"RLIMIT_NOFILE = {FILES}" in line for line in daemon.lines), daemon.lines
    path = daemon.address.removeprefix("ipc://")
    most = shares(FILES, Limits().clients, 1).clients
    peers: list[socket.socket] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * FILES:
        pytest.skip(f"RLIMIT_NOFILE allows {hard} open files at most, and this test needs {2 * FILES}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FILES), hard))

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            for _ in range(most + 3000):
                peer = socket.socket(socket.AF_UNIX)
                peers.append(peer)
                peer.connect(path)
            await asyncio.to_thread(daemon.wait_for, "connections are open")
            process = psutil.Process(daemon.process.pid)
            until = time.monotonic() + PATIENCE_S
            while process.num_fds() > most + 100:
                assert time.monotonic() < until, process.num_fds()
                await asyncio.sleep(0.05)
            before, began = process.cpu_times(), time.monotonic()
            for _ in range(20):
                await pool.score([1], [[2]], label_token_ids=[5])
                await asyncio.sleep(0.1)
            used, took = process.cpu_times(), time.monotonic() - began
            busy = (used.user + used.system - before.user - before.system) / took
            assert busy < 0.5, f"{busy:.0%} of a core"
            # A worker that is killed comes back: its pipes and logs have descriptors.
            (worker,) = (await pool.status()).groups[0].workers
            os.kill(worker.pid, 9)
            await asyncio.to_thread(daemon.wait_for, "starting worker")
            await pool.score([1], [[2]], label_token_ids=[5], timeout=PATIENCE_S)
            for peer in peers:
                peer.close()
            async with Pool.connect(daemon.address) as other:
                await other.score([1], [[2]], label_token_ids=[5])

    try:
        asyncio.run(scene())
    finally:
        for peer in peers:
            peer.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(f"{most} connections are open" in line for line in daemon.lines) == 1, daemon.lines
    assert daemon.process.poll() is None


def test_a_process_that_may_open_too_few_files_is_refused(processes: Processes, tmp_path: Path) -> None:
    daemon = Daemon(processes, sim_pool(tmp_path, workers=1), limited("RLIMIT_NOFILE", 60))
    daemon.wait_for("RLIMIT_NOFILE is 60: a pool of 1 workers needs")
    assert daemon.process.wait(PATIENCE_S) == 2


def test_the_number_of_open_files_is_raised_to_what_is_allowed(processes: Processes, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    command = [sys.executable, "-c", f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard})); "
               "os.execv(sys.argv[1], sys.argv[1:])"]  # fmt: skip
    daemon = Daemon(processes, sim_pool(tmp_path, workers=0), command).listening()
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    assert soft


def test_buffers_that_cannot_fit_the_memory_of_the_process_are_refused(processes: Processes, tmp_path: Path) -> None:
    daemon = Daemon(processes, sim_pool(tmp_path, workers=0), limited("RLIMIT_AS", 900 << 20))
    line = daemon.wait_for("limits.buffer_bytes = 1073741824")
    assert f"does not fit RLIMIT_AS, {900 << 20} bytes; at most" in line
    assert daemon.process.wait(PATIENCE_S) == 2


def test_a_message_without_memory_for_it_is_busy_and_the_next_attempt_is_answered(processes: Processes, tmp_path: Path) -> None:
    limits = Limits(max_message_bytes=32 << 20, window_bytes=64 << 20, buffer_bytes=128 << 20)
    options = {"forward_s": 0.0, "row_s": 0.0, "token_s": 0.0}
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1, limits=limits, options=options)).listening()
    pid = daemon.process.pid

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            await pool.score([1], [[2]], label_token_ids=[5])
            # As much as libzmq takes for the message, and not as much again.
            before = resource.prlimit(pid, resource.RLIMIT_AS)
            least = psutil.Process(pid).memory_info().vms + (40 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (least, before[1]))
            items = [np.full(60, i % 1000, np.int32) for i in range(100_000)]
            large = asyncio.create_task(pool.score([1], items, label_token_ids=[5], timeout=PATIENCE_S))
            await asyncio.to_thread(daemon.wait_for, "no memory for a message of a client")
            await pool.score([1], [[2]], label_token_ids=[5])
            assert not large.done()
            resource.prlimit(pid, resource.RLIMIT_AS, before)
            assert (await large).scores.shape == (100_000, 1)

    asyncio.run(scene())
    assert daemon.process.poll() is None
