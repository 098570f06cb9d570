"""How commands reach a running pool: the `--connect` option and the connection behind it."""

from typing import TYPE_CHECKING, Annotated

import typer

from enginepool.address import ADDRESS_VARIABLE, DEFAULT_ADDRESS, FORM, wrong_address

if TYPE_CHECKING:
    from enginepool.client.pool import Opening

__all__ = ["DEFAULT_ADDRESS", "Address", "open_pool"]

CONNECT_S = 10.0


def _check_address(address: str) -> str:
    if why := wrong_address(address):
        raise typer.BadParameter(f"{address!r}: {why}")
    return address


Address = Annotated[
    str,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        envvar=ADDRESS_VARIABLE,
        callback=_check_address,
        help=f"Where the pool listens: {FORM}.",
    ),
]


def open_pool(address: str) -> "Opening":
    """A connected pool, to be entered with `async with`, which closes it."""
    from enginepool.client import Pool

    return Pool.connect(address, connect_timeout=CONNECT_S)
