"""How much a batch may hold: its tokens and rows, its header, and its weight at the pace of a worker. Pure."""

from math import inf

from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.protocol.messages import Capabilities

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
    return can.cached_tokens if computed_once(work, rows, can) else can.batch_tokens


def computed_once(work: Work, rows: int, can: Capabilities) -> bool:
    """Whether the query of so many rows of `work` is computed once on a plain worker."""
    return rows > 1 and 0 < can.cached_query <= work.shared


def row_share(can: Capabilities) -> float:
    """Tokens that a row counts at least between clients: a batch that is full of short rows is a whole one."""
    return can.batch_tokens / can.batch_rows


def heaviest(pace: ForwardCostModel | None) -> float:
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


def large_rest(can: Capabilities, rows: int, tokens: int) -> bool:
    """Whether so many rows of a request that was cut are enough for a part of its own."""
    return rows >= REST * can.batch_rows or tokens >= REST * can.batch_tokens


def even(rows: int, most: int) -> int:
    """Rows of the next of as few batches as can hold `rows` at `most` a batch; none is much smaller than the others."""
    batches = -(-rows // most)
    return -(-rows // batches)
