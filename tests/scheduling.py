"""Which process runs which tests, where several do (`pytest -n`). A plugin that `conftest.py` registers beside pytest-xdist.

One process runs all that shares the real engines, which start once; of everything else one runs a whole file.
"""

import pytest
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

ENGINES = "tests/engine"


def scope(nodeid: str) -> str:
    """What is not shared out."""
    path = nodeid.partition("::")[0]
    return ENGINES if path.startswith(f"{ENGINES}/") else path


class ByScope(LoadScopeScheduling):
    """Gives each process whole scopes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first."""
    items.sort(key=lambda item: scope(item.nodeid) != ENGINES)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    """The scheduler of `-n`."""
    config.option.loadscopereorder = False
    return ByScope(config, log)
