"""The daemon keeps the promises of the specification to peers that were written from it alone, over real sockets."""

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bench.processes import free_port
from enginepool.config import GroupConfig, PoolConfig
from enginepool.workers.sim.scores import expected_scores
from tests.process.daemons import Daemon
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.wire.plain_client import PlainClient
from tests.wire.plain_worker import PlainWorker, toy_score, toy_tokens
from tests.wire.test_vectors import INVALID, frames_of

Context = zmq.Context[zmq.Socket[bytes]]
#: a group of external workers
DIAL_IN = GroupConfig(model="toy", engine="sim", workers=0)
#: what a client may send to any pool, and must be refused with any model
REFUSED = [v for v in INVALID if v["direction"] == "client-coordinator" and v["invalid"]["stage"] != "model"]


def listening(processes: Processes, folder: Path, group: GroupConfig, after: Daemon | None = None) -> Daemon:
    """A coordinator that listens: on free ports of this host, which no other process is given, or where an earlier one did."""
    clients, workers = (after.address, after.workers) if after else (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    config = PoolConfig(
        {"policy": group}, listen=clients, listen_workers=workers, insecure_loopback=True, state_dir=str(folder)
    )
    return ForkedDaemon(processes, config).listening()


@contextmanager
def plain_workers(context: Context, address: str, n: int, silence_s: float = 60.0) -> Generator[list[PlainWorker]]:
    """`n` plain workers, each on a thread of its own; they look for another coordinator after so long a silence."""
    over = threading.Event()
    found: list[PlainWorker] = []

    def work(ready: threading.Event) -> None:
        worker = PlainWorker(context, address, "policy", silence_s=silence_s)
        found.append(worker)
        ready.set()
        while not worker.ended and not over.is_set():
            worker.step(20)
        if not worker.ended:
            worker.end("the test is over")

    threads: list[threading.Thread] = []
    try:
        for _ in range(n):
            ready = threading.Event()
            threads.append(threading.Thread(target=work, args=(ready,)))
            threads[-1].start()
            assert ready.wait(100)
        yield found
    finally:
        over.set()
        for thread in threads:
            thread.join(100)


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    made = Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, context: Context) -> Iterator[Daemon]:
    """A daemon of one group, which two plain workers serve."""
    with Processes() as processes:
        daemon = listening(processes, tmp_path_factory.mktemp("pool"), DIAL_IN)
        with plain_workers(context, daemon.workers, 2):
            yield daemon


@pytest.fixture
def client(pool: Daemon, context: Context) -> Iterator[PlainClient]:
    plain = PlainClient(context, pool.address)
    plain.hello()
    yield plain
    plain.goodbye()


def expected(rows: list[list[int]], labels: list[int]) -> list[list[float]]:
    return [[toy_score(row, label) for label in labels] for row in rows]


def next_answer(client: PlainClient) -> dict[str, Any]:
    """The header of the next result or error, which is not acknowledged."""
    while client.socket.poll(30_000):
        header: dict[str, Any] = msgspec.msgpack.decode(client.socket.recv_multipart()[0])
        if header["type"] in ("result", "error"):
            return header
    raise AssertionError("no answer came")


def test_ids_are_scored_by_plain_peers_on_both_sides(client: PlainClient) -> None:
    answer = client.score([11, 12, 13], [[21, 22], [23], []], labels=[5, 6])
    assert answer.rows() == expected([[11, 12, 13, 21, 22], [11, 12, 13, 23], [11, 12, 13]], [5, 6])
    assert answer.header["forwards"] == [1]
    assert answer.header["usage"] == [3, 12]
    turned = client.score([11, 12, 13], [[21, 22]], labels=[5], item_first=True)
    assert turned.rows() == expected([[21, 22, 11, 12, 13]], [5])


def test_each_item_may_have_a_query_of_its_own(client: PlainClient) -> None:
    answer = client.score([[11], [12, 13]], [[21, 22], [23]], labels=[5])
    assert answer.rows() == expected([[11, 21, 22], [12, 13, 23]], [5])


