"""Answers are charged when their requests are admitted: to the client's window, and to the pool's one total."""

import gc
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.participants import with_worker
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.core.request_state import DONE
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import ScoreWork
from enginepool.coordinator.requests.memory import Bound, answer_bytes, misfit, request_bytes, unread_bytes
from enginepool.coordinator.requests.reply_cache import ReplyCache
from enginepool.coordinator.shell.host_memory import bounds
from enginepool.protocol.basis import RESULT_BYTES
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import Capabilities, ErrorReply, FrameSpec, Result, Timings, Tokenize, Usage
from enginepool.protocol.messages.control import Control
from tests.core.generations import CAN as GENERATES
from tests.core.generations import generate
from tests.core.invariants import check_replies
from tests.core.machines import CAN, Pool, codes, config, failures, results, text, texts, work

MB = 1 << 20
WIDE = msgspec.structs.replace(CAN, vocab=5000)
CLASSIFIER = Capabilities("classifier", 1000, 100, 100, 8, 200, 16, labels=2, hidden=4096)
LABELS = tuple(range(4096))


def test_a_small_request_for_a_huge_answer_is_refused_with_the_limit() -> None:
    pool = Pool(config())
    pool.worker(can=WIDE)
    content = work(20_000, 1, labels=LABELS)
    assert content.nbytes < 200_000
    (failure,) = failures(pool.submit(pool.client(), 1, content)).values()
    assert (failure.code, failure.field, failure.limit) == ("too_large", "items", str(64 * MB))
    assert str(20_000) in failure.message and str(4096) in failure.message
    assert pool.machine.core.live_bytes == 0


def test_expected_answers_fill_the_window_of_their_client_and_no_more() -> None:
    limits = Limits(window_bytes=60 * MB, buffer_bytes=120 * MB)
    pool = Pool(config(limits=limits))
    content = work(1000, 1, labels=LABELS)  # an answer of 16 MB
    greedy, other, third, fourth = (pool.client() for _ in range(4))
    said = [codes(pool.submit(greedy, i, content)) for i in range(5)]
    assert said == [[], [], [], ["busy"], ["busy"]]
    (failure,) = failures(pool.submit(greedy, 9, content)).values()
    assert (failure.field, failure.limit) == ("window_bytes", str(60 * MB))
    assert [codes(pool.submit(other, i, content)) for i in range(3)] == [[], [], ["busy"]]
    assert codes(pool.submit(third, 1, content)) == []
    (failure,) = failures(pool.submit(fourth, 1, content)).values()
    assert (failure.code, failure.field, failure.limit) == ("busy", "buffer_bytes", str(120 * MB))
    assert codes(pool.submit(fourth, 2, work())) == [], "small ones still pass"
    pool.do(ev.CancelAsked(0, greedy, 0))
    assert codes(pool.submit(fourth, 3, content)) == []


def test_what_a_client_has_not_read_counts_against_its_window_and_the_total() -> None:
    limits = Limits(max_message_bytes=MB, window_bytes=2 * MB, buffer_bytes=4 * MB)
    pool = Pool(config(limits=limits))
    client = pool.client()

    def submit(id_: int, unread: int, outboxes: int) -> list[tuple[str, str]]:
        sent = pool.do(ev.Submit(0, client, id_, work(), 0, None, unread=unread, outboxes=outboxes))
        return [(failure.code, failure.field) for failure in failures(sent).values()]

    assert submit(1, 0, 0) == []
    assert submit(2, 2 * MB, 2 * MB) == [("busy", "window_bytes")]
    assert submit(3, 0, 4 * MB) == [("busy", "buffer_bytes")]
    assert submit(4, MB, MB) == []


def test_what_is_sent_again_takes_half_of_the_total_and_a_part_of_what_is_left_of_that() -> None:
    """No client is charged for it: peers that ask again and again and read nothing would take the room of all others."""
    limits = Limits(max_message_bytes=MB, window_bytes=MB, buffer_bytes=4 * MB)
    pool = Pool(config(limits=limits))
    client = pool.client()
    pool.worker()
    pool.submit(client, 1, work())
    (answer,) = (sent for sent in pool.finish_all() if isinstance(sent.message, Result))
    nbytes = sum(map(len, answer.frames))

    def again(unread: int, outboxes: int) -> list[str]:
        sent = pool.do(ev.Submit(0, client, 1, work(), 0, None, unread=unread, outboxes=outboxes))
        assert len(sent) == 1 and (isinstance(sent[0].message, Result) or failures(sent)[1].field == "buffer_bytes")
        return codes(sent)

    assert again(0, 0) == again(2 * MB, MB) == again(0, 2 * MB - 2 * nbytes) == []
    assert again(0, 2 * MB) == ["busy"]
    more = MB + 100
    assert again(MB, more) == ["busy"] and again(2 * MB - more - 2 * nbytes, more) == []


