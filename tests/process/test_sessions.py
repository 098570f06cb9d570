"""Sessions through a real coordinator and its sim workers: a process that is killed changes no token of any turn."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from enginepool import Pool, Session
from enginepool.protocol.messages import Sampling
from enginepool.protocol.prefix_blocks import BLOCK as KV_BLOCK
from enginepool.workers.sim.prefix_cache import BLOCK
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, run

#: of 0.4 s each
TURN: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40}
USERS = 6


async def ready(pool: Pool) -> None:
    """Both workers are."""
    await pool.ready(PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while any(worker.stage != "ready" for worker in (await pool.status()).groups[0].workers):
            await asyncio.sleep(0.01)


def ids(user: int, turn: int) -> list[int]:
    return [(31 * user + 7 * turn + i) % VOCAB for i in range(40)]


def check(session: Session, turn: int, whole: list[int]) -> None:
    """The latest turn of a session is what follows the history before it."""
    before, output = session.history[: session.turns[turn]].tolist(), session.history[session.turns[turn] :].tolist()
    user, generated = output[: -len(whole)], output[-len(whole) :]
    expected, _, _ = expected_output([*before, *user], Sampling(**TURN), vocab=VOCAB, end_every=0)
    assert whole == generated == expected


async def turn(session: Session, user: int, number: int) -> int:
    """Ask for the next turn. Returns how many tokens were cached."""
    answer = await session.generate(ids(user, number), **TURN)
    check(session, number, answer[0][0].token_ids.tolist())
    return answer.usage.cached_tokens


def test_turns_stay_at_the_worker_that_has_the_history(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"forward_s": 0.002})

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await ready(pool)
            sessions = [pool.session() for _ in range(USERS)]
            for number in range(4):
                # In another order each time, so that turns would change places.
                order = [(user * 5 + number) % USERS for user in range(USERS)]
                cached = await asyncio.gather(*(turn(sessions[user], user, number) for user in order))
                for user, count in zip(order, cached, strict=True):
                    has = sessions[user].turns[number]
                    assert has - BLOCK < count <= has + BLOCK, f"user {user}, turn {number}: {count} of {has}"
            group = (await pool.status()).groups[0]
            assert [worker.done for worker in group.workers] == [12, 12]
            assert group.cached_tokens == sum(worker.cached_tokens for worker in group.workers) > 0.6 * group.prompt_tokens

    run(scene)
    assert daemon.end() == 0


def test_a_worker_that_is_killed_in_the_middle_of_a_session_costs_a_delay_and_no_token(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool, pool.session() as session:
            await ready(pool)
            assert await turn(session, 1, 0) == 0
            assert await turn(session, 1, 1) >= session.turns[1] - BLOCK
            stream = session.stream(ids(1, 2), **TURN)
            first = await stream.next_chunk()
            assert first is not None
            workers = (await pool.status()).groups[0].workers
            [busy] = [worker for worker in workers if worker.batches]
            os.kill(busy.pid, signal.SIGKILL)
            [[whole]] = await stream.result()
            check(session, 2, whole.token_ids.tolist())
            assert await turn(session, 1, 3) >= session.turns[3] - BLOCK, "the worker that went on with it has it all"

    run(scene)
    daemon.end()


def test_sessions_go_on_when_the_coordinator_is_killed_and_started_again(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path)

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await ready(pool)
            sessions = [pool.session() for _ in range(USERS)]
            await asyncio.gather(*(turn(session, user, 0) for user, session in enumerate(sessions)))
            streams = [session.stream(ids(user, 1), **TURN) for user, session in enumerate(sessions)]
            for stream in streams:
                assert await stream.next_chunk() is not None
            daemon.kill()
            again = ForkedDaemon(processes, daemon.config)
            for session, stream in zip(sessions, streams, strict=True):
                [[whole]] = await stream.result()
                check(session, 1, whole.token_ids.tolist())
            await asyncio.gather(*(turn(session, user, 2) for user, session in enumerate(sessions)))
        assert await asyncio.to_thread(again.end) == 0

    run(scene)


def test_turns_find_their_history_after_a_restart_of_the_coordinator_where_engines_publish_kv_events(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path, options={"forward_s": 0.002, "kv_events": True})

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await ready(pool)
            sessions = [pool.session() for _ in range(USERS)]
            for number in range(2):
                await asyncio.gather(*(turn(session, user, number) for user, session in enumerate(sessions)))
            daemon.kill()
            again = daemon.successor()
            await ready(pool)
            # In this order a coordinator that does not know where they were would give turns to the other worker.
            order = [0, 2, 4, 1, 3, 5]
            assert await asyncio.gather(*(turn(sessions[user], user, 2) for user in order)) == [2 * KV_BLOCK] * USERS
        assert await asyncio.to_thread(again.end) == 0

    run(scene)
