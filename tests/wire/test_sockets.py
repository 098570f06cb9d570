"""The coordinator's sockets receive everything, also a message of which the file descriptor tells only once."""

import asyncio
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from enginepool.coordinator.core.events import Link
from enginepool.coordinator.shell.daemon import Daemon
from enginepool.coordinator.shell.endless_messages import EndlessMessages
from enginepool.coordinator.shell.router import CLIENT_PROOF, ROUND_BYTES, UNHANDLED, Router
from enginepool.coordinator.shell.sockets import ROUNDS, Sockets
from enginepool.net.dealer import keep_alive

PATIENCE_S = 60.0
#: bytes that a peer may leave unread
MOST = 8 << 20


class Bench:
    """Two routers on a loop, a peer at each, and what the routers took in."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, quiet: bool, transport: str = "tcp") -> None:
        self._loop = loop
        self.cut: list[Link] = []
        self.clients = Router(1 << 20, CLIENT_PROOF, MOST, 1.0, self._cut)
        self.workers = Router(1 << 20, CLIENT_PROOF, MOST, 1.0, self._cut)
        self.taken: list[tuple[str, Link, list[bytes]]] = []
        self.acted = 0
        self.sockets = Sockets(loop, self.clients, self.workers, lambda: quiet)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []
        self.folder = tempfile.TemporaryDirectory()
        for name, router in (("clients", self.clients), ("workers", self.workers)):
            router.bind("tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{self.folder.name}/{name}.sock")
            peer = self.context.socket(zmq.DEALER)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(router.endpoint)
            self.peers.append(peer)

    def _cut(self, link: Link, why: str) -> None:
        self.cut.append(link)

    def act(self) -> None:
        self.acted += 1

    def listen(self) -> None:
        self.sockets.listen(
            lambda link, frames, _frame: self.taken.append(("client", link, frames)),
            lambda link, frames, _frame: self.taken.append(("worker", link, frames)),
            self.act,
        )

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.taken) < count:
                await asyncio.sleep(0.001)

    async def hello(self, peer: "zmq.Socket[bytes]") -> Link:
        """The first message of a peer arrives. Returns its link."""
        count = len(self.taken)
        peer.send(b"hello")
        await self.until(count + 1)
        return self.taken[-1][1]

    def play(self, scene: Callable[[], Coroutine[None, None, None]]) -> None:
        """What happens on the loop; everything is closed after it."""
        try:
            self._loop.run_until_complete(scene())
        finally:
            self.close()

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.context.term()
        self.sockets.close()
        self.folder.cleanup()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_a_message_that_a_send_swallowed_the_news_of_is_received_in_the_same_turn(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)

    async def scene() -> None:
        bench.listen()
        worker = bench.peers[1]
        link = await bench.hello(worker)
        # The loop does not run from here on: the message arrives, and the send takes the news of it.
        worker.send(b"swallowed")
        readable, _, _ = select.select([bench.workers.fd], [], [], PATIENCE_S)
        assert readable
        assert bench.workers.send(link, [b"work"])
        with suppress(zmq.Again):
            while True:
                assert worker.recv(zmq.NOBLOCK) == b"work"
        bench.sockets._settle()  # pyright: ignore[reportPrivateUsage]
        assert bench.taken[1:] == [("worker", link, [b"swallowed"])]

    bench.play(scene)


@pytest.mark.parametrize("quiet", [True, False])
def test_every_message_of_a_conversation_is_taken_and_acted_upon(loop: asyncio.AbstractEventLoop, quiet: bool) -> None:
    bench = Bench(loop, quiet=quiet)
    rounds = 200

    async def scene() -> None:
        bench.listen()
        for peer, router, name in zip(bench.peers, (bench.clients, bench.workers), ("client", "worker"), strict=True):
            link = await bench.hello(peer)
            for i in range(rounds):
                count = len(bench.taken)
                peer.send_multipart([b"%d" % i, b"x"])
                assert router.send(link, [b"answer"])
                bench.sockets.turn()
                await bench.until(count + 1)
                assert bench.taken[-1] == (name, link, [b"%d" % i, b"x"])
        assert len(bench.taken) == 2 * (rounds + 1)
        assert 0 < bench.acted <= len(bench.taken)

    bench.play(scene)


def read(peer: "zmq.Socket[bytes]") -> int:
    """Read all that is there, answer each ping as every peer does, and return the payload's bytes."""
    nbytes = 0
    while peer.poll(300):
        header, *frames = peer.recv_multipart()
        nbytes += len(header) + sum(map(len, frames))
        if header.startswith(b"\x82\xa4type\xa4ping"):
            nbytes -= len(header)
            peer.send(msgspec.msgpack.encode({"type": "pong", "at": msgspec.msgpack.decode(header)["at"]}))
    return nbytes


