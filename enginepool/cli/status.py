"""`enginepool status`: what a running pool is doing, as a table or as JSON."""

import asyncio
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from enginepool.cli.cli_errors import RUN_FAILED, CommandFailed
from enginepool.cli.connect import DEFAULT_ADDRESS, Address, open_pool

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from enginepool.client.pool import Pool
    from enginepool.protocol.messages import StatusReport

#: A coordinator that is up answers in milliseconds.
ANSWER_S = 10.0
#: clients that the table shows
_CLIENTS = 5


def status(
    connect: Address = DEFAULT_ADDRESS,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="How often --watch looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object (with --watch one for each look).")] = False,
) -> None:
    """Show the groups and workers of a running pool.

    \b
    Examples:
      enginepool status
      enginepool status --watch
      enginepool status --connect ipc:///run/pool.sock --json
    """
    try:
        asyncio.run(_status(connect, every if watch else None, as_json))
    except KeyboardInterrupt:
        # Ctrl-C is how a watch ends.
        if not watch:
            raise


async def _status(address: str, every: float | None, as_json: bool) -> None:
    from rich.live import Live

    from enginepool.cli.console import console

    screen = console()
    async with open_pool(address) as pool:
        if every is None or as_json:
            while True:
                report = await _ask(pool, address)
                if as_json:
                    typer.echo(json.dumps(whole(report)))
                else:
                    screen.print(tables(report))
                if every is None:
                    return
                await asyncio.sleep(every)
        with Live(console=screen, screen=screen.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(tables(await _ask(pool, address)), refresh=True)
                await asyncio.sleep(every)


async def _ask(pool: "Pool", address: str) -> "StatusReport":
    try:
        return await pool.status(ANSWER_S)
    except TimeoutError:
        raise CommandFailed(f"{address}: no answer for {ANSWER_S:.0f} s; is the pool still running?", RUN_FAILED) from None


def whole(value: Any) -> Any:
    """A report for JSON with every key, also those whose values are zero or empty: on the wire they are left out."""
    if hasattr(value, "__struct_fields__"):
        return {name: whole(getattr(value, name)) for name in value.__struct_fields__}
    return [whole(one) for one in cast("list[Any]", value)] if isinstance(value, list | tuple) else value


def tables(report: "StatusReport") -> "Group":
    """Lines about the pool and its groups, a table of groups and a table of workers; they fit 80 columns."""
    from rich.console import Group
    from rich.markup import escape

    head = f"up {_span(report.uptime_s)}   clients {report.clients}   epoch {report.epoch}"
    if report.draining:
        head += "   [yellow]draining[/]"
    kept = f"answers kept {report.answers_kept} ({_bytes(report.answers_bytes)})"
    unread = f"unread: clients {_bytes(report.client_unread_bytes)}, workers {_bytes(report.worker_unread_bytes)}"
    pauses = f"gc pauses {report.pauses[0]} ({report.pauses[1] / 1000:.0f} ms)"
    lines = [head, f"{kept}   {pauses}", unread, ""]
    groups = _table("group", "", "queued tokens oldest running answered failed batches split lost")
    workers = _table("worker", "stage", "pid weights batches tokens done silent restarts")
    details: list[str] = []
    for group in report.groups:
        name = escape(group.name)
        weights = "none" if group.version is None else f"version {group.version}"
        lines.append(f"[bold]{name}[/]: {escape(group.model)}, weights {weights}")
        if group.down:
            lines.append(f"[red]{name} is down: {escape(group.down)}[/]")
        if group.no_worker:
            lines.append(f"[yellow]{name}: {escape(group.no_worker)}[/]")
        if group.needs_weights:
            lines.append(f"[red]{name} needs weights: {escape(group.needs_weights)}[/]")
        if group.update:
            lines.append(f"[yellow]{name}: update in phase {escape(group.update)}[/]")
        if group.paused:
            lines.append(f"[yellow]{name} is paused: its requests wait until it is resumed[/]")
        if group.asleep:
            lines.append(f"[yellow]{name} sleeps ({', '.join(group.asleep)}): its requests wait until it is woken[/]")
        if group.poisoned:
            lines.append(f"[red]{name}: {group.poisoned} poisoned requests (each of them ended several workers)[/]")
        if group.early:
            lines.append(f"{name}: {group.early} of the queued requests wait for a later weight version")
        if group.halvings:
            lines.append(f"[yellow]{name}: engines ran out of memory; workers are given 1/{2**group.halvings} at a time[/]")
        if group.prompt_tokens:
            share = 100 * group.cached_tokens / group.prompt_tokens
            lines.append(f"{name}: {share:.0f} % of {group.prompt_tokens} prompt tokens were in prefix caches")
        split = f"[red]{group.split_batches}[/]" if group.split_batches else "0"
        counts = (group.queued, group.queued_tokens, _span(group.oldest_s), group.running, group.answered, group.failed)
        groups.add_row(name, *map(str, counts), str(group.batches), split, str(group.lost_batches))
        for worker in group.workers:
            color = "green" if worker.stage == "ready" else "yellow"
            version = "-" if worker.version is None else worker.version
            counts = (worker.pid or "-", version, worker.batches, worker.tokens, worker.done, _span(worker.silent_s))
            stage = f"[{color}]{escape(worker.stage)}[/]{' packed' if worker.packed else ''}"
            workers.add_row(escape(worker.name), stage, *map(str, counts), str(worker.restarts))
            if worker.pace:
                details.append(
                    f"{escape(worker.name)}: pace {worker.pace:,} tokens; a row counts for {worker.forward_row_tokens:,} more"
                )
            if worker.asleep:
                details.append(f"{escape(worker.name)}: asleep: {', '.join(worker.asleep)}")
            if worker.detail:
                details.append(f"{escape(worker.name)}: {escape(worker.detail)}")
    return Group(*lines, "", groups, "", workers, *details, *_busiest(report))


def _busiest(report: "StatusReport") -> list[str]:
    """A line for each of a few clients."""
    told = "client {}: {} requests, the oldest ({}) for {}"
    return [told.format(one.id, one.requests, one.oldest, _span(one.oldest_s)) for one in report.busiest[:_CLIENTS]]


def _table(name: str, second: str, counts: str) -> "Table":
    """An empty table: a name, perhaps a word, and right-aligned counts. Only names are folded where the line is too short."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(name, overflow="fold")
    if second:
        table.add_column(second, no_wrap=True)
    for word in counts.split():
        table.add_column(word, justify="right", no_wrap=True)
    return table


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count} B"
