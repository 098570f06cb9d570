"""What a worker fetches and opens of the media that prompts name: nothing that its group does not allow."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from enginepool.config import GroupConfig, PoolConfig
from enginepool.config_loader import check_config
from enginepool.errors import ConfigError
from enginepool.net.media_urls import is_allowed, refuse_prefix
from enginepool.workers import media_reader
from enginepool.workers.engine import EngineError, TaskMedium
from enginepool.workers.media_reader import MediaReader

IMAGE = b"\x89PNG" * 50_000


class _Images(BaseHTTPRequestHandler):
    """Serves one image, a redirect to it, and answers that are no image."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        if self.path == "/public/moved":
            self.send_response(302)
            self.send_header("Location", "/secret/a.png")
            self.end_headers()
            return
        if self.path == "/public/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the worker has had enough
            self.wfile.write(b"" if self.path == "/public/empty" else IMAGE)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    http: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Images)
    http.asked = []
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield http
    http.shutdown()
    thread.join()
    http.server_close()


def read(reader: MediaReader, source: Any, *names: str) -> list[bytes]:
    media = [TaskMedium("image", "bytes", b"as it is"), *(TaskMedium("image", source, name.encode()) for name in names)]

    async def main() -> list[bytes]:
        async with reader.reading(media) as found:
            assert {one.source for one in found} == {"bytes"} and found[0] == media[0]
            return [one.data for one in found[1:]]

    return asyncio.run(asyncio.wait_for(main(), 60))


def refusal(reader: MediaReader, source: Any, name: str) -> str:
    with pytest.raises(EngineError) as refused:
        read(reader, source, name)
    assert "\n" not in str(refused.value) and len(str(refused.value)) <= 128
    return str(refused.value)


# --- URLs ---------------------------------------------------------------------------------------------------------------


def test_a_url_under_an_allowed_prefix_is_fetched_and_no_other_server_or_folder_is_asked(server: Any) -> None:
    host = f"http://127.0.0.1:{server.server_port}"
    reader = MediaReader("", [f"{host}/public"])
    assert read(reader, "url", f"{host}/public/a.png", f"{host}/public/b.png") == [IMAGE, IMAGE]
    asked = len(server.asked)
    for name in (f"{host}/secret/a.png", f"http://localhost:{server.server_port}/public/a.png", "file:///etc/passwd"):
        assert refusal(reader, "url", name) == "image 1: its URL is not under media_urls of the group"
    assert len(server.asked) == asked
    assert "media_urls" in refusal(MediaReader("/", ()), "url", f"{host}/public/a.png")


def test_a_redirect_is_not_followed_and_what_is_no_answer_is_an_error(server: Any) -> None:
    host = f"http://127.0.0.1:{server.server_port}"
    reader = MediaReader("", [host])
    said = refusal(reader, "url", f"{host}/public/moved")
    assert said == "image 1: the server of its URL answered 302, and redirects are not followed"
    assert server.asked == ["/public/moved"]
    assert "answered 404" in refusal(reader, "url", f"{host}/public/missing")
    assert refusal(reader, "url", f"{host}/public/empty") == "image 1: no bytes"
    closed = "http://127.0.0.1:1"
    assert "cannot be fetched" in refusal(MediaReader("", [closed]), "url", f"{closed}/a")


