"""What the pool is measured against, one file a peer. Each says what it misses on this machine, starts, is driven and stops."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.processes import Child


@dataclass(frozen=True)
class Contestant:
    """A peer that runs: its load generator, and whose CPU time is the coordinator's.

    `shares` are parts of the coordinator that are worth a row of their own. `python` drives the Python client, if there is one.
    `children` must be alive as long as it is measured.
    """

    load: Child
    coordinator: Callable[[], list[int]]
    children: list[Child]
    shares: dict[str, Callable[[], list[int]]] = field(default_factory=dict[str, Callable[[], list[int]]])
    python: Child | None = None


@dataclass(frozen=True)
class Peer:
    """How to start a peer.

    Args:
        name: for the command line.
        who: for the table.
        missing: one line that says what is missing on this machine to run it, or "".
        start: starts it with two workers and a load generator. What it starts it hands to the stack, which stops it, also if
            `start` itself fails; the path is a scratch folder of its own.
    """

    name: str
    who: str
    missing: Callable[[], str]
    start: Callable[[Path, ExitStack], Contestant]


#: Seconds for a child of our own to say that it is up.
UP_S = 120.0


def begin(stack: ExitStack, argv: list[str], scratch: Path, up_s: float = UP_S) -> Child:
    """Start one of our own processes and wait until it is up."""
    child = Child(argv, scratch=scratch)
    stack.callback(child.stop)
    child.hear(up_s)
    return child
