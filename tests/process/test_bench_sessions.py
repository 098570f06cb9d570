"""The benchmark of sessions measures what it says."""

import asyncio
from pathlib import Path

from bench.sessions import BY_HAND, CACHED, POOL, TARGETS, Heard, Talk, rows_of, run
from bench.table import judge
from tests.process.daemons import PATIENCE_S
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating


def test_all_users_talk_and_the_turns_are_counted_by_worker(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path, options={"forward_s": 0.001})
    talk = Talk(users=6, turns=3, system=64, new=20, tokens=8, think_s=0.01, vocab=VOCAB)
    heard, turns = asyncio.run(asyncio.wait_for(run(daemon.address, ["g"], talk), PATIENCE_S))
    assert sum(turns) == 18 and len(turns) == 2
    assert len(heard.first_ms) == 12 and 0.3 * heard.prompt < heard.cached < heard.prompt
    assert daemon.end() == 0


def test_the_share_that_is_cached_is_compared_in_pairs_and_the_load_by_itself() -> None:
    ours, others = Heard(cached=80, prompt=100, first_ms=[1.0, 3.0, 2.0]), Heard(cached=100, prompt=100, first_ms=[4.0])
    rows = rows_of({POOL: [(ours, [30, 10])], BY_HAND: [(others, [20, 20])]})
    found = {(row.what, row.who): (row.value, row.ratio) for row in rows}
    assert found[CACHED, POOL] == (80.0, None)
    assert found[CACHED, BY_HAND] == (100.0, 0.8)
    assert [(verdict.found, verdict.met) for verdict in judge(rows, TARGETS)] == [(0.8, False), (1.5, False), (0.5, True)]
