"""Holding a group: no new work starts while engines are about to take other weights; begun requests finish, or are put back.

A request has begun when some of its rows were given to workers and no answer exists yet. All parts of an answer come from one
weight version, so that finishing them on the old weights saves what is done of them already.
"""

from collections.abc import Iterable

from enginepool.coordinator.batching import release_kept, send_batch
from enginepool.coordinator.core import Core
from enginepool.coordinator.filling import cut_next, take
from enginepool.coordinator.phases import QUEUED, RUNNING
from enginepool.coordinator.state import Batch, Group, Request, Worker
from enginepool.coordinator.weights.update import Update


def hold(update: Update) -> None:
    """Nothing new starts in its group from here on."""
    group = update.group
    waiting = (request for request in group.cut if request.state == QUEUED and request.lane is group.queue)
    update.begun = [request for request in waiting if request.flying or request.pieces]
    update.begun.sort(key=lambda request: (request.key, request.seq))
    close(group)


def close(group: Group) -> None:
    """Start nothing new in `group`."""
    group.held = True
    # No trial starts while it is held, and begun requests may have no other worker to finish them.
    release_kept(group)
    _tell(group)


def release(core: Core, group: Group) -> None:
    """Work starts again, unless the coordinator is about to end without its workers."""
    group.held = core.keep_workers
    _tell(group)
    core.wake(group)


def _tell(group: Group) -> None:
    for worker in group.workers.values():
        worker.routing.update(worker)


def working(workers: Iterable[Worker]) -> bool:
    """Whether one of them still has something in hand."""
    return any(worker.batches or worker.texts for worker in workers)


def finish_begun(core: Core, update: Update) -> None:
    """Give what is left of begun requests to workers that have room, in their order."""
    workers = [worker for worker in update.group.workers.values() if worker.able and not worker.kept]
    for request in _begun(update):
        while request.state == QUEUED:
            batch = _next(core, request, workers)
            if batch is None:
                break
            if request.state != QUEUED:
                update.group.queue.forget()
            send_batch(core, batch)
            # Sending enters it among the open workers, which it is not.
            batch.worker.routing.update(batch.worker)


def unfinished(update: Update) -> bool:
    """Whether rows of begun requests wait for a worker that could run them."""
    return bool(_begun(update)) and any(worker.able for worker in update.group.workers.values())


def _begun(update: Update) -> list[Request]:
    """Begun requests with rows that wait. Suspects are none of them: they run alone, and nobody waits for that."""
    if update.begun:
        update.begun = [request for request in update.begun if request.state <= RUNNING and not request.suspect]
    return [request for request in update.begun if request.state == QUEUED and (request.flying or request.pieces)]


def _next(core: Core, request: Request, workers: list[Worker]) -> Batch | None:
    """The next batch of `request`, on the worker with the least to do that has room for it."""
    for worker in sorted(workers, key=lambda worker: (worker.cost, worker.order)):
        can = worker.capabilities
        if can is None or not request.classes & worker.class_:
            continue
        cost, slice_ = cut_next(request, worker)
        rows = slice_[2] - slice_[1]
        if worker.cost + cost <= can.inflight_tokens and worker.rows + rows <= can.inflight_rows:
            take(core, slice_)
            return Batch(core.task_id(), worker, [slice_], cost, rows, False)
    return None
