"""The rule by which rows become sequences: what the coordinator counts is what the worker builds."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.protocol import packing
from enginepool.protocol.messages import Batch, Capabilities, Part
from enginepool.protocol.packing import Packable, Packing, cheap_to_repeat, sequences
from enginepool.workers.codec import decode_batch, encode_ids
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.packed import packable, packed_cost, refuse_unpackable
from enginepool.workers.sglang.score.prompts import packed_prompts
from enginepool.workers.texts import TextIds, common_prefix
from tests.sim.packing_bounds import BOUNDS, Bounds, bounded

CAN = Capabilities("causal", 1000, 400, 1000, 8, 2000, 16, max_item=9)
D = 999


def part(query: list[int], items: list[list[int]], query_lengths: Any = None, **asked: object) -> RowPart:
    flat = [token for item in items for token in item]
    lengths = np.array([len(item) for item in items], np.uint32)
    return RowPart(np.array(query, np.int32), np.array(flat, np.int32), lengths, query_lengths, Part([], **asked))  # pyright: ignore[reportArgumentType]


def rows(query: int, *items: int, labels: tuple[int, ...] = (), of: str = "q") -> Packable:
    """Items of these lengths behind a query of so many tokens."""
    return Packable(of, query, items, labels)


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are never so short that rows are placed whole."""
    monkeypatch.setattr(packing, "WHOLE_QUERY", 0)


# --- behind a query ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize(
    ("query", "items", "context", "count", "cost"),
    [
        (5, [3], 100, 1, 5 + 1 + 4),
        (5, [3, 2, 1], 100, 3, 5 + 1 + 4 + 3 + 2),
        (5, [3, 2, 1], 13, 3, 5 + 1 + 4 + 3 + (5 + 1 + 2)),
        (5, [3, 3, 3], 10, 3, 3 * (5 + 1 + 4)),
        (1, [1] * 4, 5, 4, (1 + 1 + 2) * 4),
    ],
)
def test_a_sequence_has_the_query_once_and_a_delimiter_before_the_first_item_and_after_each(
    query: int, items: list[int], context: int, count: int, cost: int
) -> None:
    assert Packing(context).weigh(rows(query, *items), 10**9)[:2] == (count, cost)


@pytest.mark.usefixtures("behind")
def test_rows_that_would_pass_the_limit_are_left_out() -> None:
    packing = Packing(100)
    assert packing.weigh(rows(5, 3, 2, 1), 12) == (1, 10, 10, False)
    assert packing.weigh(rows(5, 3, 2, 1), 9) == (0, 0, 0, False)
    assert packing.cost == 0, "weighing changes nothing"


def added(packing: Packing, one: Packable) -> int:
    """What it weighs, placed."""
    fit = packing.weigh(one, 10**9)
    assert fit.rows == len(one.items)
    packing.place(one, fit)
    return fit.cost


@pytest.mark.usefixtures("behind")
def test_a_query_of_another_caller_is_free_while_its_sequence_has_room() -> None:
    packing = Packing(20)
    for query, cost in (("a", 10), ("b", 10), ("a", 4), ("b", 4), ("a", 4), ("a", 10)):
        assert added(packing, rows(5, 3, of=query)) == cost


@pytest.mark.usefixtures("behind")
def test_each_sequence_weighs_up_to_a_page_more() -> None:
    assert Packing(100, page=16).weigh(rows(5, 3, 3), 10**9).cost == 5 + 1 + 4 + 4 + 15


# --- whole -------------------------------------------------------------------------------------------------------------


def test_a_row_that_shares_no_query_adds_itself_and_a_delimiter_to_those_with_the_same_labels() -> None:
    packing = Packing(100)
    assert added(packing, rows(0, 9, 4)) == 1 + 10 + 5
    assert added(packing, rows(0, 6)) == 7
    assert added(packing, rows(0, 6, labels=(3,))) == 1 + 7, "an engine computes all labels of a sequence for each row"
    assert added(packing, rows(0, 6, labels=(3,))) == 7
    assert added(packing, rows(0, 60)) == 61
    assert added(packing, rows(0, 60)) == 1 + 61, "no room for it in a sequence of 100"


