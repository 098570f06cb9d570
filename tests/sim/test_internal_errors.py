"""The simulator sees whether a coordinator goes on after an internal error, as it must not."""

import pytest

from tests.sim.sim_coordinator import SimCoordinator
from tests.sim.simulation import Failed, simulate


def test_a_coordinator_that_goes_on_after_an_internal_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimCoordinator, "goes_on", True)
    found: list[str] = []
    for seed in range(1, 21):
        try:
            simulate(seed, 1 + seed % 8, faulty=True)
        except Failed as failed:
            found.append(str(failed).partition("\n")[0])
    assert found, "every call has its answer although the coordinator goes on"


def test_a_coordinator_that_ends_after_an_internal_error_loses_no_call() -> None:
    for seed in range(1, 21):
        simulate(seed, 1 + seed % 8, faulty=True)
