"""Single steps of the pure machine that must not cost more because much is queued or kept: part of `bench.core`.

Each is one `handle` call, repeated; the machine's own time, with garbage collection as in production.
"""

import statistics
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from bench.core_load import Load
from bench.table import Row
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.operations.score import SCORE
from enginepool.protocol.messages import Batch, FrameSpec, Score
from enginepool.protocol.messages.weights import Commit, Prepared, Publish, WeightsLoaded

#: seconds of one step, by its name
Times = Iterator[tuple[str, float]]

HOLD, COMMIT, LEAVE, CUT = "a hold", "a commit", "a client leaves", "a cut of a large request, and its answer"
ROWS = 1_000_000


def timed(load: Load, event: ev.Event) -> float:
    """Handle one event; how long that took."""
    before = load.spent
    load.handle(event)
    return load.spent - before


def updates(load: Load) -> Times:
    """Updates one after the other: of one worker, that has finished what it had, with the whole queue behind it."""
    trainer, worker = load.links[0], b"w0"
    for version in range(1, 1 << 30):
        load.now += 1.0
        offer = Publish((1 << 40) + version, version, transfer="set_version")
        load.handle(ev.PublishAsked(load.now, trainer, offer, [], (), version))
        update = load.machine.core.updates["g"].id
        load.handle(ev.JournalChecked(load.now, update))
        load.handle(ev.WorkerSaid(load.now, worker, Prepared(update)))
        hold = timed(load, ev.PublisherSaid(load.now, trainer, Commit(offer.id)))
        while load.running:
            load.answer()
        load.handle(ev.WorkerSaid(load.now, worker, WeightsLoaded(update, version, "")))
        yield HOLD, hold
        yield COMMIT, timed(load, ev.JournalWritten(load.now, update))


def leavers(load: Load) -> Times:
    """A client comes, says goodbye, and had nothing; others have as many answers that are not acknowledged."""
    for number in range(1 << 30):
        link = b"l%d" % number
        load.handle(ev.ClientHello(load.now, link, b"%016x" % (1 << 40 | number), bytes(16), 0))
        yield LEAVE, timed(load, ev.ClientLeft(load.now, link))


def cuts(load: Load) -> Times:
    """One request of many rows is computed part by part."""
    lengths = np.ones(ROWS, np.uint32)
    specs = [
        FrameSpec("query", "int32", (1,)),
        FrameSpec("items", "int32", (ROWS,)),
        FrameSpec("item_lengths", "uint32", (ROWS,)),
    ]
    while load.running:
        load.answer()
    work = SCORE.open(Score(1, specs, labels=[1, 2]), [lengths[:1].tobytes(), lengths.tobytes(), lengths.tobytes()])
    parts: list[ToWorker] = []
    event: ev.Event = ev.Submit(load.now, load.links[0], 1 << 41, work, 1000, None)
    while True:
        before = load.spent
        parts += [e for e in load.handle(event) if isinstance(e, ToWorker) and isinstance(e.message, Batch)]
        if not isinstance(event, ev.Submit):
            yield CUT, load.spent - before
        if not parts:
            return
        part = parts.pop(0)
        assert isinstance(part.message, Batch)
        rows = part.message.parts[0].frames[-1].shape[0]
        outcome = ev.Outcome([FrameSpec("scores", "float32", (rows, 2))], [bytes(8 * rows)])
        event = ev.BatchDone(load.now, part.link, part.message.batch, [outcome], 0, 1, 20_000)


def steps(depth: int, repetitions: int) -> list[Row]:
    """The steps with `depth` requests queued, or answers kept: medians in ms, with the quickest and the slowest."""
    queued, kept = f"{depth:,} queued", f"{depth:,} answers kept"
    rows: list[Row] = []
    busy, idle = Load(depth, 1), Load(0, 1)
    idle.keep(depth)
    sources: tuple[tuple[Callable[[Load], Times], Load, str], ...] = (
        (updates, busy, queued),
        (leavers, busy, queued),
        (leavers, idle, kept),
        (cuts, Load(0, 1), f"{ROWS:,} rows"),
    )
    for source, load, amount in sources:
        times: dict[str, list[float]] = {}
        for name, seconds in islice(source(load), 2 * repetitions):
            times.setdefault(name, []).append(1000 * seconds)
        for name, found in times.items():
            rows.append(Row(name, amount, statistics.median(found), "ms", None, (min(found), max(found))))
    return rows
