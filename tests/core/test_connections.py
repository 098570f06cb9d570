"""How many connections the sockets of a coordinator may have, from the files that its process may open."""

import os
import socket
import time
from pathlib import Path

import zmq
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.shell.connections import EACH_WORKER, OPEN_FILES, RESERVE, Connections, shares
from enginepool.errors import ConfigError
from enginepool.protocol.messages import Welcome
from tests.core.machines import Pool, codes, config, failures, work


@given(st.integers(1, OPEN_FILES), st.integers(1, 100_000), st.integers(0, 4096))
def test_connections_leave_descriptors_for_everything_else(files: int, clients: int, workers: int) -> None:
    try:
        found = shares(files, clients, workers)
    except ConfigError as error:
        least = int(str(error).split("needs ")[1].split()[0])
        assert least > files and shares(least, clients, workers).welcome >= 1
        return
    assert found.clients + found.workers + RESERVE + EACH_WORKER * workers <= files
    assert 1 <= found.welcome <= min(clients, found.clients)
    assert found.workers >= 2 * workers, "each can connect, also while the one before it is still connected"


def test_a_default_limit_fits_the_usual_number_of_files() -> None:
    assert shares(OPEN_FILES, Limits().clients, 64).welcome == Limits().clients
    assert shares(OPEN_FILES, Limits().clients, 64).proven
    assert shares(1024, Limits().clients, 8).welcome > 200


def test_connections_above_the_limit_are_closed_and_told_of_once(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    connections = Connections(context, router, 5, 1 << 20)
    router.bind(f"ipc://{tmp_path}/x.sock")
    told = 0
    peers: list[socket.socket] = []

    def wait(count: int) -> None:
        nonlocal told
        until = time.monotonic() + 30.0
        while len(connections) != count:
            assert time.monotonic() < until, len(connections)
            time.sleep(0.01)
            told += connections.read()

    try:
        for _ in range(12):
            peer = socket.socket(socket.AF_UNIX)
            peer.connect(f"{tmp_path}/x.sock")
            peers.append(peer)
        wait(5)
        until = time.monotonic() + 30.0
        while sum(_closed(peer) for peer in peers) < 7:
            assert time.monotonic() < until
        assert not any(_closed(peer) for peer in peers[:5]), "the first ones stay"
        assert told == 1
        for peer in peers[:3]:
            peer.close()
        wait(2)
        assert not connections.read()
    finally:
        for peer in peers:
            peer.close()
        connections.close()
        router.close(linger=0)
        context.term()
    assert os.path.exists(tmp_path)


def _closed(peer: socket.socket) -> bool:
    """The other end is closed; what it has said first does not matter."""
    peer.setblocking(False)
    try:
        while peer.recv(1000):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_a_client_above_the_limit_is_told_and_let_in_when_another_one_has_left() -> None:
    pool = Pool(config(limits=Limits(clients=2)))
    first, second = pool.client(), pool.client()

    def hello(name: bytes, incarnation: int = 0) -> list[object]:
        sent = pool.do(ev.ClientHello(0, name, name.ljust(16, b"."), b"t" * 16, incarnation))
        return [*[type(s.message) for s in sent if isinstance(s.message, Welcome)], *codes(sent)]

    assert hello(b"third") == ["busy"]
    (failure,) = failures(pool.do(ev.ClientHello(0, b"third", b"third" * 3 + b".", b"t" * 16, 4))).values()
    assert (failure.field, failure.incarnation) == ("limits.clients", 4) and failure.retry_after_ms
    assert "2 clients are connected" in failure.message
    assert hello(second, 1) == [Welcome], "a client that has a link may say hello again"
    assert pool.do(ev.ClientHello(0, b"new link", first.ljust(16, b"."), b"t" * 16, 1)), "and come back on another one"
    pool.do(ev.ClientLeft(0, second))
    assert hello(b"third", 5) == [Welcome]


def test_one_link_leaves_behind_no_more_clients_than_the_limit() -> None:
    pool = Pool(config(limits=Limits(clients=3)))
    for number in range(3):
        link = pool.client(b"link", client=b"%d" % number * 16)
        pool.submit(link, 1, work())
    (failure,) = failures(pool.do(ev.ClientHello(0, b"link", b"n" * 16, b"t" * 16, 4))).values()
    assert (failure.code, failure.field) == ("busy", "limits.clients")
    assert len(pool.machine.core.clients) == 3
    assert pool.machine.core.links[b"link"].id == b"2" * 16, "the link keeps its client"
    pool.client(b"other")
    assert len(pool.machine.core.clients) == 4, "a new link is not refused"
