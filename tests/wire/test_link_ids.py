"""A peer that chooses the id of its link, or sends very many frames in a message, is cut. libzmq's ids cannot be guessed."""

import select
import tempfile
from collections.abc import Iterator

import pytest
import zmq

from enginepool.coordinator.core.events import Link
from enginepool.coordinator.shell.router import MOST_FRAMES, Router

PATIENCE_S = 60.0


class Scene:
    """A router, what it took in, and whom it cut."""

    def __init__(self, folder: str) -> None:
        self.cut: list[str] = []
        self.taken: list[tuple[Link, list[bytes]]] = []
        self.router = Router(1 << 20, 1 << 16, 1 << 20, 30.0, lambda link, why: self.cut.append(why))
        self.router.bind(f"ipc://{folder}/pool.sock")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []

    def peer(self, routing_id: bytes = b"") -> "zmq.Socket[bytes]":
        peer = self.context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        if routing_id:
            peer.setsockopt(zmq.ROUTING_ID, routing_id)
        peer.connect(self.router.endpoint)
        self.peers.append(peer)
        return peer

    def receive(self, count: int) -> None:
        """Until so many messages came, also of peers that were cut."""
        end = len(self.taken) + len(self.cut) + count
        while len(self.taken) + len(self.cut) < end:
            assert select.select([self.router.fd], [], [], PATIENCE_S)[0], "no message came"
            self.router.receive(lambda link, frames, _: self.taken.append((link, frames)) or None)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.context.term()
        self.router.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(folder)
        yield scene
        scene.close()


def test_links_of_peers_that_choose_no_id_are_numbered_from_a_random_one(scene: Scene) -> None:
    for _ in range(3):
        scene.peer().send(b"hello")
    scene.receive(3)
    first, second, third = sorted(int.from_bytes(link, "big") for link, _ in scene.taken)
    assert (second, third) == (first + 1, first + 2) and not scene.cut
    with tempfile.TemporaryDirectory() as folder:
        other = Scene(folder)
        other.peer().send(b"hello")
        other.receive(1)
        number = int.from_bytes(other.taken[0][0], "big")
        other.close()
    assert abs(number - first) > 1000, "as likely as one in two million"


@pytest.mark.parametrize("chosen", [b"me", b"\0me", bytes(5), b"\0\xff\xff\xff\xff", b"of sixteen bytes"])
def test_a_peer_that_chooses_its_id_is_cut(scene: Scene, chosen: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    chooses, honest = scene.peer(chosen), scene.peer()
    chooses.send(b"hello")
    scene.receive(1)
    assert scene.cut == ["it chose its routing id"] and not scene.taken
    assert capfd.readouterr().err.endswith("a peer is cut: it chose its routing id\n")
    honest.send(b"hello")
    scene.receive(1)
    assert [frames for _, frames in scene.taken] == [[b"hello"]]


def test_a_peer_that_sends_very_many_frames_is_cut(scene: Scene) -> None:
    peer = scene.peer()
    peer.send_multipart([b""] * MOST_FRAMES)
    scene.receive(1)
    assert len(scene.taken[0][1]) == MOST_FRAMES
    peer.send_multipart([b""] * (MOST_FRAMES + 5))
    scene.receive(1)
    assert scene.cut == [f"it sent over {MOST_FRAMES} frames"] and len(scene.taken) == 1