def test_kept_answers_make_room_for_new_requests() -> None:
    limits = Limits(max_message_bytes=64_000, window_bytes=64_000, buffer_bytes=128_000, answers_bytes=128_000)
    pool = Pool(config(limits=limits))
    client, core = pool.client(), pool.machine.core
    pool.worker()
    for i in range(80):
        assert codes(pool.submit(client, i, work())) == []
        assert i in results(pool.finish_all())
        assert core.live_bytes + core.answers.nbytes <= 128_000
    full = core.answers.nbytes
    assert codes(pool.submit(client, 100, work(50, 1, labels=tuple(range(200))))) == []
    assert core.answers.nbytes < full


def held(pool: Pool) -> list[Request]:
    """The requests in memory that have their answer, and still their payload."""
    gc.collect()
    mine = {id(client) for client in pool.machine.core.clients.values()}
    requests = [one for one in gc.get_objects() if type(one) is Request and id(one.client) in mine]
    return [request for request in requests if request.state == DONE and request.work.frames]


@pytest.mark.parametrize("where", ["queue", "version_queue", "texts", "generations"])
@pytest.mark.parametrize("end", ["cancelled", "deadline_exceeded"])
def test_requests_that_have_their_answer_leave_no_payload_in_a_queue(where: str, end: str) -> None:
    pool = Pool(config())
    client = pool.client()
    content = text("a query", ["an item"]) if where == "texts" else generate(3) if where == "generations" else work(2, 3)
    version = 1 if where == "version_queue" else 0
    pool.do(ev.Submit(0, client, 0, content, 0, None, version))  # at the top of the queue
    for id_ in range(1, 20):
        deadline = None if end == "cancelled" else pool.now + 1.0
        pool.do(ev.Submit(0, client, id_, content, 0, deadline, version))
    sent = pool.wait(1.5) if end != "cancelled" else pool.do(*(ev.CancelAsked(0, client, id_) for id_ in range(1, 20)))
    assert codes(sent) == [end] * 19
    assert not held(pool)


@pytest.mark.parametrize("content", [work(40, 10), generate(3, n=20)], ids=["rows", "sequences"])
def test_a_request_of_which_a_part_ran_leaves_no_payload_in_a_queue_either(content: Work) -> None:
    pool = Pool()
    client = pool.client()
    pool.worker(can=CAN if isinstance(content, ScoreWork) else GENERATES)
    pool.submit(client, 1, content)
    assert pool.machine.core.groups["g"].cut
    pool.do(ev.ControlAsked(0, b"operator", Control(1, "pause", mode="abort" if pool.batches else "in_place")))
    assert codes(pool.do(ev.CancelAsked(0, client, 1))) == ["cancelled"]
    pool.finish_all()
    assert not held(pool)


def test_a_suspect_text_that_ends_while_it_is_tokenized_leaves_no_payload_in_the_queue_where_it_waited() -> None:
    pool = Pool()
    client = pool.client()
    pool.submit(client, 1, text("a", ["b"]))
    [request] = pool.machine.core.groups["g"].live
    pool.machine.requests.blame([(request, False)], "it was not done")
    pool.worker()
    [asked] = texts(pool.sent)
    assert isinstance(asked.message, Tokenize)
    assert codes(pool.do(ev.CancelAsked(0, client, 1))) == ["cancelled"]
    pool.do(ev.TextTokenized(0, asked.link, asked.message.task, [], []))
    assert not held(pool)


def test_deadlines_hold_no_request_that_has_its_answer() -> None:
    pool = Pool(config())
    client = pool.client()
    pool.worker()
    pool.do(ev.Submit(0, client, 1, work(), 0, pool.now + 60.0))
    assert len(results(pool.finish_all())) == 1 and len(pool.machine.core.deadlines) == 1
    assert not held(pool)


def test_hidden_states_are_charged_and_text_is_charged_as_ids() -> None:
    plain, hidden = work(10, labels=()), work(10, labels=(), hidden=True)
    assert answer_bytes(hidden, CLASSIFIER) - answer_bytes(plain, CLASSIFIER) == 10 * 4096 * 4
    words = text("query " * 100, ["a"] * 50)
    assert request_bytes(words) > 50 * 601 * 4, "each row is tokenized with its query"


