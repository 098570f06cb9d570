"""Adapters of a whole pool of sim workers: swapped under load, by whom and from where, and what is lost with a process."""

import asyncio
import json
import os
import signal
import stat
from array import array
from collections.abc import Callable, Coroutine
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from enginepool import Generation, Pool, errors
from enginepool.protocol.messages import Sampling, WorkerStatus
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.tokens import SimSequence
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_cli_worker import Outside
from tests.process.test_generate import VOCAB, prompt, workers_of
from tests.process.waiting import check_running

#: 32 slots, and a step of 2 ms; the model has one weight that adapters may change
OPTIONS: dict[str, Any] = {
    "vocab": VOCAB, "forward_s": 0.002, "inflight_rows": 32, "inflight_tokens": 40_000, "end_every": 0,
    "tensors": [["lin.weight", "float32", [4, 6]]], "adapters": ["own"],
}  # fmt: skip
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": {"lin"}}
NAMES = ("a", "b", "c", "d")


def tensors(seed: int, rows: int = 4) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        f"base_model.model.lin.lora_{part}.weight": random.standard_normal(shape).astype(np.float32)
        for part, shape in (("A", (2, 6)), ("B", (rows, 2)))
    }


def folder(path: Path, seed: int = 0, rows: int = 4, **config: Any) -> Path:
    path.mkdir(parents=True)
    save_file(tensors(seed, rows), path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, "target_modules": ["lin"], **config}))
    return path


def pool_in(processes: Processes, directory: Path, workers: int = 2, adapter_s: float = 0.0) -> Daemon:
    config = sim_pool(directory, workers=workers, options={**OPTIONS, "adapter_s": adapter_s}, generates=True)
    group = msgspec.structs.replace(config.groups["g"], adapter_roots=[str(directory / "root")])
    return ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()


