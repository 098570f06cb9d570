"""The simulator finds what it is for: each bug that is planted here is seen within a few schedules."""

from typing import Any

import pytest

from enginepool.client.session.events import Fail
from enginepool.client.session.events import SessionEffect as ClientEffect
from enginepool.client.session.pending_requests import Call, PendingRequests
from enginepool.coordinator.core import machine
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.participants import with_worker
from enginepool.coordinator.core.request import Client, Request, RunningBatch
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.core.text_lanes import TextLanes
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet import slots
from enginepool.coordinator.fleet import workers as fleet
from enginepool.coordinator.fleet.fan_out import FanOut, OpenQuestion
from enginepool.coordinator.fleet.registration import Registration
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.operations import embed, logprobs, score
from enginepool.coordinator.operations.base import Work
from enginepool.coordinator.operations.control import Commands
from enginepool.coordinator.requests import admission, shedding
from enginepool.coordinator.requests import lifecycle as requests
from enginepool.coordinator.requests.admission import Admission
from enginepool.coordinator.requests.clients import ClientRegistry
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.shedding import AdmissionLevels
from enginepool.coordinator.scheduling import batch_builder as filling
from enginepool.coordinator.scheduling import batch_limits, row_cuts
from enginepool.coordinator.scheduling import batches as batching
from enginepool.coordinator.scheduling.lanes import Lane, QueueLevel
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.protocol.messages import Capabilities, ErrorReply, Expired, FrameSpec, Part, TaskId, Tokenize, Welcome
from enginepool.protocol.messages.control import Command, Commanded, ControlReport
from enginepool.protocol.packing import Fit, Packable, Packing
from enginepool.workers.events import EndProcess, Exit, SendToCoordinator
from enginepool.workers.ledger import TaskLedger
from enginepool.workers.machine import WorkerMachine
from enginepool.workers.memory_state import MemoryState
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate

SEEDS = range(1, 401)


def rows_in_any_order(patch: pytest.MonkeyPatch) -> None:
    def join(request: Request) -> Any:
        pieces = request.pieces[::-1]
        specs = pieces[0][1]
        frames = [b"".join(piece[2][i] for piece in pieces) for i in range(len(specs))]
        whole = [spec.__class__(spec.name, spec.dtype, (request.work.rows, *spec.shape[1:])) for spec in specs]
        return whole, frames

    patch.setattr(requests, "join_pieces", join)


def rows_without_a_separator_pass(patch: pytest.MonkeyPatch) -> None:
    def check_separated(work: Any, separator: int) -> None:
        """Nothing."""

    patch.setattr(score, "_check_separated", check_separated)


def texts_are_never_pairs(patch: pytest.MonkeyPatch) -> None:
    def tokenize(task: TaskId, frames: list[FrameSpec], item_first: bool, raw: bool) -> Tokenize:
        return Tokenize(task, frames, item_first, True)

    patch.setattr(score, "Tokenize", tokenize)


def parts_of_other_weights_are_mixed(patch: pytest.MonkeyPatch) -> None:
    def start_over(self: RequestLifecycle, request: Request) -> None:
        """Nothing."""

    patch.setattr(RequestLifecycle, "_start_over", start_over)


def lost_rows_do_not_come_back(patch: pytest.MonkeyPatch) -> None:
    def lost(self: RequestLifecycle, batch: RunningBatch, reason: str) -> None:
        """Nothing."""

    patch.setattr(RequestLifecycle, "lost", lost)


def workers_are_named_for_rows_that_they_never_answered(patch: pytest.MonkeyPatch) -> None:
    real = batching.send_batch

    def send_batch(core: Context, batch: RunningBatch) -> None:
        for request, *_ in batch.slices:
            request.workers = with_worker(request.workers, batch.worker.name)
        real(core, batch)

    patch.setattr(batching, "send_batch", send_batch)


def neighbors_are_blamed(patch: pytest.MonkeyPatch) -> None:
    real = RequestLifecycle.lost

    def lost(self: RequestLifecycle, batch: RunningBatch, reason: str) -> None:
        batch.trial = True
        real(self, batch, reason)

    patch.setattr(RequestLifecycle, "lost", lost)


def rows_in_flight_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    real = batching.send_batch

    def send_batch(core: Context, batch: RunningBatch) -> None:
        batch.rows = 0
        real(core, batch)

    patch.setattr(batching, "send_batch", send_batch)


