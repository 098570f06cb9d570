"""A process that may open few files is told so in one line, before ZeroMQ aborts it."""

import asyncio
import errno
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import zmq

from enginepool import Pool
from enginepool.cli.cli_errors import RUN_FAILED, describe
from enginepool.errors import ConnectError
from enginepool.net.dealer import ask
from enginepool.net.descriptors import CONNECTION_FILES, check_free
from tests.open_files import open_here

SHORT = r"Too many open files: a connection needs 8 file descriptors, \d are free; RLIMIT_NOFILE is \d+: raise it to 64 or more"


@contextmanager
def free(count: int) -> Generator[None]:
    """This process may open at most so many more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_look_for_free_descriptors_leaves_none_open() -> None:
    before = open_here()
    check_free(CONNECTION_FILES)
    with free(5), pytest.raises(OSError, match=SHORT) as raised:
        check_free(CONNECTION_FILES)
    assert raised.value.errno == errno.EMFILE
    assert open_here() <= before


@pytest.mark.parametrize("count", [0, 1, 3, 5, 7])
def test_a_pool_is_not_connected_to_with_too_few_descriptors(count: int) -> None:
    async def story() -> None:
        with free(count), pytest.raises(ConnectError, match=f"^ipc:///nowhere: cannot connect: {SHORT}"):
            await Pool.connect("ipc:///nowhere")

    asyncio.run(story())
    with free(count), pytest.raises(OSError, match=SHORT):
        ask("ipc:///nowhere", None, b"", 0.0)


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, os.strerror(errno.EMFILE))])
def test_a_command_without_descriptors_says_the_limit(error: Exception) -> None:
    line, code = describe(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert line.startswith("enginepool: ") and code == RUN_FAILED
    assert line.endswith(f"Too many open files; RLIMIT_NOFILE is {limit}: raise it to 64 or more (ulimit -n)"), line
