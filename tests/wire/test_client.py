"""`Pool` and `BlockingPool` on real sockets, against a coordinator of a few lines."""

import asyncio
import functools
import logging
import signal
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from bench.processes import free_port
from enginepool import BlockingPool, Pool, errors
from enginepool.client import connection
from enginepool.client.link import ClientLink
from enginepool.client.session.machine import ClientSession
from enginepool.client.session.settings import SessionSettings
from enginepool.protocol.messages import (
    Ack,
    Cancel,
    ErrorReply,
    FrameSpec,
    Goodbye,
    GroupStatus,
    Hello,
    Message,
    Result,
    Score,
    Timings,
    Usage,
    WorkerStatus,
)
from tests.wire.fake_coordinator import PATIENCE_S, FakeCoordinator, lengths_and_sums

Test = Callable[[], Coroutine[Any, Any, None]]


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield fake


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on either loop, within a bounded time."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def on_loop(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(work, 60))

    return on_loop


async def heard(coordinator: FakeCoordinator, kind: type[Message]) -> Message:
    return await asyncio.to_thread(coordinator.wait_for, kind)


# --- scoring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "items"),
    [
        ([1, 2], [[3], [4, 5]]),
        (np.array([1, 2], np.int32), [np.array([3], np.int32), np.array([4, 5], np.int64)]),
        ((1, 2), ([3], (4, 5))),
        (range(1, 3), [range(3, 4), range(4, 6)]),
        (np.array([1, 2], np.uint16)[:], [np.array([9, 3])[1:], np.array([4, 0, 5, 0])[::2]]),
        ([np.int64(1), 2], [[np.int32(3)], [4, 5]]),
    ],
)
def test_token_ids_of_every_kind_give_the_same_scores(
    coordinator: FakeCoordinator, run: Callable[..., None], query: Any, items: Any
):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            result = await pool.score(query, items, label_token_ids=[10])
            np.testing.assert_array_equal(result.scores, np.array([[3, 16], [4, 22]], np.float32))
            assert (result.scores.dtype, result.hidden, result.version, result.forwards) == (np.float32, None, 1, (1,))
            assert (result.timings.queued_s, result.timings.run_s) == (0.0015, 2.0)
            assert result.usage == (2, 7)

    run(main())
    assert coordinator.payloads == [[b"\1\0\0\0\2\0\0\0", b"\3\0\0\0\4\0\0\0\5\0\0\0", b"\1\0\0\0\2\0\0\0"]]
    assert coordinator.scores[0].frames == [
        FrameSpec("query", "int32", (2,)),
        FrameSpec("items", "int32", (3,)),
        FrameSpec("item_lengths", "uint32", (2,)),
    ]


