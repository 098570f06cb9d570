"""Generations that stop so that something else can run, and go on after their last token when it is their turn again. Pure."""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import RunningBatch
from enginepool.coordinator.core.transitions import end_batch
from enginepool.coordinator.requests.generations import StreamRequests, interrupted, stop_tasks
from enginepool.coordinator.scheduling.preemption import loses_nothing, to_preempt


def make_room(requests: StreamRequests, group: Group) -> bool:
    """Generations of one worker stop where the head of the queue is more urgent and has no slot. Returns whether it has one
    now."""
    lane = group.queue.head(sequences=True)
    return _stop(requests, [] if lane is None else to_preempt(requests.core, lane, group))


def empty_reserved(requests: StreamRequests, group: Group) -> bool:
    """Generations of the worker that is kept free for rows that run alone stop: the rows would wait for the last token of the
    longest of them. Returns whether some did."""
    kept = group.reserved_worker
    if kept is None or not kept.generations:
        return False
    lane = group.suspects.head()
    if lane is None or lane.head is None or lane.head.generation is not None:
        return False
    key, priority, _ = lane[0]
    # One that would be before the rows in the queue would have the worker back at once.
    return _stop(
        requests, [batch for batch in kept.batches.values() if loses_nothing(batch) and _behind(batch, key, -priority)]
    )


def _behind(batch: RunningBatch, key: float, priority: int) -> bool:
    """Whether a task waits behind a suspect of this key and priority, once it waits."""
    request = batch.slices[0][0]
    return request.priority == priority or (request.key, -request.priority) > (key, -priority)


def _stop(requests: StreamRequests, tasks: list[RunningBatch]) -> bool:
    for batch in tasks:
        end_batch(requests.core, batch)
        interrupted(requests, batch, lost=False)
    stop_tasks(requests.core, tasks)
    return bool(tasks)