def test_sequences_of_whole_rows_are_short_unless_a_single_row_is_long() -> None:
    packing = Packing(10**6)
    assert added(packing, rows(0, *[99] * 10)) == 1 + 10 * 100
    assert added(packing, rows(0, 23)) == 1 + 24, "1,025 tokens"
    assert added(packing, rows(0, 5000)) == 5002
    assert added(packing, rows(0, 5)) == 7


@pytest.mark.parametrize(
    ("query", "count", "whole"),
    [
        (256, 1, True),
        (257, 1, False),
        (32, 2, True),
        (33, 2, False),
        (16, 3, True),
        (17, 3, False),
        (1, 33, True),
        (1, 34, False),
    ],
)
def test_rows_are_placed_whole_where_their_query_is_short_and_few_of_them_repeat_it(
    query: int, count: int, whole: bool
) -> None:
    found = Packing(10**6).weigh(rows(query, *[5] * count), 10**9)
    assert found.whole == whole
    assert found.cost == (1 + count * (query + 6) if whole else query + 1 + count * 6)


def test_many_callers_with_one_short_query_compute_it_twice() -> None:
    packing = Packing(10**6)
    costs = [added(packing, rows(100, 5)) for _ in range(50)]
    assert costs[:2] == [1 + 106, 101 + 6]
    assert set(costs[2:]) == {6}


def test_rows_that_are_cut_are_placed_as_their_number_in_the_batch_has_it() -> None:
    """Forty of them would be behind the query; the three that fit repeat it."""
    packing = Packing(10**6)
    many = rows(10, *[20] * 40)
    assert packing.weigh(many, 10**9) == (40, 11 + 40 * 21, 11 + 40 * 21, False)
    assert packing.weigh(many, 100) == (3, 1 + 3 * 31, 1 + 3 * 31, True)
    assert packing.weigh(many, 93) == (2, 1 + 2 * 31, 1 + 2 * 31, True)
    [[whole, runs]] = sequences([many._replace(items=many.items[:3])], 10**6)
    assert whole and runs == [(0, 0, 3)]


# --- what is built -----------------------------------------------------------------------------------------------------

SHAPES = st.tuples(
    st.sampled_from(["behind", "behind", "first", "own"]),
    st.sampled_from([[1], [2, 3], [1, 2, 3, 4]]),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.sampled_from([[7], [8, 9]]),
)


def parts_of(asked: list[tuple[str, list[int], list[int], list[int]]]) -> list[RowPart]:
    parts: list[RowPart] = []
    first = 10
    for shape, query, lengths, labels in asked:
        items: list[list[int]] = []
        for length in lengths:
            items.append([*range(first, first + length)])
            first += length
        own = np.full(len(items), len(query), np.uint32) if shape == "own" else None
        parts.append(
            part(query * len(items) if shape == "own" else query, items, own, labels=labels, item_first=shape == "first")
        )
    return parts


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(15, 60), st.sampled_from([1, 4]), st.sampled_from(BOUNDS))
def test_what_is_built_is_what_was_counted_and_no_sequence_is_too_long(
    asked: list[tuple[str, list[int], list[int], list[int]]], context: int, page: int, bounds: Bounds
) -> None:
    parts = parts_of(asked)
    can = Capabilities("causal", 2000, context, 10**6, 100, 10**6, 100, page=page, max_item=15)
    with bounded(bounds):
        prompts = packed_prompts(parts, context, D * 10)
        assert packed_cost(parts, can) == sum(len(ids) + page - 1 for ids in prompts.ids)
    assert prompts.delimiters is not None
    assert all(len(ids) <= context for ids in prompts.ids)
    answers: list[list[list[int]]] = []
    for ids, delimiters, labels, runs in zip(prompts.ids, prompts.delimiters, prompts.labels, prompts.runs, strict=True):
        assert [at for at, token in enumerate(ids) if token == D * 10] == delimiters
        query = ids[: delimiters[0]]
        assert query or len(ids) <= bounds.joined or len(delimiters) == 2, "sequences of whole rows are short"
        answers.append([[], *(query + ids[a + 1 : b] for a, b in pairwise(delimiters))])
        mine = [parts[p].asked.labels for p, _, _ in runs]
        assert set(labels) == {label for one in mine for label in one}
        assert query or mine == [labels] * len(mine), "whole rows share their labels"
    assert prompts.take_apart(answers, len(parts)) == [p.prompts() for p in parts]


