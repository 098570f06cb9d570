"""A TCP forwarder between peers and a coordinator, which can be cut off as a network partition cuts: silently.

While it is partitioned it accepts nothing and forwards nothing. Its queue of connections is full then, and the kernel drops
each SYN: a peer that connects hears nothing, neither an acceptance nor a refusal. `broken=True` ends the connections that
stood, as the kernel of each side does once what it has sent is not acknowledged for `keepalive.UNREAD_S`.
"""

import contextlib
import selectors
import socket
import struct
import threading

_RESET = struct.pack("ii", 1, 0)


class Forwarder:
    """Forwards connections to `target`, `tcp://HOST:PORT`. Close it with `close`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._other: dict[socket.socket, socket.socket] = {}
        self._plugs: list[socket.socket] = []
        self._lock = threading.Lock()
        self._partitioned = self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def partition(self, *, broken: bool = False) -> None:
        """Accept and forward nothing from here on."""
        with self._lock:
            if not self._partitioned:
                self._partitioned = True
                self._selector.unregister(self._server)
                for end in self._other:
                    self._selector.unregister(end)
                self._plug()
            if broken:
                for end in list(self._other):
                    self._end(end)

    def heal(self) -> None:
        """Accept and forward again."""
        with self._lock:
            self._partitioned = False
            for plug in self._plugs:
                plug.close()
            self._plugs.clear()
            self._selector.register(self._server, selectors.EVENT_READ)
            for end in self._other:
                self._selector.register(end, selectors.EVENT_READ)
            self._wake.send(b"\0")

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for one in (*self._other, *self._plugs, self._server, self._wake, self._woken):
            one.close()
        self._selector.close()

    def _plug(self) -> None:
        """Fill the queue of connections that wait to be accepted."""
        while True:
            plug = socket.socket()
            self._plugs.append(plug)
            plug.settimeout(0.3)
            try:
                plug.connect(self._server.getsockname())
            except TimeoutError:
                return

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                with self._lock:
                    if key.fileobj is self._woken:
                        self._woken.recv(64)
                    elif self._partitioned:
                        continue
                    elif key.fileobj is self._server:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._other:
                        self._forward(key.fileobj)

    def _accept(self) -> None:
        near, _ = self._server.accept()
        try:
            far = socket.create_connection(self._target, 5.0)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._other[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._end(end)

    def _end(self, end: socket.socket) -> None:
        other = self._other.pop(end, None)
        if other is None:
            return
        del self._other[other]
        for one in (end, other):
            with contextlib.suppress(KeyError):
                self._selector.unregister(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            one.close()
