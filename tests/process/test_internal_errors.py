"""A fault inside the coordinator ends it at once, with its story in the log; it is started again, and every call ends."""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop

from enginepool import Pool, errors
from enginepool.client import embedded
from enginepool.config import GroupConfig, PoolConfig
from enginepool.protocol.messages import StatusReport
from enginepool.workers.sim.scores import expected_scores
from tests.process.commands import PROGRAM
from tests.process.daemons import PATIENCE_S, end_workers
from tests.process.faulty_coordinator import COMMAND, LABEL
from tests.process.forking import ForkedProcess
from tests.process.processes import Processes

SIM = GroupConfig(model="sim", engine="sim", workers=2, options={"forward_s": 0.05, "batch_rows": 4})


async def score(pool: Pool, label: int) -> None:
    result = await pool.score([1], [[2]], label_token_ids=[label], timeout=PATIENCE_S)
    np.testing.assert_array_equal(result.scores, expected_scores([1], [[2]], labels=(label,))["scores"])


def plant(monkeypatch: pytest.MonkeyPatch, directory: Path, how: str) -> Path:
    """Plant a fault in all coordinators to come; one that strikes once, while the returned file exists, or each time."""
    file = directory / "strikes"
    file.touch()
    monkeypatch.setenv("PLANTED", how)
    monkeypatch.setenv("PLANTED_ONCE", str(file))
    monkeypatch.setattr(embedded, "COMMAND", COMMAND)
    return file


@pytest.mark.parametrize("how", ["raise", "abort"])
def test_a_fault_in_the_core_of_an_embedded_pool_costs_no_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    file = plant(monkeypatch, tmp_path, f"once:{how}")

    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": SIM})) as pool:
            before = await ready(pool)
            await asyncio.gather(*(score(pool, label) for label in (1, 2, LABEL, 3)))
            assert not file.exists()
            after = await ready(pool)
            assert after.epoch > before.epoch
            assert pids(after) == pids(before), "adopted"

    uvloop.run(main())


def pids(report: StatusReport) -> set[int]:
    return {worker.pid for worker in report.groups[0].workers}


async def ready(pool: Pool) -> StatusReport:
    await pool.ready(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.stage != "ready" for worker in (await pool.status(PATIENCE_S)).groups[0].workers):
            await asyncio.sleep(0.05)
    return await pool.status(PATIENCE_S)


def test_a_request_that_ends_every_coordinator_ends_the_pool_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch, tmp_path, "raise")

    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": SIM})) as pool:
            await ready(pool)
            await score(pool, 1)
            why = "ended more than 5 times within 60 s, the last time with exit code 70"
            with pytest.raises(errors.PoolDown, match=why) as caught:
                await score(pool, LABEL)
            told = "\n".join(caught.value.evidence)
            assert "internal error: KeyError: 'planted'" in told and re.search(r"request: <Request \w+/\d+ QUEUED", told), told

    uvloop.run(main())


class Served:
    """`enginepool serve` with a fault, and all that it says. `make` starts it."""

    def __init__(
        self, processes: Processes, directory: Path, command: Sequence[str] = COMMAND, make: Callable[..., Any] = ForkedProcess
    ) -> None:
        self.address = f"ipc://{directory}/pool.sock"
        self.state = directory / "state"
        config = directory / "pool.toml"
        config.write_text(
            f'listen = "{self.address}"\nstate_dir = "{self.state}"\n'
            '[groups.g]\nmodel = "sim"\nengine = "sim"\nworkers = 2\n[groups.g.options]\nforward_s = 0.02\n'
        )
        self.log = directory / "log"
        processes.then(lambda: end_workers(str(self.state)))
        with self.log.open("wb") as log:
            self.process = processes.keep(make([*command, "serve", "--config", str(config)], stderr=log))

    def coordinator(self) -> psutil.Process:
        (child,) = [c for c in psutil.Process(self.process.pid).children() if "ENGINEPOOL_CONFIG" in c.environ()]
        return child


@pytest.mark.parametrize("how", ["raise", "abort"])
def test_serve_starts_its_coordinator_again_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, tmp_path: Path, how: str
) -> None:
    file = plant(monkeypatch, tmp_path, f"once:{how}")
    served = Served(processes, tmp_path)

    async def main() -> None:
        async with Pool.connect(served.address) as pool:
            before = await ready(pool)
            await asyncio.gather(*(score(pool, label) for label in (1, 2, LABEL, 3)))
            assert not file.exists()
            after = await ready(pool)
            assert after.epoch > before.epoch
            assert pids(after) == pids(before), "adopted"

    uvloop.run(main())
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(PATIENCE_S) == 0
    told = served.log.read_text()
    assert ("exit code 70" if how == "raise" else "SIGABRT") in told
    if how == "raise":
        assert "internal error: KeyError: 'planted'" in told and "event: Submit" in told
    assert "Traceback" not in told


