"""`Pool.session` on a real socket: what each call brings along, what the history keeps, and how a session ends."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import BlockingPool, Pool, Session, errors
from tests.wire.generating_coordinator import GeneratingCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[GeneratingCoordinator]:
    fake = GeneratingCoordinator(f"ipc://{tmp_path}/c.sock")
    with fake:
        yield fake


def scene(coordinator: GeneratingCoordinator, call: Callable[[Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await call(pool)

    asyncio.run(asyncio.wait_for(main(), 60))


def prompts(coordinator: GeneratingCoordinator) -> list[list[int]]:
    """What each request asked to continue."""
    return [np.frombuffer(frames[0], np.int32).tolist() for frames in coordinator.brought]


def history(session: Session) -> list[int]:
    assert session.history.dtype == np.int32
    return session.history.tolist()


def test_each_turn_brings_the_whole_history_along_and_appends_to_it(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        async with pool.session(group="policy") as session:
            [[first]] = await session.generate([11, 12], max_new_tokens=2, temperature=0)
            assert first.token_ids.tolist() == [0, 1]
            answer = await session.generate(np.array([13]), max_new_tokens=3)
            assert answer.usage.cached_tokens == 3
            assert history(session) == [11, 12, 0, 1, 13, 0, 1, 2] and session.turns == (0, 4)
            await session.generate(max_new_tokens=1)
            assert history(session)[-1] == 0 and session.turns == (0, 4, 8)

    scene(coordinator, main)
    assert prompts(coordinator) == [[11, 12], [11, 12, 0, 1, 13], [11, 12, 0, 1, 13, 0, 1, 2]]
    assert [request.group for request in coordinator.asked] == ["policy"] * 3


def test_a_stream_appends_what_its_caller_takes_also_if_it_is_left(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session = pool.session()
        chunks = [chunk.token_ids.tolist() async for chunk in session.stream([5], max_new_tokens=3)]
        assert chunks == [[0], [1], [2]] and history(session) == [5, 0, 1, 2]
        stream = session.stream([6], max_new_tokens=3, credit=1)
        await stream.next_chunk()
        assert history(session) == [5, 0, 1, 2, 6, 0]
        stream.cancel()
        await session.stream([7], max_new_tokens=2).result()
        assert history(session) == [5, 0, 1, 2, 6, 0, 7, 0, 1] and session.turns == (0, 4, 6)
        async for _ in session.stream([8], max_new_tokens=3):
            break
        assert history(session)[9:] == [8, 0]
        session.stream([9]).cancel()
        assert len(history(session)) == 11, "it had not begun"

    scene(coordinator, main)


def test_the_caller_may_reuse_the_array_of_its_prompt_while_a_call_runs(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session, buffer = pool.session(), np.array([11, 12], np.int32)
        running = asyncio.create_task(session.generate(buffer, max_new_tokens=1))
        await asyncio.sleep(0)
        buffer[:] = 99
        await running
        assert history(session) == [11, 12, 0]
        buffer[:] = 13
        stream = session.stream(buffer, max_new_tokens=1)
        buffer[:] = 99
        await stream.result()
        assert history(session) == [11, 12, 0, 13, 13, 0]

    scene(coordinator, main)
    assert prompts(coordinator) == [[11, 12], [11, 12, 0, 13, 13]]


def test_a_branch_is_independent_and_a_cut_history_goes_on_from_there(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session = pool.session()
        await session.generate([1], max_new_tokens=2)
        await session.generate([2], max_new_tokens=1)
        other = session.branch()
        assert history(other) == [1, 0, 1, 2, 0] and other.turns == (0, 3)
        await other.generate([3], max_new_tokens=1)
        session.replace(session.turns[-1], [4, 5])
        assert history(session) == [1, 0, 1, 4, 5] and session.turns == (0,)
        await session.generate([6], max_new_tokens=1)
        assert history(session) == [1, 0, 1, 4, 5, 6, 0] and session.turns == (0, 3)
        assert history(other) == [1, 0, 1, 2, 0, 3, 0]
        other.replace(7, [8, 9])
        other.replace(8, [4])
        await other.generate(max_new_tokens=1)
        assert history(other)[7:] == [8, 4, 0] and other.turns == (0, 3, 5, 7), "both cuts are of one turn"
        session.replace(0)
        assert history(session) == [] and session.turns == ()
        session.close()
        assert len(history(other)) == 10

    scene(coordinator, main)


def test_a_second_call_at_the_same_time_is_refused_and_a_branch_takes_it(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session = pool.session()
        await session.generate([1], max_new_tokens=1)
        running = asyncio.create_task(session.generate([2], max_new_tokens=1))
        await asyncio.sleep(0)
        for call in (session.stream, session.generate([3]), lambda: session.replace(0)):
            with pytest.raises(errors.SessionBusy, match="branch"):
                await call if isinstance(call, Awaitable) else call()  # type: ignore[misc]
        other = session.branch()
        await other.generate([4], max_new_tokens=1)
        await running
        assert (history(session), history(other)) == ([1, 0, 2, 0], [1, 0, 4, 0])
        stream = session.stream([5])
        with pytest.raises(errors.SessionBusy):
            session.stream([6])
        del stream
        gc.collect()
        await session.generate([6], max_new_tokens=1)

    scene(coordinator, main)


def test_an_interrupted_turn_stays_in_the_history_and_any_other_error_leaves_it_as_it_was(
    coordinator: GeneratingCoordinator,
) -> None:
    coordinator.stops, coordinator.reason = {0: 2}, "interrupted"

    async def main(pool: Pool) -> None:
        session = pool.session()
        with pytest.raises(errors.Interrupted):
            await session.generate([1], max_new_tokens=4)
        assert history(session) == [1, 0, 1]
        with pytest.raises(errors.Interrupted):
            await session.stream([2], max_new_tokens=4).result()
        assert history(session) == [1, 0, 1, 2, 0, 1]
        [[one]] = await session.generate([3], max_new_tokens=4, partial=True)
        assert one.finish_reason == "interrupted" and history(session)[6:] == [3, 0, 1]
        for wrong in ([-1], "text", [[1]], None):
            given: Any = wrong
            with pytest.raises(errors.BadRequest, match=r"^prompt"):
                await session.generate(given)
        with pytest.raises(errors.BadRequest, match="temperature"):
            await session.generate([1], temperature=-1)
        coordinator.forwards = False
        with pytest.raises(errors.DeadlineExceeded):
            await session.stream([1], timeout=0.05).result()
        assert len(history(session)) == 9

    scene(coordinator, main)


def test_options_that_a_session_has_for_itself_and_an_empty_beginning_are_refused(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session = pool.session()
        for name, value in (("n", 1), ("group", "g"), ("continue_from", None)):
            options: dict[str, Any] = {name: value}
            with pytest.raises(errors.BadRequest, match=f"^{name}: ") as refused:
                await session.generate([1], **options)
            assert refused.value.field == name
        with pytest.raises(errors.BadRequest, match=r"^prompt: empty"):
            session.stream()
        with pytest.raises(errors.BadRequest, match=r"^prompt: text; token ids"):
            session.stream("text")  # type: ignore[arg-type]
        with pytest.raises(errors.BadRequest, match=r"^at: 1; an int from 0 to 0"):
            session.replace(1)
        with pytest.raises(errors.BadRequest, match=r"^idle: 0"):
            pool.session(idle=0)

    scene(coordinator, main)
    assert not coordinator.asked


def test_an_idle_session_drops_its_history_and_says_so(coordinator: GeneratingCoordinator) -> None:
    async def main(pool: Pool) -> None:
        session, kept = pool.session(idle=0.05), pool.session(idle=None)
        for one in (session, kept):
            await one.generate([1], max_new_tokens=1)
        while "ended" not in repr(session):  # its timer frees the memory, without a call
            await asyncio.sleep(0.01)
        for call in (session.branch, session.stream, lambda: session.history, lambda: session.turns):
            with pytest.raises(errors.SessionExpired, match=r"no call for 0.05 s; its history of 2 tokens was dropped"):
                call()
        assert history(kept) == [1, 0]
        reading = pool.session(idle=0.05)
        stream = reading.stream([1], max_new_tokens=2)
        await stream.next_chunk()
        await asyncio.sleep(0.2)
        await stream.next_chunk()
        assert history(reading) == [1, 0, 1], "a call that runs keeps it"
        forgotten = weakref.ref(kept)
        del kept, one
        gc.collect()
        assert forgotten() is None

    scene(coordinator, main)


def test_a_closed_session_has_no_calls_and_its_stream_is_left(coordinator: GeneratingCoordinator) -> None:
    coordinator.forwards = False

    async def main(pool: Pool) -> None:
        async with pool.session() as session:
            stream = session.stream([1])
            reading = asyncio.create_task(stream.next_chunk())
            while not coordinator.asked:
                await asyncio.sleep(0.01)
        with pytest.raises(errors.RequestCancelled):
            await reading
        session.close()
        for call in (session.branch, session.stream, lambda: session.history):
            with pytest.raises(errors.SessionClosed, match="the session is closed"):
                call()
        with pytest.raises(errors.SessionClosed):
            await session.generate([1])

    scene(coordinator, main)


def test_a_session_blocks_too(coordinator: GeneratingCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool, pool.session() as session:
        session.generate([1], max_new_tokens=1)
        with session.stream([2], max_new_tokens=2) as stream:
            assert [chunk.token_ids.tolist() for chunk in stream] == [[0], [1]]
        other = session.branch().branch()
        session.replace(session.turns[1])
        session.close()
        assert (other.history.tolist(), other.turns) == ([1, 0, 2, 0, 1], (0, 2))
        with pytest.raises(errors.SessionClosed):
            session.generate([1])
