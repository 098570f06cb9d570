"""Real engines for the tests, started once, and the direct computation that their answers must equal."""

import sys
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference

#: Small, so that batches of a few rows are full ones.
BUDGETS: dict[str, Any] = {"max_batch_tokens": 256, "max_batch_rows": 24}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that needs a GPU tells at once why it fails: the machine may be taken away before pytest tells it at the end."""
    report = yield
    if report.failed and item.get_closest_marker("gpu"):
        print(f"\nFAILED in {report.when}: {item.nodeid}\n{report.longreprtext}", file=sys.stderr, flush=True)  # noqa: T201
    return report


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return Models(
        causal=make_tiny_model(folder / "causal", seed=1),
        reward=make_tiny_model(folder / "reward", head="reward", labels=3, seed=2),
    )


class Engines:
    """The running engines by name."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._hosted: dict[str, HostedEngine] = {}

    def _start(self, name: str) -> HostedEngine:
        if name == "causal":
            return HostedEngine(str(self._models.causal), **BUDGETS)
        # This one prepares a forward while another runs, as on a GPU.
        return HostedEngine(str(self._models.reward), options={"disable_overlap_schedule": False}, **BUDGETS)

    def get(self, name: str) -> HostedEngine:
        """The engine, ready; another one when a test has ended it."""
        if name not in self._hosted or self._hosted[name].ended:
            self._hosted[name] = self._start(name)
        return self._hosted[name].wait_until_started()

    def end(self) -> None:
        for engine in self._hosted.values():
            engine.end()


@pytest.fixture(scope="session")
def engines(models: Models) -> Iterator[Engines]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # models this small gain nothing from threads that wait for each other
        engines = Engines(models)
        yield engines
    engines.end()


@pytest.fixture
def causal(engines: Engines) -> HostedEngine:
    return engines.get("causal")


@pytest.fixture
def reward(engines: Engines) -> HostedEngine:
    return engines.get("reward")


@pytest.fixture(scope="session")
def reference(models: Models) -> Reference:
    return Reference(models)
