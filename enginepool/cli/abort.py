"""`enginepool abort`: all requests of a group end."""

from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool


def abort(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")] = "",
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """End all requests of a group.

    Generations end with the tokens that they have, and other calls with an error. Needs the role admin.

    \b
    Examples:
      enginepool abort policy
    """
    ended = ask_pool(connect, lambda pool: pool.abort(group))
    typer.echo(f"{ended} request{'' if ended == 1 else 's'} ended")
