"""How the real engine starts, tells that it was lost, and ends."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest

from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.protocol.messages import Part
from enginepool.workers.engine import EngineDied, EngineUnusable, RowBatch, RowPart
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.engine import SglangEngine
from tests.engine.conftest import BUDGETS
from tests.engine.hosted import CLOSE_S, START_S, HostedEngine
from tests.engine.reference import Models, Reference
from tests.process.daemons import Daemon
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ROW = (np.array([5], np.int32), np.array([6, 7], np.int32), np.array([2], np.uint32))
BATCH = RowBatch((RowPart(*ROW, asked=Part([], [1])),))
REWARD_BATCH = RowBatch((RowPart(*ROW),))


class Device(NamedTuple):
    """Where a pool runs: settings of its group, and how much scores are off there."""

    settings: dict[str, Any]
    rtol: float


ON_A_CPU = Device({"device": "cpu", "dtype": "float32"}, 1e-4)
#: Kernels on a GPU take bfloat16, of 8 bits.
ON_A_GPU = Device(
    {
        "device": "cuda",
        "dtype": "bfloat16",
        "fork_server": True,
        "options": {"sampling_backend": "pytorch", "mem_fraction_static": 0.2},
    },
    0.15,
)


@pytest.fixture(scope="module")
def causal(models: Models) -> Iterator[HostedEngine]:
    """An engine of this file alone, whose process tries another one before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        hosted = HostedEngine(str(models.causal), refused={"dp_size": 2}, **BUDGETS)
        yield hosted.wait_until_started()
    hosted.end()


def test_capabilities_are_those_of_the_loaded_model(causal: HostedEngine, reward: HostedEngine) -> None:
    assert causal.capabilities is not None
    assert reward.capabilities is not None
    assert (causal.capabilities.kind, causal.capabilities.labels, causal.capabilities.hidden) == ("causal", 0, 0)
    assert (reward.capabilities.kind, reward.capabilities.labels, reward.capabilities.hidden) == ("classifier", 3, 64)
    for capabilities in (causal.capabilities, reward.capabilities):
        assert (capabilities.vocab, capabilities.page, capabilities.device, capabilities.text) == (512, 1, "cpu", True)
        assert (capabilities.batch_tokens, capabilities.batch_rows) == (256, 24)
        assert (capabilities.inflight_tokens, capabilities.inflight_rows) == (512, 48)
        assert capabilities.context == 512
        assert capabilities.engine.startswith("sglang ")


def test_start_reports_what_it_is_doing(causal: HostedEngine) -> None:
    assert causal.stages == ["loading", "compiling"]


def test_an_option_that_cuts_batches_is_refused_at_start_with_the_reason(causal: HostedEngine) -> None:
    assert "dp_size=2 is refused" in causal.refusal


def test_the_workers_own_sigterm_handler_survives_the_engine(causal: HostedEngine) -> None:
    assert causal.call("terminate")
    assert len(causal.score(BATCH)) == 1


def test_a_model_that_does_not_exist_is_said_in_one_line(tmp_path: Path) -> None:
    async def start(model: str) -> str:
        engine = SglangEngine(EngineSettings(model=model, device="cpu"))
        with pytest.raises(EngineUnusable) as caught:
            await engine.start(lambda _stage, _detail: None)
        await engine.close()
        return str(caught.value)

    assert asyncio.run(start("/nowhere/to/be/found")) == "/nowhere/to/be/found: there is no such folder"
    assert asyncio.run(start(str(tmp_path))) == f"{tmp_path}: that folder has no config.json"


def test_a_gpu_that_is_not_there_is_said_in_one_line_and_not_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    async def start() -> None:
        engine = SglangEngine(EngineSettings(model=str(tmp_path), device="cuda"))
        with pytest.raises(EngineUnusable, match=r"the device is cuda, and torch finds no CUDA GPU here$"):
            await engine.start(lambda _stage, _detail: None)
        await engine.close()

    asyncio.run(start())


def test_a_killed_scheduler_ends_calls_with_the_reason_and_leaves_nothing(reward: HostedEngine) -> None:
    reason, ended = reward.call("kill_scheduler", REWARD_BATCH)
    assert "scheduler" in reason
    assert "SIGKILL" in reason
    assert str(ended) == reason
    [after] = reward.score(REWARD_BATCH)
    assert isinstance(after, EngineDied)
    assert str(after) == reason
    closed = reward.close()
    assert closed.children == []
    assert closed.seconds < CLOSE_S


def test_a_closed_engine_leaves_no_process_and_refuses_work(causal: HostedEngine) -> None:
    closed = causal.close()
    assert closed.children == []
    assert closed.seconds < CLOSE_S
    assert "closed" in closed.refusal


@pytest.mark.parametrize("on", [ON_A_CPU, pytest.param(ON_A_GPU, marks=pytest.mark.gpu)], ids=["cpu", "cuda"])
def test_a_pool_that_is_started_as_users_do_it_scores_has_its_worker_back_and_leaves_no_process(
    processes: Processes, models: Models, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: Device
) -> None:
    """Its fork server imports SGLang, and forks the worker and the one that follows."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = PoolConfig(
        groups={"policy": GroupConfig(model=str(models.causal), **on.settings)},
        listen=f"ipc://{tmp_path}/pool.sock",
        state_dir=str(tmp_path / "state"),
        timing=Timing(silence_s=60.0, starting_s=600.0),
    )
    daemon = Daemon(processes, config).listening()

    async def scenario() -> list[psutil.Process]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(timeout=START_S)
            families: list[psutil.Process] = []
            for killed in (True, False):
                result = await pool.score([5], [[6, 7]], label_token_ids=[1, 2])
                want = reference.label_scores([5, 6, 7], (1, 2), False)
                np.testing.assert_allclose(result.scores[0], want, rtol=on.rtol, atol=1e-5)
                [worker] = (await pool.status()).groups[0].workers
                host = psutil.Process(worker.pid)
                family = [host, *host.children(recursive=True)]
                assert len(family) >= 3, "a worker, and SGLang's own processes"
                families += family
                if killed:
                    host.kill()
            return families

    family = asyncio.run(scenario())
    logs = [path.read_text().splitlines() for path in (tmp_path / "state").rglob("*.log")]
    assert logs and not [line for line in sum(logs, daemon.lines) if "fork server" in line], "all were forked"
    assert daemon.end() == 0
    assert psutil.wait_procs(family, timeout=CLOSE_S)[1] == []
