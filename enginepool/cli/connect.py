"""How commands reach a running pool: the `--connect` option and the connection behind it."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from enginepool.client.pool import Opening

DEFAULT_ADDRESS = "tcp://127.0.0.1:5755"
CONNECT_S = 10.0


def _check_address(address: str) -> str:
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    good = (scheme == "ipc" and rest) or (
        scheme == "tcp" and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536
    )
    if not good:
        raise typer.BadParameter(f"{address!r}: write tcp://HOST:PORT or ipc://PATH")
    return address


Address = Annotated[
    str,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        envvar="ENGINEPOOL_ADDRESS",
        callback=_check_address,
        help="Where the pool listens: tcp://HOST:PORT or ipc://PATH.",
    ),
]


def open_pool(address: str) -> "Opening":
    """A connected pool, to be entered with `async with`, which closes it."""
    from enginepool.client import Pool

    return Pool.connect(address, connect_timeout=CONNECT_S)
