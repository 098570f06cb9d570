"""Whether the next batch of a worker is packed: what costs less time for each request, as was learned from its batches. Pure.

A packed forward computes a long query once and has one prompt for many rows, also of many requests, and its attention keeps
items apart, which costs more for each token. So which kind is faster depends on the rows and on how many wait. Both cost models
are learned from the batches of their kind alone. A model that is never asked again could stay wrong: so the other kind has a
turn now and then, the less often the slower it is.
"""

from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.protocol.messages import Capabilities
from enginepool.protocol.packing import JOINED, cheap_to_repeat

#: The slower kind has one of so many batches, times the ratio of the two times.
TURN = 64


def pack(lane: Lane[Request], worker: Worker) -> bool:
    """Whether the batch that the head of `lane` opens is packed; its rows can be."""
    can, plain, packed, head = worker.capabilities, worker.pace, worker.packed_pace, lane.head
    assert can is not None and head is not None
    if plain is None or packed is None:
        return True
    # Requests of other lanes share no batch with it.
    work, waiting = head.work, max(1, lane.size // max(1, head.group.routing.open))
    rows_alone = _seconds(plain, work.tokens + work.rows * (can.page - 1), work.rows, waiting)
    joined = _seconds(packed, packed_tokens(head, can), work.rows, waiting)
    quicker, slower = sorted((rows_alone, joined))
    packs = joined <= rows_alone
    in_a_row = worker.packed_in_a_row if packs else -worker.packed_in_a_row
    return packs != (in_a_row * quicker >= TURN * slower)


def packed_tokens(request: Request, can: Capabilities) -> int:
    """What the rows of a request weigh in a batch that has no other."""
    work = request.work
    whole = cheap_to_repeat(work.shared, work.rows)
    query, longest = (0, min(can.context, JOINED)) if whole else (work.shared, can.context)
    items = work.tokens - work.rows * query + work.rows
    sequences = -(-items // max(1, longest - query - 1))
    return items + sequences * (query + can.page)


def _seconds(model: ForwardCostModel, tokens: int, rows: int, waiting: int) -> float:
    """Seconds that a request of so many tokens takes of forwards, which as many as wait share with it."""
    together = min(waiting, model.tokens / model.weigh(tokens, rows))
    return model.seconds(tokens, rows) - model.fixed_s + model.fixed_s / together
