"""`enginepool weights`: what weights a running pool holds, where they came from, and changing them without a trainer."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.cli_errors import BAD_USAGE, RUN_FAILED, CommandFailed
from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool

if TYPE_CHECKING:
    from enginepool.client.pool import Pool
    from enginepool.protocol.messages.weight_reports import UpdateRecord, WeightsReport, WorkerWeights

weights = typer.Typer(name="weights", rich_markup_mode=None)

Group = Annotated[str, typer.Option(help="The group; a pool of one group needs no name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
Version = Annotated[int, typer.Option(min=0, help="The new version, above the one that is committed.")]
NewRun = Annotated[
    bool, typer.Option("--new-run", help="Let versions begin again, also below the committed one: another training begins.")
]


@weights.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Look at the weights of a running pool, or change them.

    All workers of a group run on one version of the weights; every answer names it. A trainer brings new ones with
    enginepool.WeightPublisher; here is what needs no trainer.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@weights.command()
def versions(connect: Address = DEFAULT_ADDRESS, group: Group = "", as_json: AsJson = False) -> None:
    """Show the version of each worker.

    \b
    Examples:
      enginepool weights versions
      enginepool weights versions --group policy --json
    """
    from enginepool.cli.weights_tables import version_table

    _report(connect, lambda pool: pool.weights(group), version_table, as_json)


@weights.command()
def history(connect: Address = DEFAULT_ADDRESS, group: Group = "", as_json: AsJson = False) -> None:
    """Show the updates of a group.

    Newest last: what became of each, and how long the pool served and stood still meanwhile.

    \b
    Examples:
      enginepool weights history
    """
    from enginepool.cli.weights_tables import history_table

    _report(connect, lambda pool: pool.weights(group), history_table, as_json)


@weights.command()
def digest(connect: Address = DEFAULT_ADDRESS, group: Group = "", as_json: AsJson = False) -> None:
    """Compare what the engines hold.

    Every worker computes a digest of the weights in its engine now. Exit code 1 if they are not all the same,
    or no worker is ready. An engine that computes or rounds what it loads is not comparable, and says why.

    \b
    Examples:
      enginepool weights digest --group policy
    """
    from enginepool.cli.weights_tables import digest_table, not_comparable

    report = _report(connect, lambda pool: pool.weights_digest(group), digest_table, as_json)
    _all_answered(report, excused=not_comparable)
    if len({worker.digest for worker in report.workers if not not_comparable(worker)}) > 1:
        raise CommandFailed(f"the workers of {report.group} hold different weights", RUN_FAILED)


@weights.command()
def validate(connect: Address = DEFAULT_ADDRESS, group: Group = "", as_json: AsJson = False) -> None:
    """Look for NaN, infinity and zeros.

    In every engine; zeros are tensors of nothing else. Exit code 1 if there is NaN or infinity, or no worker is ready.

    \b
    Examples:
      enginepool weights validate
    """
    from enginepool.cli.weights_tables import findings_table

    report = _report(connect, lambda pool: pool.validate_weights(group), findings_table, as_json)
    _all_answered(report)
    bad = [worker.name for worker in report.workers if any(finding.kind != "zero" for finding in worker.findings)]
    if bad:
        raise CommandFailed(f"NaN or infinity in {', '.join(bad)}", RUN_FAILED)


@weights.command()
def get(
    name: Annotated[str, typer.Argument(help="The weight's name in the checkpoint, as model.norm.weight.")],
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    output: Annotated[Path | None, typer.Option(metavar="FILE.npy", help="Write it there, float32, for numpy.load.")] = None,
) -> None:
    """Show one weight as an engine holds it.

    \b
    Examples:
      enginepool weights get model.norm.weight
      enginepool weights get lm_head.weight --output head.npy
    """
    import numpy as np

    if output is not None and not output.parent.is_dir():
        raise CommandFailed(f"{output.parent}: no such directory", BAD_USAGE)
    found = ask_pool(connect, lambda pool: pool.weight(name, group))
    if output is not None:
        with open(output, "wb") as file:
            np.save(file, found)
    typer.echo(f"{name}: {' × '.join(map(str, found.shape)) or 'one number'}")
    if found.size:
        typer.echo(f"least {found.min():.6g}   largest {found.max():.6g}   mean {found.mean():.6g}   std {found.std():.6g}")
        shown = " ".join(f"{value:.6g}" for value in found.ravel()[:8])
        typer.echo(f"{shown}{' ...' if found.size > 8 else ''}")


@weights.command()
def publish(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT_DIR", help="A directory that every worker can see.")],
    version: Version,
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    drain: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, max=3600, help="How long work in flight may take; then it runs again."),
    ] = 10.0,
    in_flight: Annotated[
        str,
        typer.Option(metavar="MODE", help="Work in flight: drain, abort, or for generations in_place or retract."),
    ] = "drain",
    after_drain: Annotated[
        str, typer.Option(metavar="MODE", help="Generations that drain did not wait for: abort, in_place or retract.")
    ] = "abort",
    new_run: NewRun = False,
) -> None:
    """Let all workers load a checkpoint.

    It is one transaction: all of them do, or none. The pool answers on the old weights until every worker has agreed, and then
    on the new ones; requests wait meanwhile. Names, shapes and dtypes are checked before; for NaN and infinity see validate.

    \b
    Examples:
      enginepool weights publish checkpoints/step-400 --version 400
      enginepool weights publish checkpoints/step-401 --version 401 --in-flight in_place
      enginepool weights publish /models/other --version 0 --new-run
    """
    options: Any = {"in_flight": in_flight, "after_drain": after_drain, "drain": drain, "new_run": new_run}
    record = ask_pool(connect, lambda pool: pool.publish_checkpoint(checkpoint, version, group, **options))
    typer.echo(_committed(record))


def _check_new_place(path: str) -> str:
    """A path on a worker's host, or in Redis. Raises BadParameter."""
    from enginepool.protocol.redis_url import FORM, is_redis, parse_redis

    right = parse_redis(path) is not None if is_redis(path) else path.startswith("/") and ".." not in path.split("/")
    if not right:
        raise typer.BadParameter(f"{path!r}: write an absolute path without '..', on the worker's host, or {FORM}")
    return path


