"""Filling: which rows make the next batch of a worker, and what they cost it.

A request stays together while it fits a batch of its worker's declared budget, and two forwards at its pace, by which a row
weighs more than its tokens. A larger one is cut, in row order, into as few batches as can be, of as many rows each: several
workers, and forwards that follow each other, gain nothing by a small last one. Where another request opens a batch, the next
rows of one that was cut already fill what is left. A row that alone is over the budget makes a batch of its own. A plain worker
computes every row from its first token; a packed one computes what a row adds to the sequences of its batch, so there the query
of one caller is free for the next one that has the same. A plain worker that keeps long queries computes such a query once as
well, but may have to compute it again: there rows count in full, and a batch of one request with such a query may weigh more
than others.
"""

from math import inf

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.request import Request, RunningBatch, Slice
from enginepool.coordinator.core.request_state import QUEUED, RUNNING
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import Packing
from enginepool.protocol.ragged import row_lengths

#: After a request of a higher priority came, batches of lower ones stay short for this long: the next one may come as well.
RECENT_S = 1.0
#: Meanwhile a forward of theirs has this part of the pace: what comes waits for one that runs and one that was launched. A
#: packed forward costs its engine's host as much whatever it holds, and shorter ones than that leave no time for the others.
SHORT, SHORT_PACKED = 3, 2
#: What a part adds at most to the header of its batch, and its answer to the header of the answer, without its values; and
#: what a value adds.
PART_BYTES = 160
VALUE_BYTES = 5
#: So many forwards of each worker wait, and it is throughput that all of them wait for.
DEEP = 4
#: Rows of a request that was cut fill what is left of a batch, if that is at least this part of a batch.
REST = 0.25


def short(pace: ForwardCostModel, can: Capabilities) -> int:
    """What a forward of a lower priority may weigh while higher ones come."""
    return pace.tokens // (SHORT_PACKED if can.packed else SHORT)


def pace_for(pace: ForwardCostModel, can: Capabilities, head: Request, now: float, weight: float) -> int:
    """What a forward that `head`, of this `weight`, opens may weigh.

    Little where a higher priority came lately: the next of that waits for the forward that runs and for one more, and has its
    own to come. Otherwise two forwards in one where many wait: the engine's host launches fewer then.
    """
    group = head.group
    if head.priority < group.peak and now - group.peak_at <= RECENT_S:
        return short(pace, can)
    many = weight * group.waiting >= DEEP * pace.tokens * len(group.workers)
    return 2 * pace.tokens if many else pace.tokens


def header_bytes(work: Work) -> int:
    """Bytes that rows of `work` add to the header of a batch, and its answer to that of the answer: an upper bound."""
    return PART_BYTES + VALUE_BYTES * work.values


def full(worker: Worker) -> bool:
    """Whether `worker` has as many batches as keep it busy: one that runs, and those that are launched behind it.

    What comes meanwhile waits here and joins one batch, so that the engine's host prepares, launches and reads out fewer; and
    what has a higher priority than all that waits then waits for no more than these. A worker without a pace is bound by tokens
    in flight alone, and this is not asked, unless part of that room is for queries which have to be computed again.
    """
    return len(worker.batches) >= worker.group.config.forwards_in_flight


def most_of(work: Work, rows: int, can: Capabilities) -> int:
    """Tokens that a batch of so many rows of `work`, and of nothing else, may have: more where they count a query in every row
    that is computed once."""
    return can.cached_tokens if _once(work, rows, can) else can.batch_tokens


def _once(work: Work, rows: int, can: Capabilities) -> bool:
    """Whether the query of so many rows of `work` is computed once on a plain worker."""
    return rows > 1 and 0 < can.cached_query <= work.shared


def row_share(can: Capabilities) -> float:
    """Tokens that a row counts at least between clients: a batch that is full of short rows is a whole one."""
    return can.batch_tokens / can.batch_rows


def longest(pace: ForwardCostModel | None) -> float:
    """What a batch of several rows may weigh: two forwards at the worker's pace."""
    return inf if pace is None else 2 * pace.tokens


def room_at_pace(worker: Worker, most: int, head: Request, follower: Request) -> float:
    """What a batch may weigh with rows of `follower`, of which any number can follow."""
    pace, can = worker.pace, worker.capabilities
    if pace is None or can is None:
        return inf
    return min(most, short(pace, can)) if follower.priority < head.priority else most


