"""`enginepool pause` and `enginepool resume`: a group starts no work for a while."""

from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool
from enginepool.cli.outcomes import show_outcomes

Group = Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")]


def pause(group: Group = "", connect: Address = DEFAULT_ADDRESS) -> None:
    """Let a group start no work until it is resumed.

    Its requests wait, and generations go back to the queue. Needs the role publisher. A line for each worker says whether its
    engine is empty. Exit code 1 if one is not.

    \b
    Examples:
      enginepool pause policy
    """
    show_outcomes(ask_pool(connect, lambda pool: pool.pause(group)), "paused")


def resume(group: Group = "", connect: Address = DEFAULT_ADDRESS) -> None:
    """Let a group that was paused start work again.

    Needs the role publisher. Exit code 1 if a worker is not ready.

    \b
    Examples:
      enginepool resume policy
    """
    show_outcomes(ask_pool(connect, lambda pool: pool.resume(group)), "resumed")
