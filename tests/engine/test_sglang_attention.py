"""What FlashInfer is told by the host is what SGLang would have told it from the GPU; packed rows are computed right by it."""

import random
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from enginepool.workers.engine import RowPart
from enginepool.workers.sglang.patches.attention import bounds_of, place_items_on_the_host, placed, plan_on_the_host
from enginepool.workers.sglang.score.prompts import packed_prompts
from tests.engine.reference import Reference
from tests.engine.test_sglang_scores import part_of


class Planner:
    """As much of FlashInfer's wrappers as is touched: keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin_forward(self, *args: Any, **kwargs: Any) -> None:
        self.told.append((args, kwargs))


class Updater:
    """As SGLang's class that plans a prefill, with bounds that only the GPU knows."""

    def __init__(self, use_ragged: bool) -> None:
        self.use_ragged = use_ragged
        self.ragged, self.paged = Planner(), Planner()

    def update_single_wrapper(self, lengths: Any, prefixes: Any, spec: object, *, extend_prefix_lens_cpu: Any) -> None:
        here = [None] * 8
        self.call_begin_forward(self.ragged, self.paged, *here, self.use_ragged, spec, seq_lens_cpu=lengths)

    def call_begin_forward(self, ragged: Any, paged: Any, *args: Any, seq_lens_cpu: Any) -> None:
        if self.use_ragged:
            ragged.begin_forward("gpu", "gpu", 16, 8, 128, q_data_type="bf16")
        paged.begin_forward("gpu", "gpu", torch.tensor([7, 8, 9]), "last pages on the gpu", 16, 8, 128, 1, causal=True)

    def update_sliding_window(self, lengths: Any) -> None:
        """Of a model some of whose layers look back a few tokens, in place of `update_single_wrapper`."""
        here = [None] * 8
        for _ in range(2):
            self.call_begin_forward(self.ragged, self.paged, *here, self.use_ragged, None, seq_lens_cpu=lengths)


class PatchedUpdater(Updater):
    """The same with the change."""


plan_on_the_host(PatchedUpdater)


def listed(value: Any) -> Any:
    return getattr(value, "tolist", lambda: value)()


def told(planner: Planner) -> list[Any]:
    [(args, _)] = planner.told
    return [listed(value) for value in args]


def test_rows_and_keys_are_bounded_by_what_the_host_knows() -> None:
    for ragged in (True, False):
        updater = PatchedUpdater(ragged)
        updater.update_single_wrapper(torch.tensor([5, 9]), None, None, extend_prefix_lens_cpu=[2, 0])
        keys = [0, 2, 2] if ragged else [0, 5, 14]
        assert told(updater.paged) == [[0, 3, 12], keys, [7, 8, 9], [1, 1], 16, 8, 128, 1]
        assert updater.paged.told[0][1] == {"causal": True}
        if ragged:
            assert told(updater.ragged) == [[0, 3, 12], [0, 3, 12], 16, 8, 128]


def test_what_the_host_does_not_know_stays_with_the_gpu() -> None:
    for lengths, prefixes, spec in ((None, [2], None), (torch.tensor([5]), None, None), (torch.tensor([5]), [2], "draft")):
        updater = PatchedUpdater(use_ragged=True)
        updater.update_single_wrapper(lengths, None, spec, extend_prefix_lens_cpu=prefixes)
        assert told(updater.ragged)[:2] == ["gpu", "gpu"]
        assert told(updater.paged)[3] == "last pages on the gpu"


def test_layers_with_a_sliding_window_are_planned_as_before() -> None:
    updater = PatchedUpdater(use_ragged=False)
    updater.update_sliding_window(torch.tensor([5, 9]))
    assert [args[:2] for args, _ in updater.paged.told] == [("gpu", "gpu")] * 2


def test_bounds_are_what_flashinfer_wants() -> None:
    assert listed(bounds_of(torch.tensor([4, 1]))) == [0, 4, 5]
    assert bounds_of(torch.tensor([4])).dtype == torch.int32


def test_items_stand_where_flashinfer_documents_it() -> None:
    # Three items of 3, 2 and 4 tokens after a query of 7, and two of 2 and 1 after a query of 2.
    queries, items, longest, positions = placed([np.array([7, 11, 14, 19]), np.array([2, 5, 7])], [20, 8])
    assert queries.tolist() == [7, 2]
    assert items.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert longest.tolist() == [4, 2]
    first = [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 6, 7, 8, 6, 7, 8, 9, 10, 6]
    assert positions.tolist() == [*first, 0, 1, 1, 2, 3, 1, 2, 1]
    assert [array.dtype for array in (queries, items, longest, positions)] == [np.uint32, np.uint16, np.uint16, np.int64]


def test_each_item_goes_on_where_the_query_ended() -> None:
    chance = random.Random(4)
    for _ in range(50):
        query, sizes = chance.randint(1, 9), [chance.randint(1, 7) for _ in range(chance.randint(1, 6))]
        delimiters = query + np.concatenate(([0], np.cumsum(np.array(sizes) + 1)))
        _, items, longest, positions = placed([delimiters], [int(delimiters[-1]) + 1])
        for start, size in zip(delimiters, sizes, strict=False):
            assert positions[start + 1 : start + 1 + size].tolist() == list(range(query, query + size))
            assert items[0, start - query : start + size + 1 - query].tolist() == list(range(size + 1))
        assert longest.tolist() == [max(sizes)]


