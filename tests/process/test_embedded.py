"""`Pool.start`: the coordinator as a child process, with the sim engine, and with stand-ins that misbehave."""

import asyncio
import errno
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import uvloop

from enginepool import BlockingPool, Pool, errors
from enginepool.client import embedded
from enginepool.client.embedded import EmbeddedCoordinator, embedded_config
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.host import restart_policy
from enginepool.host.child_process import ChildProcess
from enginepool.host.folders import snapshot_folders
from enginepool.host.restart_policy import CANNOT_WRITE, HOST_FAULT, HOST_FAULT_S, RESTART, RestartPolicy
from enginepool.protocol.messages import StatusReport
from enginepool.workers.sim.engine import BYTE_OFFSET
from enginepool.workers.sim.scores import expected_scores
from tests.process.processes import Processes

STAND_IN = Path(__file__).with_name("stand_in_coordinator.py")
#: Seconds that a test waits for what must come.
PATIENCE_S = 60.0
SIM = GroupConfig(model="sim", engine="sim", workers=2, options={"forward_s": 0.05, "batch_rows": 4})


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `Pool.start` start the stand-in, in this mode."""

    def use(mode: str) -> None:
        monkeypatch.setenv("STAND_IN", mode)
        monkeypatch.setattr(embedded, "COMMAND", (sys.executable, str(STAND_IN)))

    return use


def coordinator_of(pool: Pool) -> psutil.Process:
    """The child process of this one that listens where the pool does."""
    (found,) = [child for child in psutil.Process().children() if pool.address in child.environ().get("ENGINEPOOL_CONFIG", "")]
    return found


async def all_ready(pool: Pool) -> StatusReport:
    """Wait until every worker serves."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            report = await pool.status()
            if all(worker.stage == "ready" for worker in report.groups[0].workers):
                return report
            await asyncio.sleep(0.05)


# --- the real coordinator ----------------------------------------------------------------------------------------------


def test_an_embedded_pool_scores_and_leaves_nothing_behind():
    async def main() -> tuple[Path, list[psutil.Process]]:
        async with Pool.start("sim", workers=2, engine="sim") as pool:
            await pool.ready(PATIENCE_S)
            result = await pool.score([1, 2], [[3], [4, 5]], label_token_ids=[6, 7])
            assert result.scores.shape == (2, 2)
            coordinator = coordinator_of(pool)
            assert os.getpgid(coordinator.pid) != os.getpgid(0), "Ctrl-C in a terminal is for the program alone"
            directory = Path(pool.address.removeprefix("ipc://")).parent
            assert directory.stat().st_mode & 0o777 == 0o700
            return directory, [coordinator, *coordinator.children(recursive=True)]

    directory, processes = uvloop.run(main())
    assert not directory.exists()
    assert len(processes) >= 3
    assert psutil.wait_procs(processes, PATIENCE_S)[1] == []


def test_texts_of_a_cross_encoder_are_joined_as_pairs_on_the_way_to_its_engine() -> None:
    """Over every process: text is the same as ids with separators, also with the item first and blocking; and raw without."""
    a, b, separator = (ord("a") + BYTE_OFFSET, ord("b") + BYTE_OFFSET, 2)
    options = {"kind": "classifier", "separator": separator}

    def scores(*rows: list[int]) -> list[list[float]]:
        return expected_scores([], rows, classes=1)["scores"].tolist()

    with BlockingPool.start("sim", engine="sim", options=options) as pool:
        joined = pool.score("a", ["b", ""])
        assert joined.scores.tolist() == scores([a, separator, b, separator], [a, separator, separator])
        assert joined.usage.tokens == 7
        assert pool.score("a", ["b"], item_first=True).scores.tolist() == scores([b, separator, a, separator])
        assert pool.score_pairs(["a", ""], ["b", "b"]).scores.tolist() == scores([a, separator, b, separator], [b, separator])
        assert pool.score("a", ["b"], raw=True).scores.tolist() == scores([a, b])
        assert pool.score([a], [[b]], raw=True).scores.tolist() == scores([a, b])
        with pytest.raises(errors.BadRequest, match=r"^responses\[1\]: no separator token 2 between") as refused:
            pool.score_pairs([[a, separator], [a]], [[b], [b]])
        assert (refused.value.field, refused.value.limit) == ("responses[1]", "2")


