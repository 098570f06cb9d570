"""Batching: which rows go to which worker next.

`pump` runs after every event that could have made work and a worker meet. Three cases, in this
order, again and again. Text that waits to be tokenized goes to the open workers in the order of its queue, a few to each:

1. A suspect is first in line and no trial runs: it gets an idle worker of its own, or the least loaded one is kept free for it.
2. The head of the queue fits the least loaded worker: it opens a batch, followers of its lane fill what is left.
3. Nothing waits, no worker is open, or the head does not fit yet: nothing happens. No request overtakes a head that does not
   fit: the head could wait without end. Workers that generate and run rows have room for each: there a head of rows and one of
   sequences do not wait for each other.
"""

from heapq import heapify, heappop, heapreplace

from msgspec.structs import replace

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import RUNNING, TEXT
from enginepool.coordinator.core.transitions import release_reserved, reserve, start_batch, start_text, start_trial
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import longest_row
from enginepool.coordinator.scheduling.batch_builder import fill
from enginepool.coordinator.scheduling.generation_slots import (
    generating,
    media_bytes,
    next_sequences,
    place,
    start_message,
)
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.row_cuts import cut_next, take
from enginepool.protocol.messages import Batch, Part, TaskId
from enginepool.protocol.ragged import Offsets, cut
from enginepool.protocol.row_labels import cut_row_labels

#: Bytes of text, or token ids, that a tokenizer does in a second at least. Most do ten times as many. A message may have 30 MB,
#: and a worker that needs a minute for them does not hang.
SLOWEST_TEXT = 100_000


def pump(core: Context, group: Group) -> bool:
    """Give waiting work to open workers until one of the two runs out. Returns whether the head of the queue does not fit."""
    queue, routing = group.queue, group.routing
    group.blocked, stuck = None, False
    if core.now < group.resume_at:
        return False
    while True:
        if group.suspects.size or group.reserved_worker is not None:
            _try_suspect(core, group)
        lane, worker = queue.head(), routing.least()
        if lane is None or worker is None:
            break
        batch = _begin(core, queue, lane, worker)
        if batch is None and group.mixed:
            # It has no room of its kind; the other kind has room of its own.
            rows = lane.head is not None and lane.head.generation is None
            other = queue.head(sequences=rows)
            batch = None if other is None else _begin(core, queue, other, worker)
            lane = other if rows and other is not None else lane
        if batch is None:
            stuck = True
            # A batch that is delayed does not wait for room.
            if not (group.suspects.size or group.reserved_worker is not None or group in core.delayed):
                group.blocked = lane.head
            break
        send_batch(core, batch)
    for queue, long in ((group.texts, False), (group.long_texts, True)):
        if queue.size:
            _give_texts(core, group, queue, long=long)
    return stuck