@weights.command()
def save(
    path: Annotated[
        str,
        typer.Argument(
            callback=_check_new_place,
            help="A new folder on the worker's host, or redis://HOST:PORT/NAME, under save_roots of the group.",
        ),
    ],
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    worker: Annotated[str, typer.Option(help="The worker that writes it, by its name in the status; by default any.")] = "",
) -> None:
    """Save the weights that a group serves.

    One worker writes them while it serves, as load_format sharded_state of SGLang reads them, or from Redis load_format remote:
    engines start on that folder or that URL. Needs the role admin.

    \b
    Examples:
      enginepool weights save /data/saved/step-400 --group policy
      enginepool weights save redis://models.example.com:6379/step-400 --group policy
    """
    saved = ask_pool(connect, lambda pool: pool.save_weights(path, group, worker=worker))
    typer.echo(f"{saved.name}: {saved.message}")


@weights.command()
def set_version(version: Version, connect: Address = DEFAULT_ADDRESS, group: Group = "", new_run: NewRun = False) -> None:
    """Give a group's weights another version.

    No weight changes.

    \b
    Examples:
      enginepool weights set-version --version 12
      enginepool weights set-version --version 0 --new-run
    """
    typer.echo(_committed(ask_pool(connect, lambda pool: pool.set_version(version, group, new_run=new_run))))


def _committed(record: "UpdateRecord") -> str:
    from enginepool.cli.weights_tables import taken

    note = f"; {record.message}" if record.message else ""
    on = f"{record.committed} of {record.members} workers"
    return f"version {record.version} is committed on {on}, in {taken(record):.2f} s{note}"


def _report(
    address: str,
    question: "Callable[[Pool], Awaitable[WeightsReport]]",
    show: "Callable[[WeightsReport], Any]",
    as_json: bool,
) -> "WeightsReport":
    report = ask_pool(address, question)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(report).decode())
    else:
        from enginepool.cli.console import console

        console().print(show(report))
    return report


def _all_answered(report: "WeightsReport", excused: "Callable[[WorkerWeights], bool]" = lambda _: False) -> None:
    """Raises CommandFailed: no worker is ready, or a worker that is not `excused` says why it cannot answer."""
    if not report.workers:
        raise CommandFailed(f"no worker of {report.group} is ready", RUN_FAILED)
    silent = [f"{worker.name}: {worker.message}" for worker in report.workers if worker.message and not excused(worker)]
    if silent:
        raise CommandFailed("; ".join(silent), RUN_FAILED)
