"""The breakdown of a call's time: its marks are in the order of a request's life, and its steps add up to the call."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.breakdown import TOTAL, WARM, rows_of
from bench.peers.traced_coordinator import trace as trace_coordinator
from bench.peers.traced_scheduler import trace as trace_scheduler
from bench.tracing.marks import VARIABLE, Marker, Marks, read_marks
from bench.tracing.steps import STEPS, Call, steps_of, traced
from enginepool.coordinator.core import events as ev
from enginepool.workers.loop import WorkerProcess
from enginepool.workers.sglang.host import build
from enginepool.workers.sglang.patches.row_forwards import BATCH_ID
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.scoring import EngineScoring
from tests.core.checked_machine import CheckedMachine
from tests.core.machines import EPOCH, Pool, work

ROWS = "f" * BATCH_ID
KEYS = {"request": "r7", "batch": "b9", "rows": ROWS}
RELATED = {"r7": ["b8", "b9"], "b9": ["0" * BATCH_ID, ROWS]}


def marks_of(times: dict[str, float]) -> Marks:
    """The moments of one request that has been in two batches, of which the second one counts."""
    return {step.until: {"another": -1.0, KEYS.get(step.of, ""): times[step.until]} for step in STEPS if step.until in times}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Marker:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return Marker()


def test_the_steps_of_a_call_follow_each_other_and_add_up_to_it() -> None:
    times = {step.until: 100.0 + place for place, step in enumerate(STEPS)}
    found = steps_of(Call(99.0, 117.0), "r7", marks_of(times), RELATED)
    assert found == [1.0] * len(STEPS)


def test_a_moment_that_is_missing_or_out_of_order_leaves_its_time_to_its_neighbors() -> None:
    times = {step.until: 100.0 + place for place, step in enumerate(STEPS)}
    names = [step.until for step in STEPS]
    del times["sent"]
    times["launched"] = times["computed"] + 0.5  # the scheduler answered before its launch had returned
    found = dict(zip(names, steps_of(Call(99.0, 117.0), "r7", marks_of(times), RELATED), strict=True))
    assert sum(found.values()) == 18.0 and min(found.values()) == 0.0
    assert (found["sent"], found["got"]) == (2.0, 0.0) and (found["launched"], found["computed"]) == (2.0, 0.0)


def test_a_coordinator_marks_requests_and_the_batches_that_computed_them(marker: Marker, tmp_path: Path) -> None:
    class Traced(CheckedMachine):
        """As the coordinator's, marked."""

    trace_coordinator(Traced, marker)
    pool = Pool()
    pool.machine = Traced(pool.machine.core.config)
    pool.do(ev.Started(0, EPOCH, {}))
    client = pool.client()
    pool.worker("w")
    for number in (3, 2):
        pool.submit(client, number, work())
    pool.finish_all()
    marks, related = read_marks(tmp_path)
    assert {"arrived", "left", "answered", "back"} == set(marks)
    assert all(sorted(marks[name]) == ["r2", "r3"] for name in ("arrived", "left", "answered"))
    assert {batch for number in ("r2", "r3") for batch in related[number]} == set(marks["back"])
    for batch in marks["back"]:
        related[batch].append(ROWS)
    calls = [Call(0.0, 1e9), Call(0.0, 1e9)]
    assert len(traced(calls, marks, related)) == 2
    with pytest.raises(ValueError, match="longer"):
        traced(calls[:1], marks, related)


def test_a_scheduler_marks_the_rows_of_a_batch_once(marker: Marker, tmp_path: Path) -> None:
    asked = SimpleNamespace(batch=[SimpleNamespace(rid=f"{ROWS}{row:08x}") for row in range(3)])

    class Scheduler:
        """What is marked of SGLang's."""

        def process_input_requests(self, found: Any) -> None: ...
        def get_next_batch_to_run(self) -> Any:
            return SimpleNamespace(reqs=asked.batch)

        def run_batch(self, batch: Any) -> str:
            return "result"

        def process_batch_result(self, batch: Any, result: Any) -> None:
            assert result == "result"

    trace_scheduler(Scheduler, marker)
    scheduler: Any = Scheduler()
    scheduler.process_input_requests([asked, SimpleNamespace()])
    batch = scheduler.get_next_batch_to_run()
    scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    marks, _ = read_marks(tmp_path)
    names = ["got", "queued", "planning", "launching", "launched", "computed", "replied"]
    assert [name for name, _ in sorted(marks.items(), key=lambda mark: mark[1][ROWS])] == names
    assert all(list(times) == [ROWS] for times in marks.values())


def test_the_means_of_the_steps_add_up_to_the_mean_of_the_calls() -> None:
    calls = [Call(0.0, 18.0)] * (WARM + 2)
    rows = rows_of("one in flight", calls, [[1.0] * len(STEPS)] * len(calls))
    found = {row.what: row.value for row in rows}
    assert found.pop(TOTAL) == sum(found.values()) == 18_000.0
    [alone] = rows_of("bare", calls)
    assert (alone.what, alone.value) == (TOTAL, 18_000.0)


def test_what_the_marks_of_a_worker_are_put_around_is_there() -> None:
    names = {WorkerProcess: ["_batch"], EngineScoring: ["_ask"], Entries: ["_note"], build: ["run_scheduler"]}
    assert all(hasattr(holder, name) for holder, mine in names.items() for name in mine)
