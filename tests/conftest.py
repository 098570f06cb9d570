"""What all tests share: none is judged by the clock, or leaves a process; one says so if this machine misses what it needs."""

import gc
import importlib
import importlib.util
import os
import shutil
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

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

# The threads that numpy has for large matrices wait actively, for 20 ms of CPU time in each process that imports it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the commands that they interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Where pytest-xdist is installed, it shares the tests out as they should be."""
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(importlib.import_module("tests.scheduling"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests, and the tests themselves, stay: garbage is not looked for among them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def missing(marker: str) -> str | None:
    """What is missing here for a test with this marker. In CI nothing of `engine` is missing: such a test runs or fails."""
    if marker == "engine" and "CI" not in os.environ and importlib.util.find_spec("sglang") is None:
        return "needs the sglang package: make setup"
    if marker == "gpu" and shutil.which("nvidia-smi") is None:
        return "needs a CUDA GPU: no nvidia-smi on PATH"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `engine` or `gpu` where they cannot run."""
    for marker in ("engine", "gpu"):
        if reason := missing(marker):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes. Those that still run end with the test, also with one that fails."""
    with Processes() as started:
        yield started
