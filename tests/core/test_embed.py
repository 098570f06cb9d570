"""The operation `embed` in the coordinator: what it refuses and charges, which answers fit, and what shares a batch."""

import msgspec
import numpy as np
import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.embed import EMBED, UNKNOWN_EMBEDDING
from enginepool.coordinator.operations.limits import limits_of
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge, request_bytes
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import MAX_DIMENSIONS, Batch, Capabilities, Embed, FrameSpec, Result, Tokenize, Tokenized
from tests.core.machines import CAN, Pool, codes, config, failures, results, texts, work

SIZE = 8
BOTH = Capabilities(
    "causal", 1000, 100, batch_tokens=100, batch_rows=8, inflight_tokens=200, inflight_rows=16, operations=("score", "embed"),
    embedding=SIZE,
)  # fmt: skip
ONLY = Capabilities(
    "embedding", 1000, 100, batch_tokens=100, batch_rows=8, inflight_tokens=200, inflight_rows=16, operations=("embed",),
    embedding=SIZE, dimensions=[2, SIZE], text=False,
)  # fmt: skip


def embed(rows: int = 1, length: int = 10, *, first: int = 0, dimensions: int = 0, normalize: bool = True) -> Work:
    ids = (np.arange(rows * length, dtype=np.int32) + first) % 1000
    specs = [FrameSpec("items", "int32", (rows * length,)), FrameSpec("item_lengths", "uint32", (rows,))]
    message = Embed(1, specs, dimensions=dimensions, normalize=normalize)
    return EMBED.open(message, [ids.tobytes(), np.full(rows, length, np.uint32).tobytes()])


def of_text(*items: str) -> Work:
    data = [item.encode() for item in items]
    specs = [FrameSpec("items", "utf8", (sum(map(len, data)),)), FrameSpec("item_lengths", "uint32", (len(items),))]
    return EMBED.open(Embed(1, specs), [b"".join(data), np.array([len(d) for d in data], np.uint32).tobytes()])


def refusal(work: Work, can: Capabilities) -> tuple[str, str, str]:
    wrong = refusal_of(work, can)
    assert isinstance(wrong, WireError), wrong
    assert wrong.message.startswith(f"{wrong.field}: ")
    return wrong.code, wrong.field, wrong.limit


# --- what it refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [-1, MAX_DIMENSIONS + 1, 2**63])
def test_dimensions_that_no_model_has_are_refused_with_the_limit(dimensions: int) -> None:
    with pytest.raises(WireError, match=f"dimensions: {dimensions} is outside") as refused:
        embed(dimensions=dimensions)
    assert (refused.value.code, refused.value.field, refused.value.limit) == ("bad_request", "dimensions", str(MAX_DIMENSIONS))


