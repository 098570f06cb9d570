"""`enginepool worker`: workers on this host for a pool that runs elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from enginepool.cli.cli_errors import CommandFailed
from enginepool.cli.connect import check_address


def worker(
    connect: Annotated[
        str, typer.Option(metavar="ADDRESS", callback=check_address, help="The pool's address for workers: listen_workers.")
    ],
    group: Annotated[
        str, typer.Option(metavar="NAME", help="The group to work for.  [default: the only group of the pool]")
    ] = "",
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="ENGINEPOOL_KEYS", help="A key of role worker, for TCP (`enginepool keys`)."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="How many to start.")] = 1,
    gpus: Annotated[
        list[str] | None,
        typer.Option(metavar="LIST", help="The GPUs of one worker, as 0,1; once for each worker.  [default: GPUs of its own]"),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Where the model is on this host.  [default: as the group names it]")
    ] = "",
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its own logs and sockets.  [default: ~/.local/state/enginepool/external/NAME]"),
    ] = None,
) -> None:
    """Run workers on this host for a pool elsewhere.

    They run until SIGTERM or Ctrl-C. Each worker has a stager, which takes new weights while the engine serves. The engine's
    settings come from the group of the pool. What ends is started again. A worker that loses the link to its pool keeps its
    model and waits for the pool. SIGTERM and Ctrl-C let begun work finish first; when this command is killed, its workers end
    with it.

    \b
    Examples:
      enginepool worker --connect tcp://10.0.0.1:5756 --group judge --keys worker.key
      enginepool worker --connect tcp://10.0.0.1:5756 --keys worker.key --workers 2 --gpus 0 --gpus 1
    """
    from enginepool.coordinator.launchers.unit import SettingsRefused, UnitConfig, run
    from enginepool.net.keys import key_for

    unit = UnitConfig(
        address=connect,
        group=group,
        workers=workers,
        gpus=gpus or [],
        model=model,
        directory="" if state_dir is None else str(state_dir),
        key=None if keys is None else key_for(connect, keys),
        key_file="" if keys is None else str(keys.expanduser().absolute()),
    )
    try:
        code = run(unit)
    except SettingsRefused as error:
        raise CommandFailed(str(error)) from None
    raise typer.Exit(code)
