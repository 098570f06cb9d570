"""Which process runs which tests, where several do (`pytest -n`). A plugin that `conftest.py` registers with pytest-xdist.

- All tests that share the real engines, which start once, run in one process.
- A test of the simulator shares nothing, and any process may run it.
- Of everything else, a process runs a whole file.
"""

import pytest
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

ENGINES = "tests/engine"
SIMULATOR = "tests/sim/"


def scope(nodeid: str) -> str:
    """The name of what one process runs."""
    path = nodeid.partition("::")[0]
    if path.startswith(f"{ENGINES}/"):
        return ENGINES
    return nodeid if path.startswith(SIMULATOR) else path


class ByScope(LoadScopeScheduling):
    """Gives each process whole scopes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def turn(nodeid: str) -> int:
    """The engines take longest and come first. Tests of the simulator are short and come last: they keep all processes busy."""
    return 0 if scope(nodeid) == ENGINES else 2 if nodeid.startswith(SIMULATOR) else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest scopes first."""
    items.sort(key=lambda item: turn(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    """The scheduler of `-n`."""
    config.option.loadscopereorder = False
    return ByScope(config, log)
