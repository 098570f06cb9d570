"""Batching: which rows go to which worker next.

`pump` runs after every event that could have made work and a worker meet. Three cases, in this
order, again and again; text that waits to be tokenised goes to any worker that is open:

1. A suspect is first in line and no trial runs: it gets an idle worker of its own, or the least loaded one is kept free for it.
2. The head of the queue fits the least loaded worker: it opens a batch, followers of its lane fill what is left.
3. Nothing waits, no worker is open, or the head does not fit yet: nothing happens. Nobody overtakes a head that does not fit,
   or it would wait for ever.

A request stays together while it fits a batch of its worker's declared budget; a larger one is cut, in row order, into batches
as full as they can be. A row that alone is over `batch_tokens` makes a batch of its own.
"""

from enginepool.coordinator.core import Core
from enginepool.coordinator.door import cut, row_lengths
from enginepool.coordinator.effects import ToWorker
from enginepool.coordinator.events import Buffer
from enginepool.coordinator.phases import QUEUED, RUNNING, TEXT
from enginepool.coordinator.queue import Entry, Queue
from enginepool.coordinator.state import Batch, Group, Request, Slice, Worker
from enginepool.protocol.messages import Batch as BatchMessage
from enginepool.protocol.messages import Capabilities, Part, TaskId, Tokenise


def pump(core: Core, group: Group) -> None:
    """Give waiting work to open workers until one of the two runs out."""
    queue, routing = group.queue, group.routing
    while True:
        if group.suspects.size or group.kept_worker is not None:
            _try_suspect(core, group)
        lane, worker = queue.head(), routing.least()
        if lane is None or worker is None:
            break
        can = worker.capabilities
        assert can is not None
        batch = _fill(core, queue, lane, worker, can)
        if batch is None:
            break
        send_batch(core, batch)
    if group.text_waiting:
        _give_texts(core, group)


def _try_suspect(core: Core, group: Group) -> None:
    if group.trial is not None:
        return
    lane = group.suspects.head()
    first = group.queue.head()
    if lane is None or (first is not None and first[0] < lane[0]):
        release_kept(group)
        return
    kept = group.kept_worker
    worker = group.routing.least()
    if worker is not None and worker.texts and not worker.batches:
        idle = (w for w in group.workers.values() if w.open and not w.batches and not w.texts)
        worker = next(idle, worker)
    if kept is not None and kept.able and (worker is None or worker.batches or worker.texts):
        worker = kept
    elif kept is not None:
        # Another one is idle first, or the kept one drains.
        release_kept(group)
    if worker is None:
        return
    worker.kept = True
    group.routing.update(worker)
    if worker.batches or worker.texts:
        group.kept_worker = worker
        return
    group.kept_worker = None
    assert worker.capabilities is not None
    request = lane[0][2]
    if request.state == TEXT:
        group.suspects.pop(lane)
        group.trial = Batch(core.task_id(), worker, [(request, 0, 0)], 0, 0, True)
        _give_text(core, worker, group.trial.id, request)
        return
    cost, slice_ = _cut_next(request, worker.capabilities)
    _take(core, slice_)
    if slice_[0].state == RUNNING:
        group.suspects.pop(lane)
    group.trial = Batch(core.task_id(), worker, [slice_], cost, slice_[2] - slice_[1], True)
    send_batch(core, group.trial)


def _give_texts(core: Core, group: Group) -> None:
    """Text that waits goes to the open workers in turn."""
    ready = [worker for worker in group.workers.values() if worker.open]
    if not ready:
        return
    waiting, group.text_waiting = group.text_waiting, {}
    for request in waiting:
        group.text_turn += 1
        _give_text(core, ready[group.text_turn % len(ready)], core.task_id(), request)


def _give_text(core: Core, worker: Worker, task: TaskId, request: Request) -> None:
    worker.texts[task] = (request, core.now + core.config.timing.forward_s)
    post_text(core, worker, task, request)


def post_text(core: Core, worker: Worker, task: TaskId, request: Request) -> None:
    """Send a tokenising task, which its worker may have already: the worker runs an id once."""
    part = request.work.part
    core.effects.append(ToWorker(worker.link, Tokenise(task, part.frames, part.item_first), request.work.frames))


