"""`enginepool profile`: engines record what they compute for a while."""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, Target, ask_pool
from enginepool.cli.outcomes import show_outcomes

if TYPE_CHECKING:
    from enginepool.client.pool import Pool
    from enginepool.protocol.messages.control import ControlReport


def profile(
    target: Target = "",
    seconds: Annotated[float, typer.Option(min=0.1, max=300.0, metavar="SECONDS", help="For how long.")] = 10.0,
    steps: Annotated[
        int, typer.Option(min=0, max=10_000, metavar="N", help="And for how many forwards at most; 0: any number.")
    ] = 0,
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """Let engines trace what they compute, with SGLang's profiler.

    Needs the role admin, and profile_root of the group: each worker writes into a folder under it, on its host. A line for
    each worker says which one, or why it failed. Exit code 1 if one did. Ctrl-C ends it at once; the traces are
    written, and the lines shown.

    \b
    Examples:
      enginepool profile policy --seconds 5
      enginepool profile policy/policy-0 --steps 20
    """
    group, _, worker = target.partition("/")

    async def record(pool: "Pool") -> "ControlReport":
        started = await pool.start_profile(group, seconds=seconds, steps=steps, worker=worker)
        failed = {row.name: row for row in started.workers if row.code}
        if len(failed) == len(started.workers):
            return started
        typer.echo(f"engines record for {seconds:g} s; Ctrl-C ends it at once", err=True)
        with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C: what is recorded so far is written, and shown
            await asyncio.sleep(seconds)
        ended = await pool.stop_profile(group, worker=worker)
        ended.workers = [failed.get(row.name, row) for row in ended.workers]
        return ended

    show_outcomes(ask_pool(connect, record), "profiled")
