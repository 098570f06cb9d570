"""Which rows make the next batch of a worker, and what they cost it. Pure.

A request stays together while it fits a batch of its worker's declared budget, and two forwards at its pace, by which a row
weighs more than its tokens. A larger one is cut, in row order, into as few batches as can be, of as many rows each: several
workers, and forwards that follow each other, gain nothing by a small last one. Where another request opens a batch, the next
rows of one that was cut already fill what is left. A row that alone is over the budget makes a batch of its own. In a plain
batch every row is computed from its first token. In a packed one a row adds to the sequences of its batch, so there the query
of one caller may be free for the next one that has it, too; `packing_choice` says which of the two a batch is. A worker that
keeps long queries computes such a query once as well, but may have to compute it again: there rows count in full, and a batch
of one request with such a query may weigh more than others.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.request import Request, RunningBatch, Slice
from enginepool.coordinator.core.request_state import QUEUED, RUNNING
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.scheduling.batch_limits import (
    beyond_pace,
    computed_once,
    full,
    header_bytes,
    heaviest,
    large_rest,
    most_of,
    pace_for,
    room_at_pace,
    row_share,
)  # fmt: skip
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.coordinator.scheduling.next_batch import count_begun, wait_until
from enginepool.coordinator.scheduling.packing_choice import count_choice, pack
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.row_cuts import cut_next, cut_rest, pack_rows, take
from enginepool.protocol.packing import Packing


def fill(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """A batch that the head of `lane` opens on `worker`; None when the head does not fit now."""
    can, head = worker.capabilities, lane.head
    assert can is not None and head is not None
    if (worker.pace is not None or can.cached_query) and full(worker):
        return None
    if worker.row_batches and (until := wait_until(lane, worker)) > core.now:
        core.delay(head.group, until)
        return None
    packed = head.packs and pack(lane, worker)
    batch = (_fill_packed if packed else _fill_plain)(core, queue, lane, worker)
    if batch is None:
        return None
    if head.packs:
        count_choice(worker, packed=packed)
    count_begun(batch, core.now)
    return batch


def _fill_plain(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """A batch of rows, each of which is computed from its first token."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    free_tokens = can.inflight_tokens - worker.row_tokens
    free_rows = can.inflight_rows - worker.rows + worker.sequences
    extra = can.page - 1
    each = 0.0 if pace is None else pace.row
    head = lane.head
    assert head is not None
    work = head.work
    rows = work.rows
    cost = work.tokens + rows * extra
    if (
        not head.next
        # No worker has `cached_tokens` below `batch_tokens`: the common case needs no call.
        and (cost <= can.batch_tokens or cost <= most_of(work, rows, can))
        and rows <= can.batch_rows
        and (pace is None or rows * each + (0 if computed_once(work, rows, can) else cost) <= 2 * pace.tokens)
    ):
        slice_: Slice = (head, 0, rows)
    else:
        cost, slice_ = cut_next(head, worker)
        rows = slice_[2] - slice_[1]
    if cost > free_tokens or rows > free_rows:
        return None
    weight = cost + rows * each
    most = 0 if pace is None else pace_for(pace, head, core.now, weight)
    charged = max(weight, rows * row_share(can))
    slices = [slice_]
    take(core, slice_)
    if head.state != RUNNING:
        queue.charge(lane, charged)
    else:
        queue.pop(lane, charged)
        free = free_tokens, free_rows = min(free_tokens, can.batch_tokens), min(free_rows, can.batch_rows)
        next_ = lane.head
        # A whole request that is too large for what is left is the common end under load, and needs no call.
        if (
            next_ is not None
            and cost < free_tokens
            and rows < free_rows
            and (next_.next or next_.state != QUEUED or cost + next_.work.tokens <= free_tokens)
        ):
            cost, rows = _add_followers(core, queue, lane, worker, slices, (cost, rows, weight), free, most)
    return RunningBatch(core.task_id(), worker, slices, cost, rows)


