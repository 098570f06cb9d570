"""`enginepool doctor`: what this machine can run, and what is missing, in plain words."""

from pathlib import Path
from typing import Annotated

import typer

from enginepool.cli.cli_errors import RUN_FAILED


def doctor(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="POOL.TOML", help="Look at the kernel caches that it names."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Say what this machine can run, and what is missing.

    Exit code 0 if at least a coordinator can run here.

    \b
    Examples:
      enginepool doctor
      enginepool doctor --json
      enginepool doctor --config pool.toml
    """
    from enginepool.cli.doctor_checks import verify

    caches: list[str] = []
    if config is not None:
        from enginepool.config_loader import load_config

        caches = [group.kernel_cache for group in load_config(config).groups.values() if group.kernel_cache]
    examination = verify(caches)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(examination).decode())
    else:
        for finding in examination.findings:
            mark = {"good": "ok", "bad": "no", "note": "--"}[finding.state]
            typer.echo(f"  {mark}  {finding.what:<22} {finding.said}")
        typer.echo("\nWhat can run here:")
        for verdict in examination.verdicts:
            typer.echo(f"  {'yes' if verdict.can else 'no ':<4} {verdict.use:<22} {verdict.said}")
    if not examination.verdicts[0].can:
        raise typer.Exit(RUN_FAILED)
