"""Paths of sockets are as long as this system takes them, wherever one is made or refused."""

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from enginepool.client.embedded import EmbeddedCoordinator
from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_config
from enginepool.coordinator.shell.router import Router
from enginepool.errors import ConfigError
from enginepool.host import LONGEST_PATH


def path_of(length: int, folder: Path) -> str:
    path = f"{folder}/"
    return path + "x" * (length - len(os.fsencode(path)))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own, which may be too long by itself."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_longest_path_is_the_longest_that_the_system_takes(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as longest, socket.socket(socket.AF_UNIX) as too_long:
        longest.bind(path_of(LONGEST_PATH, folder))
        with pytest.raises(OSError, match="too long"):
            too_long.bind(path_of(LONGEST_PATH + 1, folder))


def test_a_pool_listens_where_the_path_is_as_long_as_can_be(folder: Path) -> None:
    def listening(length: int) -> PoolConfig:
        return PoolConfig(groups={"a": GroupConfig(model="m")}, listen=f"ipc://{path_of(length, folder)}")

    config = check_config(listening(LONGEST_PATH), where="test")
    router = Router(1 << 20, 1 << 16, 1 << 20, 1.0, lambda link, why: None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as peer:
        router.bind(config.listen)
        peer.setsockopt(zmq.IMMEDIATE, 1)  # it takes a message when it is connected
        peer.connect(router.endpoint)
        assert peer.poll(30_000, zmq.POLLOUT)
    router.close()
    with pytest.raises(ConfigError, match=f"an ipc path has at most {LONGEST_PATH} bytes"):
        check_config(listening(LONGEST_PATH + 1), where="test")


@pytest.mark.parametrize("length", range(50, 80))
def test_the_sockets_of_an_embedded_pool_have_room_wherever_temporary_files_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    parent = Path(path_of(length, folder))
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    coordinator = EmbeddedCoordinator(PoolConfig(groups={"default": GroupConfig(model="m", engine="sim")}))
    longest = coordinator.directory / "stagers" / "default.4095.sock"
    assert len(str(longest)) <= LONGEST_PATH
    below = len(str(longest)) - len(str(coordinator.directory.parent))
    assert (coordinator.directory.parent == parent) == (length + below <= LONGEST_PATH)
