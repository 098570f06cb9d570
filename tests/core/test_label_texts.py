"""Labels by their texts: a worker's tokenizer says which tokens they are, once for each group."""

from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.labels import remember
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge, request_bytes
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import MAX_LABELS, Batch, FrameSpec, Score, Tokenize
from tests.core.machines import CAN, Pool, Sent, codes, failures, results

TEXTS = ["yes", "no"]


def ids_with(texts: list[str] | None = None, rows: int = 2, **settings: Any) -> ScoreWork:
    """Rows of token ids, with labels by their texts."""
    specs = [
        FrameSpec("query", "int32", (3,)),
        FrameSpec("items", "int32", (rows,)),
        FrameSpec("item_lengths", "uint32", (rows,)),
    ]
    frames = [np.arange(3, dtype=np.int32), np.arange(rows, dtype=np.int32), np.ones(rows, np.uint32)]
    score = Score(1, specs, label_texts=TEXTS if texts is None else texts, **settings)
    return SCORE.open(score, [frame.tobytes() for frame in frames])


def texts_with(texts: list[str]) -> ScoreWork:
    specs = [FrameSpec("query", "utf8", (1,)), FrameSpec("items", "utf8", (2,)), FrameSpec("item_lengths", "uint32", (2,))]
    return SCORE.open(Score(1, specs, label_texts=texts), [b"q", b"ab", np.ones(2, np.uint32).tobytes()])


def tokenize(pool: Pool) -> list[Sent]:
    return [sent for sent in pool.sent if isinstance(sent.message, Tokenize)]


def answer(pool: Pool, sent: Sent, labels: list[int], rows: list[int] | None = None) -> list[Sent]:
    """The worker's tokens of the labels, and of the rows, one each, where these are text."""
    assert isinstance(sent.message, Tokenize)
    specs, frames = list[FrameSpec](), list[bytes]()
    if rows is not None:
        specs = [FrameSpec("items", "int32", (len(rows),)), FrameSpec("item_lengths", "uint32", (len(rows),))]
        frames = [np.array(rows, np.int32).tobytes(), np.ones(len(rows), np.uint32).tobytes()]
    return pool.do(ev.TextTokenized(0, sent.link, sent.message.task, specs, frames, labels=labels))


def test_a_worker_is_asked_for_the_labels_of_rows_of_ids_and_for_nothing_else() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, ids_with())
    (asked,) = tokenize(pool)
    assert isinstance(asked.message, Tokenize)
    assert (asked.message.labels, asked.message.frames, asked.frames) == (TEXTS, [], [])
    (batch,) = answer(pool, asked, [7, 8])
    assert isinstance(batch.message, Batch)
    [part] = batch.message.parts
    assert (part.labels, part.frames, batch.frames[0]) == ([7, 8], ids_with().part.frames, ids_with().frames[0])
    pool.finish_all()
    assert results(pool.sent)[1].usage.tokens == 8


def test_labels_that_a_group_knows_are_not_asked_for_again() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, texts_with(TEXTS))
    (asked,) = tokenize(pool)
    answer(pool, asked, [7, 8], [1, 2])
    pool.submit(client, 2, ids_with(["no"]))
    assert len(tokenize(pool)) == 1
    pool.submit(client, 3, ids_with(["no", "maybe"]))
    assert len(tokenize(pool)) == 2, "one of these is new"
    pool.submit(client, 4, texts_with(["yes"]))
    last = tokenize(pool)[-1].message
    assert isinstance(last, Tokenize) and (last.labels, len(last.frames)) == ([], 3)
    assert [part.labels for sent in pool.batches if isinstance(sent.message, Batch) for part in sent.message.parts] == [
        [7, 8],
        [8],
    ]


def test_labels_are_asked_for_again_where_another_model_may_have_come() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a", can=msgspec.structs.replace(CAN, text=True))
    pool.submit(client, 1, ids_with([" yes"]))
    [asked] = tokenize(pool)
    answer(pool, asked, [42])
    pool.finish_all()
    pool.do(ev.WorkerBroken(0, b"a", "stopped"))
    pool.worker("b", can=msgspec.structs.replace(CAN, text=True, vocab=500))
    pool.submit(client, 2, ids_with([" yes"]))
    assert len(tokenize(pool)) == 2


def test_a_group_keeps_a_bounded_number_of_labels() -> None:
    known: dict[str, int] = {}
    for start in range(0, 3 * MAX_LABELS, 1000):
        texts = [f"t{i}" for i in range(start, start + 1000)]
        remember(known, ids_with(texts), range(1000))
        assert len(known) <= MAX_LABELS
        assert known[texts[-1]] == 999


@pytest.mark.parametrize("labels", [[7], [7, 8, 9], [7, -1], [7, 2**31], []])
def test_labels_that_are_no_tokens_for_each_text_are_an_error_of_the_engine(labels: list[int]) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, ids_with())
    answer(pool, tokenize(pool)[0], labels)
    assert codes(pool.sent) == ["engine_error"]


def test_a_label_that_is_no_single_token_is_refused_in_the_words_of_the_worker() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, ids_with())
    sent = tokenize(pool)[0]
    assert isinstance(sent.message, Tokenize)
    said = ("label_texts[1]: 'no' is 2 tokens", "bad_request", "label_texts[1]", "1")
    (failure,) = failures(pool.do(ev.TextTokenized(0, sent.link, sent.message.task, [], [], *said))).values()
    assert (failure.message, failure.code, failure.field, failure.limit) == said


def test_texts_are_refused_before_the_queue_where_nothing_can_say_what_they_are() -> None:
    def refusal(work: ScoreWork, **can: Any) -> str:
        wrong = refusal_of(work, msgspec.structs.replace(CAN, **can))
        assert isinstance(wrong, WireError), wrong
        return wrong.message

    assert refusal(ids_with(), text=False) == "label_texts: the model has no tokenizer: name labels by their token ids"
    assert "a classifier has its own 2 labels" in refusal(ids_with(), kind="classifier", labels=2)
    with pytest.raises(WireError, match="label_texts: the request has labels, too") as both:
        ids_with(labels=[1])
    assert both.value.field == "label_texts"
    with pytest.raises(WireError, match="softmax: over one label"):
        ids_with(["yes"], softmax=True)


def test_rows_of_ids_are_packed_once_their_labels_are_known() -> None:
    packed = msgspec.structs.replace(CAN, max_item=50)
    pool = Pool()
    client = pool.client()
    pool.worker(can=packed)
    pool.submit(client, 1, ids_with())
    (asked,) = tokenize(pool)
    (batch,) = answer(pool, asked, [7, 8])
    assert isinstance(batch.message, Batch)
    assert batch.message.packed


def test_texts_of_labels_are_charged() -> None:
    short, long = ids_with(["a"]), ids_with(["ü" * 64] * 100)
    assert request_bytes(long) - request_bytes(short) > 100 * 64 * 2
    (named,) = [charge(ids_with(["a", "b"], labels=[]), CAN)]
    ids = Score(1, ids_with().part.frames, labels=[1, 2])
    assert named[0] == charge(SCORE.open(ids, ids_with().frames), CAN)[0], "the answer is the same"
