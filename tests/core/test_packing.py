"""The rule by which rows become sequences: what the coordinator counts is what the worker builds."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.protocol.messages import Batch, Capabilities, Part
from enginepool.protocol.packing import Packing, sequences
from enginepool.workers.codec import decode_batch, encode_ids
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.packed import packed_cost, refuse_unpackable
from enginepool.workers.sglang.score.prompts import packed_prompts
from enginepool.workers.texts import TextIds, common_prefix

CAN = Capabilities("causal", 1000, 20, 100, 8, 200, 16, max_item=9)
D = 999


def part(query: list[int], items: list[list[int]], query_lengths: Any = None, **asked: object) -> RowPart:
    flat = [token for item in items for token in item]
    lengths = np.array([len(item) for item in items], np.uint32)
    return RowPart(np.array(query, np.int32), np.array(flat, np.int32), lengths, query_lengths, Part([], **asked))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("query", "items", "context", "rows", "cost"),
    [
        (5, [3], 100, 1, 5 + 1 + 4),
        (5, [3, 2, 1], 100, 3, 5 + 1 + 4 + 3 + 2),
        (5, [3, 2, 1], 13, 3, 5 + 1 + 4 + 3 + (5 + 1 + 2)),
        (5, [3, 3, 3], 10, 3, 3 * (5 + 1 + 4)),
        (1, [1] * 4, 5, 4, (1 + 1 + 2) * 4),
    ],
)
def test_a_sequence_has_the_query_once_and_a_delimiter_before_the_first_item_and_after_each(
    query: int, items: list[int], context: int, rows: int, cost: int
) -> None:
    assert Packing(context).weigh("q", query, items, 10**9)[:2] == (rows, cost)


def test_rows_that_would_pass_the_limit_are_left_out() -> None:
    packing = Packing(100)
    assert packing.weigh("q", 5, [3, 2, 1], 12) == (1, 10, 10)
    assert packing.weigh("q", 5, [3, 2, 1], 9) == (0, 0, 0)
    assert packing.cost == 0, "weighing changes nothing"


def test_a_query_of_another_caller_is_free_while_its_sequence_has_room() -> None:
    packing = Packing(20)
    for query, added in (("a", 10), ("b", 10), ("a", 4), ("b", 4), ("a", 4), ("a", 10)):
        _, cost, length = packing.weigh(query, 5, [3], 10**9)
        assert cost == added
        packing.place(query, cost, length)


def test_each_sequence_weighs_up_to_a_page_more() -> None:
    assert Packing(100, page=16).weigh("q", 5, [3, 3], 10**9)[1] == 5 + 1 + 4 + 4 + 15


PARTS = st.lists(
    st.tuples(st.sampled_from([[1], [2, 3], [1, 2, 3, 4]]), st.lists(st.integers(1, 9), min_size=1, max_size=7)),
    min_size=1,
    max_size=6,
)


@given(PARTS, st.integers(15, 60), st.sampled_from([1, 4]))
def test_what_is_built_is_what_was_counted_and_no_sequence_is_too_long(
    asked: list[tuple[list[int], list[int]]], context: int, page: int
) -> None:
    first = 10
    parts: list[RowPart] = []
    for query, lengths in asked:
        items: list[list[int]] = []
        for length in lengths:
            items.append([*range(first, first + length)])
            first += length
        parts.append(part(query, items, labels=[len(parts)]))
    can = Capabilities("causal", 2000, context, 10**6, 100, 10**6, 100, page=page, max_item=9)
    prompts = packed_prompts(parts, context, D * 10)
    assert prompts.delimiters is not None
    assert packed_cost(parts, can) == sum(len(ids) + page - 1 for ids in prompts.ids)
    assert all(len(ids) <= context for ids in prompts.ids)
    answers: list[list[list[int]]] = []
    for ids, delimiters, labels, runs in zip(prompts.ids, prompts.delimiters, prompts.labels, prompts.runs, strict=True):
        assert [at for at, token in enumerate(ids) if token == D * 10] == delimiters
        query = ids[: delimiters[0]]
        ends = [query + ids[a + 1 : b] for a, b in pairwise(delimiters)]
        answers.append([[], *ends])
        assert set(labels) == {p for p, _, _ in runs}
    assert prompts.take_apart(answers, len(parts)) == [p.prompts() for p in parts]


@given(PARTS, st.integers(15, 60))
def test_a_query_is_computed_again_only_where_its_last_sequence_is_full(
    asked: list[tuple[list[int], list[int]]], context: int
) -> None:
    made = sequences([(tuple(query), len(query), lengths) for query, lengths in asked], context)
    last: dict[tuple[int, ...], int] = {}
    for runs in made:
        query = tuple(asked[runs[0][0]][0])
        assert {tuple(asked[p][0]) for p, _, _ in runs} == {query}
        p, row, _ = runs[0]
        assert query not in last or last[query] + asked[p][1][row] + 1 > context
        last[query] = len(query) + 1 + sum(n + 1 for p, a, b in runs for n in asked[p][1][a:b])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (part([1], [[2]], item_first=True), "one query, before the items"),
        (part([1], [[2]], query_lengths=np.array([1], np.uint32)), "one query, before the items"),
        (part([], [[2]]), "neither an empty query"),
        (part([1], [[2], []]), "nor an empty item"),
        (part([1], [[2] * 10]), "an item has 10 tokens"),
        (part([1] * 12, [[2] * 7]), "an item has 7 tokens after a query of 12"),
    ],
)
def test_what_multi_item_scoring_gets_wrong_is_refused(wrong: RowPart, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        refuse_unpackable(wrong, CAN)
    refuse_unpackable(part([1] * 11, [[2] * 7]), CAN)


def test_an_answer_of_another_number_of_delimiters_is_an_error() -> None:
    parts = [part([1], [[2], [3]])]
    with pytest.raises(EngineError, match="2 of 3 delimiters"):
        packed_prompts(parts, 20, D).take_apart([[0, 1]], 1)


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5)


@given(st.lists(st.integers(0, 2), max_size=4), ROWS)
def test_the_query_of_a_text_is_all_that_its_rows_begin_with_and_every_row_stays_what_it_was(
    beginning: list[int], ends: list[list[int]]
) -> None:
    rows = [beginning + end for end in ends]
    query = common_prefix(rows)
    assert len({tuple(row[:query]) for row in rows}) == 1
    assert all(len(row) > query for row in rows), "each row has an item"
    assert min(map(len, rows)) == query + 1 or len({row[query] for row in rows}) > 1, "a longer one is none"
    for share in (True, False):
        answer, frames = encode_ids((5, 1), TextIds(rows), share=share)
        batch = decode_batch(Batch((5, 2), [Part(answer.frames)]), frames)
        assert batch.parts[0].prompts() == rows
        assert batch.parts[0].query.size == (query if share else 0)
