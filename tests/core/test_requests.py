"""Promises to clients: one final answer, clear refusals before the queue, bounds, duplicates, deadlines, cancel."""

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.text_lanes import MOST_TEXTS
from enginepool.coordinator.operations.score import SCORE, ScoreWork
from enginepool.coordinator.requests.memory import answer_bytes, request_bytes
from enginepool.coordinator.requests.reply_cache import OVERHEAD, ReplyCache
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import (
    PROTOCOL_VERSION,
    Batch,
    Capabilities,
    ErrorReply,
    FrameSpec,
    Score,
    StatusReport,
    TaskId,
    Tokenize,
    Welcome,
)
from enginepool.protocol.messages.weight_reports import InspectWeights
from tests.core.invariants import check_replies
from tests.core.machines import CAN, EPOCH, Pool, codes, config, failures, results, text, texts, work

#: what a request takes with its answer
HELD = request_bytes(work()) + answer_bytes(work(), CAN)


def test_a_link_that_says_hello_as_one_client_after_another_leaves_only_those_that_asked_for_something() -> None:
    pool = Pool(config())
    for number in range(100):
        link = pool.client(b"x", client=b"%16d" % number)
        if number == 7:
            pool.submit(link, 1, work())
    assert sorted(pool.machine.core.clients) == [b"%16d" % 7, b"%16d" % 99]
    pool.client(b"y", client=b"%16d" % 7)
    pool.worker()
    assert [sent.link for sent in pool.finish(pool.batches[-1]) if sent.link in (b"x", b"y")] == [b"y"]


