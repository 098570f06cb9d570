"""`enginepool flush`: engines forget the prefixes that they keep."""

from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool
from enginepool.cli.outcomes import show_outcomes


def flush(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")] = "",
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """Let the engines of a group forget kept prefixes.

    An engine does it between two batches. Needs the role publisher. A line for each worker says whether it did. Exit code 1
    if one did not.

    \b
    Examples:
      enginepool flush
      enginepool flush judge
    """
    show_outcomes(ask_pool(connect, lambda pool: pool.flush(group)), "flushed")