@pytest.mark.parametrize("size", [1000, 200_000], ids=["copied by ZeroMQ", "lent to ZeroMQ"])
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_what_a_peer_has_not_read_is_counted_in_bytes_wherever_it_lies(
    loop: asyncio.AbstractEventLoop, size: int, transport: str
) -> None:
    bench = Bench(loop, quiet=False, transport=transport)
    router, peer = bench.clients, bench.peers[0]

    async def scene() -> None:
        bench.listen()
        link = await bench.hello(peer)
        count = 3_000_000 // size
        for _ in range(count):
            assert router.send(link, [b"header", bytes(size)])
        sent = count * (size + 6)
        assert router.unread_of(link) == router.unread == sent
        assert not router.proved(link, 2**62), "a peer that does not read cannot guess the number"
        assert await asyncio.to_thread(read, peer) == sent
        async with asyncio.timeout(PATIENCE_S):
            while router.unread:
                for _, _, (pong,) in bench.taken[1:]:
                    router.proved(link, msgspec.msgpack.decode(pong)["at"])
                await asyncio.to_thread(read, peer)
        assert router.unread_of(link) == 0

    bench.play(scene)


@pytest.mark.parametrize("size", [1000, 100_000], ids=["many", "large"])
@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_peer_that_leaves_too_much_unread_is_disconnected(loop: asyncio.AbstractEventLoop, transport: str, size: int) -> None:
    bench = Bench(loop, quiet=False, transport=transport)
    router, peer = bench.clients, bench.peers[0]
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    async def scene() -> None:
        bench.listen()
        link = await bench.hello(peer)
        sends = 0
        while not bench.cut:
            assert router.send(link, [bytes(size)])
            sends += 1
        assert bench.cut == [link]
        assert MOST // size <= sends <= MOST // size + 1  # a question counts as well
        assert router.unread == 0
        # ZeroMQ finds the end behind all that it has read for the peer.
        while peer.poll(300):
            peer.recv()
        assert monitor.poll(int(PATIENCE_S * 1000)), "the connection stands"

    try:
        loop.run_until_complete(scene())
    finally:
        peer.disable_monitor()
        monitor.close()
        bench.close()


def test_a_peer_that_never_says_that_it_reads_is_disconnected(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)
    peer = bench.peers[0]

    async def scene() -> None:
        bench.listen()
        assert bench.clients.send(await bench.hello(peer), [b"an answer"])
        async with asyncio.timeout(PATIENCE_S):
            while not bench.cut:
                await asyncio.sleep(0.01)

    bench.play(scene)


def test_a_worker_whose_link_broke_is_not_lost_for_it() -> None:
    """It may return; if its process has ended, or it stays silent, that is heard. One that does not read is lost at once."""
    daemon = Mock()
    Daemon._worker_cut(daemon, b"w", "")  # pyright: ignore[reportPrivateUsage]
    assert not daemon.loop.call_soon.called
    Daemon._worker_cut(daemon, b"w", "it does not read")  # pyright: ignore[reportPrivateUsage]
    assert daemon.loop.call_soon.called


def test_a_peer_that_leaves_before_it_has_said_that_it_reads_is_not_cut(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)
    router, peer = bench.clients, bench.peers[0]

    async def scene() -> None:
        bench.listen()
        assert router.send(await bench.hello(peer), [bytes(CLIENT_PROOF)])
        peer.close()
        async with asyncio.timeout(PATIENCE_S):
            while router.unread:
                router.sweep()
                await asyncio.sleep(0.001)
        assert not bench.cut

    bench.play(scene)