@given(st.lists(st.sampled_from(["", "a", "é", "€", "😀", "a€b"]), min_size=1), st.data())
def test_text_is_utf8_in_each_row_or_the_first_row_that_is_not_is_named(rows: list[str], data: st.DataObject) -> None:
    whole = bytearray("".join(rows).encode())
    if whole and data.draw(st.booleans()):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.sampled_from([0x61, 0x80, 0xC3, 0xED, 0xF0, 0xFF]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    pieces = [bytes(whole[start:end]) for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = ""
    for row, piece in enumerate(pieces):
        try:
            piece.decode()
        except UnicodeDecodeError as error:
            expected = f"items[{row}]: not UTF-8 at byte {error.start}"
            break
    try:
        open_rows(bytes(whole), [len(piece) for piece in pieces])
        found = ""
    except WireError as error:
        found = error.message
    assert found == expected


def test_empty_rows_of_text_take_no_memory_before_they_are_refused() -> None:
    counts = np.zeros(4_000_000, np.uint32)
    counts[0] = 1
    tracemalloc.start()
    try:
        assert open_rows(b"a", counts).rows == len(counts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * counts.nbytes, "one copy of the lengths is this test's own"


def open_rows(items: bytes, counts: "list[int] | np.ndarray[Any, Any]") -> ScoreWork:
    """A text request of rows of these lengths, with a query, so that they may be empty."""
    lengths = np.asarray(counts, np.uint32).tobytes()
    specs = [
        FrameSpec("query", "utf8", (1,)),
        FrameSpec("items", "utf8", (len(items),)),
        FrameSpec("item_lengths", "uint32", (len(lengths) // 4,)),
    ]
    return SCORE.open(Score(1, specs, labels=[1]), [b"q", items, lengths])


def test_hello_is_answered_with_what_is_granted() -> None:
    limits = Limits(window_requests=7, window_bytes=2000, max_message_bytes=1000)
    pool = Pool(config(groups=("a", "b"), limits=limits))
    (sent,) = pool.do(ev.ClientHello(0, b"x", b"c" * 16, b"t" * 16, 0))
    assert sent.message == Welcome(
        EPOCH,
        protocol=PROTOCOL_VERSION,
        capabilities=["score", "embed", "logprobs", "decode", "tokenize", "generate", "weights"],
        groups=["a", "b"],
        window_requests=7,
        window_bytes=2000,
        max_message_bytes=1000,
        ping_ms=1000,
    )


def heads(**settings: Any) -> ScoreWork:
    """One row for a model with a head."""
    specs = [FrameSpec("query", "int32", (0,)), FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    return SCORE.open(Score(1, specs, **settings), [b"", b"\1\0\0\0", b"\1\0\0\0"])


@pytest.mark.parametrize(
    ("labels", "settings", "field"),
    [
        (1, {"softmax": True}, "softmax"),
        (1, {"softmax": True, "logprobs": True}, "softmax"),
        (1, {"logprobs": True}, "logprobs"),
        (3, {"logprobs": True}, "logprobs"),
        (3, {"softmax": True, "logprobs": True}, ""),
        (1, {}, ""),
        (-1, {"logprobs": True}, ""),
        (-1, {"softmax": True}, "softmax"),
    ],
)
def test_a_head_is_not_asked_for_what_it_cannot_say(labels: int, settings: dict[str, bool], field: str) -> None:
    """Softmax over one output is always 1; logits have no logarithms. Known as soon as a worker has said what its head is."""
    pool = Pool()
    early, late = pool.client(), pool.client()
    pool.submit(early, 1, heads(**settings))
    head = CROSSING if labels < 0 else msgspec.structs.replace(CAN, kind="classifier", labels=labels)
    pool.worker(can=head)
    pool.submit(late, 1, heads(**settings))
    told = [s.message for s in pool.sent if isinstance(s.message, ErrorReply)]
    assert [(f.code, f.field) for f in told] == ([("bad_request", field)] * 2 if field else [])


SEP = 9
CROSSING = msgspec.structs.replace(CAN, kind="classifier", labels=1, separator=SEP, activation="sigmoid")


def pairs(query: list[int] | list[list[int]], items: list[list[int]], **settings: Any) -> ScoreWork:
    """Rows of ids: one query for all, or one each."""
    frames = [np.array([token for item in items for token in item], np.int32), np.array([*map(len, items)], np.uint32)]
    specs = [FrameSpec("items", "int32", (len(frames[0]),)), FrameSpec("item_lengths", "uint32", (len(items),))]
    if query and isinstance(query[0], list):
        heads = [row for row in query if isinstance(row, list)]
        frames = [np.array([t for row in heads for t in row], np.int32), np.array([*map(len, heads)], np.uint32), *frames]
        specs = [FrameSpec("query", "int32", (len(frames[0]),)), FrameSpec("query_lengths", "uint32", (len(heads),)), *specs]
    else:
        frames = [np.array(query, np.int32), *frames]
        specs = [FrameSpec("query", "int32", (len(query),)), *specs]
    return SCORE.open(Score(1, specs, **settings), [frame.tobytes() for frame in frames])


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (pairs([1, SEP], [[2], [3, SEP]]), None),
        (pairs([1], [[SEP, 2], [SEP]]), None),
        (pairs([1], [[SEP, 2], [2, SEP], [3]]), 1),
        (pairs([1, 2], [[3]]), 0),
        (pairs([SEP, 2], [[3]]), 0),
        (pairs([1, 2], [[3]], raw=True), None),
        (pairs([], [[1, SEP, 2], [3]]), None),
        (pairs([1, 2], [[], [3]]), 1),
        (pairs([1, SEP], [[2]], item_first=True), 0),
        (pairs([SEP, 1], [[2], []], item_first=True), None),
        (pairs([1], [[2, SEP], [2]], item_first=True), 1),
        (pairs([[1, SEP], [2], [], [4, SEP]], [[3], [SEP, 3], [3], []]), None),
        (pairs([[1, SEP], [2], [4]], [[3], [], [5, SEP]]), 2),
        (pairs([[1], [SEP, 1]], [[3, SEP], [3]], item_first=True), None),
    ],
)
def test_a_row_of_a_cross_encoder_has_a_separator_between_query_and_item(content: ScoreWork, wrong: int | None) -> None:
    pool = Pool()
    early, late = pool.client(), pool.client()
    pool.submit(early, 1, content)
    pool.worker(can=CROSSING)
    pool.submit(late, 1, content)
    told = [s.message for s in pool.sent if isinstance(s.message, ErrorReply)]
    assert [(f.code, f.field, f.limit) for f in told] == (
        [] if wrong is None else [("bad_request", f"items[{wrong}]", str(SEP))] * 2
    )
    for failure in told:
        assert f"items[{wrong}]: no separator token {SEP} between query and item" in failure.message
        assert "raw=True" in failure.message


def test_other_models_take_rows_without_a_separator() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=msgspec.structs.replace(CAN, kind="classifier", labels=2))
    pool.submit(client, 1, pairs([1, 2], [[3]]))
    assert list(results(pool.finish_all())) == [1]


@pytest.mark.parametrize("raw", [False, True])
def test_a_worker_hears_whether_texts_are_joined_as_pairs(raw: bool) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=msgspec.structs.replace(CROSSING, labels=2))
    specs = [FrameSpec("query", "utf8", (1,)), FrameSpec("items", "utf8", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    content = SCORE.open(Score(1, specs, raw=raw), [b"q", b"a", b"\1\0\0\0"])
    [task] = texts(pool.submit(client, 1, content))
    assert isinstance(task.message, Tokenize)
    assert task.message.raw is raw
    # With any result of the tokenizer: the row is whole, and has nothing to separate.
    pool.do(
        ev.TextTokenized(
            0, task.link, task.message.task, [FrameSpec("items", "int32", (2,)), specs[2]], [b"\1\0\0\0" * 2, b"\2\0\0\0"]
        )
    )
    assert list(results(pool.finish_all())) == [1]


@pytest.mark.parametrize("separator", [-1, 1000])
def test_a_separator_is_a_token_of_the_model(separator: int) -> None:
    pool = Pool()
    pool.worker(can=msgspec.structs.replace(CROSSING, separator=separator))
    assert not pool.machine.core.groups["g"].workers


def test_a_link_without_hello_is_told_so() -> None:
    pool = Pool()
    assert codes(pool.submit(b"nobody", 1, work())) == ["hello_required"]
    assert codes(pool.do(ev.CancelAsked(0, b"nobody", 1))) == ["hello_required"]
    assert codes(pool.do(ev.Heard(0, b"nobody", 1))) == ["hello_required"]


def test_a_client_is_known_by_its_token_and_its_newest_link_wins() -> None:
    pool = Pool()
    first = pool.client(b"one", client=b"c" * 16, incarnation=1)
    (refused,) = pool.do(ev.ClientHello(0, b"thief", b"c" * 16, b"x" * 16, 5))
    assert isinstance(refused.message, ErrorReply)
    assert (refused.message.code, refused.message.field) == ("unauthorized", "token")
    pool.submit(first, 1, work())
    for stale, newest in ((0, 1), (0, 2), (1, 2)):
        (refused,) = pool.do(ev.ClientHello(0, b"old", b"c" * 16, b"t" * 16, stale))
        assert isinstance(refused.message, ErrorReply)
        assert (refused.message.code, refused.message.field) == ("superseded", "incarnation")
        pool.client(b"two", client=b"c" * 16, incarnation=newest)
        assert codes(pool.submit(first, 2, work())) == ["hello_required"]
        assert codes(pool.submit(b"old", 2, work())) == ["hello_required"]
    pool.worker()
    (answer,) = [s for s in pool.finish_all() if results([s])]
    assert answer.link == b"two"


def test_the_same_hello_again_changes_nothing() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work())
    pool.client(client)
    pool.worker()
    (answer,) = [s for s in pool.finish_all() if results([s])]
    assert answer.link == client


def test_a_resend_is_attached_and_answered_once_on_the_newest_link() -> None:
    pool = Pool()
    client = pool.client(b"one", client=b"c" * 16)
    pool.worker()
    pool.submit(client, 1, work())
    assert pool.submit(client, 1, work()) == []
    again = pool.client(b"two", client=b"c" * 16, incarnation=1)
    assert pool.submit(again, 1, work()) == []
    sent = pool.finish_all()
    assert [s.link for s in sent] == [b"two"]
    assert list(results(sent)) == [1]


def test_a_resend_after_the_answer_gets_the_same_answer_until_it_is_acknowledged() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work())
    (first,) = pool.finish_all()
    (again,) = pool.submit(client, 1, work())
    assert again.message == first.message and again.frames == first.frames
    pool.do(ev.Acked(0, client, [1]))
    assert len(pool.machine.core.answers) == 0
    (batch,) = pool.submit(client, 1, work())
    assert isinstance(batch.message, Batch), "forgotten: it is run again"


@pytest.mark.parametrize("when", ["live", "answered"])
def test_an_id_used_for_something_else_is_refused(when: str) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work(first=0))
    if when == "answered":
        pool.finish_all()
    sent = pool.submit(client, 1, work(first=5))
    assert codes(sent) == ["id_reused"]
    assert failures(sent)[1].field == "id"


def test_ids_are_scoped_to_the_client() -> None:
    pool = Pool()
    pool.worker()
    a, b = pool.client(), pool.client()
    pool.submit(a, 1, work(first=0))
    pool.submit(b, 1, work(first=5))
    assert sorted(s.link for s in pool.finish_all()) == [a, b]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (Limits(window_requests=2), "window_requests"),
        (Limits(max_message_bytes=1000, window_bytes=2 * HELD), "window_bytes"),
        (Limits(queue_items=4), "queue_items"),
        (Limits(max_message_bytes=1000, window_bytes=2 * HELD, buffer_bytes=4 * HELD), "window_bytes"),
    ],
)
def test_past_a_bound_the_answer_is_busy_and_names_the_bound(limits: Limits, field: str) -> None:
    pool = Pool(config(limits=limits))
    client = pool.client()
    assert pool.submit(client, 1, work()) == []
    assert pool.submit(client, 2, work()) == []
    (failure,) = failures(pool.submit(client, 3, work())).values()
    assert (failure.code, failure.field, failure.limit) == ("busy", field, str(getattr(limits, field)))
    assert failure.retry_after_ms is not None and failure.retry_after_ms > 0
    # Room again: the same id is accepted, for nothing was kept of the refusal.
    pool.worker()
    pool.finish_all()
    assert codes(pool.submit(client, 3, work())) == []


