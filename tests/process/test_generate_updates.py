"""New weights while real processes generate: each token is there once, and of the weights that its span names."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, Self

import pytest

from enginepool import Generation, Pool, WeightPublisher, errors
from enginepool.protocol.messages import Sampling
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S, Daemon
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import LONG, VOCAB, all_ready, generating, prompt, run, streaming, workers_of
from tests.process.weights import some_weights

#: each way in which generations may run when engines load
MODES: dict[str, dict[str, Any]] = {
    "abort": {"in_flight": "abort"},
    "in_place": {"in_flight": "in_place"},
    "retract": {"in_flight": "retract"},
    "drain": {"in_flight": "drain", "drain": 0.01},
    "drain, then retract": {"in_flight": "drain", "drain": 0.01, "after_drain": "retract"},
}


class Callers:
    """So many callers that always have a generation in flight. When they have ended, each answer was that of its spans."""

    def __init__(self, pool: Pool, count: int) -> None:
        self.pool, self.count = pool, count
        #: of the versions that were committed
        self.digests = {0: ""}
        #: answers of several versions
        self.several = 0
        self._over = False
        self._answers: list[list[Generation]] = [[] for _ in range(count)]
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        for i in range(self.count):
            self._group.create_task(self._call(i))
        return self

    async def __aexit__(self, *failure: Any) -> None:
        self._over = True
        await self._group.__aexit__(*failure)
        sampling = Sampling(temperature=0.0, max_new_tokens=60)
        for i, answers in enumerate(self._answers):
            for one in answers:
                named: Any = {"spans": one.spans, "digests": self.digests, "vocab": VOCAB, "end_every": 0}
                assert one.token_ids.tolist() == expected_output(prompt(i), sampling, **named)[0]

    async def each_is_answered(self) -> None:
        """Once more."""
        before = [len(answers) for answers in self._answers]
        while any(len(answers) == n for answers, n in zip(self._answers, before, strict=True)):
            await asyncio.sleep(0.01)

    async def _call(self, i: int) -> None:
        while not self._over:
            [[one]] = await self.pool.generate(prompt(i), temperature=0.0, max_new_tokens=60)
            self._answers[i].append(one)
            self.several += len(one.spans) > 1


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract", "drain"])
def test_fifty_updates_under_two_hundred_generations_change_the_tokens_from_their_spans_on(
    processes: Processes, tmp_path: Path, mode: str
) -> None:
    daemon = generating(processes, tmp_path, options={"inflight_rows": 100, "inflight_tokens": 400_000, "forward_s": 0.05})

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            await all_ready(pool, daemon)
            watched, versions = aiter(pool.stream(prompt(199), max_new_tokens=3900, temperature=0.0)), list[int]()
            async with Callers(pool, 199) as callers:
                for version in range(51):
                    if version:
                        record = await publisher.publish(some_weights(version), version, **MODES[mode])
                        callers.digests[version] = record.digest
                    while version not in versions:  # until there are tokens of these weights
                        versions.append((await anext(watched)).version)
                await watched.aclose()
            assert versions == sorted(versions)
            assert callers.several > 50
            assert (await pool.weights()).version == 50

    run(scene)


@pytest.mark.parametrize("transfer", ["ipc", "direct"])
def test_weights_that_are_lent_or_broadcast_into_engines_change_the_tokens_from_their_spans_on(
    processes: Processes, tmp_path: Path, transfer: Any
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, **OPTIONS) as publisher:
            await all_ready(pool, daemon)
            async with Callers(pool, 20) as callers:
                version = 0
                for mode in MODES.values():
                    before = callers.several
                    while callers.several == before:
                        version += 1
                        record = await publisher.publish(some_weights(version), version, transfer=transfer, **mode)
                        assert (record.transfer, record.committed) == (transfer, 2)
                        callers.digests[version] = record.digest
                        await callers.each_is_answered()

    run(scene)


def test_generations_stay_in_their_engines_where_that_is_asked_for(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"inflight_rows": 40})

    async def scene() -> None:
        digests = {0: ""}
        for version, mode in enumerate(("in_place", "drain, then retract"), 1):
            async with streaming(daemon, 8, **LONG) as (pool, streams), WeightPublisher(pool, **OPTIONS) as publisher:
                digests[version] = (await publisher.publish(some_weights(version), version, **MODES[mode])).digest
                for [[one]] in await streams.check(digests):
                    assert [version for version, _ in one.spans] == [version - 1, version], mode
                    assert len({name for name, _ in one.workers}) == 1, mode

    run(scene)


async def struck(daemon: Daemon, mode: str, strike: Any, before: int = 1) -> tuple[UpdateRecord | str, Any]:
    """What became of an update, after so many others, in whose load something is struck. The pool takes another one then."""
    new, digests = before + 1, dict[int, str]()
    async with streaming(daemon, max_new_tokens=200) as (pool, streams), WeightPublisher(pool, **OPTIONS) as publisher:
        for version in range(1, new):
            digests[version] = (await publisher.publish(some_weights(version), version, **MODES[mode])).digest
        handle = await publisher.start(some_weights(new), new, **MODES[mode])
        finish = asyncio.create_task(handle.finish())
        async with asyncio.timeout(PATIENCE_S):
            while handle.phase != "load" and not finish.done():
                await asyncio.sleep(0.002)
        await strike()
        outcome: UpdateRecord | str
        try:
            outcome = await finish
            digests[new] = outcome.digest
        except errors.UpdateAborted as error:
            outcome = str(error)
        await all_ready(pool, daemon)
        digests[new + 1] = (await publisher.publish(some_weights(new + 1), new + 1, **MODES[mode])).digest
        return outcome, await streams.check(digests)


SLOW: dict[str, Any] = {"faults": [{"kind": "slow_on_take", "at_take": 2, "seconds": 1.0}]}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_worker_that_is_killed_in_the_load_loses_no_token(processes: Processes, tmp_path: Path, mode: str) -> None:
    daemon = generating(processes, tmp_path, options=SLOW)

    async def scene() -> None:
        async def strike() -> None:
            os.kill(workers_of(daemon)[0], signal.SIGKILL)

        outcome, _ = await struck(daemon, mode, strike)
        assert isinstance(outcome, UpdateRecord) and (outcome.committed, outcome.members) == (1, 2)

    run(scene)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_coordinator_that_is_killed_in_the_load_loses_no_token(processes: Processes, tmp_path: Path, mode: str) -> None:
    daemon = generating(processes, tmp_path, options=SLOW)

    async def scene() -> None:
        async def strike() -> None:
            daemon.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(daemon.process.wait, PATIENCE_S)
            await asyncio.to_thread(daemon.successor)

        outcome, _ = await struck(daemon, mode, strike)
        assert isinstance(outcome, str) and "coordinator" in outcome

    run(scene)


@pytest.mark.parametrize("fault", ["fail_on_take", "crash_on_take"])
def test_when_no_engine_takes_the_weights_generations_go_on_under_the_old_ones(
    processes: Processes, tmp_path: Path, fault: str
) -> None:
    # The third that a worker takes; one that has come back has taken one, the old ones.
    daemon = generating(processes, tmp_path, options={"faults": [{"kind": fault, "at_take": 3}]})

    async def scene() -> None:
        async def strike() -> None:
            """The engines do it."""

        outcome, results = await struck(daemon, "in_place", strike, before=2)
        assert isinstance(outcome, str) and "no engine runs on it" in outcome
        assert all(version != 3 for [[one]] in results for version, _ in one.spans)

    run(scene)


def test_a_mode_that_an_engine_does_not_have_is_refused_before_anything_changes(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"only_at_start": True})

    async def scene() -> None:
        async with streaming(daemon) as (pool, streams):
            with pytest.raises(errors.BadRequest, match="after_drain: in_place goes with in_flight drain"):
                await pool.publish_checkpoint(tmp_path, 1, in_flight="abort", after_drain="in_place")
            await streams.check()

    run(scene)