def test_a_matrix_of_ids_is_a_row_each(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            result = await pool.score([1], np.array([[1, 2], [3, 4]]))  # type: ignore[arg-type]
            np.testing.assert_array_equal(result.scores[:, 1], [4, 8])

    run(main())


def test_text_travels_as_utf8_with_lengths_in_bytes(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            result = await pool.score("zwölf", ["ä", "", "bc"])
            np.testing.assert_array_equal(result.scores[:, 0], [8, 6, 8])

    run(main())
    assert coordinator.payloads[0][:2] == ["zwölf".encode(), "äbc".encode()]


class Column(Sequence[Any]):
    """Of a table some of whose rows were taken: an index is a row's label, not its place."""

    def __init__(self, values: dict[int, Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, label: Any) -> Any:
        return self.values[label]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values.values())


def test_the_columns_of_a_table_are_rows_in_their_order(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            pairs = await pool.score_pairs(Column({7: "a", 9: "bc"}), Column({7: "def", 9: ""}))
            assert pairs.scores[:, 0].tolist() == [4, 2]
            shared = await pool.score([1], Column({3: [2], 5: [3, 4]}))
            assert shared.scores.tolist() == [[2, 3], [3, 8]]

    run(main())


def test_pairs_have_a_query_of_their_own(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            ids = await pool.score_pairs([[1, 2], []], [[3], [4, 5]])
            np.testing.assert_array_equal(ids.scores, [[3, 6], [2, 9]])
            text = await pool.score_pairs(["a", "b"], ["", "cd"])
            np.testing.assert_array_equal(text.scores[:, 0], [1, 3])

    run(main())
    assert [spec.name for spec in coordinator.scores[0].frames] == ["query", "query_lengths", "items", "item_lengths"]


def test_options_arrive_under_their_wire_names(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await pool.score(
                [1], [[2]], label_token_ids=np.array([7, 8]), apply_softmax=True, item_first=True, temperature=2,
                truncation="left",
                return_pooled_hidden_states=True, group="g", priority=-7, timeout=1000.0, logprobs=True, raw=True,
            )  # fmt: skip

    run(main())
    sent = coordinator.scores[0]
    assert (sent.labels, sent.softmax, sent.item_first, sent.hidden) == ([7, 8], True, True, True)
    assert (sent.temperature, sent.truncation) == (2.0, "left")
    assert (sent.group, sent.priority, sent.logprobs, sent.raw) == ("g", -7, True, True)
    assert sent.timeout_ms is not None
    assert 900_000 < sent.timeout_ms <= 1_000_000


@pytest.mark.parametrize("rows", [1, 40])
def test_arrays_in_a_result_are_the_callers_to_change(coordinator: FakeCoordinator, run: Callable[..., None], rows: int):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            result = await pool.score([1], [[i] for i in range(rows)], return_pooled_hidden_states=True)
            scores, hidden = result.scores, result.hidden
            assert hidden is not None
            assert hidden.shape == (rows, 4096)
            scores += 1
            hidden += 1
            np.testing.assert_array_equal(hidden[:, 0], 3)
            np.testing.assert_array_equal(scores[:, 0], 3)

    run(main())


def test_a_large_request_arrives_whole_although_the_caller_changes_its_arrays(
    coordinator: FakeCoordinator, run: Callable[..., None]
):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            items = [np.arange(50_000, dtype=np.int32) for _ in range(4)]
            query = np.arange(30_000, dtype=np.int32)
            call = asyncio.ensure_future(pool.score(query, items))
            await asyncio.sleep(0)
            query[:] = 1
            for item in items:
                item[:] = 1
            result = await call
            np.testing.assert_array_equal(result.usage, (4, 4 * 80_000))

    run(main())
    assert coordinator.payloads[0][0] == np.arange(30_000, dtype=np.int32).tobytes()
    assert coordinator.payloads[0][1] == np.tile(np.arange(50_000, dtype=np.int32), 4).tobytes()


def test_hundreds_of_calls_at_once_all_get_their_own_answer_through_a_small_window(
    coordinator: FakeCoordinator, run: Callable[..., None]
):
    coordinator.window = 7

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            results = await asyncio.gather(*(pool.score([i], [[1]], priority=i % 5) for i in range(400)))
            assert [int(result.scores[0, 1]) for result in results] == [i + 1 for i in range(400)]
            acked = 0
            while acked < 400:
                message = await heard(coordinator, Ack)
                assert isinstance(message, Ack)
                acked += len(message.ids)

    run(main())


# --- what is refused here ----------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("query", "items", "options", "field", "limit", "said"),
    [
        ([1], [], {}, "items", "1", "empty"),
        ([1], "abc", {}, "items", "", "a list of texts"),
        ([1], None, {}, "items", "", "a list of texts"),
        ([1], {1: [2]}, {}, "items", "", "a dict"),
        ([1], [[2], "x"], {}, "items[1]", "", "text"),
        ("a", ["b", [1]], {}, "items[1]", "", "a list"),
        ("a", ["b", None], {}, "items[1]", "", "None"),
        ("a", UserDict(input_ids=[[1]], attention_mask=[[1]]), {}, "items", "", "a UserDict"),
        ("a\ud800", ["b"], {}, "query", "", "not UTF-8"),
        ("a", ["b", "c\udfff"], {}, "items[1]", "", "not UTF-8"),
        ("", ["a", ""], {}, "items[1]", "1", "empty"),
        ([], [[1], []], {}, "items[1]", "1", "empty"),
        (None, [[1]], {}, "query", "", "None; a text, or a sequence of token ids"),
        (b"abc", [[1]], {}, "query", "", "a bytes; a text, or a sequence of token ids"),
        ([1], [None], {}, "items[0]", "", "None; a sequence of token ids"),
        ([1, -2], [[1]], {}, "query[1]", "0", "negative"),
        ([1], [[3], [4, -5]], {}, "items[1][1]", "0", "negative"),
        ([1], [np.array([1]), np.array([2, -3], np.int32)], {}, "items[1][1]", "0", "negative"),
        ([1], [[2**31]], {}, "items[0][0]", str(2**31 - 1), "31 bits"),
        ([1], [np.array([5, 2**40])], {}, "items[0][1]", str(2**31 - 1), "31 bits"),
        ([1], [[1.5]], {}, "items[0][0]", "", "a float"),
        ([1], [[True]], {}, "items[0][0]", "", "a bool"),
        ([1], [np.array([1.5])], {}, "items[0]", "", "float64"),
        ([1], [np.array([[1]])], {}, "items[0]", "", "shape [1, 1]"),
        ([1], [7], {}, "items[0]", "", "an int"),
        ([1], [[2]], {"priority": NAN}, "priority", "", "nan"),
        ([1], [[2]], {"priority": 1.0}, "priority", "", "1.0"),
        ([1], [[2]], {"priority": True}, "priority", "", "a bool"),
        ([1], [[2]], {"priority": 1001}, "priority", "1000", "from -1000 to 1000"),
        ([1], [[2]], {"timeout": 0}, "timeout", "0", "more than 0"),
        ([1], [[2]], {"timeout": NAN}, "timeout", "0", "nan"),
        ([1], [[2]], {"timeout": "1"}, "timeout", "", "a str"),
        ([1], [[2]], {"timeout": 1e300}, "timeout", "1000000000", "the most"),
        ([1], [[2]], {"timeout": 10**400}, "timeout", "1000000000", "the most"),
        ([1], [[2]], {"label_token_ids": [-1]}, "label_token_ids[0]", "0", "negative"),
        ([1], [[2]], {"label_token_ids": [1] * 4097}, "label_token_ids", "4096", "4097"),
        ([1], [[2]], {"label_token_ids": ["yes"]}, "label_token_ids[0]", "", "a str"),
        ([1], [[2]], {"apply_softmax": 1}, "apply_softmax", "", "True or False"),
        ([1], [[2]], {"apply_softmax": True, "label_token_ids": [5]}, "apply_softmax", "2", "always 1.0"),
        ([1], [[2]], {"temperature": NAN, "apply_softmax": True}, "temperature", "0.001 to 1000", "nan"),
        ([1], [[2]], {"temperature": "hot"}, "temperature", "", "a str"),
        ([1], [[2]], {"temperature": 0.5}, "temperature", "", "without apply_softmax"),
        ([1], [[2]], {"labels": [5, 6]}, "labels[0]", "", "token ids go into label_token_ids"),
        ([1], [[2]], {"labels": ["yes", 6]}, "labels[1]", "", "an int"),
        ([1], [[2]], {"labels": "yes"}, "labels", "", "a list of texts"),
        ([1], [[2]], {"labels": []}, "labels", "4096", "0 texts"),
        ([1], [[2]], {"labels": ["y" * 65]}, "labels[0]", "64", "65 characters"),
        ([1], [[2]], {"labels": ["yes"], "label_token_ids": [5]}, "labels", "", "name either texts or token ids"),
        ([1], [[2]], {"labels": ["yes"], "apply_softmax": True}, "apply_softmax", "2", "always 1.0"),
        ([1], [[2]], {"truncation": "middle"}, "truncation", "error, left, right", "'middle'"),
        ([1], [[2]], {"logprobs": "yes"}, "logprobs", "", "True or False"),
        ([1], [[2]], {"item_first": None}, "item_first", "", "True or False"),
        ([1], [[2]], {"retry_busy": "no"}, "retry_busy", "", "True or False"),
        ([1], [[2]], {"group": 3}, "group", "", "the name of a group"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent_with_field_and_limit(
    coordinator: FakeCoordinator, query: Any, items: Any, options: Any, field: str, limit: str, said: str
):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.BadRequest) as caught:
                await pool.score(query, items, **options)
            assert (caught.value.field, caught.value.limit) == (field, limit)
            assert field in str(caught.value)
            assert said in str(caught.value)
            await pool.score([1], [[2]])

    uvloop.run(main())
    assert len(coordinator.scores) == 1


@pytest.mark.parametrize(
    ("prompts", "responses", "field"),
    [
        (["a"], ["b", "c"], "responses"),
        (["a"], [[1]], "responses[0]"),
        ([[1]], ["a"], "responses[0]"),
        (["a", [1]], ["b", "c"], "prompts[1]"),
        ([[1], []], [[2], []], "responses[1]"),
        ([], [], "prompts"),
        ([[1], [2, -2]], [[1], [1]], "prompts[1][1]"),
    ],
)
def test_bad_pairs_are_named_as_prompts_and_responses(coordinator: FakeCoordinator, prompts: Any, responses: Any, field: str):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.BadRequest) as caught:
                await pool.score_pairs(prompts, responses)
            assert caught.value.field == field

    uvloop.run(main())


# --- what the coordinator refuses --------------------------------------------------------------------------------------


def refuse(code: str, **facts: Any) -> Callable[[Score, Sequence[bytes]], tuple[Message, Sequence[bytes]]]:
    return lambda message, frames: (ErrorReply(code, "no", id=message.id, **facts), ())


def test_an_error_of_the_coordinator_names_the_argument_as_python_does(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.rule = lambda message, frames: (
        ErrorReply("bad_request", "labels: id 9 is outside the vocabulary of 8", id=message.id, field="labels", limit="8"),
        (),
    )

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.BadRequest, match=r"^label_token_ids: id 9") as caught:
                await pool.score([1], [[2]], label_token_ids=[9])
            assert (caught.value.field, caught.value.limit) == ("label_token_ids", "8")

    run(main())


def test_busy_is_waited_out_unless_the_caller_wants_to_know(coordinator: FakeCoordinator, run: Callable[..., None]):
    attempts: list[int] = []

    def busy_twice(message: Score, frames: Sequence[bytes]) -> tuple[Message, Sequence[bytes]]:
        attempts.append(message.id)
        if attempts.count(message.id) <= 2:
            return ErrorReply("busy", "full", id=message.id, retry_after_ms=1), ()
        return lengths_and_sums(message, frames)

    coordinator.rule = busy_twice

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await pool.score([1], [[2]])
            with pytest.raises(errors.Busy) as caught:
                await pool.score([1], [[2]], retry_busy=False)
            assert caught.value.retry_after_s == 0.001

    run(main())
    assert attempts == [1, 1, 1, 2]


def test_an_answer_that_is_not_what_it_says_fails_its_call_alone(coordinator: FakeCoordinator, run: Callable[..., None]):
    def wrong(message: Score, frames: Sequence[bytes]) -> tuple[Message, Sequence[bytes]]:
        specs = [FrameSpec("scores", "float32", (2, 2))]
        result = Result(message.id, 1, [1], Usage(1, 1), Timings(1, 1), specs)
        return (result, [b"\0" * 12]) if message.priority else lengths_and_sums(message, frames)

    coordinator.rule = wrong

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.Malformed, match="scores"):
                await pool.score([1], [[2]], priority=1)
            await pool.score([1], [[2]])

    run(main())


@pytest.mark.parametrize(
    "frames",
    [
        (b"\xc1garbage",),
        (b"",),
        (msgspec.msgpack.encode({"type": "weather", "sun": True}), b"x", b"y"),
        (msgspec.msgpack.encode({"type": "result", "id": "one"}),),
    ],
)
def test_a_message_that_cannot_be_read_is_dropped_and_logged(
    coordinator: FakeCoordinator, run: Callable[..., None], caplog: pytest.LogCaptureFixture, frames: tuple[bytes, ...]
):
    def with_noise(message: Score, payload: Sequence[bytes]) -> None:
        coordinator.tell(*frames)
        answer, answer_frames = lengths_and_sums(message, payload)
        coordinator.tell(msgspec.msgpack.encode(answer), *answer_frames)

    coordinator.rule = with_noise

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await pool.score([1], [[2]])

    with caplog.at_level(logging.WARNING, "enginepool"):
        run(main())
    assert "cannot be read" in caplog.text


# --- cancelling, deadlines, restarts -----------------------------------------------------------------------------------


def test_cancelling_the_awaiting_task_takes_the_request_back(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.rule = lambda message, frames: None

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            task = asyncio.create_task(pool.score([1], [[2]]))
            sent = await heard(coordinator, Score)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(sent, Score)
            assert await heard(coordinator, Cancel) == Cancel(sent.id)
            coordinator.rule = lengths_and_sums
            await pool.score([1], [[2]])
            assert "pending=0" in repr(pool)

    run(main())


def test_a_timeout_ends_the_call_also_without_an_answer(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.rule = lambda message, frames: None

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(TimeoutError) as caught:
                await pool.score([1], [[2]], timeout=0.05)
            assert isinstance(caught.value, errors.DeadlineExceeded)

    run(main())


def test_a_silent_coordinator_is_told_once_and_so_is_its_return(
    coordinator: FakeCoordinator, run: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    quick = functools.partial(ClientSession, settings=SessionSettings(silence_s=2.0, hello_s=0.1))
    monkeypatch.setattr(connection, "ClientSession", quick)

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            coordinator.silent = True
            for _ in range(3):
                await heard(coordinator, Hello)
            coordinator.silent = False
            await pool.score([1], [[2]])

    with caplog.at_level(logging.WARNING, "enginepool"):
        run(main())
    assert [record.getMessage() for record in caplog.records] == [
        f"{coordinator.address}: the coordinator is silent; what it has not answered is sent again once it is back",
        f"{coordinator.address}: connected again",
    ]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_what_was_not_answered_is_answered_by_the_coordinators_successor(
    tmp_path: Path, run: Callable[..., None], transport: str
):
    address = f"ipc://{tmp_path}/c.sock" if transport == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    first = FakeCoordinator(address, epoch=1)
    first.rule = lambda message, frames: None

    async def main() -> None:
        async with Pool.connect(first.address) as pool:
            before = [asyncio.create_task(pool.score([i], [[1]])) for i in range(50)]
            for _ in before:
                await heard(first, Score)
            await asyncio.to_thread(first.stop)
            between = [asyncio.create_task(pool.score([i], [[1]])) for i in range(50, 3000)]
            await asyncio.sleep(0)
            with FakeCoordinator(first.address, epoch=2) as second:
                results = await asyncio.gather(*before, *between)
                assert [int(result.scores[0, 1]) for result in results] == [i + 1 for i in range(3000)]
                hellos = [m for m in list(second.heard.queue) if isinstance(m, Hello)]
                assert hellos
                assert hellos[0].incarnation > 1
                assert f"{second.address} connected epoch=2 pending=0" in repr(pool)

    run(main())


# --- opening and closing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["ipc:///nonexistent/pool.sock", "tcp://127.0.0.1:1", "ipc://@"])
def test_connecting_without_a_coordinator_fails_in_time_and_names_the_address(run: Callable[..., None], address: str):
    async def main() -> None:
        with pytest.raises(errors.ConnectError) as caught:
            await Pool.connect(address, connect_timeout=0.2)
        assert address in str(caught.value)
        assert "`enginepool serve` starts" in str(caught.value)
        assert isinstance(caught.value, ConnectionError)

    run(main())


@pytest.mark.parametrize("address", [5, Path("pool.sock"), b"ipc://x", "tcp://\ud800:1"])
def test_an_address_that_is_no_text_is_refused_at_once(address: Any):
    for pool in (Pool, BlockingPool):
        with pytest.raises(errors.BadRequest, match=r"^address: ") as caught:
            pool.connect(address)
        assert caught.value.field == "address"


@pytest.mark.parametrize(
    "address",
    [
        "localhost",
        "",
        "tcp://x",
        "tcp://x:abc",
        "tcp://x:0",
        "tcp://x:99999",
        "tcp://*:5",
        "carrier-pigeon://roof",
    ],
)
def test_an_address_that_is_none_is_refused_at_once_with_what_one_looks_like(address: str):
    for pool in (Pool, BlockingPool):
        with pytest.raises(errors.BadRequest) as caught:
            pool.connect(address)
        assert str(caught.value).startswith(f"address: {address!r}; write tcp://HOST:PORT or ipc://PATH")
        assert caught.value.field == "address"
        assert isinstance(caught.value, ValueError)


def test_an_address_without_its_transport_is_refused_with_the_whole_of_it():
    with pytest.raises(errors.BadRequest, match=r"^address: '127.0.0.1:5791'; write tcp://127.0.0.1:5791$"):
        Pool.connect("127.0.0.1:5791")


def test_a_socket_that_cannot_be_opened_does_not_delay_close(run: Callable[..., None]):
    async def main() -> None:
        address: Any = 5
        link = ClientLink(address, lambda _message, _frames: None, lambda _line: None)
        with pytest.raises(TypeError):
            link.open()
        link.close(0)

    run(main())


def test_a_coordinator_that_does_not_answer_counts_as_absent(tmp_path: Path, run: Callable[..., None]):
    async def main() -> None:
        with FakeCoordinator(f"ipc://{tmp_path}/c.sock", silent=True) as fake:
            opening = asyncio.ensure_future(Pool.connect(fake.address, connect_timeout=2.0))
            await heard(fake, Hello)
            with pytest.raises(errors.ConnectError, match="within 2 s"):
                await opening

    run(main())


def test_a_pool_that_is_awaited_is_closed_by_its_owner(coordinator: FakeCoordinator, run: Callable[..., None]):
    async def main() -> None:
        pool = await Pool.connect(coordinator.address)
        async with pool:
            await pool.score([1], [[2]])
        await heard(coordinator, Goodbye)
        await pool.close()
        with pytest.raises(errors.PoolClosed):
            await pool.score([1], [[2]])
        with pytest.raises(errors.PoolClosed):
            await pool.status()

    run(main())


def test_closing_ends_calls_that_wait(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.rule = lambda message, frames: None

    async def main() -> None:
        pool = await Pool.connect(coordinator.address)
        call = asyncio.create_task(pool.score([1], [[2]]))
        await heard(coordinator, Score)
        await pool.close()
        with pytest.raises(errors.PoolClosed):
            await call

    run(main())


def test_closing_does_not_wait_for_a_coordinator_that_is_gone(tmp_path: Path, run: Callable[..., None]):
    async def main() -> None:
        fake = FakeCoordinator(f"ipc://{tmp_path}/c.sock")
        pool = await Pool.connect(fake.address)
        await asyncio.to_thread(fake.stop)
        calls = [asyncio.ensure_future(pool.score([1], [[2]])) for _ in range(2000)]
        await asyncio.sleep(0)
        await asyncio.wait_for(pool.close(), PATIENCE_S)
        assert {type(end) for end in await asyncio.gather(*calls, return_exceptions=True)} == {errors.PoolClosed}

    run(main())


def test_cancelling_connect_leaves_nothing_open(run: Callable[..., None]):
    async def main() -> None:
        opening = asyncio.ensure_future(Pool.connect("ipc:///nonexistent/pool.sock", connect_timeout=None))
        await asyncio.sleep(0.01)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    run(main())


def test_the_state_of_a_pool_reads_in_words(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.rule = lambda message, frames: None

    async def main() -> None:
        pool = await Pool.connect(coordinator.address)
        words = [repr(pool)]
        call = asyncio.ensure_future(pool.score([1], [[2]]))
        await heard(coordinator, Score)
        words.append(repr(pool))
        await pool.close()
        words.append(repr(pool))
        assert words == [
            f"<Pool {coordinator.address} connected epoch=1 pending=0 sent=0 resends=0>",
            f"<Pool {coordinator.address} connected epoch=1 pending=1 sent=1 resends=0>",
            f"<Pool {coordinator.address} closed epoch=1 pending=0 sent=0 resends=0>",
        ]
        await asyncio.gather(call, return_exceptions=True)

    run(main())


def test_a_pool_on_another_loop_says_so(coordinator: FakeCoordinator):
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:

            def elsewhere() -> None:
                with pytest.raises(RuntimeError, match="another event loop"):
                    asyncio.run(pool.score([1], [[2]]))

            await asyncio.to_thread(elsewhere)

    uvloop.run(main())


# --- status and readiness ----------------------------------------------------------------------------------------------


def worker(stage: str, detail: str = "") -> WorkerStatus:
    return WorkerStatus("g-0", "i", stage, detail=detail)


def test_status_is_the_coordinators_report(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.groups = [GroupStatus("g", queued=3)]

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            report = await pool.status()
            assert (report.epoch, report.groups) == (1, [GroupStatus("g", queued=3)])

    run(main())


def test_ready_says_what_the_workers_do_until_one_of_each_group_is_ready(
    coordinator: FakeCoordinator, run: Callable[..., None]
):
    coordinator.groups = [GroupStatus("g", workers=[worker("loading", "weights")])]
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        coordinator.groups = [GroupStatus("g", workers=[worker("ready")])]

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            report = await pool.ready(timeout=PATIENCE_S, report=say)
            assert report.groups[0].workers[0].stage == "ready"

    run(main())
    assert said == ["g: g-0 loading: weights", "g: g-0 ready"]


def test_ready_ends_at_its_timeout_and_says_what_is_missing(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.groups = [GroupStatus("g", workers=[worker("compiling")]), GroupStatus("h")]

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.DeadlineExceeded, match=r"'g': g-0 compiling; group 'h' has no worker yet"):
                await pool.ready(timeout=2.0)

    run(main())


def test_ready_waits_for_a_worker_with_the_committed_weights_but_not_for_lost_weights(
    coordinator: FakeCoordinator, run: Callable[..., None]
):
    coordinator.groups = [GroupStatus("g", workers=[worker("restoring")])]
    lost = GroupStatus("g", needs_weights="version 3 is held nowhere", workers=[worker("restoring", "no snapshot")])

    def say(line: str) -> None:
        assert line in ("g: g-0 restoring", "g: g-0 restoring: no snapshot")
        coordinator.groups = [lost]

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            assert (await pool.ready(timeout=PATIENCE_S, report=say)).groups == [lost]

    run(main())


def test_ready_does_not_wait_for_a_group_that_is_down_or_does_not_exist(coordinator: FakeCoordinator, run: Callable[..., None]):
    coordinator.groups = [GroupStatus("g", down="no such model: /m")]

    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            with pytest.raises(errors.PoolDown, match="no such model: /m"):
                await pool.ready()
            with pytest.raises(errors.UnknownGroup) as caught:
                await pool.ready(group="x")
            assert caught.value.limit == "g"

    run(main())


# --- the blocking facade -----------------------------------------------------------------------------------------------


def test_the_blocking_pool_has_the_same_calls(coordinator: FakeCoordinator):
    coordinator.groups = [GroupStatus("g", workers=[worker("ready")])]
    with BlockingPool.connect(coordinator.address) as pool:
        assert pool.score([1], [[2]], label_token_ids=[3], timeout=PATIENCE_S).scores.tolist() == [[2, 6]]
        assert pool.score_pairs(["a"], ["b"]).usage.tokens == 2
        assert pool.ready().epoch == pool.status().epoch == 1
        assert repr(pool) == f"<BlockingPool {coordinator.address} connected epoch=1 pending=0 sent=0 resends=0>"
        assert pool.address == coordinator.address
        with pytest.raises(errors.BadRequest):
            pool.score([1], [])
    coordinator.wait_for(Goodbye)
    pool.close()
    with pytest.raises(errors.PoolClosed):
        pool.score([1], [[2]])


def test_many_threads_may_call_a_blocking_pool(coordinator: FakeCoordinator):
    with BlockingPool.connect(coordinator.address) as pool:
        found: dict[int, float] = {}

        def call(number: int) -> None:
            found[number] = float(pool.score([number], [[1]]).scores[0, 1])

        threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {number: number + 1 for number in range(20)}


def test_closing_a_blocking_pool_ends_calls_of_other_threads(coordinator: FakeCoordinator):
    coordinator.rule = lambda message, frames: None
    pool = BlockingPool.connect(coordinator.address)
    ends: list[type[Exception]] = []

    def call() -> None:
        try:
            pool.score([1], [[2]])
        except errors.PoolClosed as error:
            ends.append(type(error))

    thread = threading.Thread(target=call)
    thread.start()
    coordinator.wait_for(Score)
    pool.close()
    thread.join(PATIENCE_S)
    assert ends == [errors.PoolClosed]


def test_ctrl_c_in_a_blocking_call_takes_its_request_back(coordinator: FakeCoordinator):
    coordinator.rule = lambda message, frames: None
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        coordinator.wait_for(Score)
        signal.pthread_kill(main, signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    with BlockingPool.connect(coordinator.address) as pool:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([1], [[2]])
        interrupter.join()
        assert coordinator.wait_for(Cancel) == Cancel(1)
        coordinator.rule = lengths_and_sums
        pool.score([1], [[2]])


def test_a_blocking_pool_that_cannot_connect_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(errors.ConnectError):
        BlockingPool.connect("ipc:///nonexistent/pool.sock", connect_timeout=0.1)
    assert set(threading.enumerate()) <= before


def test_a_blocking_pool_that_is_forgotten_says_goodbye(coordinator: FakeCoordinator):
    pool = BlockingPool.connect(coordinator.address)
    pool.score([1], [[2]])
    del pool
    coordinator.wait_for(Goodbye)


PROGRAM = """
import sys
from enginepool import BlockingPool
pool = BlockingPool.connect(sys.argv[1])
print(pool.score([1], [[2]]).usage.tokens)
"""


def test_a_program_that_never_closes_its_blocking_pool_still_ends_and_says_goodbye(coordinator: FakeCoordinator):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, coordinator.address],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    coordinator.wait_for(Goodbye)


FORGETFUL = """
import asyncio, gc, sys
from enginepool import Pool
async def main():
    pool = await Pool.connect(sys.argv[1])
    print((await pool.score([1], [[2]])).usage.tokens)
asyncio.run(main())
gc.collect()
print("ends")
"""


def test_a_program_that_forgets_a_pool_with_its_loop_still_ends(coordinator: FakeCoordinator):
    assert output(FORGETFUL, coordinator.address) == "2\nends\n"


FORKED = """
import os, sys, time
from enginepool import BlockingPool
pool = BlockingPool.connect(sys.argv[1])
began = time.monotonic()
child = os.fork()
if child == 0:
    try:
        pool.score([1], [[2]])
    except RuntimeError as error:
        print(error, flush=True)
    pool.close()
    sys.exit()  # with all that a program's end does
assert os.waitpid(child, 0)[1] == 0
print(time.monotonic() - began < 10, pool.score([1], [[2]]).usage.tokens)
"""


def test_in_a_fork_a_blocking_pool_is_refused_at_once_and_the_parents_goes_on(coordinator: FakeCoordinator):
    said = "this pool belongs to the process that this one was forked from; open one here\nTrue 2\n"
    assert output(FORKED, coordinator.address) == said


FORKED_LOOP = """
import asyncio, os, sys
from enginepool import Pool
async def main():
    async with Pool.connect(sys.argv[1]) as pool:
        child = os.fork()
        if child == 0:
            sys.exit(7)  # the pool is closed on the way
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print((await pool.score([1], [[2]])).usage.tokens)
asyncio.run(main())
"""


def test_a_fork_that_closes_the_pool_of_a_loop_ends_and_the_parents_goes_on(coordinator: FakeCoordinator):
    assert output(FORKED_LOOP, coordinator.address) == "2\n"


def output(program: str, address: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, address], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_call_on_the_blocking_pools_own_thread_is_refused_instead_of_waiting_for_itself(coordinator: FakeCoordinator):
    coordinator.groups = [GroupStatus("g", workers=[worker("ready")])]
    with BlockingPool.connect(coordinator.address) as pool:
        with pytest.raises(RuntimeError, match="own thread"):
            pool.ready(PATIENCE_S, report=lambda line: pool.status() and None)
        assert pool.status().epoch == 1


def test_closing_a_blocking_pool_ends_the_wait_for_its_workers(coordinator: FakeCoordinator):
    coordinator.groups = [GroupStatus("g", workers=[worker("loading")])]
    pool = BlockingPool.connect(coordinator.address)
    waits, ends = threading.Event(), list[BaseException]()

    def wait() -> None:
        try:
            pool.ready(report=lambda line: waits.set())
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert waits.wait(PATIENCE_S)
    pool.close()
    thread.join(PATIENCE_S)
    assert [type(error) for error in ends] == [errors.PoolClosed]


def test_importing_the_package_is_cheap_and_the_client_needs_no_torch():
    program = """
import sys
import enginepool
assert not {"torch", "zmq", "numpy", "asyncio"} & set(sys.modules), "importing enginepool imports what it may not need"
assert not hasattr(enginepool, "weather")
from enginepool import BlockingPool, EnginepoolError, Pool, ScoreResult, errors
assert errors.EnginepoolError is EnginepoolError
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
