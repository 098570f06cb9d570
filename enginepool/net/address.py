"""The addresses of a pool: which ones a coordinator can listen on, and which ones a peer can connect to."""

import os
import re
import socket
from pathlib import Path

from enginepool.errors import ConfigError
from enginepool.host import LONGEST_PATH

#: the environment variable with the address that clients connect to where they are given none
ADDRESS_VARIABLE = "ENGINEPOOL_ADDRESS"
#: where a pool keeps its state by default, and its sockets
STATE_DIR = "~/.local/state/enginepool"
FORM = "tcp://HOST:PORT or ipc://PATH"
_LAST_PORT = 65535
#: what ZeroMQ connects to: a name, or an address, IPv6 in brackets or not; one's own may stand before it with a semicolon
_PEER = re.compile(r"[0-9A-Za-z\[:][0-9A-Za-z.:%;\[\]_*-]*")
#: where it listens: an address, the name of an interface, or * for all
_OWN = re.compile(r"[^\s/]+")


def default_address() -> str:
    """Where a user's pool listens unless told otherwise, and where clients look for it: an ipc socket in the default state
    directory; where that path is too long for a socket, in XDG_RUNTIME_DIR.

    Raises:
        ConfigError: neither gives a path that a socket can have.
    """
    folders = [STATE_DIR]
    if runtime := os.environ.get("XDG_RUNTIME_DIR", ""):
        folders.append(f"{runtime}/enginepool")
    for folder in folders:
        try:
            path = str(Path(folder).expanduser() / "pool.sock")
        except RuntimeError:  # no HOME, and a user of no name
            continue
        if path.startswith("/") and len(os.fsencode(path)) <= LONGEST_PATH:
            return f"ipc://{path}"
    raise ConfigError(
        f"listen: no default address: {STATE_DIR}/pool.sock is longer than the {LONGEST_PATH} bytes of a socket's path, "
        "or there is no home directory; name an address of your own"
    )


def wrong_address(address: str, *, listens: bool = False) -> str:
    """What is to be written instead of `address`, or "". Who listens may leave the port to the system, as * or 0."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        try:
            return f"an ipc path has at most {LONGEST_PATH} bytes" if len(rest.encode()) > LONGEST_PATH else ""
        except UnicodeEncodeError:
            return "an ipc path is UTF-8"
    name, colon, number = address.partition(":")
    if not listens and colon and _is_port(number) and _PEER.fullmatch(name):
        return f"write tcp://{address}"
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not (_OWN if listens else _PEER).fullmatch(host):
        return f"write {FORM}"
    if (listens and port in ("*", "0")) or _is_port(port):
        return ""
    return f"write {FORM}; a port is 1 to {_LAST_PORT}{', or * for a free one' if listens else ''}"


def is_in_use(address: str) -> bool:
    """Whether a process listens on this ipc socket now; False for tcp, which cannot be asked without being noticed."""
    if not address.startswith("ipc://"):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except OSError:
            return False
    return True


def _is_port(text: str) -> bool:
    return len(text) < 10 and text.isascii() and text.isdigit() and 0 < int(text) <= _LAST_PORT
