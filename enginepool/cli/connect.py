"""How commands reach a running pool: the `--connect` option and the connection behind it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from enginepool.net.address import ADDRESS_VARIABLE, FORM, default_address, wrong_address

if TYPE_CHECKING:
    from enginepool.client.opening import Opening
    from enginepool.client.pool import Pool

T = TypeVar("T")

#: stands for the ipc socket at which a user's pool listens by default
DEFAULT_ADDRESS = ""
CONNECT_S = 10.0


def check_address(address: str) -> str:
    """The address, or that of the user's own pool. Raises BadParameter."""
    address = address or default_address()
    if why := wrong_address(address):
        raise typer.BadParameter(f"{address!r}: {why}")
    return address


Address = Annotated[
    str,
    typer.Option(
        "--connect",
        metavar="ADDRESS",
        envvar=ADDRESS_VARIABLE,
        callback=check_address,
        help=f"Where the pool listens: {FORM}.",
        show_default="the socket of your own pool",
    ),
]


def check_target(target: str) -> str:
    """GROUP or GROUP/WORKER. Raises BadParameter."""
    # Half a name must not reach more than it was meant to: a script's variable may be empty.
    if not all(names := target.split("/")) or len(names) > 2:
        raise typer.BadParameter(f"{target!r}: write GROUP or GROUP/WORKER, with the names that `enginepool status` shows")
    return target


def _check_optional_target(target: str) -> str:
    return check_target(target) if target else target


#: a group, or one of its workers, or "": the only group
Target = Annotated[
    str,
    typer.Argument(
        metavar="[GROUP[/WORKER]]",
        callback=_check_optional_target,
        help="A group, or one of its workers; a pool of one group needs no name.",
    ),
]


def open_pool(address: str) -> "Opening[Pool]":
    """A connected pool, to be entered with `async with`, which closes it."""
    from enginepool.client.pool import Pool

    return Pool.connect(address, connect_timeout=CONNECT_S)


def ask_pool(address: str, question: "Callable[[Pool], Awaitable[T]]") -> T:
    """What the pool at this address answers to one question."""

    async def ask() -> T:
        async with open_pool(address) as pool:
            return await question(pool)

    return asyncio.run(ask())
