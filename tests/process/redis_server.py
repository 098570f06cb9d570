"""A Redis in a thread of the test, which can end in the middle. `fakeredis` keeps its keys; clients reach it over TCP."""

import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class RedisServer:
    """A Redis with these keys: what begins where another one ended has `kept` of that one.

    Args:
        ends_with: it ends, unanswered, with the first command that names a key which ends so.
    """

    def __init__(self, ends_with: str = "", kept: Any = None) -> None:
        server: Any = importlib.import_module("fakeredis._clients._tcp_server")

        class Handler(server.TCPFakeRequestHandler):
            def setup(self) -> None:
                handler: Any = super()
                handler.setup()
                self.rfile: Any = _Lines(self.rfile, ends_with.encode(), self.server._shutdown_event)

        self._server = server.TcpFakeServer(("127.0.0.1", 0), False)
        self._server.RequestHandlerClass = Handler
        if kept is not None:
            self._server.fake_server = kept
        self.kept = self._server.fake_server
        self._server.server_bind()
        self._server.server_activate()
        self.root = f"redis://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        client: Any = importlib.import_module("fakeredis").FakeRedis
        #: of the test, without a socket
        self.client = client(server=self.kept)

    def all_keys(self) -> set[str]:
        """As texts."""
        return {key.decode() for key in self.client.keys("*")}

    def end(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Lines:
    """What a client sends, up to the line with which the server ends."""

    def __init__(self, file: Any, last: bytes, ending: threading.Event) -> None:
        self._file, self._last, self._ending = file, last + b"\r\n", ending

    def readline(self) -> bytes:
        line: bytes = self._file.readline()
        if len(self._last) > 2 and line.endswith(self._last):
            self._ending.set()
        return b"" if self._ending.is_set() else line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def redis_server(ends_with: str = "", kept: Any = None) -> Generator[RedisServer]:
    """It runs meanwhile."""
    server = RedisServer(ends_with, kept)
    try:
        yield server
    finally:
        server.end()
