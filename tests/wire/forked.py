"""Processes that use torch, forked from one that has imported it: the import takes longer than most of what they do."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def fork(main: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """Start a process that runs `main(connection, *args)`; the process, and the other end of its connection."""
    context = multiprocessing.get_context("forkserver")
    # It is heard once in a process of pytest. Where another room came first, its modules are the ones that are there already.
    context.set_forkserver_preload(["tests.wire.receiver", "tests.wire.trainer"])
    ours, other = context.Pipe()
    process = context.Process(target=main, args=(other, *args), daemon=True)
    process.start()
    other.close()
    return process, ours
