"""The benchmark of rollouts measures what it says."""

import asyncio
from pathlib import Path

import msgspec

from bench.rollout import ALONE, BARRIER, FIRST, JUDGE, POLICY, ROLLOUT, TARGETS, WALL, Phase, measure, pool_of, rows_of
from bench.table import judge
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


def test_each_contestant_generates_all_prompts_and_takes_its_turn(processes: Processes, tmp_path: Path) -> None:
    config = pool_of(tmp_path)
    for name, options in (("policy", POLICY), ("judge", JUDGE)):
        config.groups[name] = msgspec.structs.replace(config.groups[name], options={**options, "forward_s": 0.0005})
    daemon = ForkedDaemon(processes, config).listening()
    found = asyncio.run(asyncio.wait_for(measure(daemon.address, 4, 2), 60))
    assert {who: len(phases) for who, phases in found.items()} == {ROLLOUT: 2, ALONE: 2, BARRIER: 2}
    assert all(0 < phase.first_s <= phase.wall_s and phase.tokens > 4 * 8 for phases in found.values() for phase in phases)


def test_times_are_compared_for_as_many_tokens_with_the_phase_of_the_same_prompts() -> None:
    rows = rows_of({ROLLOUT: [Phase(2.0, 1.0, 10_000)], ALONE: [Phase(2.0, 2.0, 20_000)], BARRIER: [Phase(3.0, 3.0, 20_000)]})
    found = {(row.what, row.who): (row.value, row.ratio) for row in rows}
    assert found[WALL, ROLLOUT] == (2.0, 2.0) and found[WALL, ALONE] == (1.0, None) and found[WALL, BARRIER] == (1.5, 1.5)
    assert found[FIRST, ROLLOUT] == (1.0, 0.5)
    assert [(verdict.found, verdict.met) for verdict in judge(rows, TARGETS)] == [(2.0, False)]