def test_a_request_that_not_even_an_empty_queue_would_take_is_refused_instead_of_told_to_wait() -> None:
    pool = Pool(config(limits=Limits(queue_items=4)))
    client = pool.client()
    (failure,) = failures(pool.submit(client, 1, work(rows=3))).values()
    assert (failure.code, failure.field, failure.limit) == ("bad_request", "items", "2")
    assert "3" in failure.message
    assert pool.submit(client, 2, work(rows=2)) == []


def test_buffer_bytes_bound_all_clients_together() -> None:
    pool = Pool(config(limits=Limits(max_message_bytes=1000, window_bytes=HELD, buffer_bytes=3 * HELD)))
    assert codes(pool.submit(pool.client(), 1, work())) == []
    assert codes(pool.submit(pool.client(), 1, work())) == []
    (failure,) = failures(pool.submit(pool.client(), 1, work())).values()
    assert (failure.code, failure.field) == ("busy", "buffer_bytes")


def test_an_unknown_group_is_named_with_the_known_ones() -> None:
    pool = Pool(config(groups=("policy", "reward")))
    client = pool.client()
    (failure,) = failures(pool.submit(client, 1, work(group="nope"))).values()
    assert (failure.code, failure.field, failure.limit) == ("unknown_group", "group", "policy, reward")
    assert codes(pool.submit(client, 2, work())) == ["unknown_group"], "with two groups a request names one"
    assert codes(pool.submit(client, 3, work(group="reward"))) == []
    assert len(failures(pool.submit(client, 4, work(group="x" * 1_000_000)))[4].message) < 200


