"""`enginepool sleep` and `enginepool wake`: engines release parts of their memory, and take them back."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from enginepool.cli.connect import DEFAULT_ADDRESS, Address, Target, ask_pool
from enginepool.cli.outcomes import show_outcomes

if TYPE_CHECKING:
    from enginepool.protocol.messages.control import MemoryTag


class TagName(StrEnum):
    """A part of an engine's memory."""

    weights = "weights"
    kv_cache = "kv_cache"
    cuda_graph = "cuda_graph"


Tags = Annotated[list[TagName] | None, typer.Option("--tag", help="A part of the memory; may be repeated. By default all.")]


def sleep(target: Target = "", tag: Tags = None, connect: Address = DEFAULT_ADDRESS) -> None:
    """Let engines release parts of their memory.

    Requests to a group that sleeps wait until it is woken. When one worker sleeps they run on others. Needs the role
    publisher. A line for each worker says whether it did. Exit code 1 if one did not.

    \b
    Examples:
      enginepool sleep policy
      enginepool sleep policy/policy-0 --tag kv_cache
    """
    group, _, worker = target.partition("/")
    show_outcomes(ask_pool(connect, lambda pool: pool.sleep(group, tags=_tags(tag), worker=worker)), _done("asleep", tag))


def wake(target: Target = "", tag: Tags = None, connect: Address = DEFAULT_ADDRESS) -> None:
    """Let engines take back memory that they released.

    A worker serves again when nothing of its engine sleeps and it has the committed weights. Needs the role publisher. A line
    for each worker says whether it did. Exit code 1 if one did not.

    \b
    Examples:
      enginepool wake policy
      enginepool wake policy --tag weights
    """
    group, _, worker = target.partition("/")
    show_outcomes(ask_pool(connect, lambda pool: pool.wake(group, tags=_tags(tag), worker=worker)), _done("awake", tag))


def _tags(chosen: list[TagName] | None) -> "list[MemoryTag]":
    return [tag.value for tag in chosen or TagName]  # pyright: ignore[reportReturnType] (the same names)


def _done(what: str, chosen: list[TagName] | None) -> str:
    # One part that is awake does not make a worker awake.
    return f"{what}: {', '.join(dict.fromkeys(chosen))}" if chosen else what