@pytest.mark.parametrize(("full", "rounds"), [(True, ROUNDS), (False, 1)])
def test_workers_are_asked_after_each_full_round_of_clients(full: bool, rounds: int) -> None:
    """It may have taken long, and the loop had no turn since."""
    clients, workers = Mock(sent=False), Mock(sent=False)
    asked: list[str] = []

    def from_clients(take: Mock) -> int:
        asked.append("clients")
        clients.unsure = full
        return 1

    def from_workers(take: Mock) -> int:
        asked.append("workers")
        workers.unsure = False
        return 0

    clients.receive, workers.receive = from_clients, from_workers
    Sockets(Mock(), clients, workers, lambda: False).listen(Mock(), Mock(), lambda: None)
    assert asked == ["clients", "workers"] * rounds


def test_large_messages_are_acted_upon_before_more_of_them_are_received(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)
    try:
        peer = bench.peers[0]
        for _ in range(8):
            peer.send_multipart([b"header", bytes(ROUND_BYTES)])
        taken: list[list[bytes]] = []
        for count in range(1, 9):
            while not bench.clients.asked():
                pass
            assert bench.clients.receive(lambda link, frames, frame: taken.append(frames)) == 1
            assert len(taken) == count and bench.clients.unsure
    finally:
        bench.close()


def test_a_message_that_asks_for_much_is_acted_upon_before_more_of_them_are_received(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)
    try:
        for _ in range(4):
            bench.peers[0].send(b"little")
        for _ in range(4):
            while not bench.clients.asked():
                pass
            assert bench.clients.receive(lambda link, frames, frame: ROUND_BYTES) == 1
            assert bench.clients.unsure
    finally:
        bench.close()


