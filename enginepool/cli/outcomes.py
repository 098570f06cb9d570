"""What the command line says of a command to all workers of a group."""

from typing import TYPE_CHECKING

import typer

from enginepool.cli.cli_errors import CommandFailed

if TYPE_CHECKING:
    from enginepool.protocol.messages.control import ControlReport


def show_outcomes(report: "ControlReport", done: str) -> None:
    """A line for each worker: `done`, or why it failed. Raises CommandFailed: one did, or there is none to profile."""
    if not report.workers:
        none = f"{report.group}: no worker was asked, since all are retired or none is connected"
        if report.command in ("start_profile", "stop_profile"):
            raise CommandFailed(none)
        typer.echo(none)
    for worker in report.workers:
        typer.echo(f"{worker.name}: {worker.message or done}")
    if failed := sum(bool(worker.code) for worker in report.workers):
        raise CommandFailed(f"{report.command}: {failed} of {len(report.workers)} workers of {report.group} failed")
