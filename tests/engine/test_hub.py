"""A model that the model hub does not have ends a group at once, with the reason; a hub that is not reached is asked again."""

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig, Restart
from enginepool.errors import PoolDown
from tests.process.daemons import Daemon
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S = 300.0
NAME = "nowhere (no folder here, so looked for on the model hub): OSError: "


class NoRepository(BaseHTTPRequestHandler):
    """What the hub says of a name that it does not know."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said of single requests."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a model hub without any model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), NoRepository) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolConfig:
    """One worker whose model is a name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return PoolConfig(
        groups={"g": GroupConfig(model="nowhere", device="cpu")},
        listen=f"ipc://{tmp_path}/pool.sock",
        state_dir=str(tmp_path / "state"),
        restart=Restart(backoff_s=0.1),
    )


def test_a_name_that_the_hub_does_not_know_is_not_tried_again(
    processes: Processes, config: PoolConfig, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    daemon = Daemon(processes, config).listening()

    async def answer() -> str:
        async with Pool.connect(daemon.address) as pool:
            with pytest.raises(PoolDown) as caught:
                await asyncio.wait_for(pool.score([1], [[2]], label_token_ids=[1]), START_S)
            return str(caught.value)

    assert f"{NAME}nowhere is not a local folder" in asyncio.run(answer())
    assert daemon.end() == 0
    assert sum("starting worker" in line for line in daemon.lines) == 1
    assert sum(NAME in line for line in daemon.lines) == 1


def test_a_hub_that_is_not_reached_is_asked_again(
    processes: Processes, config: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    daemon = Daemon(processes, config).listening()
    assert f"{NAME}We couldn't connect" in daemon.wait_for("ended")
    daemon.wait_for("starting worker")
    assert daemon.end() == 0