def test_without_a_query_each_item_begins_at_the_beginning() -> None:
    queries, items, longest, positions = placed([np.array([0, 4, 7]), np.array([2, 5])], [8, 6])
    assert (queries.tolist(), longest.tolist()) == ([0, 2], [3, 2])
    assert items.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 0, 0, 0, 0]]
    # No delimiter has a negative position: rotary embeddings are read at it.
    assert positions.tolist() == [0, 0, 1, 2, 0, 0, 1, 0, 0, 1, 1, 2, 3, 1]


class MultiItemScoringParams(NamedTuple):
    """As SGLang's."""

    prefix_len_ptr: Any
    token_pos_in_items_ptr: Any
    token_pos_in_items_len: int
    max_item_len_ptr: Any


class Backend:
    """As SGLang's attention backend, which is asked where the host does not know enough."""

    def _process_multi_item_scoring(self, batch: Any) -> str:
        batch.positions[0] -= 1
        return "on the gpu"


def test_packed_batches_are_placed_and_all_others_left_alone() -> None:
    assert sys.modules[Backend.__module__] is sys.modules[__name__]
    place_items_on_the_host(Backend)
    batch = SimpleNamespace(
        multi_item_delimiter_indices=[torch.tensor([2, 5, 7])],
        extend_seq_lens_cpu=[8],
        extend_prefix_lens_cpu=[0],
        positions=torch.arange(8),
    )
    process: Any = getattr(Backend(), "_process_multi_item_scoring")  # noqa: B009
    found = process(batch)
    assert found.prefix_len_ptr.tolist() == [2]
    assert found.token_pos_in_items_ptr.tolist() == [0, 1, 2, 0, 1, 0]
    assert (found.token_pos_in_items_len, found.max_item_len_ptr.tolist()) == (6, [2])
    assert batch.positions.tolist() == [0, 1, 1, 2, 3, 1, 2, 1]
    for change in (
        {"multi_item_delimiter_indices": None},
        {"extend_prefix_lens_cpu": [1]},
        {"extend_seq_lens_cpu": None},
        {"positions": torch.arange(16)},
    ):
        changed = SimpleNamespace(**({**vars(batch), "positions": torch.arange(8)} | change))
        assert process(changed) == "on the gpu"
        assert changed.positions[:3].tolist() == [0, 1, 2], "not -1"


# --- against a direct computation --------------------------------------------------------------------------------------


def seen_by_flashinfer(query: int, within: npt.NDArray[np.uint16], length: int) -> npt.NDArray[np.bool_]:
    """Which tokens of a sequence each of them sees, by the rule of FlashInfer's kernel: a token of the query those before it;
    another one the query, and as many tokens back as it is from its delimiter, itself included."""
    token, other = np.arange(length)[:, None], np.arange(length)[None]
    back = np.concatenate((np.zeros(query, np.int64), within[: length - query].astype(np.int64)))[:, None]
    behind = (token < query) | (other < query) | (token < other + back)
    return (other <= token) & behind


def random_parts(chance: random.Random) -> list[RowPart]:
    """Parts whose rows are placed whole, and one behind its query."""

    def ids(most: int) -> list[int]:
        return [chance.randrange(300) for _ in range(chance.randint(1, most))]

    parts = [part_of([(query, ids(9)) for _ in range(7)], shared=True, labels=(5, 9)) for query in [ids(9) * 10]]
    for _ in range(8):
        shared, query = chance.random() < 0.7, ids(9)
        rows = [(query if shared else ids(9), ids(9)) for _ in range(chance.randint(1, 5))]
        parts.append(part_of(rows, shared=shared, labels=(5, 9), item_first=chance.random() < 0.3))
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_packed_rows_are_what_each_row_is_alone(reference: Reference, seed: int) -> None:
    parts = random_parts(random.Random(seed))
    prompts = packed_prompts(parts, 200, 299)
    assert prompts.delimiters is not None and {places[0] == 0 for places in prompts.delimiters} == {True, False}
    queries, within, _, positions = placed([np.array(one) for one in prompts.delimiters], [len(one) for one in prompts.ids])
    logits: list[Any] = []
    heads: list[Any] = []
    start = 0
    for i, (ids, places) in enumerate(zip(prompts.ids, prompts.delimiters, strict=True)):
        sees = seen_by_flashinfer(int(queries[i]), within[i], len(ids))
        assert not sees[:, places].any(), "no token sees a delimiter"
        # SGLang reads before each delimiter; the first is read at the end of another sequence if there is no query.
        found = reference.seeing(ids, sees, positions[start : start + len(ids)], [place - 1 for place in places])
        logits.append([*found[0]])
        heads.append([*found[1]])
        start += len(ids)
    for part, says, outputs in zip(
        parts, prompts.take_apart(logits, len(parts)), prompts.take_apart(heads, len(parts)), strict=True
    ):
        for row, next_token, head in zip(part.prompts(), says, outputs, strict=True):
            np.testing.assert_allclose(next_token[[5, 9]], reference.logits(row, [5, 9]), atol=2e-5)
            np.testing.assert_allclose(head, reference.rewards(row, False), atol=2e-5)