CLASSIFIER = Capabilities("classifier", 1000, 100, 100, 8, 200, 16, labels=2)


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_a_label_that_is_no_token_id_is_named(wrong: int) -> None:
    specs = [FrameSpec("query", "int32", (0,)), FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
    with pytest.raises(WireError, match=rf"^labels\[1\]: {wrong}; a token id is 0 to 2147483647$") as caught:
        SCORE.open(Score(1, specs, labels=[5, wrong]), [b"", b"\1\0\0\0", b"\1\0\0\0"])
    assert caught.value.field == "labels"


@pytest.mark.parametrize(
    ("can", "content", "field", "limit"),
    [
        (CAN, work(labels=()), "labels", "1"),
        (CAN, work(labels=(1, 1000)), "labels", "1000"),
        (CAN, work(2, 101), "items[0]", "100"),
        (CAN, work(hidden=True), "hidden", "0"),
        (CLASSIFIER, work(), "labels", "0"),
        (CAN.__class__("causal", 55, 100, 100, 8, 200, 16), work(6, 10), "items[5][5]", "55"),
    ],
)
@pytest.mark.parametrize("early", [False, True], ids=["worker first", "request first"])
def test_what_the_model_cannot_serve_is_refused_with_field_and_limit(
    can: Capabilities, content: ScoreWork, field: str, limit: str, early: bool
) -> None:
    """Before the queue when the model is known, else as soon as the first worker says what it is; neighbors are served."""
    pool = Pool()
    client = pool.client()
    if not early:
        pool.worker(can=can)
    pool.submit(client, 1, content)
    good = work(labels=() if can.kind == "classifier" else (1,))
    pool.submit(client, 2, good)
    if early:
        pool.worker(can=can)
    (failure,) = failures(pool.sent).values()
    assert (failure.id, failure.code, failure.field, failure.limit) == (1, "bad_request", field, limit)
    pool.finish_all()
    assert list(results(pool.sent)) == [2]


def test_a_deadline_answers_wherever_the_request_is() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work(8), timeout=1.0)
    pool.submit(client, 2, work(8), timeout=3.0)
    early = pool.wait(1.5)
    assert codes(early) == ["deadline_exceeded"]
    assert failures(early)[1].message == "timeout_ms: no answer after 1.000 s; no worker of group g is ready"
    pool.worker()
    assert len(pool.batches) == 1, "what is over never reaches a worker"
    late = failures(pool.wait(2.0))
    assert list(late) == [2], "also while it runs"
    assert late[2].message == "timeout_ms: no answer after 3.000 s"
    assert results(pool.finish_all()) == {}