def test_serve_ends_with_the_reason_when_a_fault_comes_back_each_time(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, tmp_path: Path
) -> None:
    plant(monkeypatch, tmp_path, "raise")
    served = Served(processes, tmp_path)

    async def main() -> None:
        async with Pool.connect(served.address) as pool:
            await ready(pool)
            call = asyncio.create_task(score(pool, LABEL))
            async with asyncio.timeout(PATIENCE_S):
                while served.process.poll() is None:
                    await asyncio.sleep(0.05)
            call.cancel()

    uvloop.run(main())
    assert served.process.returncode == 70
    told = served.log.read_text()
    assert "ended more than 5 times within 60 s, the last time with exit code 70" in told.splitlines()[-1]
    assert told.count("internal error: ") == 6


def test_a_coordinator_ends_with_the_command_that_started_it(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, tmp_path: Path
) -> None:
    """As users start it: nothing is forked."""
    plant(monkeypatch, tmp_path, "raise")
    served = Served(processes, tmp_path, make=subprocess.Popen)

    async def main() -> None:
        async with Pool.connect(served.address) as pool:
            before = await ready(pool)
            served.process.kill()
            served.process.wait()
            again = Served(processes, tmp_path, make=subprocess.Popen)
            async with asyncio.timeout(PATIENCE_S):
                while (await pool.status(PATIENCE_S)).epoch == before.epoch:
                    await asyncio.sleep(0.05)
            after = await ready(pool)
            assert pids(after) == pids(before), "adopted"
            again.process.send_signal(signal.SIGTERM)
            assert again.process.wait(PATIENCE_S) == 0

    uvloop.run(main())


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGTERM, (0, 1)), (signal.SIGINT, (0, 1)), (signal.SIGUSR1, (0,))])
def test_a_signal_that_comes_again_until_serve_has_ended_does_not_replace_its_exit_code(
    processes: Processes, tmp_path: Path, number: signal.Signals, codes: tuple[int, ...]
) -> None:
    served = Served(processes, tmp_path, PROGRAM, make=subprocess.Popen)

    async def main() -> None:
        async with Pool.connect(served.address) as pool:
            await ready(pool)

    uvloop.run(main())
    until = time.monotonic() + PATIENCE_S
    while served.process.poll() is None and time.monotonic() < until:
        served.process.send_signal(number)
        time.sleep(0.005)
    assert served.process.poll() in codes, served.log.read_text()


#: A `serve` of which starts fail, as the case says. Its first coordinator is killed; one that is started later has drained.
FAILING = """
import errno, os, signal, sys
from enginepool.cli import coordinator_process
from enginepool.config import PoolConfig
from enginepool.host import restart_policy
from enginepool.host.child_process import ChildProcess

start, starts, case = ChildProcess.start, 0, sys.argv[1]
if case == "ignored":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def failing(command, *arguments, **options):
    global starts
    starts += 1
    if case == "first" and starts == 1 or case == "full" and starts in (2, 3):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if case == "told" and starts == 2:
        os.kill(os.getpid(), signal.SIGTERM)
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if case == "gone" and starts > 1:
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "python")
    end = "os.kill(os.getpid(), 9)" if starts == 1 else "0"
    return start((sys.executable, "-c", f"import os; {end}"), *arguments, **options)

ChildProcess.start = failing
restart_policy.HOST_FAULT_S = 60.0 if case == "told" else 0.01
policy = restart_policy.RestartPolicy(most=2)
try:
    code = coordinator_process.keep_running(PoolConfig(groups={}), policy)
except OSError as error:
    code = os.strerror(error.errno)
print(starts, code)
"""


@pytest.mark.parametrize(
    ("case", "ends", "said"),
    [
        ("full", "4 0", "could not be started again: Resource temporarily unavailable; the next try is after 0.01 s"),
        # The program that started `serve` waits for none of its children: they would leave no exit codes.
        ("ignored", "2 0", "the coordinator ended with signal SIGKILL: it is started again"),
        ("told", "2 137", "asked to end without a coordinator"),
        ("gone", "3 No such file or directory", "could not be started again: python: No such file or directory; the next try"),
        ("first", "1 Resource temporarily unavailable", ""),
    ],
)
def test_serve_tries_again_when_a_later_coordinator_cannot_be_started(
    processes: Processes, case: str, ends: str, said: str
) -> None:
    command = [sys.executable, "-c", FAILING, case]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    told, log = processes.keep(ForkedProcess(command, **pipes)).communicate(timeout=PATIENCE_S)
    assert told == f"{ends}\n" and said in log