def test_a_medium_has_a_size_and_what_is_held_has_room_again_afterwards(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = f"http://127.0.0.1:{server.server_port}"
    (tmp_path / "a").write_bytes(IMAGE)
    reader: Any = MediaReader(str(tmp_path), [host])
    assert read(reader, "path", "a", "a") == [IMAGE, IMAGE]
    monkeypatch.setattr(media_reader, "MAX_MEDIUM_BYTES", 100_000)
    assert refusal(reader, "url", f"{host}/public/a") == "image 1: more than 100000 bytes"
    assert refusal(reader, "path", "a") == "image 1: more than 100000 bytes"
    monkeypatch.setattr(media_reader, "MAX_MEDIUM_BYTES", 1 << 20)
    monkeypatch.setattr(media_reader, "PROMPT_BYTES", 300_000)
    with pytest.raises(EngineError, match="400000 bytes of URLs and paths of one prompt; at most 300000"):
        read(reader, "path", "a", "a")
    assert reader._room.free == media_reader.HELD_BYTES


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.com/public/x.png", True),
        ("https://A.com:443/public/x.png?size=1", True),
        ("https://a.com/public", True),
        ("https://a.com/public/", True),
        ("https://b.com:8443/x", True),
        ("http://a.com/public/x.png", False),
        ("https://a.com:444/public/x.png", False),
        ("https://a.com/publicity", False),
        ("https://a.com/", False),
        ("https://a.com/public/../secret", False),
        ("https://a.com/public/%2E%2e/secret", False),
        ("https://a.com/public/..", False),
        ("https://a.com/public\\..\\secret", False),
        ("https://a.com/public/x y", False),
        ("https://a.com.evil.com/public/x", False),
        ("https://a.com@evil.com/public/x", False),
        ("https://user@a.com/public/x", False),
        ("https://b.com:8443.evil.com/x", False),
        ("https://evil.com/https://a.com/public/x", False),
        ("ftp://a.com/public/x", False),
        ("https://[::1", False),
        ("https:///public/x", False),
        ("https://a.com:0/public/x", False),
        ("https://a.com\r\n/public/x", False),
    ],
)
def test_a_url_is_allowed_by_its_parts(url: str, allowed: bool) -> None:
    assert is_allowed(url, ["https://a.com/public", "https://b.com:8443"]) is allowed


@pytest.mark.parametrize(
    "prefix", ["", "a.com", "ftp://a.com", "https://", "https://u@a.com/", "https://a.com/?x", "https://a.com/../"]
)
def test_what_can_be_no_prefix_is_refused_with_the_configuration(prefix: str) -> None:
    assert refuse_prefix(prefix)
    group = GroupConfig("m", engine="sim", operations=["generate"], media_urls=["https://a.com/b", prefix])
    with pytest.raises(ConfigError, match=r"groups\.g\.media_urls\[1\] = .*: must be a URL with a host"):
        check_config(PoolConfig({"g": group}), where="x")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"media_root": "images", "operations": ["generate"]}, "media_root = 'images': an absolute path"),
        ({"media_root": "/images"}, "media_root = '/images': only where operations has 'generate'"),
        ({"media_urls": ["https://a.com"]}, r"media_urls = \['https://a.com'\]: only where operations has"),
    ],
)
def test_settings_of_media_that_have_no_effect_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_config(PoolConfig({"g": GroupConfig("m", engine="sim", **fields)}), where="x")


# --- paths --------------------------------------------------------------------------------------------------------------


def test_files_under_the_root_are_read_and_no_others(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (tmp_path / "rooted").mkdir()
    (root / "deep" / "a").write_bytes(b"inside")
    for secret in (tmp_path / "secret", tmp_path / "rooted" / "secret"):
        secret.write_bytes(b"outside")
    (root / "link").symlink_to("deep/a")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "folder-out").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    reader = MediaReader(str(root), ())
    assert read(reader, "path", "deep/a", str(root / "deep" / "a"), "link", "deep/../deep/a") == [b"inside"] * 4
    for name in (
        "../secret", str(tmp_path / "secret"), "out", "folder-out/secret", "../rooted/secret", "pipe", "deep", "missing",
        "/dev/zero", "~", "/etc/passwd",
    ):  # fmt: skip
        assert refusal(reader, "path", name) == "image 1: no file of its path under media_root of the group"
    assert "media_root" in refusal(MediaReader("", ["https://a.com"]), "path", "deep/a")


def test_a_root_that_is_a_link_is_the_folder_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"inside")
    (tmp_path / "root").symlink_to("real")
    reader = MediaReader(str(tmp_path / "root"), ())
    assert read(reader, "path", "a") == [b"inside"]
    assert reader.features == ("media_path",) and MediaReader("", ["https://a.com"]).features == ("media_url",)
