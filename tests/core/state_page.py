"""Draw `docs/states.md` from the tables of the coordinator: `python -m tests.core.state_page`."""

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from enginepool.coordinator.core.request_state import NAMES, REQUEST_MEANING, REQUEST_TRANSITIONS
from enginepool.coordinator.core.states import (
    SLOT_MEANING,
    SLOT_TRANSITIONS,
    WORKER_MEANING,
    WORKER_TRANSITIONS,
    WorkerState,
)

S = TypeVar("S", bound=Enum)

PAGE = Path(__file__).parents[2] / "docs" / "states.md"
#: what can happen to nearly every worker, and would hide the rest of the picture
COMMON = (WorkerState.NOT_READY, WorkerState.RESTORING, WorkerState.LEAVING, WorkerState.DRAINING, WorkerState.LOST)

INTRO = """\
# The states of workers, worker slots and requests

The coordinator keeps one state for each worker, each worker slot and each request. The pool starts one worker process after the
other in a slot. An external worker has no slot. [states.py](../enginepool/coordinator/core/states.py) and
[request_state.py](../enginepool/coordinator/core/request_state.py) have the tables of this page, and
[transitions.py](../enginepool/coordinator/core/transitions.py) alone changes a state. `python -m tests.core.state_page` draws
the page.

`enginepool status` shows the `stage` that the worker reports, where its state does not say more.
"""


def table(meaning: Mapping[str, str], after: Mapping[str, Collection[str]]) -> Iterable[str]:
    yield "| state | what it means | states that may follow |"
    yield "|---|---|---|"
    for state, means in meaning.items():
        following = ", ".join(f"`{other}`" for other in meaning if other in after[state])
        yield f"| `{state}` | {means} | {following or 'none'} |"


def picture(first: Iterable[str], after: Mapping[str, Collection[str]]) -> Iterable[str]:
    yield "```mermaid"
    yield "stateDiagram-v2"
    yield from (f"    [*] --> {state}" for state in first)
    for state, following in after.items():
        yield from (f"    {state} --> {other}" for other in after if other in following)
    yield "```"


def names(after: Mapping[S, Iterable[S]], *without: S) -> dict[str, list[str]]:
    """A table of transitions by the names of its states."""
    return {state.name: [other.name for other in following if other not in without] for state, following in after.items()}


def draw() -> str:
    workers, slots = names(WORKER_TRANSITIONS), names(SLOT_TRANSITIONS)
    requests = {NAMES[state]: [NAMES[other] for other in following] for state, following in REQUEST_TRANSITIONS.items()}
    lines = [INTRO, "## A worker", "", *table({s.name: means for s, means in WORKER_MEANING.items()}, workers), ""]
    left_out = ", ".join(f"`{state.name}`" for state in COMMON)
    lines += [f"The picture leaves out what can follow nearly every state: {left_out}.", ""]
    lines += [*picture(["NOT_READY"], names(WORKER_TRANSITIONS, *COMMON)), "", "## A worker slot", ""]
    lines += [*table({s.name: means for s, means in SLOT_MEANING.items()}, slots), "", *picture(["BACKOFF"], slots), ""]
    lines += ["## A request", "", *table({NAMES[s]: means for s, means in REQUEST_MEANING.items()}, requests), ""]
    lines += [*picture(["TEXT", "QUEUED"], requests), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(draw(), "utf-8")
