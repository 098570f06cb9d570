"""`enginepool ready`: wait until a running pool can serve, for scripts."""

import asyncio
from typing import Annotated

import typer

from enginepool.cli.connect import CONNECT_S, DEFAULT_ADDRESS, Address


def ready(
    connect: Address = DEFAULT_ADDRESS,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="Fail after this long.  [default: 10 s to find the pool, then none]"),
    ] = None,
    group: Annotated[str, typer.Option(help="The group to wait for; without it, every group.")] = "",
) -> None:
    """Wait until a running pool can serve.

    Returns when every group, or the one named, has a ready worker; says on stderr what the workers do meanwhile. Exit code 1
    if the time is over, if no pool is there, or if a group is down and stays down; the last line says why.

    \b
    Examples:
      enginepool ready --timeout 600 && enginepool score in.jsonl out.jsonl
      enginepool ready --group reward --connect ipc:///run/pool.sock
    """
    asyncio.run(_wait(connect, timeout, group))


async def _wait(address: str, within: float | None, group: str) -> None:
    from enginepool.client.pool import Pool

    loop = asyncio.get_running_loop()
    began = loop.time()
    # A script starts the pool and this at the same time, so the pool may take as long as its workers.
    async with Pool.connect(address, connect_timeout=CONNECT_S if within is None else within) as pool:
        left = None if within is None else max(within - (loop.time() - began), 0.001)
        report = await pool.ready(left, group=group, report=lambda line: typer.echo(line, err=True))
    names = [status.name for status in report.groups if group in ("", status.name)]
    typer.echo(f"ready: {', '.join(names)}", err=True)
