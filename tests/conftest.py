"""What all tests share: none is judged by the clock, or leaves a process; one that needs what this machine lacks says so."""

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]

from tests.process.processes import Processes

# Machines that run the tests are slow and shared; a deadline on an example would fail for that alone. CI draws the same
# examples every time, so that it is the change under test that fails; people draw new ones.
settings.register_profile(
    "enginepool",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("enginepool")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def missing(marker: str) -> str | None:
    """What a test with this marker lacks here. CI lacks nothing of `engine`: there such a test runs, and fails if it must."""
    if marker == "engine" and "CI" not in os.environ and importlib.util.find_spec("sglang") is None:
        return "needs the sglang package: make setup"
    if marker == "gpu" and shutil.which("nvidia-smi") is None:
        return "needs a CUDA GPU: no nvidia-smi on PATH"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `engine` or `gpu` where they cannot run. Those of real engines come first: they take longest."""
    for marker in ("engine", "gpu"):
        if reason := missing(marker):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: scope(item.nodeid) != ENGINES)


ENGINES = "tests/engine"


def scope(nodeid: str) -> str:
    """What one process runs where several run the tests: all that shares the real engines, or a file."""
    path = nodeid.partition("::")[0]
    return ENGINES if path.startswith(f"{ENGINES}/") else path


class ByScope(LoadScopeScheduling):
    """Gives each process whole scopes, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope:
    """The scheduler of `-n`."""
    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes; whatever is left of them ends with the test, also with one that fails."""
    with Processes() as started:
        yield started
