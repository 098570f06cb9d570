"""Weights in memory of a trainer on the same host, and processes that die meanwhile: committed or aborted, never mixed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from enginepool import Pool, WeightPublisher, errors
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.trainer import ipc_export as lending
from enginepool.trainer import update_handle as update
from enginepool.transfer.digest import Digest
from tests.open_files import lent_here
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes
from tests.process.scenes import COSTS, LIMIT_S, OPTIONS, SLOW_TAKE, TIMES, Play, Stage, arena, play
from tests.process.weights import Load, some_weights

__all__ = ["arena", "play"]


async def pids(stage: Stage) -> list[int]:
    return [await stage.pid(place) for place in range(3)]


async def ended(stage: Stage, version: int) -> UpdateRecord:
    """How the update to this version ended."""
    async with asyncio.timeout(PATIENCE_S):
        while (record := (await stage.pool.weights()).history[-1]).version != version:
            await asyncio.sleep(0.02)
    return record


def test_every_answer_under_load_is_of_weights_that_were_lent_and_no_memory_stays(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        before = lent_here()
        for version in range(stage.old + 1, stage.old + 5):
            record = await stage.publish(version, transfer="ipc", in_flight="abort" if version % 2 else "drain")
            assert (record.transfer, record.members, record.committed) == ("ipc", 3, 3)
            assert "join" not in record.phases and record.sent_bytes > 0
            await stage.load.more(5)
        assert lent_here() <= before
        assert len({worker.digest for worker in (await stage.pool.weights_digest()).workers}) == 1
        part = {"norm": some_weights(2)["norm"]}
        record = await stage.publisher.publish(part, stage.old + 5, transfer="ipc", partial=True)
        stage.committed(record)

    play(scene)


def test_memory_that_is_kept_serves_the_next_update(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        async with WeightPublisher(stage.pool, **OPTIONS, keep_memory=True) as publisher:
            for version in range(stage.old + 1, stage.old + 4):
                stage.committed(await publisher.publish(some_weights(version), version, transfer="ipc"))
                await stage.load.more(3)

    play(scene)


def test_what_is_wrong_is_refused_and_touches_no_engine(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        before, new = await pids(stage), stage.old + 1
        broken = {**some_weights(2), "norm": torch.tensor([1.0, float("nan"), 1.0])}
        with pytest.raises(errors.WeightsRefused, match="norm: 1 elements are nan"):
            await stage.publisher.publish(broken, new, transfer="ipc")
        large = {**some_weights(2), "norm": torch.tensor([1.0, -1e5, 1.0])}
        with pytest.raises(errors.WeightsRefused, match="norm: 1 elements are finite, but infinity in the engine's dtype"):
            await stage.publisher.publish(large, new, transfer="ipc")
        with pytest.raises(errors.WeightsRefused, match="missing names: embed, head"):
            await stage.publisher.publish({"norm": torch.ones(3)}, new, transfer="ipc")
        with monkeypatch.context() as patch:
            patch.setattr(update, "host_identity", lambda: "elsewhere")
            with pytest.raises(errors.Unsupported, match="the publisher is on another host"):
                await stage.publisher.publish(some_weights(2), new, transfer="ipc")
        with monkeypatch.context() as patch:
            patch.setattr(lending.IpcExporter, "gpu", "GPU-1")
            with pytest.raises(errors.Unsupported, match="the engine sees no GPU, and the publisher's memory is on GPU-1"):
                await stage.publisher.publish(some_weights(2), new, transfer="ipc")
        with monkeypatch.context() as patch:

            class Liar(Digest):
                def text(self) -> str:
                    return "0" * 32

            patch.setattr(lending, "Digest", Liar)
            with pytest.raises(errors.UpdateAborted, match="staged other bytes"):
                await stage.publisher.publish(some_weights(2), new, transfer="ipc")
        assert (await stage.pool.weights()).version == stage.old
        assert await pids(stage) == before
        await stage.publish(new, transfer="ipc")

    play(scene)


@pytest.mark.parametrize("where", ["transfer", "staged", "load"])
def test_a_trainer_that_is_killed_leaves_the_pool_to_serve_on(play: Play, where: str) -> None:
    async def scene(stage: Stage) -> None:
        new, before = stage.old + 1, await pids(stage)
        stage.load.committed[new] = []
        command = [sys.executable, "-m", "tests.process.trainer", stage.daemon.address, str(new), where, "ipc"]
        trainer = stage.processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, text=True))
        assert trainer.stdout is not None
        assert await asyncio.to_thread(trainer.stdout.readline) == "there\n"
        trainer.kill()
        record = await ended(stage, new)
        if where == "load":
            # What engines have open outlives its owner.
            assert stage.committed(record).committed == 3
        else:
            # Once it is dead, no process can open what it lent.
            reasons = ("silent for 4000 ms", "No such file") if where == "staged" else ("silent for 4000 ms",)
            assert record.outcome == "update_aborted" and any(reason in record.message for reason in reasons)
            assert (await stage.pool.weights()).version == stage.old
        assert await pids(stage) == before

    play(scene, **(SLOW_TAKE if where == "load" else {}))


def test_memory_that_is_taken_away_in_the_load_mixes_nothing(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        handle = await stage.publisher.start(some_weights(2), stage.old + 1, transfer="ipc")
        await stage.phase(handle, "staged")
        with pytest.raises(errors.DeadlineExceeded):
            await handle.finish(0.3)  # less than an engine takes
        record = await ended(stage, stage.old + 1)
        assert record.outcome == "update_aborted"
        await stage.all_on(stage.old)

    play(scene, **SLOW_TAKE)


def test_a_worker_that_is_lost_before_the_load_aborts(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        handle = await stage.publisher.start(some_weights(2), stage.old + 1, transfer="ipc")
        await stage.phase(handle, "staged")
        os.kill(await stage.pid(1), signal.SIGKILL)
        await stage.failed(handle)  # one whose loss is not noticed yet may be lost in the hand-over
        with pytest.raises(errors.UpdateAborted, match="g-1 was lost"):
            await handle.finish()

    play(scene)


def test_weights_that_no_process_keeps_are_asked_of_their_publisher(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=2, options=COSTS, **TIMES)

    async def main() -> None:
        daemon = ForkedDaemon(processes, config).listening()
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            stage = Stage(processes, daemon, pool, publisher, Load(daemon.address))
            await stage.all_on(0)
            await stage.publish(3, transfer="ipc")
            for place in range(2):
                os.kill(await stage.pid(place), signal.SIGKILL)
            await asyncio.wait_for(publisher.wanted.wait(), PATIENCE_S)
            assert publisher.wanted_version == 3
            await stage.publish(4, transfer="ipc")
            async with stage.load.running():
                assert not publisher.wanted.is_set()
            assert (await asyncio.to_thread(stage.daemon.end)) == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
