"""New weights for a whole pool of real processes under load: committed or aborted, never mixed, whichever process dies.

After each fault: the outcome within its deadlines, the pool serving, a reason that can be read, and a further update that
succeeds.
"""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from enginepool import Pool, WeightPublisher, errors
from enginepool.protocol.manifest import Manifest
from enginepool.trainer.buffers import Buffers, Cut
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import COSTS, LIMIT_S, OPTIONS, SLOW_TAKE, TIMES, Play, Stage, arena, play
from tests.process.weight_scenes import killed_trainer, loss, twenty_updates, wrong_weights
from tests.process.weights import MANIFEST, Gate, Load, some_weights

__all__ = ["arena", "play"]


# --- without faults ----------------------------------------------------------------------------------------------------


def test_after_each_of_twenty_updates_under_load_every_answer_is_of_a_committed_version(play: Play) -> None:
    play(twenty_updates)


def test_a_request_waits_for_the_version_that_it_names(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        early = asyncio.create_task(stage.pool.score([1], [[2]], label_token_ids=[3], min_version=stage.old + 2))
        await stage.publish(stage.old + 1)
        await stage.load.more(5)
        assert not early.done()
        await stage.publish(stage.old + 2)
        assert (await early).version == stage.old + 2

    play(scene)


def test_a_version_alone_changes_nothing_but_the_version(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        before = (await stage.pool.weights()).digest
        record = stage.committed(await stage.pool.set_version(stage.old + 7))
        assert record.digest == before
        with pytest.raises(errors.VersionBackwards):
            await stage.pool.set_version(stage.old + 7)

    play(scene)


def test_weights_go_straight_into_the_engines_where_it_is_asked_for(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for version in (stage.old + 1, stage.old + 2):
            record = await stage.publish(version, transfer="direct")
            assert (record.transfer, record.committed) == ("direct", 3)
            await stage.load.more(5)

    play(scene)


def test_a_part_of_the_weights_lies_over_the_rest_where_it_is_asked_for(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        part = {"norm": some_weights(2)["norm"]}
        with pytest.raises(errors.WeightsRefused, match=r"missing names: embed, head \(partial = true allows it\)"):
            await stage.publisher.publish(part, stage.old + 1)
        stage.committed(await stage.publisher.publish(part, stage.old + 1, partial=True))

    play(scene)


@pytest.mark.parametrize("snapshot", ["memory", "disk"])
def test_workers_come_back_on_the_committed_weights_also_after_the_whole_pool_was_ended(
    processes: Processes, tmp_path: Path, snapshot: Literal["memory", "disk"]
) -> None:
    config = sim_pool(tmp_path, workers=2, options=COSTS, snapshot=snapshot, **TIMES)

    async def main() -> None:
        daemon = ForkedDaemon(processes, config).listening()
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            load = Load(daemon.address)
            stage = Stage(processes, daemon, pool, publisher, load)
            await stage.all_on(0)
            async with load.running():
                await stage.publish(7)
                os.kill(await stage.pid(0), signal.SIGKILL)
                async with asyncio.timeout(PATIENCE_S):
                    while not sum(worker.restarts for worker in (await pool.status()).groups[0].workers):
                        await asyncio.sleep(0.02)
                await stage.all_on(7)
            assert await asyncio.to_thread(daemon.end) == 0
            stage.daemon = await asyncio.to_thread(lambda: ForkedDaemon(processes, config).listening())
            async with load.running():
                await stage.all_on(7)
            assert (await asyncio.to_thread(stage.daemon.end)) == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_lost_weights_are_asked_of_publishers(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=2, options=COSTS, snapshot="none", **TIMES)

    async def main() -> None:
        daemon = ForkedDaemon(processes, config).listening()
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            stage = Stage(processes, daemon, pool, publisher, Load(daemon.address))
            await stage.all_on(0)
            await stage.publish(3)
            assert await asyncio.to_thread(daemon.end) == 0
            stage.daemon = await asyncio.to_thread(lambda: ForkedDaemon(processes, config).listening())
            await asyncio.wait_for(publisher.wanted.wait(), PATIENCE_S)
            assert publisher.wanted_version == 3
            with pytest.raises(errors.NeedsWeights, match="3"):
                await pool.score([1], [[2]], label_token_ids=[3])
            # A trainer that was restarted is another client, and may come when the weights are lost already.
            async with Pool.connect(daemon.address) as again, WeightPublisher(again, **OPTIONS) as restarted:
                await asyncio.wait_for(restarted.wanted.wait(), PATIENCE_S)
                assert restarted.wanted_version == 3
            with pytest.raises(errors.VersionBackwards, match="4 or higher"):
                await publisher.publish(some_weights(4), 3)
            await stage.publish(3)
            async with stage.load.running():
                assert not publisher.wanted.is_set()
            assert (await asyncio.to_thread(stage.daemon.end)) == 0

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


# --- offers that are refused -------------------------------------------------------------------------------------------


def test_weights_that_are_wrong_are_refused_by_name_and_right_ones_taken_after_each(play: Play) -> None:
    play(wrong_weights)


def test_a_version_that_goes_backwards_is_refused_and_a_new_run_may(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for version in (0, stage.old):
            with pytest.raises(errors.VersionBackwards) as caught:
                await stage.publisher.publish(some_weights(2), version)
            assert caught.value.limit == str(stage.old)
        await stage.publish(stage.old, new_run=True)

    play(scene)


def test_of_two_publishers_at_once_the_second_is_refused_by_name(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        new = stage.old + 1
        gate = Gate(some_weights(new))
        handle = await stage.start(new, gate)
        async with Pool.connect(stage.daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as second:
            with pytest.raises(errors.Publishing):
                await second.publish(some_weights(new), new)
            gate.opened.set()
            stage.committed(await handle.finish())
            stage.committed(await second.publish(some_weights(new + 1), new + 1))

    play(scene)


# --- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("who", ["worker", "stager"])
@pytest.mark.parametrize("phase", ["transfer", "staged"])
def test_before_the_load_a_loss_aborts_and_touches_no_engine(play: Play, phase: str, who: str, sign: signal.Signals) -> None:
    play(partial(loss, phase=phase, who=who, sign=sign))


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_is_lost_in_the_load_comes_back_on_what_the_others_took(play: Play, sign: signal.Signals) -> None:
    async def scene(stage: Stage) -> None:
        handle = await stage.start(stage.old + 1)
        victim = await stage.pid(1)
        finish = asyncio.create_task(handle.finish())
        await stage.phase(handle, "load")
        os.kill(victim, sign)
        record = stage.committed(await finish)
        assert (record.committed, record.members) == (2, 3)
        await stage.all_on(stage.old + 1)

    play(scene, **SLOW_TAKE)


@pytest.mark.parametrize("fault", ["fail_on_take", "abort_on_take", "crash_on_take"])
def test_when_no_engine_takes_the_weights_all_come_back_on_the_old_ones(play: Play, fault: str) -> None:
    async def scene(stage: Stage) -> None:
        new = stage.old + 1
        await stage.publish(new)
        with pytest.raises(errors.UpdateAborted, match="no engine runs on it"):
            await stage.publisher.publish(some_weights(new + 1), new + 1)
        assert (await stage.pool.weights()).version == new
        await stage.all_on(new)

    # The third that a worker takes; one that has come back has taken one, the old ones.
    play(scene, faults=[{"kind": fault, "at_take": 3}])


@pytest.mark.parametrize("where", ["transfer", "staged"])
def test_a_trainer_that_is_killed_leaves_the_pool_to_serve_on(play: Play, where: str) -> None:
    play(partial(killed_trainer, where=where))


@pytest.mark.parametrize("phase", ["transfer", "staged", "load"])
def test_a_coordinator_that_is_killed_has_committed_or_not(play: Play, phase: str) -> None:
    async def scene(stage: Stage) -> None:
        new = stage.old + 1
        gate = Gate(some_weights(new))
        handle = await stage.start(new, gate)
        if phase != "transfer":
            gate.opened.set()
            await stage.phase(handle, "staged")
        finish = asyncio.create_task(handle.finish()) if phase == "load" else None
        if finish is not None:
            await stage.phase(handle, "load")
        await asyncio.to_thread(stage.daemon.kill)
        stage.daemon = await asyncio.to_thread(lambda: ForkedDaemon(stage.processes, stage.daemon.config).listening())
        gate.opened.set()
        why = await stage.end(finish or handle.finish())
        assert (await stage.pool.weights()).version == (stage.old if why else new)
        assert not why or "coordinator" in why

    play(scene, **(SLOW_TAKE if phase == "load" else {}))


def test_bytes_that_do_not_come_are_missed_in_time(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: Stage) -> None:
        whole = Buffers.cut

        def fewer(buffers: Buffers, manifest: Manifest, bucket_bytes: int) -> Cut:
            cut = whole(buffers, manifest, bucket_bytes)
            return cut._replace(fillings=cut.fillings[:-1])

        monkeypatch.setattr(Buffers, "cut", fewer)
        with pytest.raises(errors.UpdateAborted):
            await stage.publisher.publish(some_weights(0), stage.old + 1)
        monkeypatch.setattr(Buffers, "cut", whole)

    play(scene)


def test_a_source_that_ends_too_early_is_named(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        short = [*some_weights(2).items()][:2]
        with pytest.raises(errors.BadRequest, match="norm is missing"):
            await stage.publisher.publish(iter(short), stage.old + 1, manifest=MANIFEST)

    play(scene)


def test_a_handle_that_is_aborted_ends_at_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        handle = await stage.start(stage.old + 1)
        await handle.abort("thought better of it")
        with pytest.raises(errors.UpdateAborted, match="thought better of it"):
            await handle.finish()

    play(scene)
