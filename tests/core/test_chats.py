"""Chats as items: what is refused, what is charged, and what a worker is asked."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.chats import check_template, encode_chats
from enginepool.client.session.charges import charge_of, message_bytes
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.requests.memory import charge
from enginepool.errors import BadRequest
from enginepool.protocol.chat import MAX_CHAT_BYTES, MAX_MESSAGES, ChatTemplate, read_chats
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Batch, FrameSpec, Score, Tokenize
from tests.core.machines import CAN, Pool, failures, results

TALKS = msgspec.structs.replace(CAN, features=("chat_template",))
CHATS = [[{"role": "system", "content": "Judge."}, {"role": "user", "content": "Grüße 👍"}], [{"role": "user", "content": ""}]]


def score(chats: Any = CHATS, **settings: Any) -> tuple[Score, tuple[Any, ...]]:
    specs, frames = encode_chats(chats)
    asked: dict[str, Any] = {"labels": [1, 2], "chat": ChatTemplate()} | settings
    return Score(1, specs, **asked), frames


def work(chats: Any = CHATS, **settings: Any) -> ScoreWork:
    return SCORE.open(*score(chats, **settings))


def test_chats_travel_as_json_and_are_read_as_templates_take_them() -> None:
    specs, frames = encode_chats(CHATS)
    assert [spec.name for spec in specs] == ["items", "item_lengths"]
    ends = np.cumsum(np.frombuffer(frames[1], np.uint32)).tolist()
    items = [bytes(frames[0])[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    assert [json.loads(item) for item in items] == read_chats(items) == CHATS


def test_a_worker_renders_chats_with_the_options_of_the_request_and_its_ids_are_scored() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=TALKS)
    template = ChatTemplate(False, {"enable_thinking": False})
    (asked,) = pool.submit(client, 1, work(chat=template, truncation="left"))
    assert isinstance(asked.message, Tokenize)
    assert (asked.message.chat, asked.message.truncation, asked.message.longest) == (template, "left", 100)
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    ids = [np.array([5, 6, 7], np.int32).tobytes(), np.array([2, 1], np.uint32).tobytes()]
    (batch,) = pool.do(ev.TextTokenized(0, asked.link, asked.message.task, specs, ids, truncated=1))
    assert isinstance(batch.message, Batch) and batch.message.parts[0].frames == specs
    pool.finish_all()
    answer = results(pool.sent)[1]
    assert (answer.truncated, answer.usage.items, answer.usage.tokens) == (1, 2, 3)


@pytest.mark.parametrize("early", [True, False])
def test_a_model_without_a_template_refuses_chats_before_the_queue(early: bool) -> None:
    pool = Pool()
    client = pool.client()
    if not early:
        pool.worker()
    pool.submit(client, 1, work())
    if early:
        pool.worker()
    (failure,) = failures(pool.sent).values()
    assert (failure.code, failure.field) == ("bad_request", "chat")
    assert "has no chat template; send the text" in failure.message


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"truncation": "right"}, "truncation"), ({"item_first": True}, "item_first"), ({"raw": True}, "raw")],
)
def test_what_a_chat_cannot_have_is_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(WireError) as wrong:
        work(**settings)
    assert (wrong.value.code, wrong.value.field) == ("bad_request", field)


def test_chats_are_text_of_a_bounded_size_without_a_query() -> None:
    lengths = np.ones(1, np.uint32).tobytes()
    specs = [FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    with pytest.raises(WireError, match="items: int32; chats are text"):
        SCORE.open(Score(1, specs, labels=[1], chat=ChatTemplate()), [bytes(4), lengths])
    message, frames = score()
    with pytest.raises(WireError, match="a score request has"):
        SCORE.open(msgspec.structs.replace(message, frames=[FrameSpec("query", "utf8", (0,)), *message.frames]), [b"", *frames])
    with pytest.raises(WireError, match="a score request has"):
        SCORE.open(msgspec.structs.replace(message, chat=None), frames)
    size = MAX_CHAT_BYTES + 1
    large = [FrameSpec("items", "utf8", (size,)), FrameSpec("item_lengths", "uint32", (1,))]
    with pytest.raises(WireError) as wrong:
        SCORE.open(Score(1, large, labels=[1], chat=ChatTemplate()), [b" " * size, np.array([size], np.uint32).tobytes()])
    assert (wrong.value.field, wrong.value.limit) == ("items", str(MAX_CHAT_BYTES))


def test_what_a_template_may_add_is_charged_on_both_sides() -> None:
    message, frames = score(chat=ChatTemplate(kwargs={"name": "x" * 1000}))
    content = SCORE.open(message, frames)
    assert charge(content, CAN)[1] == charge_of(message, frames)
    assert charge(content, CAN)[1] > 4 * 1024 * len(CHATS)
    assert message_bytes(message, frames) >= len(msgspec.msgpack.encode(message)) + sum(map(len, frames))


def test_the_same_chat_with_other_options_is_another_request() -> None:
    options: list[Any] = [{}, {"a": 1}, {"a": "1"}]
    assert len({work(chat=ChatTemplate(flag, kwargs)).digest for flag in (True, False) for kwargs in options}) == 6


@pytest.mark.parametrize(
    ("item", "field", "said"),
    [
        ('{"role": "user"}', "items[1]", "Expected `array`, got `object`"),
        ('[{"role": "user"}]', "items[1]", "missing required field `content` - at `$[0]`"),
        ('[{"role": "user", "content": [1]}]', "items[1]", "Expected `str`, got `array` - at `$[0].content`"),
        ('[{"role": "", "content": ""}]', "items[1]", "length >= 1 - at `$[0].role`"),
        ('[{"role": "user", "content": "", "tool_calls": []}]', "items[1]", "unknown field `tool_calls` - at `$[0]`"),
        ("[]", "items[1]", "empty; a chat has at least one message"),
        ("[", "items[1]", "truncated"),
        ("[" * 100_000, "items[1]", "no messages of a chat"),
        (json.dumps([{"role": "u", "content": ""}] * MAX_MESSAGES), "items", "more than 16384 messages in all chats"),
    ],
)
def test_an_item_that_is_no_chat_is_refused_in_one_line(item: str, field: str, said: str) -> None:
    with pytest.raises(WireError) as wrong:
        read_chats(['[{"role": "user", "content": "a"}]', item])
    assert (wrong.value.code, wrong.value.field) == ("bad_request", field)
    assert wrong.value.message.startswith(field) and said in wrong.value.message and len(wrong.value.message) < 200


WRONG: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (CHATS[0], "messages"),
    ([[]], "messages[0]"),
    ([*CHATS, "hello"], "messages[2]"),
    ([["hello"]], "messages[0][0]"),
    ([[{"role": "user"}]], "messages[0][0].content"),
    ([[{"role": 1, "content": ""}]], "messages[0][0].role"),
    ([[{"role": "", "content": ""}]], "messages[0][0].role"),
    ([[{"role": "user", "content": [{"type": "text"}]}]], "messages[0][0].content"),
    ([[{"role": "user", "content": "", "name": "x"}]], "messages[0][0]"),
    ([[{"role": "user", "content": "\ud800"}]], "messages[0][0].content"),
    ([[{"role": "user", "content": "x" * MAX_CHAT_BYTES}]], "messages"),
]


@pytest.mark.parametrize(("chats", "field"), WRONG)
def test_a_client_names_what_is_wrong_with_its_messages(chats: Any, field: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        encode_chats(chats)
    assert wrong.value.field == field and str(wrong.value).startswith(field)


@pytest.mark.parametrize(
    "kwargs", [3, {1: 2}, {"": 1}, {"a": [1]}, {"a": "x" * 1025}, {"a": 2**63}, {str(i): i for i in range(17)}]
)
def test_options_of_a_template_are_few_plain_values(kwargs: Any) -> None:
    with pytest.raises(BadRequest) as wrong:
        check_template(True, kwargs)
    assert wrong.value.field == "chat_template_kwargs"
