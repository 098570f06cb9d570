"""Whether the next batch of a worker is packed: what costs less time for each request, as was learned from its batches. Pure.

A packed forward computes a long query once and has one prompt for many rows, also of many requests, and its attention keeps
items apart, which costs more for each token. So which kind is faster depends on the rows and on how many wait. Both cost models
are learned from the batches of their kind alone. A model that is never asked again could stay wrong: so the other kind has a
turn now and then, the less often the slower it is. On an idle engine, it has its first turns soon: what a kind costs there is
not seen under load, and a worker that measures it while its host is busy declares it wrongly.

The requests that are next make one batch, so they decide together: one of a single row would often be plain, and the batch that
it opens is not for it alone. A batch takes longer on an idle engine, and that counts as often as recent batches found the
engine idle. The others followed one another: for those behind, only the time counts that a batch keeps the engine busy.
"""

from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import QUEUED
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import JOINED, cheap_to_repeat

#: The slower kind has one of so many batches, times the ratio of the two times; on an idle engine sooner at first, the less
#: is known of it there.
TURN, FIRST_TURN = 32, 4
#: So many requests stand for all that are next.
LOOK = 8
#: The weight of the latest batch in the share of those that followed another one.
LATEST = 0.05


def pack(lane: Lane[Request], worker: Worker) -> bool:
    """Whether the batch that the head of `lane` opens is packed; its rows can be."""
    can, plain, packed, head = worker.capabilities, worker.pace, worker.packed_pace, lane.head
    assert can is not None and head is not None
    if plain is None or packed is None:
        return True
    # Requests of other lanes share no batch with it.
    waiting = max(1, lane.size // max(1, head.group.routing.open))
    next_ = [head.work, *(one.work for one in lane.some(min(waiting, LOOK)) if one is not head and one.state == QUEUED)]
    rows = sum(work.rows for work in next_)
    apart = sum(work.tokens for work in next_) + rows * (can.page - 1)
    joined = sum(packed_tokens(work, can) for work in next_)
    of_plain, of_packed = (
        _seconds(model, tokens / len(next_), rows / len(next_), waiting, worker.followed)
        for model, tokens in ((plain, apart), (packed, joined))
    )
    quicker, slower = sorted((of_plain, of_packed))
    packs = of_packed <= of_plain
    in_a_row = worker.packed_in_a_row if packs else -worker.packed_in_a_row
    turn = TURN if worker.row_batches else min(TURN, FIRST_TURN * (plain if packs else packed).idle_weight)
    return packs != (in_a_row * quicker >= turn * slower)


def count_choice(worker: Worker, *, packed: bool) -> None:
    """A batch was made of which the rows could be either."""
    step = 1 if packed else -1
    worker.packed_in_a_row = worker.packed_in_a_row + step if worker.packed_in_a_row * step > 0 else step
    worker.followed += LATEST * ((worker.row_batches > 0) - worker.followed)


def packed_tokens(work: Work, can: Capabilities) -> int:
    """What the rows of a request weigh in a batch that has no other."""
    whole = cheap_to_repeat(work.shared, work.rows)
    query, longest = (0, min(can.context, JOINED)) if whole else (work.shared, can.context)
    items = work.tokens - work.rows * query + work.rows
    sequences = -(-items // max(1, longest - query - 1))
    return items + sequences * (query + can.page)


def _seconds(model: ForwardCostModel, tokens: float, rows: float, waiting: int, followed: float) -> float:
    """Seconds that a request of so many tokens takes of forwards, which as many as wait share with it."""
    together = min(waiting, model.tokens / model.weigh(tokens, rows))
    each = model.seconds(tokens, rows) - model.fixed_s
    return each + (model.fixed_s + (1.0 - followed) * model.idle_s) / together
