"""`enginepool keys`: makes the keys of a pool that listens on TCP."""

from pathlib import Path
from typing import Annotated

import typer

from enginepool.cli.choices import RoleName
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the keys lie; made if it is missing.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Make one more key, by this name.")] = None,
    role: Annotated[RoleName | None, typer.Option(help="What that key may do.")] = None,
) -> None:
    """Make keys for a pool that listens on TCP.

    One is for the coordinator, and one for each role or for NAME. Give DIR to the pool (keys = "DIR"), and each peer its own
    file, by a safe way. Nothing is overwritten. Who may connect stands in DIR/authorized: a line that is removed there counts
    within a second, without a restart.

    \b
    Examples:
      enginepool keys keys
      enginepool keys keys --name trainer-2 --role publisher
    """
    from enginepool.net.keys import FIRST, make_keys

    if (name is None) != (role is None):
        raise CommandFailed("--name and --role go together", BAD_USAGE)
    made = make_keys(directory, FIRST if name is None or role is None else {name: role.value})
    for path in made:
        typer.echo(str(path))