def take_text(worker: Worker, task: TaskId) -> Request | None:
    """Take a tokenising task off its worker's list; None when it is not there."""
    request, _ = worker.texts.pop(task, (None, 0.0))
    group = worker.group
    if group.trial is not None and group.trial.id == task:
        group.trial = None
        worker.kept = False
        group.routing.update(worker)
    return request


def release_kept(group: Group) -> None:
    """Open the worker that was kept for a trial again."""
    worker = group.kept_worker
    if worker is not None:
        group.kept_worker = None
        worker.kept = False
        group.routing.update(worker)


def _fill(core: Core, queue: Queue, lane: list[Entry], worker: Worker, can: Capabilities) -> Batch | None:
    """A batch that the head of `lane` opens on `worker`; None when the head does not fit now."""
    free_tokens = can.inflight_tokens - worker.cost
    free_rows = can.inflight_rows - worker.rows
    extra = can.page - 1
    head = lane[0][2]
    work = head.work
    rows = work.rows
    cost = work.tokens + rows * extra
    if not head.next and cost <= can.batch_tokens and rows <= can.batch_rows:
        if cost > free_tokens or rows > free_rows:
            return None
        slices: list[Slice] = [(head, 0, rows)]
    else:
        cost, slice_ = _cut_next(head, can)
        rows = slice_[2] - slice_[1]
        if cost > free_tokens or rows > free_rows:
            return None
        slices = [slice_]
    _take(core, slices[0])
    if head.state == RUNNING:
        queue.pop(lane)
        free_tokens = min(free_tokens, can.batch_tokens)
        free_rows = min(free_rows, can.batch_rows)
        while lane and cost < free_tokens and rows < free_rows:
            next_ = lane[0][2]
            if next_.state != QUEUED or next_.lane is not queue:
                queue.pop(lane)
                continue
            work = next_.work
            more = work.tokens + work.rows * extra
            if next_.next or cost + more > free_tokens or rows + work.rows > free_rows:
                break
            cost += more
            rows += work.rows
            slice_ = (next_, 0, work.rows)
            slices.append(slice_)
            _take(core, slice_)
            queue.pop(lane)
    return Batch(core.task_id(), worker, slices, cost, rows, False)


def _cut_next(request: Request, can: Capabilities) -> tuple[int, Slice]:
    """The next rows of `request` that fit one batch: (cost, slice). At least one row, whatever it costs."""
    start, end = request.back[0] if request.back else (request.next, request.work.rows)
    extra = can.page - 1
    lengths = row_lengths(request.work)
    cost = 0
    row = start
    while row < end and row - start < can.batch_rows:
        more = lengths[row] + extra
        if row > start and cost + more > can.batch_tokens:
            break
        cost += more
        row += 1
    return cost, (request, start, row)


def _take(core: Core, slice_: Slice) -> None:
    """Mark rows as given to a worker."""
    request, start, end = slice_
    if not request.started:
        request.started = core.now
    if request.back:
        first = request.back[0][1]
        if end == first:
            request.back.pop(0)
        else:
            request.back[0] = (end, first)
    else:
        request.next = end
    request.flying += end - start
    if request.flying == request.left:
        request.state = RUNNING
        request.group.waiting -= 1
        request.group.running += 1


def send_batch(core: Core, batch: Batch) -> None:
    """Enter `batch` in its worker's ledger and send it."""
    worker = batch.worker
    worker.batches[batch.id] = batch
    worker.cost += batch.cost
    worker.rows += batch.rows
    if not batch.trial:
        worker.group.routing.moved(worker)
    timing = core.config.timing
    allowed = max(timing.forward_s, timing.forward_factor * worker.group.rate * worker.cost)
    batch.deadline = core.now + allowed
    batch.late = core.now + allowed / 2
    post_batch(core, batch)
    if core.touched is not None:
        core.touched.append(worker)
        core.touched.extend(request for request, _, _ in batch.slices)


def post_batch(core: Core, batch: Batch) -> None:
    """Send the message of `batch`, which its worker may have already: the worker runs an id once."""
    parts: list[Part] = []
    frames: list[Buffer] = []
    for request, start, end in batch.slices:
        work = request.work
        if start == 0 and end == work.rows:
            parts.append(work.part)
            frames.extend(work.frames)
        else:
            part, buffers = cut(work, start, end)
            parts.append(part)
            frames.extend(buffers)
    head = batch.slices[0][0]
    message = BatchMessage(batch.id, parts, head.priority, head.work.hidden)
    core.effects.append(ToWorker(batch.worker.link, message, frames))
