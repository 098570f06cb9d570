"""Which rows of a request go into the next batch. Pure."""

from math import inf

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.request import Request, Slice
from enginepool.coordinator.core.request_state import RUNNING
from enginepool.coordinator.core.transitions import enter_request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.scheduling.batch_limits import computed_once, even, heaviest, most_of
from enginepool.protocol.packing import Fit, Packable, Packing
from enginepool.protocol.ragged import row_lengths


def cut_next(request: Request, worker: Worker) -> tuple[int, Slice]:
    """The next rows of `request` that fit one batch of `worker`: (cost, slice). At least one row, even if it is too large."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    room = inf if pace is None else heaviest(pace)
    start, end = request.back[0] if request.back else (request.next, request.work.rows)
    bounds = most_of(request.work, end - start, can), room
    cost, rows = _count(request, worker, start, end, bounds, can.batch_rows, least=1)
    if rows < end - start:
        rows = even(end - start, rows)
        cost = sum(row_lengths(request.work.frames, start, start + rows)) + rows * (can.page - 1)
    return cost, (request, start, start + rows)


def cut_rest(request: Request, worker: Worker, bounds: tuple[int, float], most_rows: int) -> tuple[int, Slice]:
    """The next rows of `request` for the rest of a plain batch: within (tokens, weight) and so many rows. Possibly none.

    A range of rows that was taken back from a worker is not cut again.
    """
    start, end = request.back[0] if request.back else (request.next, request.work.rows)
    cost, rows = _count(request, worker, start, end, bounds, most_rows, least=0)
    return (0, (request, start, start)) if request.back and rows < end - start else (cost, (request, start, start + rows))


def _count(
    request: Request, worker: Worker, start: int, end: int, bounds: tuple[int, float], most_rows: int, *, least: int
) -> tuple[int, int]:
    """(cost, count) of the rows from `start` on that fit within (tokens, weight); the count is at least `least`."""
    can, pace = worker.capabilities, worker.pace
    assert can is not None
    each, extra = 0.0 if pace is None else pace.row, can.page - 1
    once = computed_once(request.work, end - start, can)
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


def pack_rows(
    packing: Packing,
    request: Request,
    start: int,
    end: int,
    rows: int,
    bounds: tuple[int, float, float],
    *,
    follows: bool = False,
) -> tuple[Packable, Fit]:
    """The rows from `start` on that fit within `bounds`: (tokens, weight of a row besides its tokens, weight of all). At least
    one row, unless the request `follows` another one in the batch."""
    found = packable(request, start, min(end, start + rows))
    fit = packing.weigh(found, *bounds)
    if 0 < fit.rows < end - start and not follows:
        fit = packing.weigh(found._replace(items=found.items[: even(end - start, fit.rows)]), *bounds)
    if not fit.rows and not follows:
        fit = packing.weigh(found._replace(items=found.items[:1]), request.work.longest + 2 + packing.page)
    return found, fit


def packable(request: Request, start: int, end: int) -> Packable:
    """Rows `start` to `end` of a request as the rule of packing takes them."""
    work = request.work
    labels = tuple(work.part.labels)
    if not work.shared:
        return Packable(b"", 0, row_lengths(work.frames, start, end), labels)
    return Packable(work.frames[0], work.shared, memoryview(work.frames[-1]).cast("I")[start:end], labels)


def take(core: Context, slice_: Slice) -> None:
    """Mark rows as sent to a worker."""
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
        enter_request(request, RUNNING)
    else:
        request.group.cut[request] = None
