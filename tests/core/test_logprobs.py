"""The operation `logprobs` in the coordinator: what it refuses and charges, which answers fit, and what shares a batch."""

import msgspec
import numpy as np
import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.logprobs import LOGPROBS
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge, request_bytes
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import MAX_PLACE_LABELS, Batch, Capabilities, FrameSpec, Logprobs, Result
from tests.core.machines import CAN, Pool, codes, config, failures, results, work

BOTH = msgspec.structs.replace(CAN, operations=("score", "logprobs"))


def asked(
    prompts: list[int] | int, responses: list[int], *, labels: list[int] | None = None, first: int = 0, top: int = 0
) -> Work:
    """Prompts and responses of these lengths; one number: one prompt for all."""
    shared = isinstance(prompts, int)
    heads: list[int] = [prompts] if isinstance(prompts, int) else prompts
    frames = [np.arange(sum(heads), dtype=np.int32).tobytes(), np.array(heads, np.uint32).tobytes()]
    specs = [FrameSpec("query", "int32", (sum(heads),)), FrameSpec("query_lengths", "uint32", (len(heads),))]
    ids = (np.arange(sum(responses), dtype=np.int32) + first) % 1000
    specs += [FrameSpec("items", "int32", (sum(responses),)), FrameSpec("item_lengths", "uint32", (len(responses),))]
    frames += [ids.tobytes(), np.array(responses, np.uint32).tobytes()]
    if shared:
        del specs[1], frames[1]
    return LOGPROBS.open(Logprobs(1, specs, labels=labels or [], top_logprobs=top), frames)


def refused(prompts: list[int] | int, responses: list[int], labels: list[int] | None = None) -> tuple[str, str, str]:
    with pytest.raises(WireError) as wrong:
        asked(prompts, responses, labels=labels)
    assert wrong.value.message.startswith(f"{wrong.value.field}")
    return wrong.value.code, wrong.value.field, wrong.value.limit


# --- what it refuses ----------------------------------------------------------------------------------------------------


def test_an_empty_prompt_or_response_is_refused_by_name() -> None:
    assert refused(0, [1]) == ("bad_request", "query", "1")
    assert refused([1, 0], [1, 1]) == ("bad_request", "query[1]", "1")
    assert refused(2, [1, 0, 1]) == ("bad_request", "items[1]", "1")
    assert refused([2, 1], [0, 1]) == ("bad_request", "items[0]", "1")
    assert refused(2, [1], labels=[3] * (MAX_PLACE_LABELS + 1)) == ("bad_request", "labels", str(MAX_PLACE_LABELS))
    assert refused(2, [1], labels=[3, -1]) == ("bad_request", "labels", str(2**31 - 1))


def test_text_is_refused_with_what_to_do() -> None:
    specs = [FrameSpec("query", "utf8", (1,)), FrameSpec("items", "utf8", (2,)), FrameSpec("item_lengths", "uint32", (1,))]
    with pytest.raises(WireError, match="items: text; send token ids of prompt and response") as wrong:
        LOGPROBS.open(Logprobs(1, specs), [b"a", b"bc", np.array([2], np.uint32).tobytes()])
    assert (wrong.value.code, wrong.value.field) == ("bad_request", "items")


def test_what_depends_on_the_model_is_refused_with_field_and_limit() -> None:
    def refusal(content: Work, can: Capabilities) -> tuple[str, str]:
        wrong = refusal_of(content, can)
        assert isinstance(wrong, WireError), wrong
        return wrong.field, wrong.limit

    assert refusal(asked(2, [3], labels=[5, BOTH.vocab]), BOTH) == ("labels", str(BOTH.vocab))
    assert refusal(asked(2, [3], top=6), msgspec.structs.replace(BOTH, vocab=5)) == ("top_logprobs", "5")
    assert refusal(asked(2, [3], first=995), msgspec.structs.replace(BOTH, vocab=996)) == ("items[0][1]", "996")
    assert refusal(asked([3, 3], [1, BOTH.context]), BOTH) == ("items[1]", str(BOTH.context))
    assert refusal(asked(2, [3]), CAN) == ("type", "score")
    wrong = refusal_of(asked(2, [79]), msgspec.structs.replace(BOTH, context=80, inflight_tokens=80))
    assert isinstance(wrong, WireError) and wrong.limit == "80" and "max_batch_tokens" in wrong.message
    assert refusal_of(asked(2, [3], labels=[5]), BOTH) is None


def test_they_are_not_packed() -> None:
    assert not LOGPROBS.packs(asked(2, [3]), msgspec.structs.replace(BOTH, max_item=50))


# --- what it is charged -------------------------------------------------------------------------------------------------


