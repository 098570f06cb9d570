"""Draw `docs/states.md` from the tables of the coordinator: `python -m tests.core.state_page`."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from enginepool.coordinator.core.states import (
    SLOT_MEANING,
    SLOT_TRANSITIONS,
    WORKER_MEANING,
    WORKER_TRANSITIONS,
    SlotState,
    WorkerState,
)

S = TypeVar("S", bound=StrEnum)

PAGE = Path(__file__).parents[2] / "docs" / "states.md"
#: what can happen to nearly every worker, and would hide the rest of the picture
COMMON = (WorkerState.NOT_READY, WorkerState.RESTORING, WorkerState.LEAVING, WorkerState.DRAINING, WorkerState.LOST)

INTRO = """\
# The states of workers

The coordinator keeps one state for each worker, and one for each worker slot. The pool starts one worker process after the
other in a slot. An external worker has no slot. [states.py](../enginepool/coordinator/core/states.py) has the tables of this
page, and [transitions.py](../enginepool/coordinator/core/transitions.py) alone changes a state.
`python -m tests.core.state_page` draws the page.

`enginepool status` shows the `stage` that the worker reports, where its state does not say more.
"""


def table(meaning: Mapping[S, str], after: Mapping[S, frozenset[S]]) -> Iterable[str]:
    yield "| state | what it means | states that may follow |"
    yield "|---|---|---|"
    for state, means in meaning.items():
        following = ", ".join(f"`{other.name}`" for other in meaning if other in after[state])
        yield f"| `{state.name}` | {means} | {following or 'none'} |"


def picture(first: S, after: Mapping[S, frozenset[S]]) -> Iterable[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield f"    [*] --> {first.name}"
    for state, following in after.items():
        yield from (f"    {state.name} --> {other.name}" for other in after if other in following)
    yield "```"


def draw() -> str:
    rest = {state: after - frozenset(COMMON) for state, after in WORKER_TRANSITIONS.items()}
    names = ", ".join(f"`{state.name}`" for state in COMMON)
    lines = [INTRO, "## A worker", "", *table(WORKER_MEANING, WORKER_TRANSITIONS), ""]
    lines += [f"The picture leaves out what can follow nearly every state: {names}.", ""]
    lines += [*picture(WorkerState.NOT_READY, rest), "", "## A worker slot", ""]
    lines += [*table(SLOT_MEANING, SLOT_TRANSITIONS), "", *picture(SlotState.BACKOFF, SLOT_TRANSITIONS), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(draw(), "utf-8")
