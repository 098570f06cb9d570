"""Processes that use torch, forked from one that has imported it: the import takes longer than most of what they do."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.process.forking import server


def fork(main: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `main(connection, *args)`; the process, and the other end of its connection."""
    context = server()
    ours, other = context.Pipe()
    process = context.Process(target=main, args=(other, *args), daemon=True)
    process.start()
    other.close()
    return process, ours