def test_text_is_tokenized_by_a_worker_as_one_text_a_row(client: PlainClient) -> None:
    answer = client.score("Good? ", ["Ja", "Grüße"], labels=[5, 6])
    assert answer.rows() == expected([toy_tokens("Good? Ja"), toy_tokens("Good? Grüße")], [5, 6])
    pairs = client.score(["a", "b"], ["c", "de"], labels=[5], item_first=True)
    assert pairs.rows() == expected([toy_tokens("ca"), toy_tokens("deb")], [5])


def test_a_request_over_the_budget_of_a_worker_is_cut_and_put_together_in_order(client: PlainClient) -> None:
    items = [[2 + i, 3] for i in range(50)]
    answer = client.score([1, 2, 3], items, labels=[5, 6, 7])
    assert answer.rows() == expected([[1, 2, 3, *item] for item in items], [5, 6, 7])
    assert answer.header["usage"] == [50, 250]
    assert len(answer.header["forwards"]) >= 50 // 8
    assert set(answer.header["forwards"]) == {1}


def test_many_requests_in_flight_are_each_answered_once(client: PlainClient) -> None:
    cases = {client.submit([n], [[n + 1], [n + 2]], labels=[n], priority=n % 7 - 3): n for n in range(1, 200)}
    for id_, n in cases.items():
        assert client.wait(id_).rows() == expected([[n, n + 1], [n, n + 2]], [n])
    assert client.answers == {}
    assert client.unanswered == {}


@pytest.mark.parametrize("vector", REFUSED, ids=lambda v: v["name"])
def test_an_invalid_vector_is_answered_with_its_code_and_field_and_harms_no_other_client(
    vector: dict[str, Any], client: PlainClient
) -> None:
    client.socket.send_multipart(frames_of(vector))
    want = vector["invalid"]
    answer = next_answer(client)
    assert (answer["code"], answer.get("field", "")) == (want["code"], want["field"])
    assert client.score([1], [[2]], labels=[3]).rows() == expected([[1, 2]], [3])


def test_a_label_outside_the_vocabulary_is_refused_with_the_limit(client: PlainClient) -> None:
    answer = client.score([1], [[2]], labels=[300])
    assert [answer.header.get(key) for key in ("code", "field", "limit")] == ["bad_request", "labels", "300"]
    unknown = client.score([1], [[2]], labels=[3], group="poetry")
    assert [unknown.header.get(key) for key in ("code", "field", "limit")] == ["unknown_group", "group", "policy"]


def test_an_answer_is_kept_for_a_resend_until_it_is_acknowledged_and_its_id_is_taken(client: PlainClient) -> None:
    id_ = client.submit([1], [[2]], labels=[3])
    sent = client.unanswered[id_]
    first = next_answer(client)
    assert (first["type"], first["id"]) == ("result", id_)
    client.send({**sent.header, "labels": [4]}, sent.payload)
    reused = next_answer(client)
    assert (reused["code"], reused["id"], reused["field"]) == ("id_reused", id_, "id")
    client.post(id_)
    assert next_answer(client) == first
    client.post(id_)
    assert client.wait(id_).rows() == expected([[1, 2]], [3])


def test_the_first_of_result_and_cancelled_is_the_only_answer(client: PlainClient) -> None:
    ids = [client.submit([n], [[n]], labels=[3]) for n in range(1, 30)]
    for id_ in ids:
        client.cancel(id_)
    for n, id_ in enumerate(ids, 1):
        answer = client.wait(id_)
        assert answer.header.get("code") == "cancelled" or answer.rows() == expected([[n, n]], [3])


def test_the_status_names_the_group_and_its_workers(client: PlainClient) -> None:
    client.score([1], [[2]], labels=[3])
    (group,) = client.status()["groups"]
    assert group["name"] == "policy"
    assert group["model"] in ("toy", "")
    assert [worker["stage"] for worker in group["workers"]] == ["ready", "ready"]