def test_cancel_against_answer_first_handled_wins() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work())
    pool.submit(client, 2, work())
    assert codes(pool.do(ev.CancelAsked(0, client, 1))) == ["cancelled"]
    assert list(results(pool.finish_all())) == [2]
    assert pool.do(ev.CancelAsked(0, client, 2)) == []


def test_cancelling_makes_room_for_the_next() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    for i in (1, 2):
        pool.submit(client, i, work(8))
    pool.submit(client, 3, work(16))
    pool.submit(client, 4, work(1))
    assert len(pool.batches) == 2
    pool.finish(pool.batches[0])
    pool.do(ev.CancelAsked(0, client, 3))
    pool.finish_all()
    assert sorted(results(pool.sent)) == [1, 2, 4]


def test_cancelled_requests_do_not_stay_in_memory() -> None:
    pool = Pool()
    client = pool.client()
    for i in range(1, 2001):
        pool.submit(client, i, work(), timeout=1000)
        pool.machine.handle(ev.CancelAsked(pool.now, client, i))
        pool.machine.handle(ev.Acked(pool.now, client, [i]))
    core = pool.machine.core
    assert core.groups["g"].queue.size <= 200
    assert len(core.deadlines) <= 200
    assert len(core.answers) == 0


def test_answers_are_kept_within_bytes_and_seconds() -> None:
    pool = Pool(config(limits=Limits(answers_bytes=10_000, answers_s=60)))
    client = pool.client()
    pool.worker()
    for i in range(1, 101):
        pool.submit(client, i, work())
        pool.finish_all()
    answers = pool.machine.core.answers
    assert 0 < answers.nbytes <= 10_000
    for _ in range(13):
        pool.wait(5)
        pool.do(ev.Heard(0, client, 1))
        pool.do(ev.WorkerHeard(0, b"w"))
    assert len(answers) == 0