def test_an_answer_is_charged_by_its_longest_response_and_labels() -> None:
    content = asked(2, [3, 7, 1])
    assert charge(content, None) == charge(content, BOTH)
    assert charge(content, None)[0] == 512 + 3 * (2 + 4 * 7)
    assert request_bytes(content) == 2048 + content.nbytes
    content = asked(2, [3, 7, 1], labels=[5, 6])
    assert charge(content, None)[0] == 512 + 3 * (2 + 4 * 7 * 3)
    assert request_bytes(content) == 2048 + 40 * 2 + content.nbytes
    content = asked(2, [3, 7, 1], labels=[5, 6], top=4)
    assert charge(content, None)[0] == 512 + 3 * (2 + 4 * 7 * (3 + 2 * 4))


def test_a_client_counts_the_same_columns() -> None:
    for content in (asked(2, [3, 7, 1]), asked([1, 2], [4, 4], labels=[5, 6, 7]), asked(2, [3, 5], top=7)):
        message = Logprobs(1, content.part.frames, labels=content.part.labels, top_logprobs=content.part.top_logprobs)
        assert message.columns(content.frames) == sum(columns for _, columns in LOGPROBS.outputs(content, None))
        assert message.values == content.values


def test_an_answer_over_the_size_limit_is_refused_before_any_work() -> None:
    pool = Pool(config(limits=Limits(max_message_bytes=1 << 20)))
    link = pool.client()
    # A long response makes every row of the answer as long.
    sent = pool.submit(link, 1, asked(1, [1] * 60 + [5000]))
    assert codes(sent) == ["too_large"] and failures(sent)[1].field == "items"
    assert not pool.machine.core.live_bytes


# --- batches and answers ------------------------------------------------------------------------------------------------


def done(pool: Pool, batch: object, shapes: list[list[tuple[str, tuple[int, int]]]]) -> None:
    """Answer a batch: the frames of each part, filled with the number of the part."""
    assert isinstance(batch, Batch)
    outcomes = [
        ev.Outcome(
            [FrameSpec(name, "int32" if name == "top_ids" else "float32", shape) for name, shape in part],
            [np.full(shape, i, np.float32).tobytes() for _, shape in part],
        )
        for i, part in enumerate(shapes)
    ]
    pool.do(ev.BatchDone(0, b"w", batch.batch, outcomes, 0, 1, 1000))


def test_requests_share_a_batch_with_each_other_and_none_with_a_score() -> None:
    pool = Pool(forwards_in_flight=1)
    link = pool.client()
    for id_, content in enumerate((asked(1, [2]), work(1), asked([3], [4], labels=[1, 2], top=3), work(2))):
        pool.submit(link, id_, content)
    pool.worker(can=BOTH)
    operations = [{part.operation for part in sent.message.parts} for sent in pool.batches if isinstance(sent.message, Batch)]
    assert operations == [{"logprobs"}, {"score"}]
    first = pool.batches[0].message
    assert isinstance(first, Batch) and [(part.columns, part.labels) for part in first.parts] == [(2, []), (4, [1, 2])]
    top = [("top_ids", (1, 12)), ("top_logprobs", (1, 12))]
    done(pool, first, [[("logprobs", (1, 2))], [("logprobs", (1, 4)), ("labels", (1, 8)), *top]])
    answered = results(pool.sent)
    shapes = {id_: [(spec.name, spec.shape) for spec in answer.frames] for id_, answer in answered.items()}
    assert shapes == {0: [("logprobs", (1, 2))], 2: [("logprobs", (1, 4)), ("labels", (1, 8)), *top]}


def test_a_request_that_is_cut_is_answered_in_rows_of_its_longest_response() -> None:
    pool = Pool()
    pool.worker(can=BOTH)
    pool.submit(pool.client(), 1, asked(2, [1, 2, 3] * 10 + [30]))
    batches = 0
    while pool.batches:
        batch = pool.batches.pop(0).message
        assert isinstance(batch, Batch)
        [part] = batch.parts
        assert part.columns == 30
        done(pool, batch, [[("logprobs", (part.frames[-1].shape[0], 30))]])
        batches += 1
    result = results(pool.sent)[1]
    assert batches > 1 and isinstance(result, Result) and result.frames[0].shape == (31, 30)


@pytest.mark.parametrize("shapes", [[("logprobs", (2, 4))], [("scores", (2, 5))], [("logprobs", (2, 5)), ("labels", (2, 5))]])
def test_a_worker_whose_answer_has_another_shape_is_given_up(shapes: list[tuple[str, tuple[int, int]]]) -> None:
    pool = Pool()
    pool.worker(can=BOTH)
    pool.submit(pool.client(), 1, asked(3, [5, 1]))
    done(pool, pool.batches[0].message, [shapes])
    assert not pool.machine.core.groups["g"].workers and not results(pool.sent)


def test_other_content_under_the_id_of_a_request_is_refused() -> None:
    pool = Pool()
    link = pool.client()
    pool.submit(link, 1, asked(2, [3]))
    assert codes(pool.submit(link, 1, asked(2, [3]))) == []
    for other in (asked(2, [3], labels=[1]), asked(2, [2]), asked([2], [3]), work()):
        assert codes(pool.submit(link, 1, other)) == ["id_reused"]
