"""`enginepool adapters`: the LoRA adapters of a running pool."""

from typing import Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, ask_pool

adapters = typer.Typer(name="adapters", rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="What calls name: adapter=NAME.")]
Group = Annotated[str, typer.Option(help="The group; a pool of one group needs no name.")]


@adapters.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """List, load and unload LoRA adapters.

    All workers of a group have the same ones, each in one version; answers name it.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@adapters.command("list")
def list_(
    connect: Address = DEFAULT_ADDRESS,
    group: Annotated[str, typer.Option(help="Those of this group alone.")] = "",
) -> None:
    """Show the adapters that were loaded.

    A line for each: its group, name, version, digest, and its folder or its size. Those that engines start with are in
    `enginepool status --json` alone.

    \b
    Examples:
      enginepool adapters list
    """
    from enginepool.client.readiness import named_group

    report = ask_pool(connect, lambda pool: pool.status())
    for one in [named_group(report, group)] if group else report.groups:
        for adapter in one.adapters:
            where = adapter.path or f"{adapter.nbytes} bytes"
            typer.echo(f"{one.name}: {adapter.name} version {adapter.version} {adapter.digest} {where}")


@adapters.command()
def load(
    name: Name,
    path: Annotated[str, typer.Argument(help="Its folder on the hosts of the workers, under adapter_roots of the group.")],
    connect: Address = DEFAULT_ADDRESS,
    group: Group = "",
    version: Annotated[int | None, typer.Option(min=1, help="Above the present one.  [default: the next one]")] = None,
) -> None:
    """Load an adapter, or a newer version.

    All workers load it, or none does. Needs the role publisher.

    \b
    Examples:
      enginepool adapters load french /adapters/french
      enginepool adapters load french /adapters/french-2 --version 7
    """
    report = ask_pool(connect, lambda pool: pool.load_adapter(name, path, version=version, group=group))
    typer.echo(f"{report.group}: {report.name} version {report.version} {report.digest}")


@adapters.command()
def unload(name: Name, connect: Address = DEFAULT_ADDRESS, group: Group = "") -> None:
    """Unload an adapter from all workers.

    Calls that generate with it end. Needs the role publisher.

    \b
    Examples:
      enginepool adapters unload french
    """
    report = ask_pool(connect, lambda pool: pool.unload_adapter(name, group))
    typer.echo(f"{report.group}: {report.name} is not loaded")