def test_the_oldest_answers_go_for_what_the_newest_weigh() -> None:
    client, frame = Client(b"c", b"t", 0, b"link", 0.0, 1), b"." * 500
    answers = ReplyCache(60.0, 3 * OVERHEAD + 3 * len(frame))

    def add(id_: int, *frames: bytes) -> list[int]:
        answers.add(client, id_, 0, ErrorReply("cancelled", ""), frames, 0.0)
        check_replies(answers)
        return [known for known in range(10) if answers.get(client, known) is not None]

    assert add(1, frame) == [1]
    assert add(2, frame) == [1, 2]
    assert add(3, frame) == [1, 2, 3], "as much as may be"
    assert add(4, frame, b".") == [3, 4], "a byte more than that"
    assert add(5, *[frame] * 5) == [5]
    assert add(6, *[frame] * 8) == [5], "more than all may weigh: not kept, and nothing goes for it"


def test_a_silent_client_is_forgotten_with_all_it_asked_for() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work())
    pool.wait(31)
    core = pool.machine.core
    assert not core.clients and not core.links and not core.live_rows and not len(core.answers)


@pytest.mark.parametrize("what", ["hello", "status", "weights"])
def test_every_message_of_a_client_counts_as_being_heard(what: str) -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work())
    for _ in range(40):
        if what == "hello":
            pool.client(client)
        elif what == "status":
            pool.do(ev.StatusAsked(0, client, 1))
        else:
            pool.do(ev.WeightsAsked(0, client, InspectWeights(1)))
        pool.wait(1.0)
    pool.worker()
    assert 1 in results(pool.finish_all())


def test_a_goodbye_cancels() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, work())
    pool.do(ev.ClientLeft(0, client))
    pool.worker()
    assert not pool.batches


def test_a_goodbye_lets_others_start_who_waited_behind_it() -> None:
    pool = Pool()
    leaving, staying = pool.client(), pool.client()
    pool.worker()
    for number, length in ((1, 100), (2, 60), (3, 90)):
        pool.submit(leaving, number, work(1, length))
    pool.submit(staying, 4, work(1, 30), priority=-1)
    assert len(pool.batches) == 2
    pool.do(ev.ClientLeft(0, leaving))
    assert len(pool.batches) == 3, "what stood before it did not fit, and is gone"


def test_a_cut_link_keeps_its_requests_for_the_next_link() -> None:
    pool = Pool()
    client = pool.client(b"one", client=b"c" * 16)
    pool.submit(client, 1, work())
    pool.do(ev.LinkCut(0, client))
    pool.worker()
    assert pool.finish_all() == []
    again = pool.client(b"two", client=b"c" * 16, incarnation=1)
    (answer,) = pool.submit(again, 1, work())
    assert list(results([answer])) == [1]


# --- text --------------------------------------------------------------------------------------------------------------


def ids(pool: Pool, sent: object, rows: list[list[int]]) -> None:
    import numpy as np

    task = sent.message.task  # type: ignore[attr-defined]
    flat = np.array([i for row in rows for i in row], np.int32)
    specs = [FrameSpec("items", "int32", flat.shape), FrameSpec("item_lengths", "uint32", (len(rows),))]
    frames = [flat.tobytes(), np.array([len(row) for row in rows], np.uint32).tobytes()]
    pool.do(ev.TextTokenized(0, sent.link, task, specs, frames))  # type: ignore[attr-defined]


def test_text_is_tokenized_on_a_worker_before_it_is_queued() -> None:
    pool = Pool()
    client = pool.client()
    assert pool.submit(client, 1, text("ab", ["c", "dé"])) == []
    pool.worker()
    (task,) = texts(pool.sent)
    assert task.frames[1] == "cdé".encode()
    ids(pool, task, [[5, 6], [7, 8, 9]])
    (answer,) = pool.finish_all()
    assert results([answer])[1].usage.tokens == 5


def test_text_that_turns_out_too_long_is_refused() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, text("q", ["a", "b"]))
    (task,) = texts(pool.sent)
    ids(pool, task, [[1], list(range(101))])
    (failure,) = failures(pool.sent).values()
    assert (failure.code, failure.field, failure.limit) == ("bad_request", "items[1]", "100")