#: A router, in a process of its own, whose peer leaves while more of its messages wait than ZeroMQ reads ahead.
CROWDED = """
import sys, time, zmq
from enginepool.coordinator.shell.router import Router

router = Router(1 << 20, 1 << 16, 1 << 20, 30.0, lambda link, why: None)
router.bind(sys.argv[1])
context = zmq.Context()
peer = context.socket(zmq.DEALER)
peer.setsockopt(zmq.LINGER, 0)
peer.setsockopt(zmq.SNDHWM, 0)
peer.connect(router.endpoint)
for _ in range(100_000):
    peer.send(bytes(100))
while not router.asked():
    time.sleep(0.01)
peer.close()
context.term()
time.sleep(2.5)  # as long as the coordinator may be busy; ZMTP heartbeats of 2 s would end the process
while router.receive(lambda link, frames, frame: None):
    pass
router.close()
print("alive")
"""


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_peer_that_leaves_behind_more_than_was_read_ends_nothing_but_its_link(transport: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/pool.sock" if transport == "ipc" else "tcp://127.0.0.1:*"
        ended = subprocess.run([sys.executable, "-c", CROWDED, endpoint], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


@pytest.mark.parametrize("what", ["reads", "leaves", "does neither"])
def test_a_coordinator_that_ends_waits_for_a_client_to_read_its_last_answer(
    loop: asyncio.AbstractEventLoop, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ZeroMQ of a client drops what it has received and the client has not read, when the connection ends."""
    monkeypatch.setattr("enginepool.coordinator.shell.sockets.READ_S", 0.05 if what == "does neither" else 10 * PATIENCE_S)
    bench = Bench(loop, quiet=False)

    async def scene() -> None:
        bench.listen()
        client = bench.peers[0]
        link = await bench.hello(client)
        assert bench.clients.send(link, [b"answer"])
        over = asyncio.Event()
        bench.sockets.when_read(over.set)
        assert not over.is_set()
        if what == "reads":
            assert await asyncio.to_thread(client.recv) == b"answer"
            ping = msgspec.msgpack.decode(await asyncio.to_thread(client.recv))
            assert not over.is_set() and ping["type"] == "ping"
            assert bench.clients.proved(link, ping["at"])
        elif what == "leaves":
            client.close()
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
        assert (bench.clients.unread == 0) == (what != "does neither") and not bench.cut

    bench.play(scene)


def test_sockets_that_are_closed_while_a_client_reads_its_last_answer_are_asked_no_more(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is told to end at once while it waits for its clients."""
    monkeypatch.setattr("enginepool.coordinator.shell.sockets.LOOK_S", 0.0)
    bench = Bench(loop, quiet=False)
    errors: list[object] = []
    loop.set_exception_handler(lambda _, what: errors.append(what["exception"]))
    over: list[bool] = []

    async def scene() -> None:
        bench.listen()
        link = await bench.hello(bench.peers[0])
        assert bench.clients.send(link, [b"answer"])
        bench.sockets.when_read(lambda: over.append(True))

    bench.play(scene)
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0.001))
    assert errors == [] and over == []


def test_a_coordinator_whose_clients_have_read_everything_ends_at_once(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench(loop, quiet=False)
    over: list[bool] = []
    bench.sockets.when_read(lambda: over.append(True))
    assert over
    bench.close()


@pytest.mark.parametrize(("seconds", "ms"), [(1e-9, 1), (2.5, 2500), (1e14, 2**31 - 1)])
def test_the_kernel_is_told_the_nearest_time_that_it_can_keep(seconds: float, ms: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        keep_alive(socket, seconds)
        assert socket.getsockopt(zmq.TCP_MAXRT) == ms


#: of ZMTP 3: a greeting, and a READY of a DEALER, without security
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
#: of a frame that half fills a message, with more to come, or as the last one
MORE, LAST = b"\x03", b"\x02"


def plain_peer(router: Router) -> socket.socket:
    """A connection that speaks ZMTP without libzmq, which sends no message before its end."""
    host, port = router.endpoint.removeprefix("tcp://").rsplit(":", 1)
    peer = socket.create_connection((host, int(port)), PATIENCE_S)
    peer.sendall(_GREETING)
    with peer.makefile("rb") as greeting:
        assert len(greeting.read(64)) == 64
    peer.sendall(bytes([4, len(_READY)]) + _READY)
    return peer


def ended(peer: socket.socket) -> bool:
    """Wait until the other end has closed it."""
    with suppress(ConnectionError):
        while peer.recv(1 << 16):
            pass
    return True


@pytest.mark.parametrize("spoke", [False, True])
def test_a_peer_whose_message_does_not_end_is_cut_and_one_that_ends_as_many_bytes_is_not(
    loop: asyncio.AbstractEventLoop, spoke: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq holds all frames of such a message, and counts them in no limit."""
    monkeypatch.setattr("enginepool.coordinator.shell.endless_messages._resident", lambda: 1 << 40)
    bench = Bench(loop, quiet=False)
    size = 1 << 19

    def send(peer: socket.socket, kind: bytes, count: int) -> None:
        for _ in range(count):
            peer.sendall(kind + size.to_bytes(8, "big") + bytes(size))

    def sweep() -> None:
        bench.clients.connections.read()
        bench.clients.sweep()

    async def scene() -> None:
        bench.listen()
        with plain_peer(bench.clients) as endless, plain_peer(bench.clients) as other:
            if spoke:
                await asyncio.to_thread(send, endless, LAST, 1)
                await bench.until(1)
            sweep()
            many = (UNHANDLED // 2 + 1) * 2 + 1
            before = len(bench.taken)
            await asyncio.to_thread(send, other, LAST, many)
            await asyncio.to_thread(send, endless, MORE, many)
            await bench.until(before + many)
            sweep()
            assert await asyncio.to_thread(ended, endless)
            await asyncio.to_thread(send, other, LAST, 1)
            await bench.until(before + many + 1)

    bench.play(scene)


def test_bytes_that_libzmq_has_not_read_are_of_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may send as much while the coordinator stands still, and the kernel holds more than small messages have."""
    monkeypatch.setattr("enginepool.coordinator.shell.endless_messages._resident", lambda: 1 << 40)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as peer:
        connection, _ = server.accept()
        with connection:
            found = EndlessMessages(10_000)
            assert not found.find([connection.fileno()], set())
            peer.sendall(bytes(20_000))
            assert not found.find([connection.fileno()], set())
            assert len(connection.recv(20_000, socket.MSG_WAITALL)) == 20_000
            assert found.find([connection.fileno()], set()) == [connection.fileno()]