def _begin(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """What the head of `lane` begins at `worker`, which has the least to do, or at another one; None: it does not fit now."""
    head = lane.head
    assert head is not None
    if head.generation is not None:
        return place(core, queue, lane, worker)
    group = head.group
    if group.mixed:
        # The sequences of a worker say nothing of its room for rows.
        worker = min(generating(group), key=lambda one: (one.row_batches, one.row_tokens, one.cost, one.stamp))
    return fill(core, queue, lane, worker)


def _try_suspect(core: Context, group: Group) -> None:
    """Start the next trial, or keep a worker free for it."""
    if group.trial is not None:
        return
    kept = group.reserved_worker
    lane, first = group.suspects.head(), group.queue.head()
    if lane is not None and first is not None and first.before_suspect(lane):
        lane = None
    worker = None if lane is None else _quietest(group)
    if lane is not None and kept is not None and (worker is None or worker.busy):
        worker = kept
    if kept is not None and worker is not kept:
        # Another one is idle first, or the suspect is no longer first in line.
        release_reserved(core, group)
    if lane is None or worker is None:
        return
    reserve(core, worker)
    if worker.busy:
        return
    request = lane.head
    assert request is not None
    if request.state == TEXT:
        group.suspects.pop(lane, request.work.tokens)
        trial = RunningBatch(core.task_id(), worker, [(request, 0, 0)], 0, 0, trial=True)
        start_trial(trial)
        _give_text(core, worker, trial.id, request)
        return
    cost, slice_ = cut_next(request, worker) if request.generation is None else next_sequences(request, worker, 1)
    take(core, slice_)
    if slice_[0].state == RUNNING:
        group.suspects.pop(lane, cost)
    else:
        group.suspects.charge(lane, cost)
    trial = RunningBatch(core.task_id(), worker, [slice_], cost, slice_[2] - slice_[1], trial=True)
    start_trial(trial)
    send_batch(core, trial)


def _quietest(group: Group) -> Worker | None:
    """The least loaded open worker; one without texts to tokenize, if such a one is idle."""
    worker = group.routing.least()
    if worker is not None and worker.texts and not worker.batches:
        idle = (one for one in group.workers.values() if one.open and not one.busy)
        worker = next(idle, worker)
    return worker


def _give_texts(core: Context, group: Group, queue: "Queue[Request]", *, long: bool) -> None:
    """Texts go to the open workers that have the fewest, and no long one, as long as one has room."""

    def rank(worker: Worker) -> tuple[int, int, int, int, Worker]:
        return len(worker.texts.long), len(worker.texts.short), worker.cost, worker.order, worker

    room = [rank(worker) for worker in group.workers.values() if worker.open and worker.texts.takes(long=long)]
    heapify(room)
    while room and (lane := queue.head()) is not None:
        worker, request = room[0][-1], lane.head
        assert request is not None
        queue.pop(lane, request.work.tokens)
        _give_text(core, worker, core.task_id(), request)
        if worker.texts.takes(long=long):
            heapreplace(room, rank(worker))
        else:
            heappop(room)


def text_due(core: Context, worker: Worker, request: Request) -> float:
    """When `worker` must have done the text of `request`, which it begins with now. A short one may have to wait for a long
    one, because a tokenizer that cannot be copied does one after the other."""
    begins = core.now if request.long_text else max([core.now, *(due for _, due in worker.texts.long.values())])
    return begins + core.config.timing.forward_s + request.work.tokens / SLOWEST_TEXT


def _give_text(core: Context, worker: Worker, task: TaskId, request: Request) -> None:
    start_text(worker, task, request, text_due(core, worker, request))
    post_text(core, worker, task, request)


def post_text(core: Context, worker: Worker, task: TaskId, request: Request) -> None:
    """Send a tokenizing task, which its worker may have already: the worker runs an id once."""
    work = request.work
    message = work.operation.tokenize(work, task)
    message.long = request.long_text
    if work.truncation:
        can = worker.group.capabilities
        assert can is not None
        message.truncation, message.longest = work.truncation, longest_row(can)
    core.effects.append(ToWorker(worker.link, message, work.frames if message.frames else ()))


def send_batch(core: Context, batch: RunningBatch) -> None:
    """Enter `batch` in its worker's ledger and send it."""
    worker = batch.worker
    start_batch(batch)
    if (generation := batch.slices[0][0].generation) is not None:
        generation.tasks[batch.id] = batch
        request, start, _ = batch.slices[0]
        batch.at = len(generation.sequences[start].tokens)
        worker.unread_media += media_bytes(request, start)
    timing, tokens, rows = core.config.timing, worker.row_tokens, worker.rows - worker.sequences
    # Before its first batch, what the worker measured when it started.
    models = [pace.seconds(tokens, rows) for pace in (worker.pace, worker.packed_pace) if pace is not None]
    expected = max(worker.group.speed.token_s * tokens, *models, 0.0)
    allowed = max(timing.forward_s, timing.forward_factor * expected)
    batch.began, batch.deadline = core.now, core.now + allowed
    if generation is not None and worker.time_left is not None:
        batch.deadline -= max(0.0, timing.forward_s - worker.time_left)
    batch.late = batch.deadline - allowed / 2
    post_batch(core, batch)


def post_batch(core: Context, batch: RunningBatch) -> None:
    """Send the message of `batch`, which its worker may have already: the worker runs an id once."""
    head = batch.slices[0][0]
    if head.generation is not None:
        core.effects.append(ToWorker(batch.worker.link, *start_message(batch)))
        return
    parts: list[Part] = []
    frames: list[Buffer] = []
    for request, start, end in batch.slices:
        work = request.work
        if end - start == work.rows:
            part = work.part
            frames += work.frames
        else:
            if request.offsets is None:
                request.offsets = Offsets(work.frames)
            specs, buffers = cut(work.part.frames, work.frames, request.offsets, start, end)
            part = replace(work.part, frames=specs)
            frames += buffers
        if work.row_labels:
            spec, labels = cut_row_labels(work.row_labels, len(work.row_labels) // (4 * work.rows), start, end)
            part = replace(part, frames=[*part.frames, spec])
            frames.append(labels)
        parts.append(part)
    message = Batch(batch.id, parts, head.priority, batch.packed)
    core.effects.append(ToWorker(batch.worker.link, message, frames))