def test_one_worker_serves_packed_and_plain_batches_with_the_same_scores_by_default():
    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": msgspec.structs.replace(SIM, workers=1)})) as pool:
            await pool.ready(PATIENCE_S)
            [worker] = (await pool.status()).groups[0].workers
            assert worker.packed
            query, items = [5, 6, 7], [[i, i + 1] for i in range(1, 11)]
            calls = [pool.score(query, items, label_token_ids=[2]) for _ in range(8)]
            calls.append(pool.score(query, items, label_token_ids=[2], item_first=True))
            *shared, turned = await asyncio.gather(*calls)
            for result in shared:
                np.testing.assert_array_equal(result.scores, expected_scores(query, items, labels=(2,))["scores"])
            want = expected_scores(query, items, labels=(2,), item_first=True)["scores"]
            np.testing.assert_array_equal(turned.scores, want)

    uvloop.run(main())


def test_a_long_query_that_is_computed_once_lets_a_request_stay_whole():
    async def forwards(query: list[int]) -> tuple[int, ...]:
        group = msgspec.structs.replace(SIM, workers=1, max_batch_tokens=40, cached_query_tokens=20)
        async with Pool.start(config=PoolConfig(groups={"g": group})) as pool:
            await pool.ready(PATIENCE_S)
            items = [[7], [8], [9], [10]]
            result = await pool.score(query, items, label_token_ids=[2])
            np.testing.assert_array_equal(result.scores, expected_scores(query, items, labels=(2,))["scores"])
            return result.forwards

    assert uvloop.run(forwards([5] * 20)) == (1,), "4 x 21 tokens in a batch, where others have 40"
    assert uvloop.run(forwards([5] * 19)) == (1, 1), "a shorter query is computed for each row"


def test_what_was_not_answered_survives_the_death_of_the_coordinator():
    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": SIM})) as pool:
            before = await all_ready(pool)
            once = (await pool.score([0], [[1]], label_token_ids=[2])).scores
            calls = [asyncio.ensure_future(pool.score([i], [[1], [2]], label_token_ids=[2])) for i in range(60)]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            # Workers that stand still leave unanswered what is asked now, however late the coordinator dies.
            workers = [psutil.Process(worker.pid) for worker in before.groups[0].workers]
            for worker in workers:
                worker.suspend()
            calls += [asyncio.ensure_future(pool.score([i], [[1], [2]], label_token_ids=[2])) for i in range(60, 80)]
            await pool.status()  # asked after them on the same link
            coordinator_of(pool).kill()
            for worker in workers:
                worker.resume()
            results = await asyncio.gather(*calls)
            assert {result.scores.shape for result in results} == {(2, 1)}
            np.testing.assert_array_equal(results[0].scores[:1], once)
            after = await pool.status()
            assert after.epoch > before.epoch
            adopted = {worker.pid for worker in after.groups[0].workers}
            assert adopted == {worker.pid for worker in workers}, "workers are adopted"
            assert "resends=0" not in repr(pool)

    uvloop.run(main())


def test_a_coordinator_that_dies_is_started_again_also_where_the_program_keeps_no_exit_codes() -> None:
    """A program that ignores SIGCHLD, or waits for all of its children, took any end for that of a pool that was stopped."""

    async def main() -> None:
        async with Pool.start(config=PoolConfig(groups={"g": SIM})) as pool:
            await all_ready(pool)
            coordinator_of(pool).kill()
            assert (await pool.score([1], [[2]], label_token_ids=[1])).scores.shape == (1, 1)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_blocking_pool_can_be_started_too():
    with BlockingPool.start(config=PoolConfig(groups={"g": SIM})) as pool:
        pool.ready(PATIENCE_S)
        assert pool.score("a question", ["an item"], label_token_ids=[1, 2]).scores.shape == (1, 2)


def test_a_blocking_pool_that_is_closed_waits_for_work_of_others_as_long_as_it_may_drain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("enginepool.client.blocking._CLOSE_S", 0.1)
    slow = msgspec.structs.replace(SIM, workers=1, options={"forward_s": 2.0})
    pool = BlockingPool.start(config=PoolConfig(groups={"g": slow}, timing=Timing(drain_s=PATIENCE_S)))
    pool.ready(PATIENCE_S)
    with BlockingPool.connect(pool.address) as other, ThreadPoolExecutor(1) as thread:
        asked = thread.submit(other.score, [1], [[2]], label_token_ids=[3])
        while not pool.status().groups[0].running:
            assert not asked.done()
        pool.close()
        assert asked.result(PATIENCE_S).scores.shape == (1, 1)