def test_text_of_a_lost_worker_goes_to_another_one() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, text("q", ["a"]))
    pool.do(ev.WorkerBroken(0, b"a", "gone"))
    pool.worker("b")
    first, second = texts(pool.sent)
    assert (first.link, second.link) == (b"a", b"b")
    ids(pool, second, [[1]])
    assert list(results(pool.finish_all())) == [1]


def test_status_counts_what_is_there() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker()
    for i in (1, 2, 3):
        pool.submit(client, i, work(8))
    (sent,) = pool.do(ev.StatusAsked(0, client, 5, 11, 12, (3, 4)))
    report = sent.message
    assert isinstance(report, StatusReport)
    (group,) = report.groups
    assert (report.id, report.client_unread_bytes, report.worker_unread_bytes, report.pauses) == (5, 11, 12, (3, 4))
    assert (group.queued, group.running, group.workers[0].batches) == (1, 2, 2)


def test_status_tells_what_waits_from_what_runs_and_how_long_the_oldest_has_waited() -> None:
    """Not how long that has waited which is next: what has a low priority waits longest."""
    pool = Pool()
    client = pool.client()
    pool.worker()

    def shown() -> tuple[int, int, int, float]:
        (sent,) = pool.do(ev.StatusAsked(0, client, 1))
        assert isinstance(sent.message, StatusReport)
        (group,) = sent.message.groups
        return group.queued, group.running, group.queued_tokens, group.oldest_s

    pool.submit(client, 1, work(8))
    pool.submit(client, 2, work(8))
    assert shown() == (0, 2, 0, 0.0)
    pool.submit(client, 3, work(8))
    pool.now += 3.0
    pool.submit(client, 4, work(2), priority=5)
    assert shown() == (2, 2, 100, 3.0)
    pool.do(ev.CancelAsked(0, client, 3))
    assert shown() == (1, 2, 20, 0.0)
    pool.now += 1.0
    pool.do(ev.CancelAsked(0, client, 4))
    pool.do(ev.Submit(0, client, 5, work(), 0, None, 9))
    pool.now += 1.0
    pool.submit(client, 6, text("q", ["a"]))
    assert shown() == (2, 2, 12, 1.0), "what waits for a version"
    pool.do(ev.CancelAsked(0, client, 5))
    pool.now += 1.0
    assert shown() == (1, 2, 2, 1.0), "text that waits for its ids"
    pool.finish(pool.batches[0])
    pool.do(ev.WorkerBroken(0, b"w", "nonsense"))
    assert shown() == (2, 0, 82, 6.0), "what runs again has waited since it came"


def test_refusals_of_one_do_not_touch_others() -> None:
    pool = Pool()
    pool.worker()
    good, bad = pool.client(), pool.client()
    pool.submit(good, 1, work())
    for i in range(1, 50):
        assert isinstance(pool.submit(bad, i, work(labels=()))[0].message, ErrorReply)
    assert list(results(pool.finish_all())) == [1]


def test_a_link_belongs_to_the_last_client_that_greeted_on_it() -> None:
    pool = Pool()
    link = pool.client(b"x", client=b"a" * 16)
    pool.submit(link, 1, work())
    pool.client(b"x", client=b"b" * 16)
    pool.worker()
    assert results(pool.finish_all()) == {}, "the first client's answer does not go to the second"


def test_text_that_a_worker_refuses_goes_to_another_one() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, text("q", ["a"]))
    (task,) = texts(pool.sent)
    assert isinstance(task.message, Tokenize)
    pool.worker("b")
    (again,) = texts(pool.do(ev.WorkerSaid(0, b"a", ErrorReply("shutting_down", "", task.message.task[1]))))
    assert again.link == b"b"
    ids(pool, again, [[1]])
    assert list(results(pool.finish_all())) == [1]


def test_text_that_a_reconnecting_worker_may_have_lost_is_sent_again() -> None:
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    pool.submit(client, 1, text("q", ["a"]))
    again = texts(pool.do(ev.WorkerRegistered(0, b"a2", "g", "a", 1, "h")))
    assert [s.link for s in again] == [b"a2"]


