"""A process that may open few files is told so in one line, before ZeroMQ aborts it."""

import asyncio
import errno
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from enginepool import Pool
from enginepool.cli.cli_errors import RUN_FAILED, describe
from enginepool.client.session.events import OpenLink
from enginepool.errors import ConnectError
from enginepool.net.dealer import ask
from enginepool.net.descriptors import CONNECTION_FILES, check_free
from tests.open_files import open_here
from tests.wire.fake_coordinator import FakeCoordinator

SHORT = r"Too many open files: a connection needs 8 file descriptors, \d are free; RLIMIT_NOFILE is \d+: raise it to 64 or more"


@contextmanager
def free(count: int) -> Generator[None]:
    """This process may open at most so many more files."""
    lowest = os.dup(0)
    os.close(lowest)
    with at_most(lowest + count):
        yield


@contextmanager
def at_most(count: int) -> Generator[None]:
    """The limit of open files: with fewer than are open, one that is closed makes no room."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
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


def test_a_pool_that_cannot_connect_again_for_want_of_descriptors_does_so_once_they_are_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(fake: FakeCoordinator) -> None:
        async with Pool.connect(fake.address) as pool:
            perform = pool._connection._perform  # pyright: ignore[reportPrivateUsage]
            with at_most(3):
                perform(OpenLink())
            assert "cannot connect: Too many open files" in caplog.text
            perform(OpenLink())  # as the session wants it after the next silence
            assert (await pool.score([1], [[2]], label_token_ids=[1])).scores.shape == (1, 2)

    with FakeCoordinator(f"ipc://{tmp_path}/c") as fake:
        asyncio.run(asyncio.wait_for(story(fake), 60))


@pytest.mark.parametrize("error", [zmq.ZMQError(errno.EMFILE), OSError(errno.EMFILE, os.strerror(errno.EMFILE))])
def test_a_command_without_descriptors_says_the_limit(error: Exception) -> None:
    line, code = describe(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert line.startswith("enginepool: ") and code == RUN_FAILED
    assert line.endswith(f"Too many open files; RLIMIT_NOFILE is {limit}: raise it to 64 or more (ulimit -n)"), line
