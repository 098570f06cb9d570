"""`enginepool restart`: workers restarted, one after the other, or started again after they were given up."""

from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool, check_target


def restart(
    target: Annotated[
        str,
        typer.Argument(
            metavar="GROUP[/WORKER]", callback=check_target, help="A group, or one of its workers, as in the status."
        ),
    ],
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """Restart the workers of a group, or one worker.

    Workers are restarted one after the other, and a retired one is started again. A ready worker finishes its work first,
    and is ready again before the next one ends. Needs the role admin. Exit code 1 if a worker does not become ready again;
    those after it are not restarted.

    \b
    Examples:
      enginepool restart judge
      enginepool restart judge/judge-0
    """
    group, _, worker = target.partition("/")
    ask_pool(connect, lambda pool: pool.restart(group, worker, report=typer.echo))