def texts_are_first_in_first_out(patch: pytest.MonkeyPatch) -> None:
    real = Queue[Request].push

    def push(self: Queue[Request], request: Request) -> Any:
        if request.state != TEXT:
            return real(self, request)
        before, request.priority, request.key = (request.priority, request.key), 0, request.arrival
        try:
            return real(self, request)
        finally:
            request.priority, request.key = before

    patch.setattr(Queue, "push", push)


def a_worker_gets_any_number_of_texts(patch: pytest.MonkeyPatch) -> None:
    def takes(_: TextLanes, *, long: bool) -> bool:
        return True

    patch.setattr(TextLanes, "takes", takes)


def priority_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Request.__init__

    def init(self: Request, *args: Any) -> None:
        real(self, *args)
        self.key = self.arrival

    patch.setattr(Request, "__init__", init)


def deadlines_come_early(patch: pytest.MonkeyPatch) -> None:
    real = Admission.submit

    def submit(self: Admission, e: Any) -> None:
        if e.deadline is not None:
            e.deadline = (e.now + e.deadline) / 2
        real(self, e)

    patch.setattr(Admission, "submit", submit)


def answers_are_passed_on_twice(patch: pytest.MonkeyPatch) -> None:
    def answered(self: PendingRequests, id_: int, effect: ClientEffect, now: float, out: list[ClientEffect]) -> None:
        call = self.by_id.pop(id_, None)
        if call is not None:
            self._uncount(call)  # pyright: ignore[reportPrivateUsage]
            out += [effect, effect]

    patch.setattr(PendingRequests, "answered", answered)


def nothing_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = PendingRequests._send  # pyright: ignore[reportPrivateUsage]

    def send(self: PendingRequests, call: Call, now: float, out: list[ClientEffect]) -> None:
        if not call.sends:
            real(self, call, now, out)

    patch.setattr(PendingRequests, "_send", send)


def work_of_a_dead_epoch_is_run_beside_the_new(patch: pytest.MonkeyPatch) -> None:
    real = TaskLedger.drop

    def drop(self: TaskLedger) -> None:
        real(self)
        self.leaving.clear()

    patch.setattr(TaskLedger, "drop", drop)


def everything_is_packed(patch: pytest.MonkeyPatch) -> None:
    def can_be_packed(work: Work, can: Capabilities | None) -> bool:
        return can is not None and can.packs and work.operation.name == "score"

    patch.setattr(admission, "can_be_packed", can_be_packed)
    patch.setattr(requests, "can_be_packed", can_be_packed)


def packed_batches_do_not_say_so(patch: pytest.MonkeyPatch) -> None:
    def init(self: RunningBatch, *args: Any, packed: bool = False, **options: Any) -> None:
        real(self, *args, **options)

    real = RunningBatch.__init__
    patch.setattr(RunningBatch, "__init__", init)


def a_query_is_counted_once_too_rarely(patch: pytest.MonkeyPatch) -> None:
    real = Packing.weigh

    def weigh(self: Packing, rows: Packable, *bounds: Any) -> Fit:
        fit = real(self, rows, *bounds)
        return fit._replace(cost=fit.cost - rows.tokens) if fit.rows else fit

    patch.setattr(Packing, "weigh", weigh)


def whole_rows_of_other_labels_are_believed_to_share_a_sequence(patch: pytest.MonkeyPatch) -> None:
    real = row_cuts.packable

    def packable(request: Request, start: int, end: int) -> Packable:
        return real(request, start, end)._replace(labels=())

    patch.setattr(row_cuts, "packable", packable)


def every_query_is_believed_to_be_computed_once(patch: pytest.MonkeyPatch) -> None:
    def most_of(_work: object, _rows: int, can: Capabilities) -> int:
        return max(can.cached_tokens, can.batch_tokens)

    patch.setattr(filling, "most_of", most_of)
    patch.setattr(row_cuts, "most_of", most_of)


def failures_are_never_the_same(patch: pytest.MonkeyPatch) -> None:
    def signature(reason: str) -> str:
        return reason

    patch.setattr(slots, "signature", signature)


def failures_are_always_the_same(patch: pytest.MonkeyPatch) -> None:
    def signature(reason: str) -> str:
        return ""

    patch.setattr(slots, "signature", signature)


