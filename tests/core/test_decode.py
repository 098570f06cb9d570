"""The operations `decode` and `tokenize` in the coordinator: what they refuse and charge, and that a tokenizer answers them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.decode import DECODE, UNKNOWN_TOKEN_BYTES, DecodeWork
from enginepool.coordinator.operations.tokenize_texts import TOKENIZE, TokenizeWork
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.requests.memory import charge
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Capabilities, Decode, Exiting, FrameSpec, Tokenize, TokenizeTexts
from tests.core.machines import CAN, Pool, Sent, codes, config, failures, results, texts

DECODES = msgspec.structs.replace(CAN, token_bytes=10)


def decode(*rows: Sequence[int], skip: bool = True) -> DecodeWork:
    ids = np.array([token for row in rows for token in row], np.int32)
    specs = [FrameSpec("items", "int32", (len(ids),)), FrameSpec("item_lengths", "uint32", (len(rows),))]
    lengths = np.array([len(row) for row in rows], np.uint32)
    return DECODE.open(Decode(1, specs, skip_special_tokens=skip), [ids.tobytes(), lengths.tobytes()])


def answer(pool: Pool, sent: Sent, *rows: str, name: str = "texts") -> list[Sent]:
    assert isinstance(sent.message, Tokenize)
    data = [row.encode() for row in rows]
    specs = [FrameSpec(name, "utf8", (sum(map(len, data)),)), FrameSpec("text_lengths", "uint32", (len(data),))]
    frames = [b"".join(data), np.array([len(row) for row in data], np.uint32).tobytes()]
    return pool.do(ev.TextTokenized(0, sent.link, sent.message.task, specs, frames, ""))


def refused(work: DecodeWork, can: Capabilities) -> WireError:
    wrong = refusal_of(work, can)
    assert isinstance(wrong, WireError)
    return wrong


def test_the_texts_of_a_tokenizer_are_the_answer_and_no_engine_runs_anything() -> None:
    pool = Pool()
    pool.worker(can=DECODES)
    [sent] = texts(pool.submit(pool.client(), 1, decode([5, 6], [7], skip=False)))
    assert isinstance(sent.message, Tokenize)
    assert (sent.message.operation, sent.message.skip_special_tokens) == ("decode", False)
    assert [spec.name for spec in sent.message.frames] == ["items", "item_lengths"]
    [told] = answer(pool, sent, "ä b", "")
    result = results([told])[1]
    assert [spec.name for spec in result.frames] == ["texts", "text_lengths"] and told.frames[0] == "ä b".encode()
    assert (result.forwards, result.usage.items, result.usage.tokens, result.workers) == ([], 2, 3, ["w"])
    assert not pool.batches and not pool.machine.core.live_bytes


def test_ids_outside_the_vocabulary_and_a_model_without_a_tokenizer_are_refused_in_one_line() -> None:
    wrong = refused(decode([1], [2, 1000]), DECODES)
    assert (wrong.code, wrong.field, wrong.limit) == ("bad_request", "items[1][1]", "1000")
    wrong = refused(decode([1]), CAN)
    assert (wrong.code, wrong.field) == ("bad_request", "type") and "\n" not in wrong.message


def test_workers_of_every_operation_and_kind_decode() -> None:
    generates = msgspec.structs.replace(DECODES, operations=("generate",))
    packed = msgspec.structs.replace(DECODES, max_item=10)
    assert refusal_of(decode([1]), generates) is None
    assert refusal_of(decode([1]), packed) is None


def test_the_longest_texts_that_the_ids_can_have_are_charged_before_any_work() -> None:
    assert charge(decode([1, 2], [3]), DECODES)[0] == 512 + 2 * 6 + 3 * 10
    assert charge(decode([1, 2], [3]), None)[0] == 512 + 2 * 6 + 3 * UNKNOWN_TOKEN_BYTES
    pool = Pool(config(limits=Limits(max_message_bytes=1 << 20)))
    pool.worker(can=msgspec.structs.replace(DECODES, token_bytes=1 << 15))
    sent = pool.submit(pool.client(), 1, decode([1] * 40))
    assert codes(sent) == ["too_large"] and "40 ids of up to 32768 bytes of text each" in failures(sent)[1].message
    assert not pool.machine.core.live_bytes


def test_a_request_that_waited_is_charged_by_what_the_first_worker_says_or_refused() -> None:
    pool = Pool()
    link = pool.client()
    pool.submit(link, 1, decode([1, 2]))
    pool.submit(link, 2, decode([2000]))
    pool.worker(can=DECODES)
    assert failures(pool.sent)[2].field == "items[0][0]"
    [request] = next(iter(pool.machine.core.groups.values())).live
    assert request.answer == 512 + 6 + 20


@pytest.mark.parametrize("rows", [("a",), ("a", "b", "c"), ("x" * 600, "")], ids=["fewer", "more", "too long"])
def test_an_answer_that_does_not_fit_is_an_error_of_the_engine_and_costs_no_worker(rows: tuple[str, ...]) -> None:
    pool = Pool()
    pool.worker(can=DECODES)
    [sent] = texts(pool.submit(pool.client(), 1, decode([1], [2])))
    assert codes(answer(pool, sent, *rows)) == ["engine_error"]
    [sent] = texts(pool.submit(b"client1", 2, decode([1], [2])))
    assert codes(answer(pool, sent, "a", "b", name="items")) == ["engine_error"]
    [sent] = texts(pool.submit(b"client1", 3, decode([1], [2])))
    assert results(answer(pool, sent, "a", "b")).keys() == {3}


def test_rows_whose_worker_is_lost_are_decoded_by_another() -> None:
    pool = Pool()
    pool.worker("w1", can=DECODES)
    [sent] = texts(pool.submit(pool.client(), 1, decode([1])))
    pool.worker("w2", can=DECODES)
    [again] = texts(pool.do(ev.WorkerSaid(0, sent.link, Exiting("it crashed", True))))
    assert again.link == b"w2" and results(answer(pool, again, "a")).keys() == {1}


def test_a_caller_that_cancels_gets_no_texts_and_the_next_call_does() -> None:
    pool = Pool()
    pool.worker(can=DECODES)
    link = pool.client()
    [sent] = texts(pool.submit(link, 1, decode([1])))
    assert codes(pool.do(ev.CancelAsked(0, link, 1))) == ["cancelled"]
    assert not answer(pool, sent, "a")
    [sent] = texts(pool.submit(link, 2, decode([1])))
    assert results(answer(pool, sent, "a")).keys() == {2}


# --- texts to ids -------------------------------------------------------------------------------------------------------


def tokenize(*rows: str, special: bool = True) -> TokenizeWork:
    data = [row.encode() for row in rows]
    specs = [FrameSpec("items", "utf8", (sum(map(len, data)),)), FrameSpec("item_lengths", "uint32", (len(data),))]
    lengths = np.array([len(row) for row in data], np.uint32)
    return TOKENIZE.open(TokenizeTexts(1, specs, add_special_tokens=special), [b"".join(data), lengths.tobytes()])


def ids(pool: Pool, sent: Sent, *rows: Sequence[int]) -> list[Sent]:
    assert isinstance(sent.message, Tokenize)
    flat = np.array([token for row in rows for token in row], np.int32)
    specs = [FrameSpec("items", "int32", flat.shape), FrameSpec("item_lengths", "uint32", (len(rows),))]
    frames = [flat.tobytes(), np.array([len(row) for row in rows], np.uint32).tobytes()]
    return pool.do(ev.TextTokenized(0, sent.link, sent.message.task, specs, frames, ""))


def test_the_ids_of_a_tokenizer_are_the_answer_and_are_charged_before() -> None:
    assert charge(tokenize("ab", "c"), None)[0] == 512 + 2 * 6 + 4 * (3 + 2 * 8)
    pool = Pool()
    link = pool.client()
    pool.submit(link, 1, tokenize("ab", "c", special=False))
    pool.worker(can=DECODES)
    [sent] = texts(pool.sent)
    assert isinstance(sent.message, Tokenize)
    assert (sent.message.operation, sent.message.raw, sent.message.add_special_tokens) == ("tokenize", True, False)
    [told] = ids(pool, sent, [1, 5, 6], [])
    result = results([told])[1]
    assert [spec.name for spec in result.frames] == ["items", "item_lengths"] and not pool.batches
    assert (result.usage.items, result.usage.tokens, result.forwards) == (2, 3, [])
    [sent] = texts(pool.submit(link, 2, tokenize("ab")))
    assert codes(ids(pool, sent, [1] * 200)) == ["engine_error"], "more than any tokenizer makes of it"
    [sent] = texts(pool.submit(link, 3, tokenize("ab")))
    assert codes(ids(pool, sent, [1], [2])) == ["engine_error"]
    assert not pool.machine.core.live_bytes


def test_texts_for_a_model_without_a_tokenizer_are_refused() -> None:
    wrong = refusal_of(tokenize("a"), msgspec.structs.replace(CAN, text=False))
    assert isinstance(wrong, WireError) and (wrong.code, wrong.field) == ("bad_request", "type")