OWNER = """
import asyncio, os, sys, time
from enginepool import Pool

async def main():
    pool = await Pool.start("sim", workers=1, engine="sim")
    report = await pool.ready(60)
    if sys.argv[1] == "fork" and os.fork() == 0:
        os.close(1)
        time.sleep(600)
    print(os.path.dirname(pool.address.removeprefix("ipc://")), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_coordinator_and_workers_end_with_a_program_that_is_killed(processes: Processes, way: str):
    owner = processes.start([sys.executable, "-c", OWNER, way], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory = owner.stdout.readline().strip()
    assert directory, "the program failed"
    children = psutil.Process(owner.pid).children(recursive=True)
    pool = [child for child in children if "enginepool." in child.cmdline()[-1]]
    forks = [child for child in children if child not in pool]
    for fork in forks:
        processes.adopt(fork)
    assert len(pool) >= 2
    assert len(forks) == (1 if way == "fork" else 0)
    owner.kill()
    assert psutil.wait_procs(pool, PATIENCE_S)[1] == []
    assert all(fork.is_running() for fork in forks)
    shutil.rmtree(directory)


PRIVATE = """
import sys
from enginepool.client.embedded import EmbeddedCoordinator
from enginepool.config import PoolConfig
coordinator = EmbeddedCoordinator(PoolConfig(groups={}))
print(coordinator.directory, flush=True)
sys.stdin.read()
"""


def test_what_a_program_leaves_that_is_killed_with_all_of_its_pool_is_removed_by_the_next_one(processes: Processes):
    """A batch system kills all processes of a job at once; the weights that it kept in memory would stay there."""
    program = processes.start([sys.executable, "-c", PRIVATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    directory = Path(program.stdout.readline().strip())
    kept = Path(snapshot_folders(directory)["memory"])
    kept.mkdir()
    processes.then(lambda: shutil.rmtree(kept, ignore_errors=True))
    (kept / "g-weights").write_bytes(b"large")
    meanwhile = EmbeddedCoordinator(PoolConfig(groups={"g": SIM}))
    assert directory.exists() and kept.exists()
    program.kill()
    program.wait(PATIENCE_S)
    following = EmbeddedCoordinator(PoolConfig(groups={"g": SIM}))
    assert not directory.exists() and not kept.exists()
    assert meanwhile.directory.exists() and following.directory.exists()


# --- coordinators that misbehave ---------------------------------------------------------------------------------------


def test_a_coordinator_that_ends_at_once_is_an_error_with_exit_code_and_last_lines(stand_in: Callable[[str], None]):
    stand_in("exit 3")

    async def main() -> None:
        with pytest.raises(errors.PoolDown, match="ended before it answered with exit code 3") as caught:
            await Pool.start("sim", engine="sim")
        assert caught.value.evidence == ("enginepool: this is the exit coordinator",)

    uvloop.run(main())


def test_a_coordinator_that_refuses_its_configuration_is_a_config_error(stand_in: Callable[[str], None]):
    stand_in("exit 2")

    async def main() -> None:
        with pytest.raises(errors.ConfigError, match=r"^this is the exit coordinator$"):
            await Pool.start("sim", engine="sim")

    uvloop.run(main())


def test_a_coordinator_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "COMMAND", ("/nonexistent/python",))

    async def main() -> None:
        with pytest.raises(errors.PoolDown, match="could not be started: /nonexistent/python: No such file"):
            await Pool.start("sim", engine="sim")

    uvloop.run(main())


def test_a_coordinator_that_cannot_be_started_again_for_a_while_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(restart_policy, "HOST_FAULT_S", 0.02)

    def start(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def tries() -> int:
        return sum("could not be started: Too many open files; tried again" in line for line in caplog.messages)

    async def main() -> None:
        async with Pool.start("sim", engine="sim") as pool:
            await pool.ready(PATIENCE_S)
            with monkeypatch.context() as without:
                without.setattr(ChildProcess, "start", start)
                coordinator_of(pool).kill()
                async with asyncio.timeout(PATIENCE_S):
                    while tries() < 10:
                        await asyncio.sleep(0.01)
            assert (await pool.score([1], [[2]], label_token_ids=[3])).scores.shape == (1, 1)

    uvloop.run(main())


def test_a_coordinator_that_can_never_be_started_again_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(embedded, "RestartPolicy", lambda: RestartPolicy(most=2))

    async def main() -> None:
        async with Pool.start("sim", engine="sim") as pool:
            await pool.ready(PATIENCE_S)
            coordinator = coordinator_of(pool)
            monkeypatch.setattr(embedded, "COMMAND", ("/nonexistent/python",))
            coordinator.kill()
            with pytest.raises(errors.PoolDown, match="could not be started: /nonexistent/python: No such file"):
                await pool.score([1], [[2]], label_token_ids=[3])

    uvloop.run(main())


def test_a_coordinator_that_dies_again_and_again_is_given_up_with_the_story(
    stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    stand_in("fragile")
    monkeypatch.setattr(embedded, "RestartPolicy", lambda: RestartPolicy(most=2))

    async def main() -> None:
        async with Pool.start("sim", engine="sim") as pool:
            with pytest.raises(
                errors.PoolDown, match="more than 2 times within 60 s, the last time with signal SIGKILL"
            ) as caught:
                await pool.score([1], [[2]])
            assert caught.value.evidence[-1] == "what a request!"
            assert caught.value.evidence.count("enginepool: this is the fragile coordinator") == 3
            with pytest.raises(errors.PoolDown):
                await pool.score([1], [[2]])
            assert "failed (pool_down)" in repr(pool)

    uvloop.run(main())


def test_closing_kills_a_coordinator_that_does_not_end(stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    stand_in("stubborn")
    monkeypatch.setattr(embedded, "_END_S", 0.1)
    config = PoolConfig(groups={"g": SIM}, timing=Timing(drain_s=0.1))

    async def main() -> psutil.Process:
        async with Pool.start(config=config) as pool:
            return coordinator_of(pool)

    process = uvloop.run(main())
    assert not process.is_running()


def test_cancelling_the_start_ends_the_child(stand_in: Callable[[str], None], monkeypatch: pytest.MonkeyPatch):
    stand_in("stubborn")
    monkeypatch.setattr(embedded, "_END_S", 0.1)
    config = PoolConfig(groups={"g": msgspec.structs.replace(SIM, options={})}, timing=Timing(drain_s=0.1))
    before = set(psutil.Process().children())

    async def main() -> set[psutil.Process]:
        opening = asyncio.ensure_future(Pool.start(config=config))
        await asyncio.sleep(0)
        started = set(psutil.Process().children()) - before
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return started

    (child,) = uvloop.run(main())
    assert not child.is_running()


# --- configuration and restarts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": "m", "engine": "vllm"}, "engine = 'vllm': one of sglang, sim"),
        ({"model": "m", "engine": "sim", "weather": 1}, "unknown key weather"),
        ({"model": "m", "engine": "sim", "workers": -1}, "workers = -1: 0 to 4096"),
        ({"model": "m", "engine": "sim", "workers": "two"}, "workers = 'two': must be a whole number"),
        ({"model": "m", "engine": "sim", "options": {"x": object()}}, "object"),
        ({}, "model: name one"),
        ({"model": "m", "config": PoolConfig(groups={"g": SIM})}, "model: write it in the config"),
        ({"workers": 2, "config": PoolConfig(groups={"g": SIM})}, "workers: write it in the config"),
        ({"dtype": "half", "config": PoolConfig(groups={"g": SIM})}, "dtype: write it in the config"),
        ({"weather": 1, "config": PoolConfig(groups={"g": SIM})}, "Pool.start() has no argument 'weather'"),
        ({"timeout": 3, "config": PoolConfig(groups={"g": SIM})}, "no argument 'timeout': it does not wait"),
        ({"worker": 3, "config": PoolConfig(groups={"g": SIM})}, "no argument 'worker'; did you mean workers?"),
        ({"config": PoolConfig(groups={})}, "at least one group"),
        ({"model": "/no/such/folder"}, "configuration: model = '/no/such/folder': no folder /no/such/folder"),
        ({"config": PoolConfig(groups={"g": GroupConfig("a/b/c")})}, "groups.g.model = 'a/b/c': no folder "),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name_before_anything_starts(arguments: dict[str, Any], said: str):
    with pytest.raises(errors.ConfigError) as caught:
        Pool.start(**arguments)
    assert said in str(caught.value)


def test_an_option_that_no_engine_has_is_refused_by_its_name_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    def started(*_: object) -> None:
        raise AssertionError("a coordinator is started")

    monkeypatch.setattr(EmbeddedCoordinator, "start", started)

    async def main() -> None:
        with pytest.raises(errors.ConfigError) as refused:
            await Pool.start("m", engine="sim", options={"vocap": 3})
        assert str(refused.value) == "configuration: options.vocap: the engine sim has no such option; did you mean 'vocab'?"
        whole = PoolConfig(groups={"g": SIM, "h": msgspec.structs.replace(SIM, options={"vocab": 0})})
        with pytest.raises(errors.ConfigError, match=r"groups.h.options: .*vocab = 0: must be more than 0"):
            await Pool.start(config=whole)

    asyncio.run(main())


def test_defaults_and_open_ports_become_private_and_what_was_chosen_is_kept(tmp_path: Path):
    private = EmbeddedCoordinator(PoolConfig(groups={"g": SIM}))
    assert private.config.listen == private.address == f"ipc://{private.directory}/pool.sock"
    assert private.config.state_dir == str(private.directory)
    wildcard = EmbeddedCoordinator(
        PoolConfig(groups={"g": SIM}, listen="tcp://127.0.0.1:*", insecure_loopback=True, state_dir=str(tmp_path))
    )
    assert wildcard.address == f"ipc://{wildcard.directory}/pool.sock"
    assert wildcard.config.state_dir == str(tmp_path)
    fixed = EmbeddedCoordinator(PoolConfig(groups={"g": SIM}, listen="tcp://127.0.0.1:7001", insecure_loopback=True))
    assert fixed.address == "tcp://127.0.0.1:7001"
    directories = [coordinator.directory for coordinator in (private, wildcard, fixed)]
    del private, wildcard, fixed
    assert not any(directory.exists() for directory in directories)


def test_the_named_arguments_make_one_group():
    config = embedded_config(None, {"model": "m", "engine": "sim", "workers": 3, "device": "cpu", "ageing_s": None})
    assert config.groups == {"default": GroupConfig(model="m", engine="sim", workers=3, device="cpu", ageing_s=None)}


def test_a_number_that_no_file_could_have_is_not_taken_for_one_that_was_left_out():
    whole = PoolConfig(groups={"g": msgspec.structs.replace(SIM, ageing_s=math.nan)})
    with pytest.raises(errors.ConfigError, match="ageing_s = nan: more than 0"):
        embedded_config(whole, {})
    with pytest.raises(errors.ConfigError, match="ageing_s = nan: more than 0"):
        embedded_config(None, {"model": "m", "engine": "sim", "ageing_s": math.nan})


def test_restarts_come_slower_and_end_when_too_many_fall_into_the_window():
    policy = RestartPolicy(most=4, window_s=10.0)
    assert [policy.after_death(float(now)) for now in range(4)] == [0.0, 0.1, 0.2, 0.4]
    assert policy.after_death(3.5) is None
    calm = RestartPolicy(most=1, window_s=10.0)
    assert [calm.after_death(now) for now in (0.0, 20.0, 40.0)] == [0.0, 0.0, 0.0]


def test_faults_of_the_host_do_not_count_as_deaths_of_the_coordinator():
    policy = RestartPolicy(most=1, window_s=1000.0)
    assert [policy.after_end(HOST_FAULT, float(now)) for now in range(100)] == [HOST_FAULT_S] * 100
    assert [policy.after_end(CANNOT_WRITE, float(now)) for now in range(100)] == [HOST_FAULT_S] * 100
    full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    assert [policy.after_failed_start(full, float(now)) for now in range(100)] == [HOST_FAULT_S] * 100
    assert [policy.after_end(code, 100.0) for code in (RESTART, -9, RESTART, 2)] == [0.0, 0.0, 0.0, None]


def test_a_signal_handler_for_ctrl_c_is_the_programs_own():
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with Pool.start(config=PoolConfig(groups={"g": SIM})):
            assert signal.getsignal(signal.SIGINT) is before

    uvloop.run(main())