def a_worker_that_was_ready_is_given_up_like_one_that_never_was(patch: pytest.MonkeyPatch) -> None:
    real = WorkerSlots.vacate

    def vacate(self: WorkerSlots, slot: WorkerSlot, permanent: bool) -> None:
        slot.was_ready, slot.start_failure = False, slot.start_failure or slot.end_reason
        real(self, slot, permanent)

    patch.setattr(WorkerSlots, "vacate", vacate)


@pytest.mark.parametrize(
    "mutate",
    [failures_are_never_the_same, failures_are_always_the_same, a_worker_that_was_ready_is_given_up_like_one_that_never_was],
)
def test_a_bug_planted_in_giving_up_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, unloadable=True))


def labels_are_not_counted_in_headers(patch: pytest.MonkeyPatch) -> None:
    def header_bytes(_work: object) -> int:
        return batch_limits.PART_BYTES

    patch.setattr(filling, "header_bytes", header_bytes)


def answers_over_the_size_limit_are_computed(patch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        """Nothing is."""

    for module in (admission, requests):
        patch.setattr(module, "too_large", too_large)

    def most(_: Client) -> int:
        return 1 << 40

    def keep(_: Client, value: int) -> None:
        """The real limit does not matter."""

    patch.setattr(Client, "max_message", property(most, keep))


def a_charge_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    real = RequestLifecycle.cancel

    def cancel(self: RequestLifecycle, e: Any) -> None:
        before = self.core.live_bytes
        real(self, e)
        self.core.live_bytes = before

    patch.setattr(RequestLifecycle, "cancel", cancel)


def kept_answers_make_no_room(patch: pytest.MonkeyPatch) -> None:
    def make_room(self: Context, nbytes: int, outboxes: int) -> bool:
        return self.live_bytes + nbytes <= self.config.limits.buffer_bytes

    patch.setattr(Context, "make_room", make_room)


def a_silent_link_is_held_against_the_worker(patch: pytest.MonkeyPatch) -> None:
    real = WorkerRegistry.lose

    def lose(self: WorkerRegistry, worker: Worker, reason: str, **how: bool) -> None:
        real(self, worker, reason, **{**how, "silent": False})

    patch.setattr(WorkerRegistry, "lose", lose)


def an_expired_worker_ends(patch: pytest.MonkeyPatch) -> None:
    def expired(self: WorkerMachine, message: Expired) -> list[Any]:
        self.ended = EndProcess(Exit.REFUSED, message.reason, False)
        return [self.ended]

    patch.setattr(WorkerMachine, "_expired", expired)


def a_new_incarnation_takes_the_work_of_the_old_one_along(patch: pytest.MonkeyPatch) -> None:
    real = WorkerMachine._expired  # pyright: ignore[reportPrivateUsage]

    def drop(self: TaskLedger) -> None:
        """Nothing."""

    def expired(self: WorkerMachine, message: Expired) -> list[Any]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TaskLedger, "drop", drop)
            return real(self, message)

    patch.setattr(WorkerMachine, "_expired", expired)


@pytest.mark.parametrize(
    "mutate",
    [
        a_silent_link_is_held_against_the_worker,
        an_expired_worker_ends,
        a_new_incarnation_takes_the_work_of_the_old_one_along,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_external_workers_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, external=True))


@pytest.mark.parametrize(
    "mutate",
    [
        labels_are_not_counted_in_headers,
        answers_over_the_size_limit_are_computed,
        a_charge_is_not_given_back,
        kept_answers_make_no_room,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_the_bounds_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, wide=True))


def embeddings_share_batches_with_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(embed, "_SIGNATURE", 0)