def run(daemon: Daemon, scene: Callable[[Pool], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(PATIENCE_S)
            await scene(pool)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def check(i: int, name: str, one: Generation) -> set[int]:
    """Each token is that of the version which the answer names for it. Returns the versions."""
    sequence = SimSequence(array("i", prompt(i)).tobytes(), Sampling(max_new_tokens=len(one.token_ids)), 0, VOCAB, 0)
    spans = chain.from_iterable(repeat(version, count) for version, count in one.adapters)
    for token, version in zip(one.token_ids.tolist(), spans, strict=True):
        assert sequence.next(Weights().with_adapter(f"{name}@{version}")).token == token, (name, version, one.adapters)
    return {version for version, _ in one.adapters}


async def workers(pool: Pool) -> list[WorkerStatus]:
    return (await pool.status()).groups[0].workers


async def version_of(pool: Pool) -> dict[str, int]:
    return {one.name: one.version for one in (await pool.status()).groups[0].adapters}


def test_four_adapters_are_swapped_under_load_and_each_answer_is_of_the_version_that_it_names(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = pool_in(processes, tmp_path)
    seen: dict[str, set[int]] = {name: set() for name in NAMES}
    over = asyncio.Event()

    async def ask(pool: Pool, i: int) -> None:
        name = NAMES[i % 4]
        while not over.is_set():
            [[one]] = await pool.generate(prompt(i), max_new_tokens=20, temperature=0.0, adapter=name)
            seen[name] |= check(i, name, one)

    async def scene(pool: Pool) -> None:
        for seed, name in enumerate(NAMES):
            report = await pool.load_adapter(name, tensors=tensors(seed), config=CONFIG)
            assert (report.name, report.version) == (name, 1)
        callers = [asyncio.create_task(ask(pool, i)) for i in range(16)]
        for version in range(2, 6):
            for name in NAMES:
                path = folder(tmp_path / "root" / f"{name}{version}", version)
                await pool.load_adapter(name, path, version=version)
                [[one]] = await pool.generate(prompt(0), max_new_tokens=3, temperature=0.0, adapter=name)
                assert check(0, name, one) == {version}, "what is asked after the answer is of the new version"
        over.set()
        await asyncio.gather(*callers)
        assert all(len(versions) > 1 for versions in seen.values()), seen
        assert await version_of(pool) == dict.fromkeys(NAMES, 5)

    run(daemon, scene)
    assert daemon.end() == 0
    assert not list((tmp_path / "state/adapters/g").iterdir()), "no version that came as tensors is left"


def test_an_adapter_is_unloaded_while_generations_that_used_it_stand_still_in_a_paused_engine(
    processes: Processes, tmp_path: Path
) -> None:
    async def scene(pool: Pool) -> None:
        await pool.load_adapter("a", tensors=tensors(1), config=CONFIG)
        before = [worker.pid for worker in await workers(pool)]
        used, other = (pool.stream(prompt(i), max_new_tokens=1000, adapter=name) for i, name in enumerate(("a", "")))
        begun = [aiter(used), aiter(other)]
        for chunks in begun:
            await anext(chunks)
        assert [row.code for row in (await pool.pause(mode="in_place")).workers] == [""]
        await pool.unload_adapter("a")
        with pytest.raises(errors.Interrupted):
            await used.result()
        await pool.load_adapter("b", tensors=tensors(2), config=CONFIG)  # once the worker has unloaded the other one
        assert [worker.pid for worker in await workers(pool)] == before
        await pool.resume()
        [[one]] = await other.result()
        assert len({*one.workers}) == 1

    run(pool_in(processes, tmp_path, workers=1), scene)


def test_adapters_survive_the_coordinator_and_the_workers(processes: Processes, tmp_path: Path) -> None:
    daemon = pool_in(processes, tmp_path)

    async def load(pool: Pool) -> None:
        await pool.load_adapter("t", tensors=tensors(1), config=CONFIG)
        await pool.load_adapter("p", folder(tmp_path / "root/p"), version=7)
        stored = tmp_path / "state/adapters/g/t@1"
        assert {stat.S_IMODE(path.stat().st_mode) for path in stored.iterdir()} == {0o600}

    async def look(pool: Pool) -> None:
        assert await version_of(pool) == {"p": 7, "t": 1}
        for name, version in (("p", 7), ("t", 1)):
            [[one]] = await pool.generate(prompt(0), max_new_tokens=3, temperature=0.0, adapter=name)
            assert check(0, name, one) == {version}

    run(daemon, load)
    daemon.kill()
    daemon = daemon.successor()
    run(daemon, look)
    for pid in workers_of(daemon):
        os.kill(pid, signal.SIGKILL)
    daemon.wait_for("is ready")
    run(daemon, look)

    async def unload(pool: Pool) -> None:
        assert (await pool.unload_adapter("t")).version == 0
        with pytest.raises(errors.BadRequest, match="the workers of this group have own, p"):
            await pool.generate(prompt(0), adapter="t")
        await pool.unload_adapter("t")

    run(daemon, unload)
    assert daemon.end() == 0
    run(daemon := daemon.successor(), lambda pool: look_at(pool, {"p": 7}))
    assert daemon.end() == 0


async def look_at(pool: Pool, versions: dict[str, int]) -> None:
    assert await version_of(pool) == versions


def test_a_worker_that_is_killed_while_it_loads_ends_the_change_and_the_next_one_succeeds(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = pool_in(processes, tmp_path, adapter_s=0.5)

    async def scene(pool: Pool) -> None:
        await pool.load_adapter("a", tensors=tensors(1), config=CONFIG)
        change = asyncio.create_task(pool.load_adapter("a", tensors=tensors(2), config=CONFIG))
        while not (pids := [worker.pid for worker in await workers(pool) if worker.detail == "loads adapter a@2"]):
            check_running([change])
            await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(errors.UpdateAborted, match=r"g-\d did not load a@2: it was lost"):
            await change
        assert await version_of(pool) == {"a": 1}
        await pool.load_adapter("a", tensors=tensors(2), config=CONFIG)
        [[one]] = await pool.generate(prompt(0), max_new_tokens=3, temperature=0.0, adapter="a")
        assert check(0, "a", one) == {2}

    run(daemon, scene)
    assert daemon.end() == 0


def test_a_coordinator_that_is_killed_while_workers_load_is_asked_again_by_the_client(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = pool_in(processes, tmp_path, adapter_s=0.5)
    state = tmp_path / "state/adapters/g/a@1"

    async def scene(pool: Pool) -> None:
        change = asyncio.create_task(pool.load_adapter("a", tensors=tensors(1), config=CONFIG))
        while not any(worker.detail == "loads adapter a@1" for worker in await workers(pool)):
            check_running([change])
            await asyncio.sleep(0.01)
        daemon.kill()
        again = await asyncio.to_thread(daemon.successor)
        assert (await change).version == 1
        [[one]] = await pool.generate(prompt(0), max_new_tokens=3, temperature=0.0, adapter="a")
        assert check(0, "a", one) == {1} and state.exists()
        assert await asyncio.to_thread(again.end) == 0

    run(daemon, scene)


def test_what_lies_elsewhere_or_does_not_fit_is_refused_with_its_reason_and_touches_no_engine(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = pool_in(processes, tmp_path, workers=1)
    root = tmp_path / "root"
    folder(tmp_path / "elsewhere")
    folder(root / "wide", rows=5)
    folder(root / "dora", use_dora=True)
    (folder(root / "pickled") / "more.bin").write_bytes(b"")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "empty").mkdir()

    async def scene(pool: Pool) -> None:
        for path, code, says in (
            (tmp_path / "elsewhere", errors.BadRequest, "must lie under one of the group's adapter_roots"),
            (f"{root}/../elsewhere", errors.BadRequest, "path"),
            (root / "wide", errors.WeightsRefused, r"lin: lora_A and lora_B are .*; expected .*'B': \[4, 2\]"),
            (root / "dora", errors.WeightsRefused, "use_dora is True, which SGLang does not serve"),
            (root / "pickled", errors.WeightsRefused, "has adapter_model.safetensors, more.bin"),
            (root / "empty", errors.WeightsRefused, "has no tensors"),
            (root / "none", errors.WeightsRefused, "there is no such directory"),
        ):
            with pytest.raises(code, match=says):
                await pool.load_adapter("x", os.fspath(path))
        with pytest.raises(errors.WeightsRefused, match=r"not under adapter_roots .* once links are resolved"):
            await pool.connection.ask(LoadAdapter(0, "x", 1, path=str(root / "link")), AdapterReport, 10.0)
        broken = {**tensors(1), "base_model.model.lin.lora_A.weight": np.full((2, 6), np.nan, np.float32)}
        with pytest.raises(errors.WeightsRefused, match="has NaN or infinity"):
            await pool.load_adapter("x", tensors=broken, config=CONFIG)
        with pytest.raises(errors.WeightsRefused, match="not a safetensors file"):
            await pool.load_adapter("x", tensors=b"anything", config=CONFIG)
        with pytest.raises(errors.BadRequest, match="engines of this group start with 'own'"):
            await pool.load_adapter("own", tensors=tensors(1), config=CONFIG)
        assert await version_of(pool) == {}

    run(daemon, scene)
    assert daemon.end() == 0
    assert not list((tmp_path / "state/adapters/g").iterdir()), "nothing that was refused is kept"


def test_a_worker_that_the_pool_did_not_start_reads_folders_and_refuses_tensors_by_name(
    processes: Processes, tmp_path: Path
) -> None:
    """It may run on another host, where the store of the coordinator is not."""
    daemon = pool_in(processes, tmp_path, workers=1)
    path = folder(tmp_path / "root/p")
    says = "it came as tensors, which only workers that the pool starts itself can read; load it by a path"

    async def scene(pool: Pool) -> None:
        await pool.load_adapter("x", tensors=tensors(1), config=CONFIG)
        outside = Outside(processes, daemon.workers, tmp_path / "outside")
        while not any(says in worker.detail for worker in await workers(pool)):
            await asyncio.sleep(0.02)
        [[one]] = await pool.generate(prompt(0), max_new_tokens=3, temperature=0.0, adapter="x")
        assert check(0, "x", one) == {1}, "the other worker serves on"
        await pool.unload_adapter("x")
        while [(worker.stage, worker.detail) for worker in await workers(pool)] != [("ready", "")] * 2:
            await asyncio.sleep(0.02)
        with pytest.raises(errors.WeightsRefused, match=f"did not load y@1: {says}"):
            await pool.load_adapter("y", tensors=tensors(1), config=CONFIG)
        assert (await pool.load_adapter("y", path)).version == 1
        assert outside.process.poll() is None

    run(daemon, scene)
    assert daemon.end() == 0


def test_commands_list_load_and_unload(processes: Processes, tmp_path: Path) -> None:
    daemon = pool_in(processes, tmp_path, workers=1)
    run(daemon, lambda pool: look_at(pool, {}))
    path, at = folder(tmp_path / "root/f"), ("--connect", daemon.address)
    assert call("adapters", "list", *at) == (0, "", "")
    assert call("adapters", "list", "--group", "h", *at) == (1, "", "enginepool: group: 'h' is none of: g\n")
    code, out, _ = call("adapters", "load", "f", path, "--version", 3, *at)
    assert code == 0 and out.startswith("g: f version 3 ")
    digest = out.split()[-1]
    assert call("adapters", "list", *at) == (0, f"g: f version 3 {digest} {path}\n", "")
    code, _, err = call("adapters", "load", "f", path, "--version", 2, *at)
    assert code != 0 and "expected more than 3" in err
    assert call("adapters", "unload", "f", *at) == (0, "g: f is not loaded\n", "")
    assert daemon.end() == 0
