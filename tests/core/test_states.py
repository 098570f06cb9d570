"""The tables of states: what they allow, what their page says, and that one file alone changes a state."""

import ast
from pathlib import Path
from typing import Any, cast

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core import states, transitions
from enginepool.coordinator.core.request_state import NAMES, REQUEST_MEANING, REQUEST_TRANSITIONS
from enginepool.coordinator.core.states import SLOT_MEANING, SLOT_TRANSITIONS, WORKER_MEANING, WORKER_TRANSITIONS
from enginepool.coordinator.core.states import SlotState as Slot
from enginepool.coordinator.core.states import WorkerState as State
from enginepool.protocol.messages import Exiting, Idle, Ready, Stage
from tests.core.machines import CAN, EPOCH, Pool, work
from tests.core.state_page import PAGE, draw

COORDINATOR = Path(states.__file__).parents[1]
WRITER = Path(transitions.__file__)
#: attributes that `transitions` alone assigns, and what they are attributes of
WRITTEN = {
    "state": {"worker", "slot", "other", "request"},
    "stage": {"worker"},
    "since": {"worker"},
    "epoch_confirmed": {"worker"},
    "restore_due": {"worker"},
    "cost": {"worker"},
    "rows": {"worker"},
    "incarnation": {"slot"},
    "retired_reason": {"slot", "other"},
    "trial": {"group"},
    "reserved_worker": {"group"},
    "on_hold": {"group"},
    "holds": {"group"},
    "weights": {"group"},
    "version": {"group"},
}
#: a stall of the coordinator moves every deadline
EXTENDS = {("fleet/deadlines.py", "since"), ("fleet/deadlines.py", "restore_due")}


def test_every_state_has_a_meaning_and_a_row() -> None:
    assert list(WORKER_MEANING) == list(WORKER_TRANSITIONS) == list(State)
    assert list(SLOT_MEANING) == list(SLOT_TRANSITIONS) == list(Slot)
    assert list(REQUEST_MEANING) == list(REQUEST_TRANSITIONS) == list(range(len(NAMES)))


def test_a_lost_worker_never_comes_back_and_every_other_can_be_lost() -> None:
    assert not WORKER_TRANSITIONS[State.LOST]
    assert all(State.LOST in after for state, after in WORKER_TRANSITIONS.items() if state is not State.LOST)


def test_every_state_can_be_reached() -> None:
    for first, table in cast(Any, ((State.NOT_READY, WORKER_TRANSITIONS), (Slot.BACKOFF, SLOT_TRANSITIONS))):
        found = {first}
        while more := {after for state in found for after in table[state]} - found:
            found |= more
        assert found == set(table)


def test_a_slot_starts_no_second_process() -> None:
    assert {state for state, after in SLOT_TRANSITIONS.items() if Slot.UP in after} == {Slot.BACKOFF}


def test_the_page_shows_the_tables() -> None:
    assert PAGE.read_text("utf-8") == draw(), "run: python -m tests.core.state_page"


def written(path: Path) -> list[tuple[int, str]]:
    """Assignments in `path` to what `transitions` alone may assign."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store | ast.Del):
            continue
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if owner in WRITTEN.get(node.attr, ()):
            found.append((node.lineno, node.attr))
    return found


def test_one_file_alone_changes_states() -> None:
    assert written(WRITER)
    for path in sorted(COORDINATOR.rglob("*.py")):
        name = path.relative_to(COORDINATOR).as_posix()
        found = [(line, attribute) for line, attribute in written(path) if (name, attribute) not in EXTENDS]
        assert path == WRITER or not found, f"{name}: {found}; only core/transitions.py assigns these"


def test_nothing_else_calls_the_routing_or_changes_what_a_worker_has() -> None:
    for path in sorted(COORDINATOR.rglob("*.py")):
        if path in (WRITER, COORDINATOR / "scheduling/routing.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                assert not call.endswith(
                    ("routing.update", "routing.moved", "batches.pop", "worker.texts.pop", "worker.texts.add")
                ), (path, call)
            if isinstance(node, ast.Delete):
                assert "batches[" not in ast.unparse(node), (path, node.lineno)


def test_a_transition_that_the_table_does_not_have_is_an_internal_error() -> None:
    pool = Pool()
    link = pool.worker("one")
    core = pool.machine.core
    worker = core.worker_links[link]
    pool.do(ev.WorkerSaid(0, link, Exiting("it ends", failed=False)))
    assert worker.state is State.LOST
    with pytest.raises(AssertionError, match="cannot go from lost to restoring"):
        transitions.start_restore(core, worker, 1.0)


def test_the_states_of_a_worker_that_starts_serves_and_ends() -> None:
    pool = Pool()
    link = pool.worker("one", ready=False)
    worker = pool.machine.core.worker_links[link]
    seen = [worker.state]
    pool.do(ev.WorkerSaid(0, link, Ready(CAN, 0)))
    seen.append(worker.state)
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    seen.append(worker.state)
    client = pool.client()
    pool.submit(client, 1, work())
    pool.do(ev.WorkerSaid(0, link, Stage("draining", "")))
    seen.append(worker.state)
    pool.do(ev.WorkerSaid(0, link, Exiting("it ends", failed=False)))
    assert [*seen, worker.state] == [State.NOT_READY, State.SYNCING, State.READY, State.DRAINING, State.LOST]
