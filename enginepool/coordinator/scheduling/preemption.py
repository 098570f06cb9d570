"""Preemption: which generations stop to make room for one of a higher priority. Pure.

A generation keeps its slot for as long as its tokens take. So a request of a higher priority that finds no slot, or no room for
its tokens, takes one from the lowest priority. What is stopped goes on after its last token, when it is its turn again. What
could not go on exactly keeps its slot once it has tokens.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.generation_slots import generating, media_fit, next_sequences
from enginepool.coordinator.scheduling.lanes import Lane


def to_preempt(core: Context, lane: Lane[Request], group: Group) -> list[RunningBatch]:
    """The tasks of one worker that have to stop so that it has room for the next sequence of the head of `lane`; [] where that
    cannot be. Workers that have the lowest priorities come first, then those with the fewest tokens."""
    head = lane.head
    if head is None or head.generation is None:
        return []
    workers = [worker for worker in generating(group) if worker.priorities and media_fit(core, head, worker)]
    for worker in sorted(workers, key=lambda worker: (min(worker.priorities), worker.cost, worker.order)):
        if tasks := _of_worker(lane, head, worker):
            return tasks
    return []


def _of_worker(lane: Lane[Request], head: Request, worker: Worker) -> list[RunningBatch]:
    """The tasks of `worker` that have to stop so that it has room for the next sequence of `head`, the head of `lane`; [] where
    that cannot be.

    Those of the lowest priority are first, then those with the fewest sequences, then the newest: they lose the least.
    """
    if min(worker.priorities, default=head.priority) >= head.priority:
        return []
    can = worker.capabilities
    assert can is not None
    cost, _ = next_sequences(head, worker, 1)
    slots, room = can.most_sequences - worker.sequences, can.most_sequence_tokens - worker.sequence_tokens
    candidates = [batch for batch in worker.batches.values() if _may_stop(batch, head.priority, lane[0][0])]
    candidates.sort(key=lambda batch: (batch.slices[0][0].priority, batch.rows, -batch.id[1]))
    found: list[RunningBatch] = []
    for batch in candidates:
        if slots >= 1 and room >= cost:
            break
        found.append(batch)
        slots, room = slots + batch.rows, room + batch.cost
    return found if slots >= 1 and room >= cost else []


def _may_stop(batch: RunningBatch, priority: int, key: float) -> bool:
    """Whether a task is of a lower priority, waits behind `key` when it is back in the queue, and loses nothing."""
    request = batch.slices[0][0]
    return not batch.trial and request.priority < priority and request.key >= key and loses_nothing(batch)


def loses_nothing(batch: RunningBatch) -> bool:
    """Whether a task generates, and all that it generated is kept when it stops."""
    request, start, stop = batch.slices[0]
    state, work = request.generation, request.work
    if state is None or not isinstance(work, GenerateWork):
        return False
    if not (work.partial or work.inexact(batch.worker.capabilities)):
        return True
    return all(len(one.tokens) == one.start for one in state.sequences[start:stop] if one.end is None)
