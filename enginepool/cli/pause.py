"""`enginepool pause` and `enginepool resume`: a group starts no work for a while."""

from enum import StrEnum
from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool
from enginepool.cli.outcomes import show_outcomes


class PauseModeName(StrEnum):
    """What becomes of generations that run."""

    abort = "abort"
    in_place = "in_place"
    retract = "retract"


Group = Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")]


def pause(
    group: Group = "",
    connect: Address = DEFAULT_ADDRESS,
    mode: Annotated[
        PauseModeName, typer.Option(metavar="MODE", help="Generations that run: abort, in_place or retract.")
    ] = PauseModeName.abort,
) -> None:
    """Let a group start no work until it is resumed.

    Its requests wait. Generations go back to the queue, or with in_place and retract stand still in their engines. Needs the
    role publisher. A line for each worker says whether its engine works no more. Exit code 1 if one does.

    \b
    Examples:
      enginepool pause policy
      enginepool pause policy --mode in_place
    """
    show_outcomes(ask_pool(connect, lambda pool: pool.pause(group, mode.value)), "paused")


def resume(group: Group = "", connect: Address = DEFAULT_ADDRESS) -> None:
    """Let a group that was paused start work again.

    Needs the role publisher. Exit code 1 if a worker is not ready.

    \b
    Examples:
      enginepool resume policy
    """
    show_outcomes(ask_pool(connect, lambda pool: pool.resume(group)), "resumed")
