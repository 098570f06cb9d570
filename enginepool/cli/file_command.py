"""The command of an operation that sends a file of requests through a pool: the options that all such commands have."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address
from enginepool.cli.jsonl import Ask, InputLine

L = TypeVar("L", bound=InputLine)


def _shared(
    source: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One request on each line, see below; - is stdin.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="One answer on each line, appended as they come; - is stdout.")
    ],
    connect: Address = DEFAULT_ADDRESS,
    group: Annotated[str, typer.Option(help="The group to ask; a pool of one group needs no name.")] = "",
    priority: Annotated[int, typer.Option(min=-1000, max=1000, help="Larger runs first.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Give a request up after this long.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests under way at a time.")] = 64,
    min_version: Annotated[
        int, typer.Option(metavar="VERSION", min=0, help="The oldest weights that may answer; requests wait for them.")
    ] = 0,
    version: Annotated[
        int | None, typer.Option(metavar="VERSION", min=0, help="The only weights that may answer; requests wait for them.")
    ] = None,
    mixed_versions: Annotated[
        bool, typer.Option("--mixed-versions", help="Go on although OUT has answers of another weight version.")
    ] = False,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Ask again what OUT has an error for.")] = False,
) -> None:
    """The options of every such command."""


def file_command(
    form: type[L], ask: Ask[L], *, priority: int = 0
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command of a function that has the options of one operation and returns the settings of its lines.

    Args:
        form: an input line of the operation.
        ask: asks the pool for the answer to a line.
        priority: of lines that do not say it, without the option.
    """
    shared = dict(inspect.signature(_shared).parameters)
    shared["priority"] = shared["priority"].replace(default=priority)

    def make(own: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(own)
        def command(**given: Any) -> None:
            from enginepool.cli.file_run import run_file

            common = {name: given.pop(name) for name in shared}
            settings = own(**given)
            settings |= {name: common.pop(name) for name in ("group", "priority", "timeout", "min_version", "version")}
            run_file(form, ask, settings, address=common.pop("connect"), **common)

        places, options = list(shared.values())[:2], list(shared.values())[2:]
        parameters = [*places, *inspect.signature(own).parameters.values(), *options]
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return make
