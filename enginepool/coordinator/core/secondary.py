"""Secondary events: what one event causes that other parts of the coordinator must hear of.

A part of the machine appends them to `Context.secondary`. The machine handles them in order, after the events in hand and
before it dispatches work. The handler of one may append more.
"""

from dataclasses import dataclass

from enginepool.coordinator.core.worker import Worker


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker was given up. `reason` is a clause on the worker."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """A worker registered. What was sent on its earlier link may be lost with that link."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerLoaded:
    """A worker said `ready`: its engine is loaded, and the worker said with which weights."""

    worker: Worker


SecondaryEvent = WorkerLost | WorkerReturned | WorkerLoaded