def logprobs_share_batches_with_scores(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(logprobs, "_SIGNATURE", 0)


def normalizing_is_forgotten_where_rows_are_cut(patch: pytest.MonkeyPatch) -> None:
    def replace(part: Any, **changes: Any) -> Any:
        return real(part, **changes, normalize=True) if isinstance(part, Part) else real(part, **changes)

    real: Any = batching.replace
    patch.setattr(batching, "replace", replace)


@pytest.mark.parametrize(
    "mutate",
    [
        embeddings_share_batches_with_scores,
        logprobs_share_batches_with_scores,
        normalizing_is_forgotten_where_rows_are_cut,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_operations_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, embedding=True))


def a_planned_stop_fails_what_it_refuses(patch: pytest.MonkeyPatch) -> None:
    def put_back(self: PendingRequests, id_: int, now: float, out: list[ClientEffect]) -> None:
        self.answered(id_, Fail(id_, ErrorReply("shutting_down", "the coordinator is draining", id=id_)), now, out)

    patch.setattr(PendingRequests, "put_back", put_back)


def calls_wait_for_an_ended_coordinator(patch: pytest.MonkeyPatch) -> None:
    real = PendingRequests.welcome

    def welcome(self: PendingRequests, limits: Welcome, new_epoch: bool, now: float, out: list[ClientEffect]) -> None:
        paused = self.paused
        real(self, limits, new_epoch, now, out)
        self.paused = paused

    patch.setattr(PendingRequests, "welcome", welcome)


def epochs_that_workers_have_heard_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    real = Registration.register

    def register(self: Registration, e: Any) -> None:
        e.epoch = min(e.epoch, self.core.epoch)
        real(self, e)

    patch.setattr(Registration, "register", register)


def epochs_that_clients_have_heard_do_not_matter(patch: pytest.MonkeyPatch) -> None:
    real = ClientRegistry.hello

    def hello(self: ClientRegistry, e: Any) -> None:
        e.epoch = 0
        real(self, e)

    patch.setattr(ClientRegistry, "hello", hello)


def only_its_last_message_says_that_memory_ran_out(patch: pytest.MonkeyPatch) -> None:
    real = WorkerRegistry.exited

    def exited(self: WorkerRegistry, e: Any) -> None:
        e.out_of_memory = False
        real(self, e)

    patch.setattr(WorkerRegistry, "exited", exited)


def a_loss_for_want_of_memory_counts(patch: pytest.MonkeyPatch) -> None:
    def halve(worker: Worker, now: float) -> bool:
        return False

    patch.setattr(fleet, "halve", halve)


@pytest.mark.parametrize(
    "mutate",
    [only_its_last_message_says_that_memory_ran_out, a_loss_for_want_of_memory_counts],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_losses_for_want_of_memory_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, starved=True))


def work_is_started_by_a_coordinator_that_ends_alone(patch: pytest.MonkeyPatch) -> None:
    def hold(group: Group) -> None:
        """Nothing."""

    patch.setattr(machine, "hold", hold)


@pytest.mark.parametrize(
    "mutate",
    [
        a_planned_stop_fails_what_it_refuses,
        calls_wait_for_an_ended_coordinator,
        work_is_started_by_a_coordinator_that_ends_alone,
        epochs_that_workers_have_heard_do_not_matter,
        epochs_that_clients_have_heard_do_not_matter,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_a_planned_stop_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, stops=True))


@pytest.mark.parametrize(
    "mutate",
    [
        everything_is_packed,
        packed_batches_do_not_say_so,
        a_query_is_counted_once_too_rarely,
        whole_rows_of_other_labels_are_believed_to_share_a_sequence,
        every_query_is_believed_to_be_computed_once,
    ],
)
def test_a_bug_planted_in_packing_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 2 + seed % 8, packed=True))


@pytest.mark.parametrize(
    "mutate",
    [
        rows_in_any_order,
        rows_without_a_separator_pass,
        texts_are_never_pairs,
        workers_are_named_for_rows_that_they_never_answered,
        parts_of_other_weights_are_mixed,
        lost_rows_do_not_come_back,
        neighbors_are_blamed,
        rows_in_flight_are_not_counted,
        priority_is_forgotten,
        texts_are_first_in_first_out,
        a_worker_gets_any_number_of_texts,
        deadlines_come_early,
        answers_are_passed_on_twice,
        nothing_is_sent_again,
        work_of_a_dead_epoch_is_run_beside_the_new,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8))


def a_full_queue_sheds_nothing(patch: pytest.MonkeyPatch) -> None:
    def take(_: AdmissionLevels, _priority: int, _rows: int, _nbytes: int) -> list[Request]:
        return []

    patch.setattr(AdmissionLevels, "take", take)


def one_client_may_fill_the_queue(patch: pytest.MonkeyPatch) -> None:
    def below(_: AdmissionLevels, _priority: int) -> tuple[int, int]:
        return 1 << 50, 1 << 50

    patch.setattr(AdmissionLevels, "below", below)


