"""The states of workers and worker slots, and which state may follow which. Data; `transitions` alone changes a state.

How it thinks. A worker's state says what the coordinator may do with the worker now. `transitions` derives most states from
facts about the worker: the stage that the worker reported, whether it confirmed the epoch, which weights its engine has, its
batches. RESTORING, LEAVING and LOST hold until a transition of their own ends them. That a whole group is on hold is a fact of
the group. `docs/states.md` is drawn from these tables.
"""

from enum import StrEnum


class WorkerState(StrEnum):
    """What the coordinator may do with a worker. Only a READY worker is given work, unless its group is on hold."""

    NOT_READY = "not_ready"
    SYNCING = "syncing"
    OTHER_WEIGHTS = "other_weights"
    RESTORING = "restoring"
    MISSING_WEIGHTS = "missing_weights"
    ASLEEP = "asleep"
    MISSING_ADAPTERS = "missing_adapters"
    READY = "ready"
    LATE = "late"
    RESERVED = "reserved"
    LEAVING = "leaving"
    DRAINING = "draining"
    LOST = "lost"


class SlotState(StrEnum):
    """What a worker slot waits for."""

    BACKOFF = "backoff"
    UP = "up"
    ENDING = "ending"
    RETIRED = "retired"


W, S = WorkerState, SlotState

#: what a state means
WORKER_MEANING: dict[WorkerState, str] = {
    W.NOT_READY: "Its engine starts, loads a model or takes weights, or the worker must register again.",
    W.SYNCING: "Its engine is ready. The worker has not yet said that it dropped the work of earlier epochs.",
    W.OTHER_WEIGHTS: "Its engine is ready on weights that are not the committed ones. An update, or a restore, comes next.",
    W.RESTORING: "It was told to load the committed weights, and must have done so by a deadline.",
    W.MISSING_WEIGHTS: "It could not load the committed weights. It is asked again after a while.",
    W.ASLEEP: "Parts of its engine's memory are released, or are to be. It gets no work until it is woken.",
    W.MISSING_ADAPTERS: "Its engine does not have a committed adapter. It is told to load it, and again after a failure.",
    W.READY: "It gets work.",
    W.LATE: "Its oldest batch is late. It gets no more work until that batch is done.",
    W.RESERVED: "It is kept free for a request that runs alone, or runs that request.",
    W.LEAVING: "The coordinator ends it soon. It finishes its work and gets no more.",
    W.DRAINING: "It said that it ends. It finishes its work and gets no more.",
    W.LOST: "It was given up. Its incarnation never comes back.",
}
SLOT_MEANING: dict[SlotState, str] = {
    S.BACKOFF: "No process exists. The next one starts when the backoff is over.",
    S.UP: "Its process exists. It starts, or is registered as a worker.",
    S.ENDING: "SIGKILL is on its way to the process. The slot waits until the whole process group has ended.",
    S.RETIRED: "It starts no process again, unless an operator restarts it.",
}

#: a worker may go to these from any state but LEAVING, DRAINING and LOST
_ANY_TIME = frozenset({W.NOT_READY, W.RESTORING, W.LEAVING, W.DRAINING, W.LOST})
_SERVING = frozenset({W.READY, W.LATE, W.RESERVED, W.OTHER_WEIGHTS, W.ASLEEP, W.MISSING_ADAPTERS})
_SETTLED = _SERVING | {W.SYNCING, W.MISSING_WEIGHTS}

#: which states may follow a state
WORKER_TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    W.NOT_READY: (_SETTLED | _ANY_TIME) - {W.NOT_READY},
    W.SYNCING: frozenset({W.OTHER_WEIGHTS, W.MISSING_WEIGHTS, W.MISSING_ADAPTERS, W.ASLEEP, W.READY}) | _ANY_TIME,
    W.OTHER_WEIGHTS: (_SERVING | _ANY_TIME) - {W.OTHER_WEIGHTS},
    W.RESTORING: (_SETTLED | _ANY_TIME) - {W.RESTORING},
    W.MISSING_WEIGHTS: _SERVING | _ANY_TIME,
    W.ASLEEP: (_SERVING | _ANY_TIME | {W.MISSING_WEIGHTS}) - {W.ASLEEP},
    W.MISSING_ADAPTERS: (_SERVING | _ANY_TIME) - {W.MISSING_ADAPTERS},
    W.READY: (_SERVING | _ANY_TIME) - {W.READY},
    W.LATE: (_SERVING | _ANY_TIME) - {W.LATE},
    W.RESERVED: (_SERVING | _ANY_TIME) - {W.RESERVED},
    W.LEAVING: _SETTLED | {W.NOT_READY, W.DRAINING, W.LOST},
    W.DRAINING: _SETTLED | {W.NOT_READY, W.LOST},
    W.LOST: frozenset(),
}
SLOT_TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    S.BACKOFF: frozenset({S.UP, S.RETIRED}),
    S.UP: frozenset({S.ENDING, S.BACKOFF, S.RETIRED}),
    S.ENDING: frozenset({S.BACKOFF, S.RETIRED}),
    S.RETIRED: frozenset({S.BACKOFF}),
}