def _add_followers(
    core: Context,
    queue: Queue[Request],
    lane: Lane[Request],
    worker: Worker,
    slices: list[Slice],
    filled: tuple[int, int, float],
    free: tuple[int, int],
    most: int,
) -> tuple[int, int]:
    """Add the requests that follow in `lane` to `slices`, as far as they fit: (tokens, rows) of the batch.

    Args:
        filled: tokens, rows and weight of what the batch has.
        free: tokens and rows that the batch may have.
        most: what the batch may weigh at the worker's pace; 0 without a pace.
    """
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    (cost, rows, weight), (free_tokens, free_rows), head = filled, free, slices[0][0]
    extra, least = can.page - 1, row_share(can)
    each = 0.0 if pace is None else pace.row
    header = 0
    while (next_ := lane.head) is not None and cost < free_tokens and rows < free_rows:
        if next_.state != QUEUED or next_.lane is not queue:
            queue.drop(lane)
            continue
        work = next_.work
        header = (header or header_bytes(head.work)) + header_bytes(work)
        if next_.next:
            room = room_at_pace(pace, most, head, next_) - weight
            more, slice_ = cut_rest(next_, worker, (free_tokens - cost, room), free_rows - rows)
            count = slice_[2] - slice_[1]
            if header > core.header_bytes or not large_rest(can, count, more):
                break
            slices.append(slice_)
            take(core, slice_)
            charged = max(more + count * each, count * least)
            if next_.flying == next_.left:
                queue.pop(lane, charged)
            else:
                queue.charge(lane, charged)
            return cost + more, rows + count
        more = work.tokens + work.rows * extra
        weighs = more + work.rows * each
        if (
            cost + more > free_tokens
            or rows + work.rows > free_rows
            or header > core.header_bytes
            or beyond_pace(pace, most, head, next_, weight, weighs)
        ):
            break
        cost += more
        rows += work.rows
        weight += weighs
        slice_ = (next_, 0, work.rows)
        slices.append(slice_)
        take(core, slice_)
        queue.pop(lane, max(weighs, work.rows * least))
    return cost, rows


def _fill_packed(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """The same of a packed batch, where a row costs what it adds to the sequences of the batch."""
    can, pace = worker.capabilities, worker.packed_pace
    assert can is not None
    free_rows = can.inflight_rows - worker.rows
    each = 0.0 if pace is None else pace.row
    packing = Packing(can.context, can.page)
    slices: list[Slice] = []
    rows = most = header = 0
    most_tokens, most_rows, room = can.batch_tokens, can.batch_rows, heaviest(pace)
    while (request := lane.head) is not None and rows < most_rows:
        if request.state != QUEUED or request.lane is not queue:
            queue.drop(lane)
            continue
        start, end = request.back[0] if request.back else (request.next, request.work.rows)
        weight = packing.cost + rows * each
        follows = bool(slices and request.next)
        limit = room_at_pace(pace, most, slices[0][0], request) if follows else room
        bounds = (most_tokens - packing.cost, each, limit - weight)
        found, fit = pack_rows(packing, request, start, end, most_rows - rows, bounds, follows=bool(slices))
        stop, cost = start + fit.rows, fit.cost
        weighs = cost + (stop - start) * each
        charged = max(weighs, (stop - start) * row_share(can))
        header += header_bytes(request.work)
        if follows and (header > core.header_bytes or not large_rest(can, stop - start, cost) or (request.back and stop < end)):
            break
        if (slices and not follows) and (
            header > core.header_bytes
            or stop < request.work.rows
            or beyond_pace(pace, most, slices[0][0], request, weight, weighs)
        ):
            break
        if not slices:
            most = 0 if pace is None else pace_for(pace, request, core.now, weighs)
            free_tokens = can.inflight_tokens - worker.cost
            if cost > free_tokens or stop - start > free_rows:
                return None
            most_tokens, most_rows = min(free_tokens, most_tokens), min(free_rows, can.batch_rows)
        packing.place(found, fit)
        slices.append((request, start, stop))
        rows += stop - start
        take(core, slices[-1])
        if request.flying < request.left:
            queue.charge(lane, charged)
            break
        queue.pop(lane, charged)
        if follows:
            break
    return RunningBatch(core.task_id(), worker, slices, packing.cost, rows, packed=True)
