"""How much a batch may hold: its tokens and rows, its header, and its weight in the cost model of a worker. Pure."""

from math import inf

from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.protocol.messages import Capabilities

#: Batches of lower priorities stay short for so many seconds after a request of a higher priority arrived: another may follow.
RECENT_S = 1.0
#: Upper bounds in bytes. PART_BYTES: what a part without its values adds to the header of its batch, or its answer to the
#: header of the answer. VALUE_BYTES: what each value of the part adds.
PART_BYTES = 160
VALUE_BYTES = 5
#: From this queue length on (in forwards for each worker), throughput matters more than the time of one forward.
DEEP = 4
#: Rows of a request that was cut fill the rest of a batch, if the rest is at least this share of a batch.
REST = 0.25


def pace_for(pace: ForwardCostModel, head: Request, now: float, weight: float) -> int:
    """Weight limit of a forward whose first request is `head`, of this `weight`.

    - A request of a higher priority arrived lately: a short forward. The next such request waits for the running forward and
      for one more before its own.
    - Many requests wait: twice the pace. The host of the engine then launches half as many forwards.
    - Otherwise: the pace.
    """
    group = head.group
    if head.priority < group.peak and now - group.peak_at <= RECENT_S:
        return pace.short
    many = weight * group.waiting_for_workers >= DEEP * pace.tokens * len(group.workers)
    return 2 * pace.tokens if many else pace.tokens


def header_bytes(work: Work) -> int:
    """Upper bound of the bytes that rows of `work` add to the header of a batch. It also bounds the header of the answer."""
    return PART_BYTES + VALUE_BYTES * work.values


def full(worker: Worker) -> bool:
    """Whether `worker` has enough batches to stay busy: one that runs, and those that are launched behind it.

    Requests that arrive meanwhile wait in the queue and join one batch. So the host of the engine prepares, launches and reads
    out fewer batches, and a request of a higher priority waits only for the batches in flight.

    The caller skips this check for a worker without a pace: tokens in flight alone limit it. The exception is a worker that
    keeps part of its tokens in flight for queries that must be computed again.
    """
    return worker.row_batches >= worker.group.config.forwards_in_flight


def most_of(work: Work, rows: int, can: Capabilities) -> int:
    """Token limit of a batch that holds so many rows of `work` and no other request. The limit is higher where the engine
    computes the query once, because the count of tokens has the query in every row."""
    return can.cached_tokens if computed_once(work, rows, can) else can.batch_tokens


def computed_once(work: Work, rows: int, can: Capabilities) -> bool:
    """Whether the query of so many rows of `work` is computed once, ahead of them."""
    return rows > 1 and 0 < can.cached_query <= work.shared


def row_share(can: Capabilities) -> float:
    """Least number of tokens that a row counts in the sharing between clients: a batch full of short rows counts as a whole
    one."""
    return can.batch_tokens / can.batch_rows


def heaviest(pace: ForwardCostModel | None) -> float:
    """Weight limit of a batch of several rows: two forwards at the worker's pace."""
    return inf if pace is None else 2 * pace.tokens


def room_at_pace(pace: ForwardCostModel | None, most: int, head: Request, follower: Request) -> float:
    """Weight limit of a batch that rows of `follower` fill up, any number of them."""
    if pace is None:
        return inf
    return min(most, pace.short) if follower.priority < head.priority else most


def beyond_pace(pace: ForwardCostModel | None, most: int, head: Request, follower: Request, weight: float, more: float) -> bool:
    """Whether `follower` would make a batch of this `weight` too long for its head.

    Half of a follower may be above the limit of the head, so that batches reach the limit on average. A follower of a lower
    priority makes no forward longer than a short one.
    """
    if pace is None:
        return False
    if follower.priority < head.priority:
        return weight + more > min(most, pace.short)
    return weight + more / 2 > most or weight + more > 2 * pace.tokens


def large_rest(can: Capabilities, rows: int, tokens: int) -> bool:
    """Whether so many rows of a request that was cut are worth a part in a batch."""
    return rows >= REST * can.batch_rows or tokens >= REST * can.batch_tokens


def even(rows: int, most: int) -> int:
    """Rows of the next batch, when `rows` are spread evenly over as few batches as possible, with at most `most` rows each."""
    batches = -(-rows // most)
    return -(-rows // batches)


def needs_as_much(request: Request, blocked: Request, worker: Worker | None) -> bool:
    """Whether `request` is the head of the queue now, and `worker` has no room for it, as it had none for the head `blocked`.

    That holds if `request`, the head of its lane, is of the same lane, is not smaller, and goes whole into one batch. A request
    that is cut opens with a smaller batch, which may find room. One that can be packed may weigh less than its tokens.
    """
    if request.generation is not None:
        return False
    work, than = request.work, blocked.work
    if worker is None or (can := worker.capabilities) is None:
        return True
    if work.signature != than.signature or request.packs:
        return False
    if work.tokens < than.tokens or work.rows < than.rows:
        return False
    cost, pace = work.tokens + work.rows * (can.page - 1), worker.pace
    whole = cost <= can.batch_tokens and work.rows <= can.batch_rows
    return whole and (pace is None or cost + work.rows * pace.row <= heaviest(pace))