def test_what_a_request_takes_is_known_better_once_a_worker_is_ready() -> None:
    pool = Pool(config(limits=Limits(max_message_bytes=MB, window_bytes=100 * MB)))
    client = pool.client()
    assert codes(pool.submit(client, 1, work(20, labels=(), hidden=True))) == []
    assert codes(pool.submit(client, 2, work(100, 1, labels=(), hidden=True))) == []
    guessed = pool.machine.core.live_bytes
    pool.worker(can=CLASSIFIER)
    (failure,) = failures(pool.sent).values()
    assert (failure.id, failure.code, failure.field) == (2, "too_large", "items"), "1.6 MB, of 1 MB"
    assert pool.machine.core.live_bytes < guessed


def test_peers_that_read_are_not_disconnected_when_requests_turn_out_larger_than_they_were_charged() -> None:
    limits = Limits(max_message_bytes=MB, window_bytes=8 * MB, buffer_bytes=16 * MB)
    pool = Pool(config(limits=limits))
    client = pool.client()
    for id_ in range(30):
        assert codes(pool.submit(client, id_, work(50, 1, labels=()))) == []
    pool.worker(can=msgspec.structs.replace(CLASSIFIER, labels=4096))
    live = pool.machine.core.live_bytes
    assert live > limits.buffer_bytes, "a head of 1024 columns was charged"
    assert unread_bytes(live, limits) == limits.buffer_bytes // 10
    assert unread_bytes(0, limits) == limits.buffer_bytes * 21 // 20


def test_text_that_no_message_could_carry_as_ids_is_refused() -> None:
    pool = Pool(config(limits=Limits(max_message_bytes=100_000)))
    (failure,) = failures(pool.submit(pool.client(), 1, text("q" * 10_000, ["a"] * 10))).values()
    assert (failure.code, failure.field) == ("too_large", "items")
    assert "token ids" in failure.message


def test_a_client_with_a_limit_of_its_own_gets_no_longer_answer() -> None:
    pool = Pool()
    pool.worker(can=WIDE)
    small = b"small"
    pool.do(ev.ClientHello(0, small, b"c" * 16, b"t" * 16, 0, max_message_bytes=MB))
    content = work(8, 1, labels=LABELS)
    assert codes(pool.submit(small, 1, content)) == []
    large = work(100, 1, labels=LABELS)
    (failure,) = failures(pool.submit(small, 2, large)).values()
    assert (failure.code, failure.limit) == ("too_large", str(MB))
    other = pool.client()
    assert codes(pool.submit(other, 1, large)) == []


def test_an_answer_that_its_client_no_longer_takes_ends_as_too_large_and_is_final() -> None:
    pool = Pool()
    pool.worker(can=msgspec.structs.replace(WIDE, batch_rows=100, inflight_rows=200))
    before, after = b"before", b"after"
    pool.do(ev.ClientHello(0, before, b"c" * 16, b"t" * 16, 0))
    content = work(100, 1, labels=LABELS)
    pool.submit(before, 1, content)
    pool.do(ev.ClientHello(0, after, b"c" * 16, b"t" * 16, 1, max_message_bytes=MB))
    assert failures(pool.finish_all())[1].code == "too_large"
    assert failures(pool.submit(after, 1, content))[1].code == "too_large"
    assert pool.batches == [], "it is not computed again"


def test_a_kept_answer_is_not_given_to_a_link_that_takes_less() -> None:
    pool = Pool()
    pool.worker(can=msgspec.structs.replace(WIDE, batch_rows=100, inflight_rows=200))
    before, after = b"before", b"after"
    pool.do(ev.ClientHello(0, before, b"c" * 16, b"t" * 16, 0))
    content = work(100, 1, labels=LABELS)
    pool.submit(before, 1, content)
    assert 1 in results(pool.finish_all())
    pool.do(ev.ClientHello(0, after, b"c" * 16, b"t" * 16, 1, max_message_bytes=MB))
    assert failures(pool.submit(after, 1, content))[1].code == "too_large"
    assert pool.batches == []


@given(rows=st.integers(1, 5000), labels=st.integers(1, 4096), names=st.lists(st.text(max_size=90), max_size=60))
def test_the_header_of_a_result_is_within_what_is_charged_for_it(rows: int, labels: int, names: list[str]) -> None:
    names_of = "logprobs", "labels", "top_ids", "top_logprobs"  # no answer has more frames
    specs = [FrameSpec(name, "float32", (rows, 2**31 * labels)) for name in names_of]
    workers: list[str] = []
    for name in names:
        workers = with_worker(workers, name)
    times = Timings(2**62, 2**62)
    result = Result(2**63 - 1, 2**63 - 1, [1] * rows, Usage(rows, 2**62), times, specs, truncated=rows, workers=workers)
    assert len(encode_header(result)) <= RESULT_BYTES + 2 * rows


# --- kept answers ------------------------------------------------------------------------------------------------------


def client(name: bytes) -> Client:
    return Client(name, b"t", 0, b"link", 0.0, 1)