def what_an_engine_was_given_is_shed(patch: pytest.MonkeyPatch) -> None:
    def untouched(_: Request) -> bool:
        return True

    patch.setattr(shedding, "_untouched", untouched)


def what_is_shed_is_not_told(patch: pytest.MonkeyPatch) -> None:
    def shed(self: RequestLifecycle, request: Request, _: ErrorReply) -> None:
        self._release(request)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(RequestLifecycle, "shed", shed)


def busy_is_kept_as_the_answer(patch: pytest.MonkeyPatch) -> None:
    def shed(self: RequestLifecycle, request: Request, failure: ErrorReply) -> None:
        self._finish(request, failure, ())  # pyright: ignore[reportPrivateUsage]
        self.core.wake(request.group)

    patch.setattr(RequestLifecycle, "shed", shed)


@pytest.mark.parametrize(
    "mutate",
    [
        a_full_queue_sheds_nothing,
        one_client_may_fill_the_queue,
        what_an_engine_was_given_is_shed,
        what_is_shed_is_not_told,
        busy_is_kept_as_the_answer,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_admission_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, crowded=True))


def _nothing(*_: object) -> float:
    return 0.0


def clients_are_served_first_in_first_out(patch: pytest.MonkeyPatch) -> None:
    def charge(_line: Any, _client: Any, start: float, _weight: float) -> float:
        return start

    patch.setattr(Queue, "_charge", staticmethod(charge))
    patch.setattr(QueueLevel, "enter", _nothing)


def a_cut_request_does_not_yield(patch: pytest.MonkeyPatch) -> None:
    def charge(_self: Queue[Any], _lane: Any, _weight: float) -> None:
        """Its next part is next."""

    patch.setattr(Queue, "charge", charge)


def each_signature_has_a_turn_of_its_own(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lane, "defer", _nothing)


def short_rows_weigh_their_tokens_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(filling, "row_share", _nothing)


@pytest.mark.parametrize(
    "mutate",
    [
        clients_are_served_first_in_first_out,
        a_cut_request_does_not_yield,
        each_signature_has_a_turn_of_its_own,
        short_rows_weigh_their_tokens_alone,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_fair_queueing_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8))
    assert " batches before " in found, "it is the invariant of fairness that finds it"


def a_lost_worker_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    def lost(_: FanOut, _worker: Worker, _reason: str) -> None:
        """Its outcome comes when the time is over."""

    patch.setattr(FanOut, "lost", lost)


def a_worker_that_is_not_ready_has_no_outcome(patch: pytest.MonkeyPatch) -> None:
    real = Commands.report

    def report(self: Commands) -> Any:
        message, frames = real(self)
        assert isinstance(message, ControlReport)
        message.workers = [row for row in message.workers if row.code != "pool_down"]
        return message, frames

    patch.setattr(Commands, "report", report)


def a_command_is_done_when_it_arrives(patch: pytest.MonkeyPatch) -> None:
    def take(_: MemoryState, message: Command, *_args: Any, **_named: Any) -> Any:
        return SendToCoordinator(Commanded(message.task))

    patch.setattr(MemoryState, "take", take)


def a_report_is_sent_before_the_last_outcome(patch: pytest.MonkeyPatch) -> None:
    real = FanOut._close_if_done  # pyright: ignore[reportPrivateUsage]

    def close(self: FanOut, opened: OpenQuestion) -> None:
        if len(opened.pending) == 1:
            opened.pending.clear()
        real(self, opened)

    patch.setattr(FanOut, "_close_if_done", close)


def a_command_that_is_open_is_run_again(patch: pytest.MonkeyPatch) -> None:
    def is_open(_: FanOut, _link: bytes, _id: int) -> bool:
        return False

    patch.setattr(FanOut, "is_open", is_open)


def a_command_has_no_time_limit(patch: pytest.MonkeyPatch) -> None:
    def watch(_: FanOut) -> None:
        """A worker that does not answer is waited for."""

    patch.setattr(FanOut, "watch", watch)


@pytest.mark.parametrize(
    "mutate",
    [
        a_lost_worker_is_waited_for,
        a_worker_that_is_not_ready_has_no_outcome,
        a_command_is_done_when_it_arrives,
        a_report_is_sent_before_the_last_outcome,
        a_command_that_is_open_is_run_again,
        a_command_has_no_time_limit,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_commands_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, commanding=True))
