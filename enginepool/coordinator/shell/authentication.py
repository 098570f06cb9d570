"""Which keys may connect over TCP, and as what: ZAP, answered by pyzmq's authenticator in a thread of its own.

libzmq asks it at each handshake, and names the key with every message of that link (`User-Id`). The role is looked up for each
message: no table of links can be out of date. Messages of a key that is removed from `authorized` are refused at once, also on
established links.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from enginepool.coordinator.shell.peers import Peer
from enginepool.errors import ConfigError
from enginepool.net.keys import AUTHORIZED, SERVER, Key, read_authorized, read_key
from enginepool.protocol.roles import INCLUDES

#: the coordinator's TCP sockets, as ZAP calls them
DOMAIN = "enginepool"
#: unknown keys that are named to the operator until `authorized` changes: strangers must not fill the log
NAMED = 16
_NO_ROLES = Peer()
#: seconds between two looks at the file of authorized keys
KEYS_S = 1.0


def read_keys(folder: Path) -> tuple[Key, dict[str, Peer]]:
    """The coordinator's key, and the keys that may connect, from the folder that `enginepool keys` made. Raises ConfigError."""
    return read_key(folder / SERVER), _peers(folder / AUTHORIZED)


def _peers(path: Path) -> dict[str, Peer]:
    return {public: Peer(INCLUDES[role]) for public, role in read_authorized(path).items()}


class Authenticator:
    """The keys of one coordinator.

    Args:
        folder: that `enginepool keys` made.
        context: of the sockets.
    """

    def __init__(self, folder: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Raises ConfigError."""
        self._path = folder / AUTHORIZED
        self._seen = self._signature()
        #: replaced as a whole: the authenticator's thread reads it, too
        self.key, self._peers = read_keys(folder)
        #: keys that were refused, and whether the operator was told
        self._refused: dict[str, bool] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key, in Z85, may connect: ZAP asks, in the authenticator's thread."""
        name = key.decode()
        if name in self._peers:
            return True
        if len(self._refused) < NAMED:
            self._refused.setdefault(name, False)
        return False

    def refused(self) -> list[str]:
        """A line for the operator for each key that was refused, and not named before."""
        new = [name for name, told in list(self._refused.items()) if not told]
        self._refused.update(dict.fromkeys(new, True))
        return [f"keys: {name} is not in {self._path}: its connection was refused" for name in new]

    def peer(self, frame: zmq.Frame) -> Peer:
        """Who sent this frame."""
        return self._peers.get(str(frame.get("User-Id")), _NO_ROLES)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Have a socket that is about to listen on TCP take connections of these keys alone."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.key.public.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        # Without an authenticator libzmq would take every key.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def reload(self) -> str:
        """Read `authorized` again if it has changed; a line for the operator, or "". What cannot be read changes nothing."""
        signature = self._signature()
        if signature == self._seen:
            return ""
        self._seen = signature
        try:
            self._peers = _peers(self._path)
        except ConfigError as error:
            return f"{error}; the keys of before hold"
        self._refused = {}
        return f"keys: {self._path} has changed: {len(self._peers)} keys may connect"

    def watch(self, loop: asyncio.AbstractEventLoop, log: Callable[[str, str], None]) -> None:
        """Look at the file of authorized keys from now on; `log` gets a line and its kind."""
        for line in self.refused():
            log(line, "refused")
        if line := self.reload():
            log(line, "")
        self._timer = loop.call_later(KEYS_S, self.watch, loop, log)

    def _signature(self) -> tuple[int, int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return (0, 0, 0, 0)
        return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def close(self) -> None:
        """Refuse all keys from now on. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._authenticator.stop()
