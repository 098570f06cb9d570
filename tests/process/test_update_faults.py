"""A process is killed or stopped while generations meet new weights: all workers have them or none, and no token is lost.

After each fault the next update succeeds, and all workers are on it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginepool import Pool, WeightPublisher, errors
from enginepool.protocol.messages.weight_reports import UpdateRecord
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon, ForkedProcess
from tests.process.processes import Processes
from tests.process.scenes import OPTIONS
from tests.process.test_generate import GENERATES, Streams, all_ready, streaming, workers_of
from tests.process.weights import some_weights

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
#: an engine takes weights long enough for a fault to happen meanwhile
ENGINE: dict[str, Any] = {**GENERATES, "forward_s": 0.005, "take_s": 1.0}
TIMES: dict[str, Any] = {
    "silence_s": 2.0,
    "update_prepare_s": 4.0,
    "update_join_s": 5.0,
    "update_stall_s": 2.0,
    "update_load_s": 5.0,
    # Where an update was committed without a worker that is ready a moment later, its snapshot may not be written then.
    "restore_again_s": 0.5,
}
#: of a publisher that tries again
PATIENT: dict[str, Any] = {**OPTIONS, "retry_timeout": PATIENCE_S}


class Shared:
    """One pool for all cases, with the coordinator that it has now."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes = processes
        config = sim_pool(directory, options=ENGINE, generates=True, **TIMES)
        self.daemon: Daemon = ForkedDaemon(processes, config).listening()

    def stager(self) -> int:
        path = Path(self.daemon.config.state_dir) / "stagers" / "g.0.json"
        return msgspec.json.decode(path.read_bytes())["pid"]

    async def strike(self, who: str, sign: signal.Signals) -> None:
        """Send it to a process of the pool. A coordinator that is killed has a successor, and one that is stopped goes on."""
        if who != "coordinator":
            os.kill(self.stager() if who == "stager" else workers_of(self.daemon)[0], sign)
            return
        self.daemon.process.send_signal(sign)
        if sign == KILL:
            await asyncio.to_thread(self.daemon.process.wait, PATIENCE_S)
            self.daemon = await asyncio.to_thread(self.daemon.successor)
        else:
            await asyncio.sleep(2 * TIMES["silence_s"])
            self.daemon.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with Processes() as processes:
        yield Shared(processes, tmp_path_factory.mktemp("pool"))


@dataclass(frozen=True)
class Case:
    """Who is struck how, in which phase of an update with this `in_flight`; and how such an update ends."""

    mode: str
    phase: str
    who: str
    sign: signal.Signals
    ends: str
    transfer: str = "staged"

    def __str__(self) -> str:
        return f"{self.mode}-{self.phase}-{self.who}-{self.sign.name}-{self.transfer}"


CASES = [
    Case("in_place", "transfer", "trainer", STOP, "aborted"),
    Case("in_place", "load", "stager", KILL, "committed"),
    Case("in_place", "load", "stager", STOP, "committed"),
    Case("in_place", "load", "trainer", KILL, "committed"),
    Case("in_place", "load", "worker", STOP, "committed"),
    Case("in_place", "load", "coordinator", STOP, "committed"),
    Case("retract", "staged", "stager", KILL, "either"),
    Case("retract", "load", "stager", KILL, "committed"),
    Case("retract", "load", "trainer", STOP, "committed"),
    Case("abort", "load", "stager", KILL, "committed"),
    Case("abort", "load", "trainer", KILL, "committed"),
    Case("abort", "load", "trainer", KILL, "committed", "ipc"),
    Case("abort", "transfer", "trainer", KILL, "aborted", "direct"),
    Case("in_place", "transfer", "trainer", KILL, "aborted", "direct"),
    Case("abort", "load", "coordinator", KILL, "aborted"),
    Case("drain", "hold", "stager", KILL, "either"),
    Case("drain", "hold", "trainer", KILL, "committed"),
    Case("drain", "hold", "worker", KILL, "aborted"),
    Case("drain", "hold", "worker", STOP, "aborted"),
    Case("drain", "hold", "coordinator", KILL, "aborted"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_is_lost_during_an_update_loses_no_token_and_the_next_update_succeeds(shared: Shared, case: Case) -> None:
    async def scene() -> None:
        # Those that are waited for must not have ended before.
        async with streaming(shared.daemon, 8, max_new_tokens=800 if case.phase == "hold" else 300) as (pool, streams):
            new = (await pool.weights()).version + 1
            how = await (by_another_trainer if case.who == "trainer" else by_this_one)(shared, pool, case, new)
            assert case.ends in (how, "either"), how
            assert (await pool.weights()).version == (new if how == "committed" else new - 1)
            async with WeightPublisher(pool, **PATIENT) as publisher:
                await publisher.publish(some_weights(new + 1), new + 1, in_flight="abort")
            await all_ready(pool, shared.daemon)
            await check(pool, streams)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_an_update_is_not_taken_for_one_of_its_version_in_an_earlier_run(shared: Shared) -> None:
    """The history has the same version and weights as committed: the publisher of it is another message."""

    async def scene() -> None:
        async with streaming(shared.daemon, 1) as (pool, _streams), WeightPublisher(pool, **PATIENT) as publisher:
            before = (await pool.weights()).version
            await publisher.publish(some_weights(before + 1), before + 1, in_flight="abort")
            await publisher.publish(some_weights(before), before, in_flight="abort", new_run=True)
            lost = Case("abort", "load", "coordinator", KILL, "aborted")
            assert await by_this_one(shared, pool, lost, before + 1) == "aborted"
            assert (await pool.weights()).version == before
            await all_ready(pool, shared.daemon)

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


async def check(pool: Pool, streams: Streams) -> None:
    history = (await pool.weights()).history
    await streams.check({0: "", **{record.version: record.digest for record in history if record.outcome == "committed"}})


async def by_this_one(shared: Shared, pool: Pool, case: Case, new: int) -> str:
    """How an update of this process's own publisher ends."""
    async with WeightPublisher(pool, **OPTIONS) as publisher:
        finish: asyncio.Task[UpdateRecord] | None = None
        async with asyncio.timeout(PATIENCE_S):
            while True:
                handle = await publisher.start(some_weights(new), new, in_flight=case.mode)  # type: ignore[arg-type]
                if case.phase != "staged":
                    finish = asyncio.create_task(handle.finish())
                while handle.phase not in (case.phase, "failed"):
                    assert handle.phase != "committed"
                    await asyncio.sleep(0.002)
                if handle.phase == case.phase:
                    break
                # It went no further for longer than TIMES allow: this machine was busy.
                with pytest.raises(errors.UpdateAborted):
                    await (finish or handle.finish())
        await shared.strike(case.who, case.sign)
        try:
            return (await (finish or handle.finish())).outcome
        except errors.UpdateAborted:
            return "aborted"


async def by_another_trainer(shared: Shared, pool: Pool, case: Case, new: int) -> str:
    """How an update of a trainer ends that is lost meanwhile."""
    command = [
        sys.executable,
        "-m",
        "tests.process.trainer",
        shared.daemon.address,
        str(new),
        case.phase,
        case.transfer,
        case.mode,
    ]
    trainer = shared.processes.keep(ForkedProcess(command, stdout=subprocess.PIPE, text=True), first=KILL)
    assert await asyncio.to_thread(trainer.stdout.readline) == "there\n"
    trainer.send_signal(case.sign)
    async with asyncio.timeout(PATIENCE_S):
        while not (history := (await pool.weights()).history) or history[-1].version != new:
            await asyncio.sleep(0.02)
    return history[-1].outcome.removeprefix("update_")
