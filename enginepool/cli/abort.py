"""`enginepool abort`: all requests of a group or of a client end, or one of them."""

import re
from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool


def _check_client(client: str) -> str:
    """The id of a client, its beginning, or the id that the status shows. Raises BadParameter."""
    if client and not re.fullmatch("[0-9a-f]{8,32}(-[0-9]{1,15})?", client):
        raise typer.BadParameter(f"{client!r}: write the id that `enginepool status` shows, of 8 or more hex digits")
    return client


def abort(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")] = "",
    client: Annotated[
        str,
        typer.Option(metavar="ID", callback=_check_client, help="Those of this client alone, in all groups or in GROUP."),
    ] = "",
    request: Annotated[int | None, typer.Option(metavar="N", min=0, help="The one of the client with this id alone.")] = None,
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """End all requests of a group, or of a client.

    Generations end with the tokens that they have, and other calls with an error. `enginepool status` lists clients. Needs the
    role admin.

    \b
    Examples:
      enginepool abort policy
      enginepool abort --client 70756230
      enginepool abort --client 70756230 --request 42
    """
    if request is not None and not client:
        raise typer.BadParameter("goes with --client, whose request it is", param_hint="'--request'")
    ended = ask_pool(connect, lambda pool: pool.abort(group, client=client, request=request))
    typer.echo(f"{ended} request{'' if ended == 1 else 's'} ended")
