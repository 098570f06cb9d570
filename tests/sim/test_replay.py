"""A seed is all that it takes to see a schedule again: the same events at the same times, in any process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.simulation import Failed, Simulation, simulate
from tests.sim.world import World

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seed", "paced"), [(3, False), (5, False), (7, False), (12, False), (4, True), (8, True)])
def test_a_seed_replays_exactly(seed: int, paced: bool) -> None:
    first: list[str] = []
    again: list[str] = []
    outcome = simulate(seed, 6, first.append, paced=paced)
    assert simulate(seed, 6, again.append, paced=paced) == outcome
    assert first == again
    assert simulate(seed + 100, 6).digest != outcome.digest


def test_a_seed_replays_exactly_in_a_process_that_hashes_otherwise() -> None:
    said: list[str] = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.sim", "--seed", "11", "--workers", "8"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    assert f"digest {simulate(11, 8).digest:08x}" in said[0]


def test_what_happens_at_one_time_happens_in_the_order_asked_for() -> None:
    world = World(0)
    seen: list[int] = []
    for i in range(5):
        world.at(1.0, seen.append, i)
    world.at(0.5, seen.append, -1)
    world.run_until(2.0)
    assert seen == [-1, 0, 1, 2, 3, 4]
    assert world.now == 2.0


def test_a_failure_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(simulation: Simulation) -> None:
        raise AssertionError("a promise is broken")

    monkeypatch.setattr(Simulation, "run", broken)
    with pytest.raises(Failed, match=r"a promise is broken\nreplay: python -m tests\.sim --seed 42 --workers 3 --trace"):
        simulate(42, 3)
