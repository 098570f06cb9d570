"""Sleep, pause and abort with whole pools of sim workers under load: no request is lost, also when processes die meanwhile.

The sim engine ends when it is given work while it sleeps, and when it releases memory twice. Its weights are lost with their
memory, as on a GPU without a copy on the host.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest

from enginepool import Pool, WeightPublisher
from enginepool.errors import BadRequest, Interrupted, RequestCancelled
from enginepool.protocol.messages import GroupStatus
from enginepool.protocol.messages.control import ControlReport
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS, Play, Stage, arena, play
from tests.process.test_generate import LONG, Streams, generating, run, streaming, workers_of
from tests.process.waiting import check_running
from tests.process.weights import some_weights

__all__ = ["arena", "play"]

ALL = ["cuda_graph", "kv_cache", "weights"]


def done(report: ControlReport) -> bool:
    return [(row.name, row.code) for row in report.workers] == [("g-0", ""), ("g-1", ""), ("g-2", "")]


async def status(stage: Stage) -> GroupStatus:
    return await status_of(stage.pool)


def test_sleep_wake_weights_update_wake_the_cache_and_answer(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for version in (stage.old + 1, stage.old + 2):
            assert done(await stage.pool.sleep())
            seen = await status(stage)
            assert seen.asleep == ALL and [(one.stage, one.asleep) for one in seen.workers] == [("asleep", ALL)] * 3
            assert done(await stage.pool.sleep(tags=["kv_cache"])), "what sleeps already is left as it is"
            assert done(await stage.pool.wake(tags=["weights"]))
            await stage.publish(version)
            answered = len(stage.load.answers)
            assert done(await stage.pool.wake())
            await stage.load.more(10)
            assert {answer.version for _, _, answer in stage.load.answers[answered + 10 :]} <= {version}
        assert stage.old + 2 in stage.load.versions()

    play(scene, sleep_loses_weights=True)


def test_without_an_update_the_committed_weights_are_restored(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        assert done(await stage.pool.sleep(worker="")) and done(await stage.pool.wake())
        await stage.all_on(stage.old)
        await stage.load.more(10)

    play(scene, sleep_loses_weights=True)


def test_one_worker_sleeps_while_the_others_answer(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        report = await stage.pool.sleep("g", worker="g-1", tags=["kv_cache"])
        assert [(row.name, row.code) for row in report.workers] == [("g-1", "")]
        before = {one.name: one.done for one in (await status(stage)).workers}
        await stage.load.more(10)
        after = {one.name: one.done for one in (await status(stage)).workers}
        assert after["g-1"] == before["g-1"] and after != before
        with pytest.raises(BadRequest, match="worker: 'g-9' is not a worker of group 'g', which has g-0, g-1, g-2"):
            await stage.pool.wake(worker="g-9")
        with pytest.raises(
            BadRequest, match="tags: expected a list of one or more of weights, kv_cache, cuda_graph, got 'disk'"
        ):
            await stage.pool.sleep(tags=["disk"])  # type: ignore[list-item]
        wrong: Any
        for wrong in ("weights", [], None, 3, [["weights"]]):
            with pytest.raises(BadRequest, match="tags: expected a list of one or more of weights, kv_cache, cuda_graph, got"):
                await stage.pool.wake(tags=wrong)
        code, out, err = await asyncio.to_thread(call, "sleep", "g/g-1", "--tag", "weights", "--connect", stage.daemon.address)
        assert (code, out, err) == (0, "g-1: asleep: weights\n", "")
        code, out, err = await asyncio.to_thread(call, "wake", "--connect", stage.daemon.address)
        assert (code, out, err) == (0, "g-0: awake\ng-1: awake\ng-2: awake\n", "")

    play(scene, sleep_loses_weights=True)


def test_a_paused_group_answers_nothing_takes_new_weights_and_stays_paused_across_a_crash(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        assert done(await stage.pool.pause())
        answered = len(stage.load.answers)
        assert [one.batches for one in (await status(stage)).workers] == [0, 0, 0]
        await stage.publish(stage.old + 1)
        await asyncio.to_thread(stage.daemon.kill)
        stage.daemon = await asyncio.to_thread(stage.daemon.successor)
        await stage.all_on(stage.old + 1)
        seen = await status(stage)
        assert seen.paused and not seen.running and len(stage.load.answers) <= answered + 6, "but what was on its way"
        code, out, err = await asyncio.to_thread(call, "resume", "--connect", stage.daemon.address)
        assert (code, out, err) == (0, "g-0: resumed\ng-1: resumed\ng-2: resumed\n", "")
        await stage.load.more(10)

    play(scene, sleep_loses_weights=True)


def test_a_worker_that_is_killed_while_it_sleeps_is_started_again_when_it_is_woken(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        assert done(await stage.pool.sleep())
        pid = await stage.pid(1)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while (seen := {one.name: one for one in (await status(stage)).workers}["g-1"]).pid == pid:
                await asyncio.sleep(0.05)
        assert seen.stage == "asleep" and not seen.pid
        report = await stage.pool.wake()
        assert [row.code for row in report.workers] == ["", "pool_down", ""]
        await stage.all_on(stage.old)

    play(scene, sleep_loses_weights=True)


def test_a_successor_of_the_coordinator_keeps_the_group_asleep(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        assert done(await stage.pool.sleep(tags=["kv_cache"]))
        await asyncio.to_thread(stage.daemon.kill)
        stage.daemon = await asyncio.to_thread(stage.daemon.successor)
        async with asyncio.timeout(PATIENCE_S):
            seen = await status(stage)
            while [one.stage for one in seen.workers] != ["asleep"] * 3:
                await asyncio.sleep(0.05)
                seen = await status(stage)
        assert seen.asleep == ["kv_cache"] and not seen.running
        assert done(await stage.pool.wake())
        await stage.load.more(10)

    play(scene, sleep_loses_weights=True)


def test_the_requests_of_a_group_end_with_what_they_have(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1, generates=True, options={"forward_s": 0.01, "end_every": 0}))

    async def main() -> None:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(PATIENCE_S):
            await pool.ready()
            begun = pool.stream([1, 2], max_new_tokens=10_000)
            chunks = aiter(begun)
            await anext(chunks)
            report = await pool.pause()
            assert [row.code for row in report.workers] == [""]
            waits = asyncio.ensure_future(pool.generate([3, 4], max_new_tokens=5))
            while (await status_of(pool)).queued < 2:
                check_running([waits])
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(call, "abort", "g", "--connect", daemon.address) == (0, "2 requests ended\n", "")
            with pytest.raises(Interrupted) as ended:
                await begun.result()
            assert 0 < len(ended.value.generations[0][0].token_ids) < 10_000
            with pytest.raises(RequestCancelled, match="all requests of group 'g' were aborted"):
                await waits
            assert await pool.abort() == 0
            for from_shell in (False, True):
                waits = asyncio.ensure_future(pool.generate([3, 4], max_new_tokens=5))
                while not (busy := (await pool.status()).busiest):
                    check_running([waits])
                    await asyncio.sleep(0.01)
                assert (busy[0].id, busy[0].requests) == (pool.client_id, 1)
                if not from_shell:
                    assert await pool.abort(client=pool.client_id, request=busy[0].oldest) == 1
                else:
                    shown = await asyncio.to_thread(call, "abort", "--client", pool.client_id, "--connect", daemon.address)
                    assert shown == (0, "1 request ended\n", "")
                with pytest.raises(RequestCancelled, match="aborted by an operator"):
                    await waits
            with pytest.raises(BadRequest, match="request: expected the id of a request of `client`, got 3"):
                await pool.abort(request=3)
            await pool.resume()
            assert len((await pool.generate([3, 4], max_new_tokens=5))[0][0].token_ids) == 5

    asyncio.run(main())


async def status_of(pool: Pool) -> GroupStatus:
    return (await pool.status()).groups[0]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_generations_of_a_paused_group_stand_still_take_new_weights_and_go_on(
    processes: Processes, tmp_path: Path, mode: Literal["in_place", "retract"]
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with streaming(daemon, 8, **LONG) as (pool, streams), WeightPublisher(pool, **OPTIONS) as publisher:
            gone = asyncio.create_task(pool.generate([1], max_new_tokens=4 * LONG["max_new_tokens"]))
            while (await status_of(pool)).running <= len(streams.tasks):
                check_running([gone, *streams.tasks])
                await asyncio.sleep(0)
            code, out, err = await asyncio.to_thread(call, "pause", "g", "--mode", mode, "--connect", daemon.address)
            assert (code, out, err) == (0, "g-0: paused\ng-1: paused\n", "")
            gone.cancel()
            taken = await standing(streams)
            digest = (await publisher.publish(some_weights(1), 1, in_flight="in_place")).digest
            assert await standing(streams) == taken and (await status_of(pool)).paused
            assert [row.code for row in (await pool.resume()).workers] == ["", ""]
            for [[one]] in await streams.check({0: "", 1: digest}):
                assert [version for version, _ in one.spans] == [0, 1] and len({*one.workers}) == 1

    run(scene)


@pytest.mark.parametrize("killed", ["worker", "coordinator"])
def test_generations_of_a_paused_group_survive_their_worker_and_their_coordinator(
    processes: Processes, tmp_path: Path, killed: str
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with streaming(daemon) as (pool, streams):
            assert [row.code for row in (await pool.pause(mode="in_place")).workers] == ["", ""]
            taken = await standing(streams)
            if killed == "worker":
                os.kill(workers_of(daemon)[0], signal.SIGKILL)
            else:
                daemon.process.send_signal(signal.SIGKILL)
                await asyncio.to_thread(daemon.process.wait, PATIENCE_S)
                await asyncio.to_thread(daemon.successor)
            await pool.ready(PATIENCE_S)
            assert (await status_of(pool)).paused and await standing(streams) == taken
            await pool.resume()
            await streams.check()

    run(scene)


def test_an_engine_that_cannot_pause_says_why_and_the_group_goes_on(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        report = await stage.pool.pause(mode="retract")
        assert [row.code for row in report.workers] == ["engine_error"] * 3
        assert report.workers[0].message.startswith("pause retract: this engine runs score")
        assert not (await status(stage)).paused
        await stage.load.more(10)
        with pytest.raises(BadRequest, match="mode: 'kill'; one of abort, in_place, retract"):
            await stage.pool.pause(mode="kill")  # type: ignore[arg-type]

    play(scene)


async def standing(streams: Streams) -> dict[tuple[int, int], int]:
    """What each stream has taken, once nothing more arrives of what was sent."""
    while True:
        taken = {key: len(tokens) for key, tokens in streams.taken.items()}
        await asyncio.sleep(0.1)
        if taken == {key: len(tokens) for key, tokens in streams.taken.items()}:
            return taken