def test_the_highest_incarnation_of_a_client_wins_and_its_secret_proves_it(client: PlainClient, context: Context) -> None:
    second = PlainClient(context, client.address)
    second.client, second.token, second.incarnation = client.client, client.token, client.incarnation
    second.hello()
    assert second.score([1], [[2]], labels=[3]).rows() == expected([[1, 2]], [3])

    thief = PlainClient(context, client.address)
    thief.client, thief.incarnation = client.client, 1000
    thief.greet()
    late = PlainClient(context, client.address)
    late.client, late.token, late.incarnation = client.client, client.token, -1
    late.greet()
    for peer, code in ((thief, "unauthorized"), (late, "superseded")):
        while not peer.complaints:
            peer.step(float("inf"))
        assert peer.complaints[0]["code"] == code
        peer.socket.close(0)
    second.goodbye()


def test_every_request_of_a_link_without_hello_is_answered_hello_required_under_its_id(
    client: PlainClient, context: Context
) -> None:
    stranger = PlainClient(context, client.address)
    publish = {"type": "publish", "version": 3, "transfer": "set_version"}
    sent = {"type": "sent", "digest": "", "sent_bytes": 0}
    for header in (publish, {"type": "renew"}, sent, {"type": "commit"}, {"type": "abort"}, {"type": "cancel"}):
        stranger.send({**header, "id": 8})
        refusal = next_answer(stranger)
        assert (refusal["code"], refusal["id"]) == ("hello_required", 8)
    for kind in ("ping", "pong"):
        stranger.send({"type": kind}, [b"that nobody reads"])
        assert next_answer(stranger)["code"] == "hello_required"
    for kind in ("ack", "goodbye"):
        stranger.send({"type": kind, "ids": [1]})
    stranger.send({"type": "inspect_weights", "id": 9, "group": "none such"})
    refusal = next_answer(stranger)
    assert (refusal["code"], refusal["id"]) == ("unknown_group", 9), "a question needs no hello, and its error has its id"
    stranger.socket.close(0)


def test_of_two_links_with_one_incarnation_the_later_one_is_the_client_s(client: PlainClient, context: Context) -> None:
    other = PlainClient(context, client.address)
    other.client, other.token, other.incarnation = client.client, client.token, client.incarnation - 1
    other.hello()
    client.send({"type": "cancel", "id": 1})
    assert next_answer(client)["code"] == "hello_required"
    assert other.score([1], [[2]], labels=[3]).rows() == expected([[1, 2]], [3])
    other.goodbye()


def test_what_answers_a_hello_repeats_its_incarnation_and_no_other_error_has_one(client: PlainClient, context: Context) -> None:
    def ask(incarnation: int, **changes: Any) -> dict[str, Any]:
        peer = PlainClient(context, client.address)
        peer.send({"type": "hello", "client": client.client, "token": client.token, "incarnation": incarnation, **changes})
        assert peer.socket.poll(30_000)
        header: dict[str, Any] = msgspec.msgpack.decode(peer.socket.recv_multipart()[0])
        peer.socket.close(0)
        return header

    def facts(header: dict[str, Any]) -> tuple[Any, ...]:
        return header["type"], header.get("code"), header.get("incarnation")

    assert client.welcome.get("incarnation", 0) == client.incarnation
    assert facts(ask(9, token=bytes(16))) == ("error", "unauthorized", 9)
    assert facts(ask(10, protocol=2)) == ("error", "protocol_version", 10)
    assert facts(ask(11, client=b"short")) == ("error", "bad_request", 11)
    assert facts(ask(12, agent=7)) == ("error", "bad_request", 12)
    assert facts(ask(13)) == ("welcome", None, 13)
    assert facts(ask(3)) == ("error", "superseded", 3)
    client.send({"type": "cancel", "id": 1})
    assert facts(next_answer(client)) == ("error", "hello_required", None)
    client.incarnation = 13
    client.hello()


def test_a_client_learns_the_limits_of_a_group_and_is_served_up_to_them(client: PlainClient) -> None:
    client.score([1], [[2]], labels=[3])
    limits = client.status()["groups"][0]["limits"]
    assert limits["kind"] == "causal"
    context, vocab = limits["context"], limits["vocab"]
    assert "scores" in client.score([1], [[2] * (context - 1)], labels=[vocab - 1]).arrays
    longer = client.score([1], [[2] * context], labels=[3]).header
    assert (longer["code"], longer["field"], longer["limit"]) == ("bad_request", "items[0]", str(context))
    larger = client.score([1], [[vocab]], labels=[3]).header
    assert (larger["code"], larger["limit"]) == ("bad_request", str(vocab))
    more = client.score([], [[1]] * (limits["items"] + 1), labels=[3]).header
    assert (more["code"], more["field"], more["limit"]) == ("bad_request", "items", str(limits["items"]))


