"""Blocking facades have the methods, signatures and docstrings of the async classes, and a type checker knows their results."""

import asyncio
import inspect
import queue
import threading
from concurrent.futures import CancelledError
from typing import Any, assert_type

import pytest

from enginepool import BlockingPool, BlockingSession, Generations, Pool, RolloutGroup, ScoreResult, Session, TokenChunk
from enginepool.client.facade import BlockingIterator
from enginepool.client.loop_thread import LoopThread
from enginepool.errors import PoolClosed
from enginepool.protocol.messages import StatusReport
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.trainer.blocking_publisher import BlockingUpdateHandle, BlockingWeightPublisher
from enginepool.trainer.publisher import WeightPublisher
from enginepool.trainer.update_handle import UpdateHandle


def methods(kind: type) -> dict[str, Any]:
    return {name: method for name, method in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [
        (BlockingPool, Pool),
        (BlockingSession, Session),
        (BlockingWeightPublisher, WeightPublisher),
        (BlockingUpdateHandle, UpdateHandle),
    ],
)
def test_a_facade_has_every_async_method_with_its_signature_and_docstring(blocking: type, awaited: type) -> None:
    # `begin` is the publisher's, not a caller's.
    expected = {name: method for name, method in methods(awaited).items() if inspect.iscoroutinefunction(method)}
    expected.pop("begin", None)
    found = methods(blocking)
    assert expected.keys() <= found.keys()
    for name in expected.keys() - {"close"}:
        assert inspect.signature(found[name]) == inspect.signature(expected[name]), name
        assert inspect.getdoc(found[name]) == inspect.getdoc(expected[name]), name
        assert not inspect.iscoroutinefunction(found[name]), name


def test_a_facade_opens_a_pool_with_the_arguments_of_the_async_class() -> None:
    for name in ("connect", "start"):
        assert inspect.signature(getattr(BlockingPool, name)) == inspect.signature(getattr(Pool, name))


def test_a_blocking_stream_has_the_arguments_and_the_docstring_of_the_async_one() -> None:
    for name in ("stream", "rollout"):
        found, expected = getattr(BlockingPool, name), getattr(Pool, name)
        assert (inspect.signature(found), inspect.getdoc(found)) == (inspect.signature(expected), inspect.getdoc(expected))


@pytest.mark.parametrize("name", ["stream", "branch", "replace", "close"])
def test_a_blocking_session_has_the_arguments_and_the_docstrings_of_the_async_one(name: str) -> None:
    found, expected = getattr(BlockingSession, name), getattr(Session, name)
    assert (inspect.signature(found), inspect.getdoc(found)) == (inspect.signature(expected), inspect.getdoc(expected))


def test_every_call_that_another_thread_makes_while_the_loop_ends_returns() -> None:
    thread, count = LoopThread(), 16
    begun, ended = threading.Barrier(count + 1), queue.SimpleQueue[type[BaseException]]()

    async def nothing() -> None: ...

    def call() -> None:
        thread.call(nothing())
        begun.wait()
        while True:
            try:
                thread.call(nothing())
            except BaseException as error:
                ended.put(type(error))
                return

    for _ in range(count):
        threading.Thread(target=call, daemon=True).start()
    begun.wait()
    thread.stop()
    assert {ended.get(timeout=20) for _ in range(count)} <= {PoolClosed, CancelledError}


def test_a_signal_handler_can_call_while_its_thread_gives_a_call_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, give, given = LoopThread(), asyncio.run_coroutine_threadsafe, list[int]()

    async def number(value: int) -> int:
        return value

    def interrupted(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", give)
        given.append(thread.call(number(1), 20.0))
        return give(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    assert (thread.call(number(2)), given) == (2, [1])
    thread.stop()


def typed(pool: BlockingPool, publisher: BlockingWeightPublisher) -> None:
    """For the type checker alone."""
    assert_type(BlockingPool.connect("ipc:///pool.sock", connect_timeout=1.0), BlockingPool)
    assert_type(pool.score("query", ["item"], priority=3), ScoreResult)
    assert_type(pool.generate("prompt", n=2, temperature=0), Generations)
    assert_type(pool.stream("prompt", credit=3), BlockingIterator[TokenChunk, Generations])
    assert_type(pool.rollout([[1]], 2, reward="judge", temperature=0).take(3), list[RolloutGroup])
    assert_type(pool.session(group="g"), BlockingSession)
    assert_type(pool.session().generate([1], temperature=0), Generations)
    assert_type(pool.session().stream([1]), BlockingIterator[TokenChunk, Generations])
    assert_type(pool.session().branch(), BlockingSession)
    assert_type(pool.ready(3.0, group="g"), StatusReport)
    assert_type(publisher.publish({}, 3, transfer="direct"), UpdateRecord)
    assert_type(publisher.start({}, partial=True), BlockingUpdateHandle)
    assert_type(publisher.start({}).finish(timeout=3.0), UpdateRecord)
    pool.score("query", ["item"], prioritx=3)  # pyright: ignore[reportCallIssue]
    pool.ready("soon")  # pyright: ignore[reportArgumentType]
