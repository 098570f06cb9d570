"""`enginepool serve`: the pool as a daemon, described by a file or by a few flags."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginepool.cli.choices import Device, EngineName
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed

if TYPE_CHECKING:
    from enginepool.config import PoolConfig


def serve(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="POOL.TOML", help="The pool's description; excludes the other flags."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A checkpoint directory, or a name that SGLang can load.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=4096, metavar="N", help="Workers to start; 0: only `enginepool worker` starts some.  [default: 1]"
        ),
    ] = None,
    engine: Annotated[EngineName | None, typer.Option(help="The engine in each worker.  [default: sglang]")] = None,
    device: Annotated[Device | None, typer.Option(help="Where the engine runs.  [default: auto]")] = None,
    operation: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="generate, score, embed or logprobs; may be repeated.  [default: the last three]"),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where clients connect.  [default: a socket of your own]")
    ] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Journal and logs; one pool each.  [default: ~/.local/state/enginepool]")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether the configuration can be used on this host.")
    ] = False,
) -> None:
    """Run a pool, until SIGTERM or Ctrl-C.

    Either lets begun work finish first and then ends the workers, and so does a terminal that is closed (SIGHUP). SIGUSR1 ends
    the coordinator alone: the workers keep their models, and the next `enginepool serve` with the same state_dir adopts them.
    Calls that are not answered wait for it.

    \b
    Examples:
      enginepool serve --config pool.toml
      enginepool serve --model Qwen/Qwen3-Reranker-0.6B --workers 2
      enginepool serve --model Qwen/Qwen3-0.6B --operation generate
      enginepool serve --engine sim --workers 4      (no model and no GPU: a dry run)
    """
    flags = {
        "model": model, "workers": workers, "engine": engine, "device": device, "operation": operation or None,
        "listen": listen, "state_dir": state_dir,
    }  # fmt: skip
    pool = _read(config, flags)
    where = str(config or "configuration")
    _check_host(pool, where, check)
    if check:
        from enginepool.coordinator.shell.startup import check_ports

        check_ports(pool)
        typer.echo(f"{where}: good; {_summary(pool)}")
        return
    from enginepool.cli.coordinator_process import keep_running

    raise typer.Exit(keep_running(pool))


def _read(config: Path | None, flags: dict[str, Any]) -> "PoolConfig":
    from enginepool.config_loader import load_config

    given = [f"--{name.replace('_', '-')}" for name, value in flags.items() if value is not None]
    if config is not None and given:
        raise CommandFailed(f"--config and {given[0]} exclude each other: write it in {config}", BAD_USAGE)
    return load_config(config) if config is not None else _from_flags(flags)


def _check_host(pool: "PoolConfig", where: str, check: bool) -> None:
    """Refuse what this host cannot serve with. `where` names the configuration. A disk without room, or one that is read-only,
    is refused by `--check` alone: `serve` waits for it."""
    from enginepool.config_loader import check_models, check_roots
    from enginepool.coordinator.launchers.engine_options import check_options
    from enginepool.coordinator.launchers.gpus import check_gpus
    from enginepool.coordinator.shell.journal import HostFault
    from enginepool.coordinator.shell.startup import check_host
    from enginepool.host import DISK_ERRORS

    _check_engines(pool)
    check_models(pool, where)
    check_roots(pool, where)
    check_options(pool, where)
    check_gpus(pool, where)
    try:
        check_host(pool)
    except (HostFault, OSError) as error:
        # The coordinator says what cannot be written, and is tried again.
        if check or error.errno not in DISK_ERRORS:
            raise


def _summary(pool: "PoolConfig") -> str:
    from enginepool.net.address import default_address, is_in_use

    groups = ", ".join(f"{name} ({group.workers} x {group.engine})" for name, group in pool.groups.items())
    address = pool.listen or default_address()
    now = ", where a pool runs now" if is_in_use(address) else ""
    return f"groups: {groups}; listens on {address}{now}"


def _from_flags(flags: dict[str, Any]) -> "PoolConfig":
    """A pool of one group, `default`, from the flags that were given."""
    import msgspec

    from enginepool.config_loader import decode_config

    if flags["model"] is None and flags["engine"] is not EngineName.sim:
        raise CommandFailed("serve needs --config POOL.TOML or --model MODEL (or --engine sim, which needs neither)", BAD_USAGE)
    group = {name: flags[name] for name in ("model", "workers", "engine", "device") if flags[name] is not None}
    if flags["operation"] is not None:
        group["operations"] = flags["operation"]
    pool: dict[str, Any] = {"groups": {"default": {"model": "sim", **group}}}
    pool |= {name: str(flags[name]) for name in ("listen", "state_dir") if flags[name] is not None}
    return decode_config(msgspec.json.encode(pool))


def _check_engines(pool: "PoolConfig") -> None:
    """Refuse now what every worker would fail on a minute later."""
    for name, group in pool.groups.items():
        if group.engine != "sglang" or group.workers == 0:
            continue
        if importlib.util.find_spec("sglang") is None:
            raise CommandFailed(
                f"group {name}: the engine sglang is not installed here: pip install 'enginepool[sglang]' on a GPU machine, "
                'or try engine = "sim"; `enginepool doctor` says more'
            )