@contextmanager
def greeted(context: Context, daemon: Daemon) -> Generator[PlainClient]:
    plain = PlainClient(context, daemon.address)
    plain.hello()
    yield plain
    plain.goodbye()


def test_a_deadline_without_a_worker_is_kept(processes: Processes, tmp_path: Path, context: Context) -> None:
    with greeted(context, listening(processes, tmp_path, DIAL_IN)) as plain:
        answer = plain.score([1], [[2]], labels=[3], timeout_s=0.2)
        assert answer.header["code"] == "deadline_exceeded"


def test_plain_peers_find_a_restarted_coordinator_and_nothing_is_lost(
    processes: Processes, tmp_path: Path, context: Context
) -> None:
    first = listening(processes, tmp_path, DIAL_IN)
    plain = PlainClient(context, first.address)
    epoch = plain.hello()["epoch"]
    waiting = plain.submit([1], [[2]], labels=[3])
    first.kill()
    second = listening(processes, tmp_path, DIAL_IN, after=first)
    with plain_workers(context, second.workers, 1):
        assert plain.wait(waiting).rows() == expected([[1, 2]], [3])
        assert plain.epoch > epoch
        plain.goodbye()


def test_a_coordinator_that_ends_refuses_what_is_new_and_the_next_one_takes_it_under_a_new_id(
    processes: Processes, tmp_path: Path, context: Context
) -> None:
    first = listening(processes, tmp_path, DIAL_IN)
    plain = PlainClient(context, first.address)
    epoch = plain.hello()["epoch"]
    begun = plain.submit([1], [[2]], labels=[3])
    while not plain.status()["groups"][0].get("queued"):
        assert not plain.answers
    first.process.terminate()
    while not plain.status().get("draining"):
        assert not plain.answers
    refused = plain.score([1], [[4]], labels=[3]).header
    assert (refused["code"], refused.get("final", True)) == ("shutting_down", True)
    # Nothing else is left: it ends. The answer of this one may be lost with the link, and then it is asked again.
    plain.cancel(begun)
    first.process.wait(100)
    second = listening(processes, tmp_path, DIAL_IN, after=first)
    with plain_workers(context, second.workers, 1):
        assert plain.score([1], [[4]], labels=[3]).rows() == expected([[1, 4]], [3])
        assert plain.epoch > epoch
        last = plain.wait(begun)
        assert last.header.get("code") == "cancelled" or last.rows() == expected([[1, 2]], [3])
        plain.goodbye()


def test_a_plain_worker_is_adopted_by_the_next_coordinator(processes: Processes, tmp_path: Path, context: Context) -> None:
    first = listening(processes, tmp_path, DIAL_IN)
    with plain_workers(context, first.workers, 1, silence_s=2.5) as (worker,):
        plain = PlainClient(context, first.address)
        plain.hello()
        assert plain.score([1], [[2]], labels=[3]).rows() == expected([[1, 2]], [3])
        first.kill()
        listening(processes, tmp_path, DIAL_IN, after=first)
        assert plain.score([1], [[2]], labels=[3]).rows() == expected([[1, 2]], [3])
        assert worker.epoch == plain.epoch
        plain.goodbye()


def test_a_plain_client_is_served_by_the_package_s_own_workers(processes: Processes, tmp_path: Path, context: Context) -> None:
    daemon = listening(processes, tmp_path, GroupConfig(model="sim", engine="sim", workers=1))
    with greeted(context, daemon) as plain:
        answer = plain.score([11, 12, 13], [[21, 22], [23]], labels=[5, 6])
        want = expected_scores([11, 12, 13], [[21, 22], [23]], labels=[5, 6])["scores"]
        assert answer.rows() == want.tolist()
