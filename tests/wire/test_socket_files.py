"""A pool listens again where the file of its ipc socket was removed, for example by a service that cleans /tmp."""

import select
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from enginepool.coordinator.shell.router import Router

PATIENCE_S = 60.0
Dealer = zmq.Socket[bytes]


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own can be too long for the path of a socket
        yield Path(folder, "below", "pool.sock")


@pytest.fixture
def router(path: Path) -> Iterator[Router]:
    path.parent.mkdir(0o700)
    router = Router(1 << 20, 1 << 16, 1 << 20, 30.0, lambda link, why: None)
    router.bind(f"ipc://{path}")
    yield router
    router.close()


def peer(context: "zmq.Context[Dealer]", router: Router) -> Dealer:
    found = context.socket(zmq.DEALER)
    found.setsockopt(zmq.LINGER, 0)
    found.connect(router.endpoint)
    return found


def heard(router: Router, sender: Dealer, message: bytes) -> list[list[bytes]]:
    """What the router receives once `sender` has sent this."""
    sender.send(message)
    found: list[list[bytes]] = []
    while not found:
        assert select.select([router.fd], [], [], PATIENCE_S)[0], f"{message!r} did not arrive"
        router.receive(lambda link, frames, _: found.append(frames) or None)
    return found


def test_new_peers_connect_and_old_ones_stay_where_the_file_was_removed(
    path: Path, router: Router, capfd: pytest.CaptureFixture[str]
) -> None:
    with zmq.Context[Dealer]() as context:
        old = peer(context, router)
        assert heard(router, old, b"before") == [[b"before"]]
        path.unlink()
        router.sweep()
        assert path.is_socket()
        new = peer(context, router)
        assert heard(router, new, b"new") == [[b"new"]]
        assert heard(router, old, b"old") == [[b"old"]]
        router.sweep()
        for one in (old, new):
            one.close()
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition("ipc://")[2] for line in lines] == [f"{path}: its file was removed: listening again"]


def test_it_is_tried_again_while_the_folder_is_missing_and_said_once(
    path: Path, router: Router, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    for _ in range(3):
        router.sweep()
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith(
        f"ipc://{path}: cannot listen: No such file or directory; its file was removed, and this is tried again every second"
    )
    path.parent.mkdir(0o700)
    router.sweep()
    assert path.is_socket()
    assert capfd.readouterr().err.endswith(f"ipc://{path}: its file was removed: listening again\n")
