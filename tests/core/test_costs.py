"""No step costs more because more is queued, kept or connected that it does not touch: counted with few and with many."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.config import GroupConfig, Limits, PoolConfig, Timing
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.score import SCORE
from enginepool.protocol import ragged
from enginepool.protocol.messages import Batch, Capabilities, FrameSpec, Idle, Ready, Score
from enginepool.protocol.messages.weights import Commit, Prepared, Publish, WeightsLoaded
from enginepool.protocol.ragged import Offsets, cut, row_lengths
from tests.core.counting import Cost, cost_of
from tests.core.machines import CAN, text, work

FEW, MANY = 100, 5_000
ONE = work(1)
WORDS = text("a ", ["b"])


@dataclass
class Pool:
    """A machine without checks, which would cost what they check."""

    machine: Machine = field(init=False)
    workers: int = 0
    groups: tuple[str, ...] = ("g",)
    now: float = 100.0
    batches: list[ef.ToWorker] = field(default_factory=list[ef.ToWorker])
    started: list[str] = field(default_factory=list[str])
    ids: int = 0
    offer: int = 0

    def __post_init__(self) -> None:
        big = 1 << 40
        group = GroupConfig(model="m", engine="sim", workers=self.workers, ageing_s=None)
        limits = Limits(
            window_requests=big, queue_items=big, buffer_bytes=big, window_bytes=big, answers_bytes=big, max_message_bytes=big
        )
        timing = Timing(client_silence_s=1e9, silence_s=1e9)
        self.machine = Machine(PoolConfig(groups=dict.fromkeys(self.groups, group), limits=limits, timing=timing))
        self.do(ev.Started(self.now, 7, {}))
        for link in (b"many", b"few"):
            self.do(ev.ClientHello(0, link, link.ljust(16, b"."), b"t" * 16, 0))

    def do(self, event: ev.Event) -> list[ef.Effect]:
        event.now = self.now
        effects = self.machine.handle(event)
        for effect in effects:
            if isinstance(effect, ef.ToWorker) and isinstance(effect.message, Batch):
                self.batches.append(effect)
            if isinstance(effect, ef.StartWorker):
                self.started.append(effect.incarnation)
        return effects

    def worker(self, name: str = "w", can: Capabilities = CAN, group: str = "g") -> bytes:
        link = name.encode()
        self.do(ev.WorkerRegistered(0, link, group, name, 1, "host"))
        self.do(ev.WorkerSaid(0, link, Idle(7)))
        self.do(ev.WorkerSaid(0, link, Ready(can, 0)))
        return link

    def submit(self, link: bytes = b"many", content: Work = ONE, **kwargs: float) -> int:
        self.ids += 1
        deadline = kwargs.get("deadline")
        min_version = int(kwargs.get("min_version", 0))
        self.do(ev.Submit(0, link, self.ids, content, int(kwargs.get("priority", 0)), deadline, min_version))
        return self.ids

    def queue(self, number: int, content: Work = ONE, **kwargs: float) -> list[int]:
        return [self.submit(b"many", content, **kwargs) for _ in range(number)]

    def done(self, sent: ef.ToWorker) -> ev.BatchDone:
        message = sent.message
        assert isinstance(message, Batch)
        outcomes = [
            ev.Outcome([FrameSpec("scores", "float32", (rows, 2))], [bytes(8 * rows)])
            for rows in (part.frames[-1].shape[0] for part in message.parts)
        ]
        return ev.BatchDone(self.now, sent.link, message.batch, outcomes, 0, 1, 1000)

    def finish(self) -> None:
        """Answer the oldest batch."""
        self.do(self.done(self.batches.pop(0)))

    def say(self, link: bytes, message: Prepared | WeightsLoaded) -> list[ef.Effect]:
        return self.do(ev.WorkerSaid(0, link, message))

    def publish(self, version: int = 1, **kwargs: bool) -> None:
        """A transaction of the workers `w` that waits for its commit."""
        self.offer = (1 << 50) + version
        offer = Publish(self.offer, version, transfer="set_version", new_run=kwargs.get("new_run", False))
        self.do(ev.PublishAsked(0, b"few", offer, [], (), 1))
        update = self.machine.core.updates["g"]
        self.do(ev.JournalChecked(0, update.id))
        for member in list(update.members.values()):
            self.say(member.worker.link, Prepared(update.id))

    def commit(self) -> ev.PublisherSaid:
        return ev.PublisherSaid(self.now, b"few", Commit(self.offer))

    def written(self) -> ev.JournalWritten:
        """Everything of the open transaction up to the journal; the event that commits it."""
        self.do(self.commit())
        update = self.machine.core.updates["g"]
        while self.batches:
            self.finish()
        for member in list(update.members.values()):
            self.say(member.worker.link, WeightsLoaded(update.id, update.offer.version, ""))
        return ev.JournalWritten(self.now, update.id)

    def lose(self, link: bytes) -> ev.Event:
        return ev.WorkerBroken(self.now, link, "a test says so")


Step = Callable[[], object]


def event(pool: Pool, *events: ev.Event) -> Step:
    return lambda: pool.machine.handle(*events)


# --- each: a pool with `number` of something, and the step that must not see them -----------------------------------------


def a_hold(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    pool.publish()
    return event(pool, pool.commit())


def a_commit(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    pool.publish()
    return event(pool, pool.written())


def a_commit_that_requests_for_later_versions_wait_through(number: int) -> Step:
    pool = Pool()
    pool.worker()
    for i in range(number):
        pool.submit(min_version=2 + i)
    pool.publish()
    return event(pool, pool.written())


def an_abort_of_a_hold(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.worker("v")
    pool.queue(number)
    pool.publish()
    pool.do(pool.commit())
    return event(pool, pool.lose(b"v"))


def a_client_that_leaves_beside_kept_answers(number: int) -> Step:
    pool = Pool()
    pool.worker()
    for _ in range(number):
        pool.submit()
        pool.finish()
    assert len(pool.machine.core.answers) == number
    return event(pool, ev.ClientLeft(pool.now, b"few"))


def a_client_that_leaves_beside_queued_requests(number: int) -> Step:
    pool = Pool()
    pool.queue(number)
    pool.submit(b"few")
    return event(pool, ev.ClientLeft(pool.now, b"few"))


def clients_that_wait(number: int) -> tuple[Pool, bytes]:
    """A pool that many clients have asked once each, and the link of one in the middle."""
    pool = Pool()
    for count in range(number):
        link = b"%d" % count
        pool.do(ev.ClientHello(0, link, link.ljust(16, b"."), b"t" * 16, 0))
        pool.submit(link)
    return pool, b"%d" % (number // 2)


def a_link_that_is_cut_among_many(number: int) -> Step:
    pool, link = clients_that_wait(number)
    return event(pool, ev.LinkCut(pool.now, link))


def a_client_that_is_back_among_many(number: int) -> Step:
    pool, link = clients_that_wait(number)
    pool.do(ev.LinkCut(0, link))
    return event(pool, ev.ClientHello(pool.now, b"new", link.ljust(16, b"."), b"t" * 16, 1))


def a_cancel(number: int) -> Step:
    pool = Pool()
    ids = pool.queue(number)
    return event(pool, ev.CancelAsked(pool.now, b"many", ids[number // 2]))


def a_status_report(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_status_report_of_requests_for_later_versions(number: int) -> Step:
    pool = Pool()
    pool.queue(number, min_version=2)
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_status_report_of_texts(number: int) -> Step:
    pool = Pool()
    pool.queue(number, content=WORDS)
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_status_report_of_texts_with_a_tokenizer(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number, content=WORDS)
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_status_report_after_cancels(number: int) -> Step:
    pool = Pool()
    for id_ in pool.queue(number)[: number * 2 // 5]:
        pool.do(ev.CancelAsked(pool.now, b"many", id_))
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_status_report_of_requests_that_came_back(number: int) -> Step:
    pool = Pool()
    for i in range(number):
        pool.submit(min_version=1 + i % 2)
    pool.worker()
    for version in (1, 2):
        pool.publish(version)
        pool.do(pool.written())
    return event(pool, ev.StatusAsked(pool.now, b"few", 1))


def a_worker_that_is_lost(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    return event(pool, pool.lose(b"w"))


def a_lone_worker_that_comes_back(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    pool.do(pool.lose(b"w"))
    pool.do(ev.WorkerRegistered(0, b"x", "g", "x", 1, "host"))
    return event(pool, ev.WorkerSaid(pool.now, b"x", Ready(msgspec.structs.replace(CAN, pace=1000), 0)))


def one_more_worker(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    pool.do(ev.WorkerRegistered(0, b"x", "g", "x", 1, "host"))
    pool.do(ev.WorkerSaid(0, b"x", Idle(7)))
    return event(pool, ev.WorkerSaid(pool.now, b"x", Ready(CAN, 0)))


def a_tick(number: int) -> Step:
    pool = Pool()
    pool.worker()
    for _ in range(number):
        pool.submit()
        pool.finish()
    pool.queue(number, deadline=1e9)
    pool.now += 1.0
    return event(pool, ev.Tick(pool.now))


def a_deadline(number: int) -> Step:
    pool = Pool()
    pool.queue(number, deadline=1e9)
    pool.submit(deadline=pool.now + 0.5)
    pool.do(ev.Tick(pool.now))
    pool.now += 0.6
    return event(pool, ev.Tick(pool.now))


def a_submit_and_its_answer(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.queue(number)
    pool.ids += 1
    done = pool.done(pool.batches[0])
    return event(pool, ev.Submit(pool.now, b"few", pool.ids, ONE, 0, None), done, ev.Acked(pool.now, b"many", [1]))


def another_group_that_goes_down(number: int) -> Step:
    pool = Pool(workers=1, groups=("g", "h"))
    pool.queue(number, content=work(1, group="g"))
    return event(pool, ev.WorkerExited(pool.now, pool.started[1], "gone", permanent=True))


def draining(number: int) -> Step:
    pool = Pool()
    for i in range(number):
        pool.do(ev.ClientHello(0, b"c%d" % i, b"%016d" % i, b"t" * 16, 0))
    pool.worker()
    pool.do(ev.ClientHello(0, b"last", b"last".ljust(16), b"t" * 16, 0))
    pool.submit(b"last")
    pool.do(ev.DrainAsked(0, 1000.0))
    return event(pool, ev.Heard(pool.now, b"few"))


def the_next_cut_of_a_large_request(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.submit(content=work(number))
    for _ in range(number // 16):
        pool.finish()
    return event(pool, pool.done(pool.batches.pop(0)))


def a_lost_part_of_a_large_request(number: int) -> Step:
    pool = Pool()
    pool.worker()
    pool.worker("v")
    pool.submit(content=work(number))
    for _ in range(number // 16):
        pool.finish()
    return event(pool, pool.lose(b"w"))


STEPS: Iterable[Callable[[int], Step]] = (
    a_hold,
    a_commit,
    a_commit_that_requests_for_later_versions_wait_through,
    an_abort_of_a_hold,
    a_client_that_leaves_beside_kept_answers,
    a_client_that_leaves_beside_queued_requests,
    a_link_that_is_cut_among_many,
    a_client_that_is_back_among_many,
    a_cancel,
    a_status_report,
    a_status_report_of_requests_for_later_versions,
    a_status_report_of_texts,
    a_status_report_of_texts_with_a_tokenizer,
    a_status_report_after_cancels,
    a_status_report_of_requests_that_came_back,
    a_worker_that_is_lost,
    a_lone_worker_that_comes_back,
    one_more_worker,
    a_tick,
    a_deadline,
    a_submit_and_its_answer,
    another_group_that_goes_down,
    draining,
    the_next_cut_of_a_large_request,
    a_lost_part_of_a_large_request,
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.replace("_", " "))
def test_a_step_costs_what_it_touches(step: Callable[[int], Step]) -> None:
    few, many = cost_of(step(FEW)), cost_of(step(MANY))
    # Heaps are deeper where there is more; a loop over all would be as many steps as there are requests, at least.
    assert many.steps <= few.steps + 500, (few, many)
    assert many.nbytes <= few.nbytes + 8_000, (few, many)


class Lengths:
    """A view of row lengths that counts the lengths which are read from it."""

    read = 0

    def __init__(self, buffer: bytes) -> None:
        self.view = memoryview(buffer)
        self.numbers = self.view.cast("I")
        self.lengths = False

    def cast(self, form: str) -> "Lengths":
        assert form == "I"
        self.lengths = True
        return self

    def __getitem__(self, rows: slice) -> memoryview:
        if not self.lengths:
            return self.view[rows]
        found = self.numbers[rows]
        Lengths.read += len(found)
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers[:])


@pytest.mark.parametrize("pairs", [False, True], ids=["one query", "a query for each row"])
def test_a_cut_reads_the_lengths_of_its_own_rows_and_of_few_before_them(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 8 * MANY
    content = work(rows, 2)
    if pairs:
        items, lengths = content.frames[1:]
        specs = [
            FrameSpec("query", "int32", (rows,)),
            FrameSpec("query_lengths", "uint32", (rows,)),
            *content.part.frames[1:],
        ]
        ones = np.ones(rows, np.uint32).tobytes()
        content = SCORE.open(Score(1, specs, labels=[1, 2]), [ones, ones, items, lengths])
    pool = Pool()
    pool.worker()
    monkeypatch.setattr(ragged, "memoryview", Lengths, raising=False)
    pool.submit(content=content)
    before, parts = Lengths.read, 0
    while parts < 100:
        pool.finish()
        parts += 1
    # A part has up to 8 rows: they are read to weigh them and to cut them.
    assert Lengths.read - before <= 2 * 100 * (2 * 8 + Offsets.STEP)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=700), st.data())
def test_a_cut_holds_the_rows_that_it_names(lengths: list[int], data: st.DataObject) -> None:
    lengths[0] = 1
    start = data.draw(st.integers(0, len(lengths) - 1))
    end = data.draw(st.integers(start + 1, len(lengths)))
    ids = np.arange(sum(lengths), dtype=np.int32)
    sizes = np.array(lengths, np.uint32)
    heads = np.ones(len(lengths), np.uint32)
    specs = [
        FrameSpec("query", "int32", (len(lengths),)),
        FrameSpec("query_lengths", "uint32", (len(lengths),)),
        FrameSpec("items", "int32", (len(ids),)),
        FrameSpec("item_lengths", "uint32", (len(lengths),)),
    ]
    frames = [np.arange(len(lengths), dtype=np.int32).tobytes(), heads.tobytes(), ids.tobytes(), sizes.tobytes()]
    cut_specs, (query, _, items, item_lengths) = cut(specs, frames, Offsets(frames), start, end)
    first = sum(lengths[:start])
    assert np.frombuffer(query, np.int32).tolist() == list(range(start, end))
    assert np.frombuffer(items, np.int32).tolist() == ids[first : first + sum(lengths[start:end])].tolist()
    assert (
        np.frombuffer(item_lengths, np.uint32).tolist()
        == lengths[start:end]
        == [n - 1 for n in row_lengths(frames, start, end)]
    )
    assert [spec.shape[0] for spec in cut_specs] == [end - start, end - start, sum(lengths[start:end]), end - start]


def test_the_count_sees_loops_and_copies() -> None:
    numbers = list(range(MANY))
    assert cost_of(lambda: [n for n in numbers if n < 0]).steps > MANY
    assert cost_of(lambda: list(numbers)).nbytes > 8 * MANY - 100
    assert cost_of(lambda: None) < Cost(20, 1000)