def test_a_query_and_an_empty_row_are_refused_by_name() -> None:
    specs = [FrameSpec("query", "int32", (0,)), FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    with pytest.raises(WireError) as layout:
        EMBED.open(Embed(1, specs), [b"", bytes(4), np.array([1], np.uint32).tobytes()])
    assert (layout.value.code, layout.value.field) == ("malformed", "frames")
    with pytest.raises(WireError) as empty:
        EMBED.open(
            Embed(1, [specs[1], FrameSpec("item_lengths", "uint32", (2,))]),
            [bytes(4), np.array([1, 0], np.uint32).tobytes()],
        )
    assert (empty.value.code, empty.value.field) == ("bad_request", "items[1]")


def test_what_depends_on_the_model_is_refused_with_field_and_limit() -> None:
    assert refusal(embed(dimensions=SIZE + 1), BOTH) == ("bad_request", "dimensions", f"1..{SIZE}")
    assert refusal(embed(dimensions=4), ONLY) == ("bad_request", "dimensions", f"2, {SIZE}")
    small = msgspec.structs.replace(BOTH, vocab=900)
    assert refusal(embed(first=995), small) == ("bad_request", "items[0][0]", "900")
    assert refusal(embed(length=101), BOTH) == ("bad_request", "items[0]", "100")
    assert refusal(of_text("a"), ONLY) == ("bad_request", "items", "")
    for dimensions in (0, 2, SIZE):
        assert refusal_of(embed(dimensions=dimensions), ONLY) is None


def test_a_group_runs_the_operations_of_its_workers_and_no_other() -> None:
    assert refusal(embed(), CAN) == ("bad_request", "type", "score")
    assert refusal(work(), ONLY) == ("bad_request", "type", "embed")
    assert refusal_of(work(), BOTH) == refusal_of(embed(), BOTH) is None


def test_a_request_that_waited_for_the_first_worker_is_refused_once_that_cannot_embed() -> None:
    pool = Pool()
    link = pool.client()
    assert pool.submit(link, 1, embed()) == []
    pool.worker(can=CAN)
    assert (failures(pool.sent)[1].code, failures(pool.sent)[1].field) == ("bad_request", "type")


def test_the_limits_of_a_group_tell_what_a_request_may_ask_for() -> None:
    limits = limits_of(ONLY, 100)
    assert limits is not None
    assert (limits.kind, limits.operations, limits.embedding, limits.dimensions) == ("embedding", ("embed",), SIZE, [2, SIZE])


# --- what it is charged -------------------------------------------------------------------------------------------------


def test_an_answer_is_charged_by_rows_and_dimensions() -> None:
    def answer(columns: int) -> int:
        return 512 + 3 * (2 + 4 * columns)

    assert charge(embed(3, dimensions=2), None)[0] == charge(embed(3, dimensions=2), BOTH)[0] == answer(2)
    assert charge(embed(3), BOTH)[0] == answer(SIZE)
    assert charge(embed(3), None)[0] == answer(UNKNOWN_EMBEDDING)
    asked = embed(3)
    assert charge(asked, BOTH)[1] == answer(SIZE) + request_bytes(asked) == answer(SIZE) + 2048 + 3 * 44


def test_an_answer_over_the_size_limit_is_refused_before_any_work() -> None:
    pool = Pool(config(limits=Limits(max_message_bytes=1 << 20)))
    link = pool.client()
    sent = pool.submit(link, 1, embed(8, dimensions=MAX_DIMENSIONS))
    assert codes(sent) == ["too_large"] and failures(sent)[1].field == "items"
    assert not pool.machine.core.live_bytes


# --- batches and answers ------------------------------------------------------------------------------------------------


def done(pool: Pool, batch: "object", shapes: list[tuple[str, tuple[int, int]]]) -> list[object]:
    assert isinstance(batch, Batch)
    outcomes = [ev.Outcome([FrameSpec(name, "float32", shape)], [bytes(4 * shape[0] * shape[1])]) for name, shape in shapes]
    return list(pool.do(ev.BatchDone(0, b"w", batch.batch, outcomes, 0, 1, 1000)))


def test_requests_of_several_dimensions_share_a_batch_and_none_with_a_score() -> None:
    pool = Pool(forwards_in_flight=1)
    link = pool.client()
    for id_, content in enumerate(
        (embed(1), work(1), embed(2, dimensions=2, normalize=False), work(2), embed(1, dimensions=1))
    ):
        pool.submit(link, id_, content)
    pool.worker(can=BOTH)
    operations = [{part.operation for part in sent.message.parts} for sent in pool.batches if isinstance(sent.message, Batch)]
    assert operations == [{"embed"}, {"score"}]
    first = pool.batches[0].message
    assert isinstance(first, Batch)
    assert [(part.dimensions, part.normalize) for part in first.parts] == [(0, True), (2, False), (1, True)]
    done(pool, first, [("embeddings", (1, SIZE)), ("embeddings", (2, 2)), ("embeddings", (1, 1))])
    answered = results(pool.sent)
    assert {id_: answer.frames[0].shape for id_, answer in answered.items()} == {0: (1, SIZE), 2: (2, 2), 4: (1, 1)}
    assert all(answer.frames[0].name == "embeddings" and answer.forwards == [1] for answer in answered.values())


@pytest.mark.parametrize(("name", "columns"), [("scores", SIZE), ("embeddings", SIZE - 1)])
def test_a_worker_whose_answer_is_no_embedding_of_that_size_is_given_up(name: str, columns: int) -> None:
    pool = Pool()
    pool.worker(can=BOTH)
    pool.submit(pool.client(), 1, embed(2))
    done(pool, pool.batches[0].message, [(name, (2, columns))])
    assert not pool.machine.core.groups["g"].workers
    assert not results(pool.sent)


def test_a_large_request_is_cut_into_whole_batches_and_put_together_again() -> None:
    pool = Pool()
    pool.worker(can=BOTH)
    pool.submit(pool.client(), 1, embed(20, 10, dimensions=2))
    while pool.batches:
        batch = pool.batches.pop(0).message
        assert isinstance(batch, Batch)
        [part] = batch.parts
        assert [spec.name for spec in part.frames] == ["items", "item_lengths"] and part.dimensions == 2
        done(pool, batch, [("embeddings", (part.frames[1].shape[0], 2))])
    result = results(pool.sent)[1]
    assert isinstance(result, Result) and result.frames[0].shape == (20, 2) and set(result.forwards) == {1}


def test_text_is_tokenized_first_and_has_no_query() -> None:
    pool = Pool()
    pool.worker(can=BOTH)
    pool.submit(pool.client(), 1, of_text("ab", "c"))
    [sent] = texts(pool.sent)
    assert isinstance(sent.message, Tokenize)
    assert [spec.name for spec in sent.message.frames] == ["items", "item_lengths"]
    ids = [np.array([5, 6, 7], np.int32).tobytes(), np.array([2, 1], np.uint32).tobytes()]
    specs = [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    pool.do(ev.TextTokenized(0, b"w", Tokenized(sent.message.task).task, specs, ids, ""))
    batch = pool.batches[0].message
    assert isinstance(batch, Batch) and batch.parts[0].operation == "embed" and batch.parts[0].frames == specs


def test_the_same_rows_scored_under_the_id_of_a_request_to_embed_are_another_content() -> None:
    pool = Pool()
    link = pool.client()
    pool.submit(link, 1, embed())
    assert codes(pool.submit(link, 1, embed())) == []
    for other in (embed(dimensions=2), embed(normalize=False), work()):
        assert codes(pool.submit(link, 1, other)) == ["id_reused"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"embedding": 0},
        {"dimensions": [0]},
        {"dimensions": [SIZE + 1]},
        {"dimensions": [1] * 2000},
        {"operations": ("score",)},
    ],
)
def test_a_worker_with_impossible_embeddings_is_refused(wrong: dict[str, object]) -> None:
    pool = Pool()
    pool.worker(can=msgspec.structs.replace(BOTH, **wrong))
    assert not pool.machine.core.groups["g"].workers
