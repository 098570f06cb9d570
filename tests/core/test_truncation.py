"""Truncation in the coordinator: what is cut, what is kept, and when that is known."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.embed import EMBED
from enginepool.coordinator.operations.logprobs import LOGPROBS
from enginepool.coordinator.operations.score import SCORE
from enginepool.coordinator.operations.truncation import fitted
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, Embed, FrameSpec, Logprobs, Score, Tokenize
from tests.core.machines import CAN, Pool, codes, failures, results, text

#: rows of at most 10 ids
SHORT = msgspec.structs.replace(CAN, context=10, operations=("score", "logprobs"))


def ids_of(name: str, rows: list[list[int]]) -> tuple[list[FrameSpec], list[bytes]]:
    flat = np.array([token for row in rows for token in row], np.int32)
    lengths = "query_lengths" if name == "query" else "item_lengths"
    specs = [FrameSpec(name, "int32", (flat.size,)), FrameSpec(lengths, "uint32", (len(rows),))]
    return specs, [flat.tobytes(), np.array([len(row) for row in rows], np.uint32).tobytes()]


def asked(kind: Any, queries: list[list[int]] | list[int] | None, items: list[list[int]], **settings: Any) -> Work:
    """A request of one query for all rows, or one each, or none."""
    specs, frames = ids_of("items", items)
    if queries is not None and queries and isinstance(queries[0], list):
        more, first = ids_of("query", queries)  # type: ignore[arg-type]
    elif queries is not None:
        query = np.array(queries, np.int32)
        more, first = [FrameSpec("query", "int32", (query.size,))], [query.tobytes()]
    else:
        more, first = [], []
    operation: Any = {Score: SCORE, Embed: EMBED, Logprobs: LOGPROBS}[kind]
    settings = {"labels": [1, 2]} | settings if kind is Score else settings
    return operation.open(kind(1, [*more, *specs], **settings), [*first, *frames])


def rows_of(work: Work) -> list[tuple[list[int], list[int]]]:
    """The query and the item of each row."""

    def cut(values: Any, lengths: Any) -> list[list[int]]:
        ends = np.cumsum(np.frombuffer(lengths, np.uint32)).tolist()
        return [row.tolist() for row in np.split(np.frombuffer(values, np.int32), ends[:-1])]

    items = cut(*work.frames[-2:])
    if len(work.frames) == 4:
        return list(zip(cut(*work.frames[:2]), items, strict=True))
    query: list[int] = np.frombuffer(work.frames[0], np.int32).tolist() if len(work.frames) == 3 else []
    return [(query, item) for item in items]


def fit(work: Work, can: Capabilities = SHORT) -> Work:
    found = fitted(work, can)
    assert found.digest == work.digest, "the same request sent again is known"
    assert (found.tokens, found.longest) == _measured(rows_of(found))
    assert found.nbytes == sum(map(len, found.frames))
    assert [spec.shape[0] * 4 for spec in found.part.frames] == [len(frame) for frame in found.frames]
    assert charge(found, can)[1] <= charge(work, can)[1]
    return found


def _measured(rows: list[tuple[list[int], list[int]]]) -> tuple[int, int]:
    lengths = [len(query) + len(item) for query, item in rows]
    return sum(lengths), max(lengths)


@given(data=st.data(), side=st.sampled_from(["left", "right"]), paired=st.booleans(), item_first=st.booleans())
def test_a_score_keeps_its_queries_and_cuts_items_on_the_side_that_was_asked_for(
    data: st.DataObject, side: str, paired: bool, item_first: bool
) -> None:
    ids = st.integers(1, 900)
    items = data.draw(st.lists(st.lists(ids, min_size=1, max_size=15), min_size=1, max_size=5))
    query = st.lists(ids, min_size=paired, max_size=9)
    queries: Any = [data.draw(query) for _ in items] if paired else data.draw(query)
    work = fit(asked(Score, queries, items, truncation=side, item_first=item_first))
    count = 0
    for (head, found), item, given_ in zip(rows_of(work), items, queries if paired else [queries] * len(items), strict=True):
        room = 10 - len(given_)
        assert head == given_
        assert found == (item[:room] if side == "right" else item[-room:])
        count += len(item) > room
    assert work.truncated == count
    assert refusal_of(work, SHORT) is None


def test_inputs_of_embeddings_are_cut() -> None:
    items = [[1, 2], list(range(1, 13))]
    assert rows_of(fit(asked(Embed, None, items, truncation="left")))[1][1] == list(range(3, 13))
    assert rows_of(fit(asked(Embed, None, items, truncation="right")))[1][1] == list(range(1, 11))


def test_logprobs_keep_their_responses_and_cut_prompts_at_their_beginning() -> None:
    own = fit(asked(Logprobs, [list(range(9)), [7]], [[1, 2, 3], [4]], truncation="left"))
    assert (rows_of(own), own.truncated) == ([([2, 3, 4, 5, 6, 7, 8], [1, 2, 3]), ([7], [4])], 1)
    shared = fit(asked(Logprobs, list(range(9)), [[1, 2, 3], [4]], truncation="left"))
    assert (rows_of(shared), shared.truncated) == ([(list(range(2, 9)), [1, 2, 3]), (list(range(2, 9)), [4])], 2)
    with pytest.raises(WireError, match="truncation: 'right' would cut what responses follow") as wrong:
        asked(Logprobs, [1], [[2]], truncation="right")
    assert (wrong.value.field, wrong.value.limit) == ("truncation", "left")


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (asked(Score, list(range(10)), [[1], [2]], truncation="left"), "query"),
        (asked(Score, [[1], list(range(12))], [[1], [2]], truncation="right"), "query[1]"),
        (asked(Logprobs, [1, 2], [[1], list(range(10))], truncation="left"), "items[1]"),
    ],
)
def test_what_is_kept_leaves_a_place_for_what_is_cut(work: Work, field: str) -> None:
    with pytest.raises(WireError, match="tokens, which are not truncated; at most 9, so that one of its") as wrong:
        fit(work)
    assert (wrong.value.code, wrong.value.field, wrong.value.limit) == ("bad_request", field, "9")


@pytest.mark.parametrize("early", [True, False])
def test_rows_are_cut_once_it_is_known_what_workers_take_and_the_answer_counts_them(early: bool) -> None:
    pool = Pool()
    client = pool.client()
    if not early:
        pool.worker(can=SHORT)
    pool.submit(client, 1, asked(Score, [1], [[2], list(range(50)), list(range(9))], truncation="right"))
    if early:
        pool.worker(can=SHORT)
    pool.finish_all()
    answer = results(pool.sent)[1]
    assert (answer.truncated, answer.usage.tokens) == (1, 2 + 10 + 10)
    assert (pool.machine.core.live_bytes, pool.machine.core.live_rows) == (0, 0)


@pytest.mark.parametrize("early", [True, False])
def test_a_row_that_cannot_be_cut_is_refused(early: bool) -> None:
    pool = Pool()
    client = pool.client()
    if not early:
        pool.worker(can=SHORT)
    pool.submit(client, 1, asked(Score, list(range(10)), [[2]], truncation="right"))
    if early:
        pool.worker(can=SHORT)
    (failure,) = failures(pool.sent).values()
    assert (failure.code, failure.field) == ("bad_request", "query")


@pytest.mark.parametrize("early", [True, False])
def test_without_memory_to_cut_rows_their_client_is_told_to_come_again(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("enginepool.coordinator.operations.truncation.truncate", exhausted)
    pool = Pool()
    client = pool.client()
    if not early:
        pool.worker(can=SHORT)
    pool.submit(client, 1, asked(Score, [1], [list(range(50))], truncation="right"))
    if early:
        pool.worker(can=SHORT)
    (failure,) = failures(pool.sent).values()
    assert (failure.code, failure.field, failure.retry_after_ms) == ("busy", "buffer_bytes", 1000)
    assert (pool.machine.core.live_bytes, pool.machine.core.live_rows) == (0, 0)


def test_without_truncation_or_with_error_a_long_row_is_refused() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=SHORT)
    for id_, settings in ((1, {}), (2, {"truncation": "error"})):
        (failure,) = failures(pool.submit(client, id_, asked(Score, [1], [list(range(10))], **settings))).values()
        assert (failure.field, failure.limit) == ("items[0]", "10")


def test_ids_of_a_cross_encoder_are_not_cut() -> None:
    crossing = msgspec.structs.replace(SHORT, kind="classifier", labels=1, separator=9)
    wrong = refusal_of(asked(Score, [1, 9], [[2]], truncation="left", labels=[]), crossing)
    assert isinstance(wrong, WireError) and wrong.field == "truncation"
    assert refusal_of(asked(Score, [1, 9], [[2]], truncation="error", labels=[]), crossing) is None
    assert refusal_of(asked(Score, [1], [[2]], truncation="left", labels=[], raw=True), crossing) is None


def test_a_worker_that_tokenizes_text_is_told_what_to_cut_and_says_how_many_rows_it_cut() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=SHORT)
    content = msgspec.structs.replace(text("q", ["a", "b"]), truncation="left")
    (task,) = pool.submit(client, 1, content)
    assert isinstance(task.message, Tokenize)
    assert (task.message.truncation, task.message.longest) == ("left", 10)
    specs, frames = ids_of("items", [[1, 2], [3]])
    pool.do(ev.TextTokenized(0, task.link, task.message.task, specs, frames, truncated=1))
    pool.finish_all()
    assert results(pool.sent)[1].truncated == 1


def test_a_text_that_a_worker_finds_wrong_is_its_callers_error_with_field_and_limit() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=SHORT)
    (task,) = pool.submit(client, 1, msgspec.structs.replace(text("q", ["a"]), truncation="left"))
    assert isinstance(task.message, Tokenize)
    answer = ev.TextTokenized(0, task.link, task.message.task, [], [], "items[0]: 10 tokens", "bad_request", "items[0]", "9")
    (failure,) = failures(pool.do(answer)).values()
    assert (failure.code, failure.message, failure.field, failure.limit) == (
        "bad_request",
        "items[0]: 10 tokens",
        "items[0]",
        "9",
    )


@pytest.mark.parametrize("truncated", [-1, 3])
def test_an_impossible_count_of_a_worker_is_its_error(truncated: int) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=SHORT)
    (task,) = pool.submit(client, 1, text("q", ["a", "b"]))
    assert isinstance(task.message, Tokenize)
    specs, frames = ids_of("items", [[1, 2], [3]])
    pool.do(ev.TextTokenized(0, task.link, task.message.task, specs, frames, truncated=truncated))
    assert codes(pool.sent) == ["engine_error"]