def beyond_pace(worker: Worker, most: int, head: Request, follower: Request, weight: float, more: float) -> bool:
    """Whether `follower` would make a batch of this `weight` too long for its head. Half of a follower may be over what the
    head may have, so that batches have it on average; those of a lower priority make no forward longer than a short one."""
    pace, can = worker.pace, worker.capabilities
    if pace is None or can is None:
        return False
    if follower.priority < head.priority:
        return weight + more > min(most, short(pace, can))
    return weight + more / 2 > most or weight + more > 2 * pace.tokens


def fill(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """A batch that the head of `lane` opens on `worker`; None when the head does not fit now."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    if (pace is not None or can.cached_query) and full(worker):
        return None
    free_tokens = can.inflight_tokens - worker.cost
    free_rows = can.inflight_rows - worker.rows
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
        and (pace is None or rows * each + (0 if _once(work, rows, can) else cost) <= 2 * pace.tokens)
    ):
        slice_: Slice = (head, 0, rows)
    else:
        cost, slice_ = cut_next(head, worker)
        rows = slice_[2] - slice_[1]
    if cost > free_tokens or rows > free_rows:
        return None
    weight = cost + rows * each
    most = 0 if pace is None else pace_for(pace, can, head, core.now, weight)
    least = row_share(can)
    slices = [slice_]
    take(core, slice_)
    if head.state != RUNNING:
        queue.charge(lane, max(weight, rows * least))
    else:
        queue.pop(lane, max(weight, rows * least))
        header = 0
        free_tokens = min(free_tokens, can.batch_tokens)
        free_rows = min(free_rows, can.batch_rows)
        while (next_ := lane.head) is not None and cost < free_tokens and rows < free_rows:
            if next_.state != QUEUED or next_.lane is not queue:
                queue.drop(lane)
                continue
            work = next_.work
            if next_.next:
                room = room_at_pace(worker, most, head, next_) - weight
                more, slice_ = cut_rest(next_, worker, (free_tokens - cost, room), free_rows - rows)
                count = slice_[2] - slice_[1]
                fits = (header or header_bytes(head.work)) + header_bytes(work) <= core.header_bytes
                if fits and large_rest(can, count, more):
                    cost += more
                    rows += count
                    slices.append(slice_)
                    take(core, slice_)
                    charged = max(more + count * each, count * least)
                    if next_.flying == next_.left:
                        queue.pop(lane, charged)
                    else:
                        queue.charge(lane, charged)
                break
            more = work.tokens + work.rows * extra
            weighs = more + work.rows * each
            if (
                cost + more > free_tokens
                or rows + work.rows > free_rows
                or beyond_pace(worker, most, head, next_, weight, weighs)
                or (header := (header or header_bytes(head.work)) + header_bytes(work)) > core.header_bytes
            ):
                break
            cost += more
            rows += work.rows
            weight += weighs
            slice_ = (next_, 0, work.rows)
            slices.append(slice_)
            take(core, slice_)
            queue.pop(lane, max(weighs, work.rows * least))
    return RunningBatch(core.task_id(), worker, slices, cost, rows, False)


def fill_packed(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """The same on a packed worker, where a row costs what it adds to the sequences of its batch."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    if (pace is not None or can.cached_query) and full(worker):
        return None
    free_rows = can.inflight_rows - worker.rows
    each = 0.0 if pace is None else pace.row
    packing = Packing(can.context, can.page)
    slices: list[Slice] = []
    rows = most = header = 0
    most_tokens, most_rows, room = can.batch_tokens, can.batch_rows, longest(pace)
    while (request := lane.head) is not None and rows < most_rows:
        if request.state != QUEUED or request.lane is not queue:
            queue.drop(lane)
            continue
        start, end = request.back[0] if request.back else (request.next, request.work.rows)
        weight = packing.cost + rows * each
        follows = bool(slices and request.next)
        limit = room_at_pace(worker, most, slices[0][0], request) if follows else room
        bounds = (most_tokens - packing.cost, each, limit - weight)
        stop, cost, length = _pack(packing, request, start, end, most_rows - rows, bounds, follows=bool(slices))
        weighs = cost + (stop - start) * each
        charged = max(weighs, (stop - start) * row_share(can))
        header += header_bytes(request.work)
        if follows and (header > core.header_bytes or not large_rest(can, stop - start, cost) or (request.back and stop < end)):
            break
        if (slices and not follows) and (
            header > core.header_bytes
            or stop < request.work.rows
            or beyond_pace(worker, most, slices[0][0], request, weight, weighs)
        ):
            break
        if not slices:
            most = 0 if pace is None else pace_for(pace, can, request, core.now, weighs)
            free_tokens = can.inflight_tokens - worker.cost
            if cost > free_tokens or stop - start > free_rows:
                return None
            most_tokens, most_rows = min(free_tokens, most_tokens), min(free_rows, can.batch_rows)
        packing.place(_query(request), cost, length)
        slices.append((request, start, stop))
        rows += stop - start
        take(core, slices[-1])
        if request.flying < request.left:
            queue.charge(lane, charged)
            break
        queue.pop(lane, charged)
        if follows:
            break
    return RunningBatch(core.task_id(), worker, slices, packing.cost, rows, False)


def _query(request: Request) -> Buffer:
    return request.work.frames[0]


def _pack(
    packing: Packing,
    request: Request,
    start: int,
    end: int,
    rows: int,
    bounds: tuple[int, float, float],
    *,
    follows: bool = False,
) -> tuple[int, int, int]:
    """(end, cost, length) of the rows from `start` on that fit within these bounds (tokens; what a row weighs beside them, and
    what all may weigh); unless it `follows`, at least one."""
    work = request.work
    items = memoryview(work.frames[-1]).cast("I")[start : min(end, start + rows)]
    query = _query(request)
    count, cost, length = packing.weigh(query, work.shared, items, *bounds)
    if 0 < count < end - start and not follows:
        count, cost, length = packing.weigh(query, work.shared, items[: even(end - start, count)], *bounds)
    if not count and not follows:
        count, cost, length = packing.weigh(query, work.shared, items[:1], work.longest + 2 + packing.page)
    return start + count, cost, length


def cut_next(request: Request, worker: Worker) -> tuple[int, Slice]:
    """The next rows of `request` that fit one batch of `worker`: (cost, slice). At least one row, whatever it costs."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    each, room = (0.0, inf) if pace is None else (pace.row, longest(pace))
    start, end = request.back[0] if request.back else (request.next, request.work.rows)
    if can.packed:
        bounds = (can.batch_tokens, each, room)
        end, cost, _ = _pack(Packing(can.context, can.page), request, start, end, can.batch_rows, bounds)
        return cost, (request, start, end)
    bounds = most_of(request.work, end - start, can), room
    cost, rows = _count(request, worker, start, end, bounds, can.batch_rows, least=1)
    if rows < end - start:
        rows = even(end - start, rows)
        cost = sum(row_lengths(request.work.frames, start, start + rows)) + rows * (can.page - 1)
    return cost, (request, start, start + rows)


def cut_rest(request: Request, worker: Worker, bounds: tuple[int, float], most_rows: int) -> tuple[int, Slice]:
    """The next rows of `request` for what is left of a plain batch: within (tokens, weight) and so many rows. Possibly none.

    Rows that came back from a worker stay together.
    """
    start, end = request.back[0] if request.back else (request.next, request.work.rows)
    cost, rows = _count(request, worker, start, end, bounds, most_rows, least=0)
    return (0, (request, start, start)) if request.back and rows < end - start else (cost, (request, start, start + rows))


def large_rest(can: Capabilities, rows: int, tokens: int) -> bool:
    """Whether so many rows of a request that was cut are enough for a part of its own."""
    return rows >= REST * can.batch_rows or tokens >= REST * can.batch_tokens


def _count(
    request: Request, worker: Worker, start: int, end: int, bounds: tuple[int, float], most_rows: int, *, least: int
) -> tuple[int, int]:
    """(cost, how many) of the rows from `start` on that are within (tokens, weight), at least so many."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    each, extra = 0.0 if pace is None else pace.row, can.page - 1
    once = _once(request.work, end - start, can)
    most, room = bounds
    cost, weight, rows = 0, 0.0, 0
    for length in row_lengths(request.work.frames, start, min(end, start + most_rows)):
        more = length + extra
        weight += each if once else more + each
        if rows >= least and (cost + more > most or weight > room):
            break
        cost += more
        rows += 1
    return cost, rows


def even(rows: int, most: int) -> int:
    """Rows of the next of as few batches as can hold `rows` at `most` a batch; none is much smaller than the others."""
    batches = -(-rows // most)
    return -(-rows // batches)


def take(core: Context, slice_: Slice) -> None:
    """Mark rows as given to a worker."""
    request, start, end = slice_
    if not request.started:
        request.started = core.now
    if request.back:
        (_, first), *rest = request.back
        request.back = rest if end == first else [(end, first), *rest]
    else:
        request.next = end
    request.flying += end - start
    if request.flying == request.left:
        request.state = RUNNING
        request.group.waiting -= 1
        request.group.running += 1
        request.group.running_tokens += request.work.tokens
    else:
        request.group.cut[request] = None
