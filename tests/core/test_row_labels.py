"""Labels of each row: what is refused, how they are cut into batches, and which workers have them."""

from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.client.payload import encode_row_labels, encode_shared
from enginepool.client.session.charges import charge_of
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.operations.tokenize import with_ids
from enginepool.coordinator.operations.truncation import truncate
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge
from enginepool.errors import BadRequest
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import MAX_LABELS, Batch, FrameSpec, Score
from enginepool.workers.codec import decode_batch
from enginepool.workers.engine import RowPart
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.scores import expected_scores, score_part
from tests.core.machines import CAN, Pool, results

LABELS = [[i, 100 + i, i] for i in range(20)]


def score(own_labels: Any = LABELS, rows: int = 20, **settings: Any) -> tuple[Score, list[Any]]:
    """Rows of ten ids each."""
    specs, frames = encode_shared([1, 2], [[3 + i] * 8 for i in range(rows)])
    own = np.array(own_labels, np.int32)
    return Score(1, [*specs, FrameSpec("labels", "int32", own.shape)], **settings), [*frames, own.tobytes()]


def work(*args: Any, **settings: Any) -> ScoreWork:
    return SCORE.open(*score(*args, **settings))


def test_each_batch_of_a_request_has_the_labels_of_its_rows() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work())
    given: list[list[int]] = []
    while pool.batches:
        [sent] = [pool.batches[0]]
        assert isinstance(sent.message, Batch)
        batch = decode_batch(sent.message, tuple(sent.frames))
        for part in batch.parts:
            assert part.labels is not None and len(part.labels) == len(part.item_lengths) < 20
            given += part.labels.tolist()
        found = [part for part in sent.message.parts if part.frames[-1].name != "labels"]
        assert found == []
        pool.finish(sent)
    assert sorted(given) == sorted(LABELS)
    assert results(pool.sent)[1].usage.items == 20


def test_a_batch_may_mix_rows_that_have_labels_of_their_own_with_others() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 2, work([[5, 6], [7, 8]], 2))
    pool.submit(client, 3, SCORE.open(*_shared_labels()))
    pool.worker()
    assert isinstance(pool.batches[0].message, Batch)
    parts = decode_batch(pool.batches[0].message, tuple(pool.batches[0].frames)).parts
    assert [None if part.labels is None else part.labels.tolist() for part in parts] == [[[5, 6], [7, 8]], None]
    pool.finish_all()
    assert set(results(pool.sent)) == {2, 3}


def _shared_labels() -> tuple[Score, Any]:
    specs, frames = encode_shared([1, 2], [[3]])
    return Score(1, specs, labels=[9, 8]), frames


def test_both_sides_charge_the_same_and_a_copy_is_known_by_its_labels() -> None:
    message, frames = score()
    assert charge(SCORE.open(message, frames), CAN)[1] == charge_of(message, frames)
    assert work().digest != work([[i, 101 + i, i] for i in range(20)]).digest
    assert work().columns == 3


def test_they_stay_charged_when_rows_are_truncated_or_tokenized() -> None:
    before = work(truncation="left")
    after = truncate(before, 6)
    assert after.truncated == 20 and after.row_labels == before.row_labels
    assert before.nbytes - after.nbytes == 4 * 4 * 20, "four ids of each row are gone, and nothing else"
    specs = [FrameSpec("items", "utf8", (2,)), FrameSpec("item_lengths", "uint32", (1,)), FrameSpec("labels", "int32", (1, 2))]
    text = SCORE.open(Score(1, [FrameSpec("query", "utf8", (0,)), *specs]), [b"", b"ab", b"\2\0\0\0", bytes(8)])
    ids = with_ids(text, [FrameSpec("items", "int32", (2,)), specs[1]], [bytes(8), b"\2\0\0\0"])
    assert ids.nbytes == 8 + 4 + 8


@pytest.mark.parametrize(
    ("labels", "settings", "code"),
    [
        (LABELS[:19], {}, "malformed"),
        (np.arange(20), {}, "malformed"),
        (np.zeros((20, 0)), {}, "bad_request"),
        (np.zeros((20, MAX_LABELS + 1)), {}, "bad_request"),
        ([[1, -1]] * 20, {}, "bad_request"),
        (LABELS, {"labels": [1]}, "bad_request"),
        (LABELS, {"label_texts": ["a"]}, "bad_request"),
    ],
)
def test_labels_that_do_not_fit_are_refused(labels: Any, settings: dict[str, Any], code: str) -> None:
    with pytest.raises(WireError) as wrong:
        work(labels, **settings)
    assert (wrong.value.code, wrong.value.field) == (code, "labels")


def test_what_depends_on_the_model_is_refused() -> None:
    def refusal(content: ScoreWork, **can: Any) -> str:
        wrong = refusal_of(content, msgspec.structs.replace(CAN, **can))
        assert isinstance(wrong, WireError), wrong
        return wrong.message

    assert "labels: id 119 is outside the vocabulary of 119" in refusal(work(), vocab=119)
    assert "a classifier has its own 2 labels" in refusal(work(), kind="classifier", labels=2)
    with pytest.raises(WireError, match="softmax: over one label"):
        work([[1]] * 20, softmax=True)


def test_they_are_not_packed() -> None:
    assert not SCORE.packs(work(), msgspec.structs.replace(CAN, max_item=50))


def test_the_sim_engine_scores_each_row_by_its_own_labels() -> None:
    found = expected_scores([1], [[2], [3]], labels=[], row_labels=[[4, 5], [6, 7]], softmax=True)["scores"]
    alone = [expected_scores([1], [[i]], labels=own, softmax=True)["scores"][0] for i, own in ((2, [4, 5]), (3, [6, 7]))]
    np.testing.assert_array_equal(found, alone)
    ids = np.array([1], np.int32)
    part = RowPart(ids, ids, np.array([1], np.uint32), labels=np.array([[4, 4]], np.int32))
    assert score_part(part, Weights())["scores"].shape == (1, 2)


LISTS: list[Any] = [[[1, 2], [3, 4]], ([1, 2], (3, 4)), np.array([[1, 2], [3, 4]]), [np.array([1, 2]), (3, 4)]]


@pytest.mark.parametrize("labels", LISTS)
def test_a_client_takes_a_list_for_each_item(labels: Any) -> None:
    found = encode_row_labels(labels, 2)
    assert found is not None
    assert (found[0], bytes(found[1][0])) == (
        [FrameSpec("labels", "int32", (2, 2))],
        np.array([1, 2, 3, 4], np.int32).tobytes(),
    )


@pytest.mark.parametrize("labels", [None, [1, 2], np.array([1, 2]), range(3), []])
def test_one_list_for_all_items_is_no_list_for_each(labels: Any) -> None:
    assert encode_row_labels(labels, 2) is None


WRONG: list[tuple[Any, str]] = [
    ([[1, 2]], "label_token_ids"),
    ([[1, 2], [3]], "label_token_ids[1]"),
    ([[1, 2], 3], "label_token_ids[1]"),
    ([[1, 2], [3, "no"]], "label_token_ids[1][1]"),
    ([[1, 2], [3, -1]], "label_token_ids[1][1]"),
    ([[], []], "label_token_ids"),
    (np.zeros((2, 2)), "label_token_ids[0]"),
]


@pytest.mark.parametrize(("labels", "field"), WRONG)
def test_a_client_names_what_is_wrong_with_its_lists(labels: Any, field: str) -> None:
    with pytest.raises(BadRequest) as wrong:
        encode_row_labels(labels, 2)
    assert wrong.value.field == field and str(wrong.value).startswith(field)