def test_many_texts_at_once_have_time_each() -> None:
    """A tokenizer that takes one after the other is healthy as long as each is done in time, however long all of them take."""
    pool = Pool()
    link = pool.worker()
    client = pool.client()
    for number in range(MOST_TEXTS):
        pool.submit(client, number, text("q", ["a"]))
    asked = texts(pool.sent)
    assert len(asked) == MOST_TEXTS
    for number, one in enumerate(asked[:6]):
        for _ in range(10):
            pool.do(ev.WorkerHeard(0, link))
            pool.do(ev.Heard(0, client))
            pool.finish_all()
            pool.wait(1.0)
        ids(pool, one, [[number]])
    assert pool.machine.core.groups["g"].workers
    for one in asked[7:]:
        ids(pool, one, [[1]])
    for _ in range(29):
        pool.do(ev.WorkerHeard(0, link))
        pool.do(ev.Heard(0, client))
        pool.finish_all()
        pool.wait(1.0)
    assert pool.machine.core.groups["g"].workers, "the one that is left has as much time as any other"
    pool.do(ev.WorkerHeard(0, link))
    pool.wait(2.0)
    assert not pool.machine.core.groups["g"].workers


@pytest.mark.parametrize(("before", "nbytes", "seconds"), [(0, 1, 30), (0, 1_000_000, 40), (1, 1_000_000, 40)])
def test_text_that_is_not_tokenized_in_time_loses_the_worker(before: int, nbytes: int, seconds: int) -> None:
    """One client's long text costs no worker that others need, only because it takes long. `before`: texts before it."""
    pool = Pool()
    client = pool.client()
    pool.worker("a")
    for number in range(before):
        pool.submit(client, number, text("q", ["a"]))
    pool.submit(client, before, text("q", ["a" * nbytes]))
    for one in texts(pool.sent)[:before]:
        ids(pool, one, [[1]])
    workers = pool.machine.core.groups["g"].workers
    for second in range(seconds + 2):
        assert workers or second >= seconds
        pool.do(ev.WorkerHeard(0, b"a"))
        pool.do(ev.Heard(0, client, 0))
        pool.finish_all()
        pool.wait(1)
    assert not workers


@pytest.mark.parametrize("early", [False, True], ids=["worker first", "request first"])
def test_text_for_a_model_without_a_tokenizer_is_refused_with_what_to_send(early: bool) -> None:
    pool = Pool()
    client = pool.client()
    without = msgspec.structs.replace(CAN, text=False)
    if not early:
        pool.worker(can=without)
    pool.submit(client, 1, text("q", ["x"]))
    if early:
        pool.worker(can=without)
    (failure,) = failures(pool.sent).values()
    assert (failure.code, failure.field) == ("bad_request", "query")
    assert failure.message == "query: the model has no tokenizer: send token ids"
    assert not texts(pool.sent)


@pytest.mark.parametrize("code", ["shutting_down", "hello_required", "busy", "superseded", "x" * 2000])
def test_a_failed_part_has_no_code_that_is_about_the_link_or_the_pool(code: str) -> None:
    """A client that gets one would greet again, or pause its requests to all groups."""
    pool = Pool()
    link, worker = pool.client(), pool.worker()
    pool.submit(link, 1, work())
    [batch] = batch_ids(pool)
    failed = pool.do(ev.BatchDone(0, worker, batch, [ev.Outcome([], [], code, "it says so")], 0, 1, 1))
    assert [(error.code, error.message) for error in failures(failed).values()] == [("engine_error", "it says so")]


def test_a_failed_part_tells_what_is_wrong_with_its_request() -> None:
    pool = Pool()
    link, worker = pool.client(), pool.worker()
    pool.submit(link, 1, work())
    [batch] = batch_ids(pool)
    assert codes(pool.do(ev.BatchDone(0, worker, batch, [ev.Outcome([], [], "malformed", "")], 0, 1, 1))) == ["malformed"]


def batch_ids(pool: Pool) -> list[TaskId]:
    return [sent.message.batch for sent in pool.batches if isinstance(sent.message, Batch)]
