"""A model that the model hub does not have ends a group at once, with the reason; a hub that is not reached is asked again."""

import asyncio
import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from enginepool import Pool
from enginepool.config import GroupConfig, PoolConfig, RestartConfig
from enginepool.errors import PoolDown
from enginepool.workers.sglang.host.model_size import UnknownSize, model_bytes
from tests.engine.forked import ForkedDaemon
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S = 300.0
NAME = "nowhere (no folder here, so looked for on the model hub): OSError: "


class SmallHub(BaseHTTPRequestHandler):
    """A hub with one model: what it says of its files, and of any other name."""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/api/models/some/model" and "blobs=" in self.path:
            sizes = {"a.safetensors": 3_000_000, "b.safetensors": 2_000_000, "old/c.safetensors": 7_000_000, "d.bin": 5}
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            text = json.dumps({"id": "some/model", "siblings": files}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is said of single requests."""


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a model hub."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SmallHub) as server:
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
        restart=RestartConfig(backoff_s=0.1),
    )


def test_the_size_of_a_model_is_what_its_hub_says_or_what_is_kept_of_it(
    tmp_path: Path, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants: Any = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in (("ENDPOINT", hub), ("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", False)):
        monkeypatch.setattr(constants, name, value)
    assert 5_000_000 <= model_bytes("some/model") < 7_000_000
    with pytest.raises(UnknownSize, match="some/other: RepositoryNotFoundError"):
        model_bytes("some/other")
    kept = tmp_path / "models--some--model"
    snapshot = kept / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0123")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"v": "x.safetensors", "w": "y.safetensors"}}')
    (snapshot / "x.safetensors").write_bytes(bytes(1_000_000))
    assert model_bytes("some/model") >= 5_000_000, "what is kept of it is not all"
    (snapshot / "y.safetensors").write_bytes(bytes(1_000_000))
    assert 2_000_000 <= model_bytes("some/model") < 4_000_000


def test_a_name_that_the_hub_does_not_know_is_not_tried_again(
    processes: Processes, config: PoolConfig, hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub)
    daemon = ForkedDaemon(processes, config).listening()

    async def answer() -> str:
        async with Pool.connect(daemon.address) as pool:
            with pytest.raises(PoolDown) as caught:
                await asyncio.wait_for(pool.score([1], [[2]], label_token_ids=[1]), START_S)
            return str(caught.value)

    assert f"{NAME}nowhere is not a local folder" in asyncio.run(answer())
    assert daemon.end() == 0
    assert sum("starting worker" in line for line in daemon.lines) == 1
    assert any(NAME in line for line in daemon.lines)


def test_a_hub_that_is_not_reached_is_asked_again(
    processes: Processes, config: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    daemon = ForkedDaemon(processes, config).listening()
    assert f"{NAME}We couldn't connect" in daemon.wait_for("ended", START_S)
    daemon.wait_for("starting worker", START_S)
    assert daemon.end() == 0