def test_large_answers_of_one_client_do_not_displace_those_of_others() -> None:
    answers = ReplyCache(60.0, 10 * MB)
    small, big = [client(b"%d" % i) for i in range(50)], client(b"big")
    for i in range(20):
        for one in small:
            answers.add(one, i, 0, ErrorReply("cancelled", ""), (bytes(100),), 0.0)
    for i in range(30):
        answers.add(big, i, 0, ErrorReply("cancelled", ""), (bytes(3 * MB),), 0.0)
        check_replies(answers)
    assert all(answers.get(one, i) is not None for one in small for i in range(20))
    assert [i for i in range(30) if answers.get(big, i) is not None] == [28, 29]


def test_a_client_that_acknowledged_large_answers_keeps_its_small_one() -> None:
    answers = ReplyCache(60.0, 10 * MB)
    was_big, other = client(b"was big"), client(b"other")
    for i in range(3):
        answers.add(was_big, i, 0, ErrorReply("cancelled", ""), (bytes(3 * MB if i else 100),), 0.0)
    for i in (1, 2):
        answers.drop(was_big, i)
    for i in range(12):
        answers.add(other, i, 0, ErrorReply("cancelled", ""), (bytes(MB),), 0.0)
        check_replies(answers)
    assert answers.get(was_big, 0) is not None
    assert [i for i in range(12) if answers.get(other, i) is not None] == list(range(3, 12))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 4000), st.booleans()), max_size=60))
def test_answers_are_always_within_their_bytes(steps: list[tuple[int, int, int, bool]]) -> None:
    clients = [client(b"%d" % i) for i in range(4)]
    answers = ReplyCache(60.0, 12_000)
    known: set[tuple[int, int]] = set()
    for who, id_, size, add in steps:
        if add and (who, id_) not in known:
            answers.add(clients[who], id_, 0, ErrorReply("cancelled", ""), (bytes(size),), 0.0)
        elif id_ == 5:
            answers.drop_client(clients[who])
        else:
            answers.drop(clients[who], id_)
        check_replies(answers)
        known = {(w, i) for w in range(4) for i in range(6) if answers.get(clients[w], i) is not None}
        assert len(answers) == len(known)


@pytest.mark.parametrize("nbytes", [1, MB - 1])
def test_a_limit_below_the_longest_header_is_refused(nbytes: int) -> None:
    from enginepool.coordinator.shell.decode import client_event
    from enginepool.protocol.errors import WireError
    from enginepool.protocol.messages import Hello

    hello = Hello(b"c" * 16, b"t" * 16, max_message_bytes=nbytes)
    with pytest.raises(WireError) as caught:
        client_event(0.0, b"link", [encode_header(hello)], MB)
    assert caught.value.field == "max_message_bytes"


# --- the memory of the process -----------------------------------------------------------------------------------------


def test_buffers_are_held_to_the_tightest_bound_of_the_process() -> None:
    limits = Limits(max_message_bytes=MB, window_bytes=10 * MB, buffer_bytes=100 * MB)
    assert misfit(limits, []) == ("", False)
    assert misfit(limits, [Bound("RLIMIT_AS", 1000 * MB, 100 * MB)]) == ("", False)
    what, impossible = misfit(limits, [Bound("RLIMIT_AS", 220 * MB, 100 * MB), Bound("a group", 1000 * MB, 0)])
    assert not impossible and "close to RLIMIT_AS" in what
    what, impossible = misfit(limits, [Bound("a group", 220 * MB, 100 * MB), Bound("RLIMIT_AS", 150 * MB, 100 * MB)])
    assert impossible and "does not fit RLIMIT_AS" in what and what.endswith(f"at most {48 * MB}")


def test_the_limits_of_control_groups_are_found(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    put("proc/self/statm", "1000 200 100 1 0 50 0\n")
    put("proc/self/cgroup", "4:memory:/outer/inner\n3:cpu:/\n0::/a/b\n")
    put("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "5000000\n")
    put("sys/fs/cgroup/memory/outer/inner/memory.limit_in_bytes", "9223372036854771712\n")
    put("sys/fs/cgroup/a/memory.max", "7000000\n")
    put("sys/fs/cgroup/a/b/memory.max", "max\n")
    page = os.sysconf("SC_PAGE_SIZE")
    found = [(bound.name, bound.most, bound.used) for bound in bounds(tmp_path) if bound.name != "RLIMIT_AS"]
    assert found == [
        ("the memory limit of /sys/fs/cgroup/memory/outer/memory.limit_in_bytes", 5_000_000, 200 * page),
        ("the memory limit of /sys/fs/cgroup/a/memory.max", 7_000_000, 200 * page),
    ]
    assert bounds(tmp_path / "nowhere") == []
