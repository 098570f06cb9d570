"""When a worker that has a batch gets the next one. Pure.

A batch is sent while another one runs, so that the engine never waits for work. Where less than a forward waits, it is sent
only just in time: what arrives until then joins it. Else, where one batch answered many callers that ask again, the first of
them would have a forward of its own, which costs the host of the engine nearly as much as one for all.
"""

from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.lanes import Lane

#: A batch is sent so many seconds before its host must begin with it.
AHEAD_S = 0.003


def wait_until(lane: Lane[Request], worker: Worker) -> float:
    """When `worker`, which has a batch, needs the next one, if what waits in `lane` is less than a forward; otherwise 0."""
    pace, packed, head = worker.pace, worker.packed_pace, lane.head
    if pace is None or head is None or worker.generations:
        return 0.0
    if pace.weigh(head.work.tokens, head.work.rows) * lane.size >= pace.tokens:
        return 0.0
    host_s = max(0.0, pace.idle_s, 0.0 if packed is None else packed.idle_s)
    return worker.busy_until - host_s - AHEAD_S


def count_begun(batch: RunningBatch, now: float) -> None:
    """A worker is about to be given a batch of rows."""
    worker = batch.worker
    if (pace := _pace(batch)) is not None:
        free_at = max(worker.busy_until, now) if worker.row_batches else now + pace.idle_s
        worker.busy_until = free_at + pace.seconds(batch.cost, batch.rows)


def count_done(worker: Worker, now: float) -> None:
    """A worker has done a batch of rows: those that it has left follow from now on."""
    worker.busy_until = now
    if worker.generations:
        return
    for batch in worker.batches.values():
        if (pace := _pace(batch)) is not None:
            worker.busy_until += pace.seconds(batch.cost, batch.rows)


def _pace(batch: RunningBatch) -> ForwardCostModel | None:
    return batch.worker.packed_pace if batch.packed else batch.worker.pace
