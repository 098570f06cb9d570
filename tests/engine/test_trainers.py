"""The examples of trainers, on real engines: TRL's trainer and the pool have the same weights after each step, also when a
worker is killed, and a hand-written loop learns its task."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig, RestartConfig, Timing
from enginepool.protocol.messages import GroupStatus
from tests.engine.forked import PRELOADED, ForkedDaemon
from tests.engine.reference import Models
from tests.process.daemons import Daemon
from tests.process.forking import ForkedProcess
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
START_S = 300.0
STEPS = 20
#: the code of a process that runs a file with arguments
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def daemon(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two engines generate, and a simulated one rewards."""
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        options = {"max_running_requests": 32}
        policy = GroupConfig(model=str(models.causal), workers=2, device="cpu", operations=["generate"], options=options)
        judge = GroupConfig(model="sim", engine="sim", options={"kind": "classifier"})
        config = PoolConfig(
            groups={"policy": policy, "judge": judge},
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0),
            restart=RestartConfig(backoff_s=0.1),
        )
        daemon = ForkedDaemon(processes, config).listening()
        yield daemon


class Program:
    """An example that runs."""

    def __init__(self, processes: Processes, name: str, daemon: Daemon, model: Path, folder: Path) -> None:
        command = [sys.executable, "-c", RUN, str(ROOT / "examples" / name), daemon.address, str(model)]
        self._log = folder / "errors.txt"
        with self._log.open("w") as log:
            process = ForkedProcess(command, PRELOADED, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
        self._process = processes.keep(process)
        self._said = ""

    def until(self, text: str) -> None:
        """It has said so. "" is not found."""
        for line in self._process.stdout:
            self._said += line
            if text and text in line:
                return
        assert not text, self._said + self._log.read_text("utf-8")

    def end(self) -> str:
        """All that it said."""
        self.until("")
        assert self._process.wait(60) == 0, self._said + self._log.read_text("utf-8")
        return self._said


def policy_of(daemon: Daemon) -> GroupStatus:
    async def ask() -> GroupStatus:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(START_S)
            return next(group for group in (await pool.status()).groups if group.name == "policy")

    return asyncio.run(ask())


def test_trl_trains_with_a_pool_that_has_its_weights_after_each_step_also_when_a_worker_is_killed(
    daemon: Daemon, processes: Processes, models: Models, tmp_path: Path
) -> None:
    before = policy_of(daemon)
    program = Program(processes, "trl_grpo.py", daemon, models.causal, tmp_path)
    program.until("step 7:")
    victim = next(worker for worker in policy_of(daemon).workers if worker.stage == "ready")
    psutil.Process(victim.pid).send_signal(signal.SIGKILL)
    said = program.end()
    differences = re.findall(r"step (\d+): the log-probabilities differ by at most (\S+)", said)
    assert [int(step) for step, _ in differences] == [*range(STEPS)]
    assert max(float(difference) for _, difference in differences) < 1e-4
    version = (before.version or 0) + 1 + STEPS
    assert f"{STEPS} steps; the pool has version {version}, and {version} was published last" in said
    assert policy_of(daemon).version == version


def test_a_loop_by_hand_raises_the_reward_with_groups_of_at_most_the_last_weights(
    daemon: Daemon, processes: Processes, models: Models, tmp_path: Path
) -> None:
    said = Program(processes, "grpo.py", daemon, models.causal, tmp_path).end()
    steps = re.findall(r"step \d+: reward (\S+), by weights up to (\d+) versions old", said)
    rewards = [float(reward) for reward, _ in steps]
    assert len(steps) == STEPS and {int(age) for _, age in steps} <= {0, 1}
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.05, said