@given(st.lists(st.tuples(SHAPES, st.integers(0, 60)), min_size=1, max_size=6), st.integers(15, 60), st.sampled_from(BOUNDS))
def test_parts_that_are_cut_are_counted_as_what_is_left_of_them_is_built(
    asked: list[tuple[tuple[str, list[int], list[int], list[int]], int]], context: int, bounds: Bounds
) -> None:
    with bounded(bounds):
        counted, placed = Packing(context), list[Packable]()
        for one, (_, limit) in zip(parts_of([shape for shape, _ in asked]), asked, strict=True):
            found = packable(one)
            fit = counted.weigh(found, limit)
            assert fit.cost <= limit
            if fit.rows:
                counted.place(found, fit)
                placed.append(found._replace(items=found.items[: fit.rows]))
        built = 0
        for whole, runs in sequences(placed, context):
            built += 1 if whole else 1 + placed[runs[0][0]].tokens
            more = [1 + (placed[p].tokens if whole else 0) for p, _, _ in runs]
            built += sum(n + extra for (p, a, b), extra in zip(runs, more, strict=True) for n in placed[p].items[a:b])
    assert counted.cost == built


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(15, 60), st.sampled_from(BOUNDS))
def test_a_query_is_computed_again_only_where_its_last_sequence_is_full_or_a_few_rows_were_placed_whole(
    asked: list[tuple[str, list[int], list[int], list[int]]], context: int, bounds: Bounds
) -> None:
    packables = [packable(one) for one in parts_of(asked)]
    with bounded(bounds):
        made = sequences(packables, context)
        known: set[Any] = set()
        whole: set[int] = set()
        for number, one in enumerate(packables):
            if not one.tokens or (one.query not in known and cheap_to_repeat(one.tokens, len(one.items))):
                whole.add(number)
            known |= {one.query} if one.tokens else set()
    last: dict[Any, int] = {}
    for joins, runs in made:
        assert {p in whole for p, _, _ in runs} == {joins}
        p = runs[0][0]
        first = packables[p]
        key, head, longest = ("without", first.labels), 0, min(context, bounds.joined)
        if not joins:
            key, head, longest = ("behind", first.query), first.tokens, context
            assert {packables[p].query for p, _, _ in runs} == {first.query}
        sizes = [n + 1 + (packables[p].tokens if joins else 0) for p, a, b in runs for n in packables[p].items[a:b]]
        assert key not in last or last[key] + sizes[0] > longest
        last[key] = head + 1 + sum(sizes)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (replace(part([1], [[2]]), labels=np.ones((1, 1), np.int32)), "no labels of their own"),
        (part([1], [[2], []]), "an item behind a query that packed rows share is empty"),
        (part([], [[]]), "a packed row has no tokens"),
        (part([1], [[2] * 9]), "an item has 9 tokens after a query of 1"),
        (part([1], [[2] * 9], item_first=True), "an item has 10 tokens after a query of 0"),
        (part([1] * 4, [[2] * 2, [3] * 7], query_lengths=np.array([1, 3], np.uint32)), "an item has 10 tokens"),
        (part([1] * 300, [[2] * 10]), "an item has 10 tokens after a query of 300"),
        (part([1] * 391, [[2] * 8]), "an item has 8 tokens after a query of 391"),
    ],
)
def test_what_multi_item_scoring_gets_wrong_is_refused(wrong: RowPart, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        refuse_unpackable(wrong, CAN)


def test_what_can_be_packed_is_not_refused() -> None:
    for right in (
        part([1] * 391, [[2] * 7]),
        part([1] * 300, [[2] * 9]),
        part([1], [[2] * 8]),
        part([], [[2] * 9]),
        part([1], [[2] * 8], item_first=True),
        part([1], [[2] * 8, []], item_first=True),
        part([1] * 3, [[2] * 6, []], query_lengths=np.array([2, 1], np.uint32)),
    ):
        refuse_unpackable(right, CAN)


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
