"""Which process runs which tests, where several do (`pytest -n`). A plugin that `conftest.py` registers with pytest-xdist.

- All tests that share real engines, which start once, run in one process, and so do all others that load SGLang.
- A test of the simulator shares nothing, and any process may run it.
- Of everything else, a process runs a whole file.

Most tests of real processes wait, and the simulator waits for nothing. So the last process takes tests from the end, where the
simulator is, and runs them when the other processes leave a core idle.
"""

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]
from xdist.workermanage import WorkerController  # pyright: ignore[reportMissingTypeStubs]

ENGINES = "tests/engine"
#: of those, the tests that share engines; the others start pools or engines of their own
SHARED_ENGINES = (f"{ENGINES}/test_sglang", f"{ENGINES}/test_versions")
SIMULATOR = "tests/sim/"
#: a file that takes a minute, and waits all the time
WAITS = "tests/wire/test_trainer_ranks.py"
#: The tests that take longest come first, and those of the simulator last.
ORDER = (f"{ENGINES}/", WAITS, "tests/house/", "tests/process/", "tests/wire/", "tests/core/", SIMULATOR)


def scope(nodeid: str) -> str:
    """The name of what one process runs."""
    path = nodeid.partition("::")[0]
    if path.startswith(f"{ENGINES}/"):
        return f"{ENGINES}: shared" if path.startswith(SHARED_ENGINES) else ENGINES
    return nodeid if path.startswith(SIMULATOR) else path


def is_last(process: str, count: int) -> bool:
    """Whether this is the last of several processes, which pytest-xdist names gw0, gw1 and so on."""
    return count > 1 and process == f"gw{count - 1}"


class ByScope(LoadScopeScheduling):
    """Gives each process whole scopes, in the order of the tests; the last process takes them from the end."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if is_last(node.gateway.id, self.numnodes):  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is not compiled yet, one process compiles. The others would do the same at the same time: they wait for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(folder, fcntl.LOCK_SH)
        return (yield)
    finally:
        os.close(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folder by folder, in this order."""
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in ORDER])


def pytest_sessionstart() -> None:
    """The last of several processes has a low priority, so that tests that wait for processes get a core at once."""
    if is_last(os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))):
        os.nice(10)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    """The scheduler of `-n`."""
    config.option.loadscopereorder = False
    return ByScope(config, log)
