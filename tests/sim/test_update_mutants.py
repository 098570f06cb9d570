"""The simulator finds what it is for in weight updates too: each bug that is planted here is seen within a few schedules."""

from random import Random
from typing import Any

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import StartWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import QUEUED
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.weights import outcomes as ending
from enginepool.coordinator.weights import phases, transaction
from enginepool.coordinator.weights import publishing as publishers
from enginepool.coordinator.weights.phases import Phases
from enginepool.coordinator.weights.publishing import Publishers
from enginepool.coordinator.weights.restarts import Restarts
from enginepool.coordinator.weights.restoring import Restoring
from enginepool.coordinator.weights.transaction import Transactions
from enginepool.coordinator.weights.update import Member, Phase, Update
from enginepool.protocol.messages.weights import Sent
from enginepool.workers.events import SendToCoordinator
from enginepool.workers.ledger import TaskLedger
from enginepool.workers.weights.machine import WorkerUpdates
from tests.sim.plan import Plan
from tests.sim.planted import Mutate, find
from tests.sim.simulation import Failed, simulate

SEEDS = range(1, 501)


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def why_refused(_: Update) -> None:
        """Nothing is wrong."""

    patch.setattr(phases, "why_refused", why_refused)


def the_publisher_hears_before_the_journal(patch: pytest.MonkeyPatch) -> None:
    real = Phases.enter  # pyright: ignore[reportPrivateUsage]

    def enter(self: Phases, update: Update, phase: Phase, seconds: float = float("inf")) -> None:
        real(self, update, phase, seconds)
        if phase == "journal":
            self.ending.commit(update, self.ending.new_weights(update, next(iter(update.members.values())).digest))

    patch.setattr(Phases, "enter", enter)


def a_held_group_goes_on(patch: pytest.MonkeyPatch) -> None:
    def open_(self: Worker) -> bool:
        return self.state is WorkerState.READY

    patch.setattr(Worker, "open", property(open_))


def late_workers_finish_old_work(patch: pytest.MonkeyPatch) -> None:
    """Workers that were no members keep what they run on the old weights."""

    real = WorkerRegistry.recall

    def recall(self: WorkerRegistry, worker: Worker) -> list[tuple[Request, bool]]:
        update = self.core.update_of(worker.group)
        return [] if update is None else real(self, worker)

    patch.setattr(WorkerRegistry, "recall", recall)


def who_failed_lives_on(patch: pytest.MonkeyPatch) -> None:
    real = WorkerRegistry.lose

    def lose(self: WorkerRegistry, worker: Worker, reason: str, *, kill: bool) -> None:
        if "weight" not in reason:
            real(self, worker, reason, kill=kill)

    patch.setattr(WorkerRegistry, "lose", lose)


def only_the_version_counts(patch: pytest.MonkeyPatch) -> None:
    def holds(self: Worker) -> bool:
        return self.version == self.group.version

    patch.setattr(Worker, "holds", property(holds))


def a_lease_lasts_for_ever(patch: pytest.MonkeyPatch) -> None:
    real = Transactions.watch

    def watch(self: Transactions) -> None:
        for update in self.core.updates.values():
            update.lease_until = float("inf")
        real(self)

    patch.setattr(Transactions, "watch", watch)


def a_drain_has_no_end(patch: pytest.MonkeyPatch) -> None:
    def stop(self: Phases, update: Update) -> None:
        """Nothing."""

    patch.setattr(Phases, "_stop_draining", stop)


def engines_take_weights_beside_work(patch: pytest.MonkeyPatch) -> None:
    def drop(self: TaskLedger) -> None:
        self.running.clear()
        self.held.clear()
        self.answers.clear()
        self.answer_bytes = 0
        self.unsent.clear()

    patch.setattr(TaskLedger, "drop", drop)


def nothing_is_asked_again_on_a_new_link(patch: pytest.MonkeyPatch) -> None:
    def returned(self: Transactions, worker: Worker) -> None:
        """Nothing."""

    patch.setattr(Transactions, "returned", returned)


def answers_are_said_once(patch: pytest.MonkeyPatch) -> None:
    def kept_answers(self: WorkerUpdates) -> list[SendToCoordinator]:
        return []

    patch.setattr(WorkerUpdates, "kept_answers", kept_answers)


def nobody_is_restored(patch: pytest.MonkeyPatch) -> None:
    def ask(self: Restoring, worker: Worker) -> None:
        """Nothing."""

    patch.setattr(Restoring, "_ask", ask)


def a_lost_member_is_not_missed(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Transactions, worker: Worker, reason: str) -> None:
        """Nothing."""

    patch.setattr(Transactions, "lost", lost)


def the_group_stays_held(patch: pytest.MonkeyPatch) -> None:
    def release(core: Any, group: Group) -> None:
        """Nothing."""

    patch.setattr(ending, "release", release)


def versions_may_go_back(patch: pytest.MonkeyPatch) -> None:
    real = Publishers.publish

    def publish(self: Publishers, e: ev.PublishAsked) -> None:
        e.message.new_run = True
        real(self, e)

    patch.setattr(Publishers, "publish", publish)


def a_process_group_is_kept_whoever_is_in_it(patch: pytest.MonkeyPatch) -> None:
    real = Phases._join  # pyright: ignore[reportPrivateUsage]
    #: of each coordinator
    first: dict[tuple[Phases, str], Any] = {}

    def join(self: Phases, update: Update) -> None:
        real(self, update)
        assert update.process_group is not None
        update.process_group = first.setdefault((self, update.group.name), update.process_group)

    patch.setattr(Phases, "_join", join)


def a_publisher_that_lends_is_believed(patch: pytest.MonkeyPatch) -> None:
    """No worker looks at the bytes."""
    real = Transactions.sent

    def sent(self: Transactions, update: Update, message: Sent) -> None:
        real(self, update, message)
        if update.ipc:
            for member in update.members.values():
                member.digest = message.digest
            update.pending.clear()

    patch.setattr(Transactions, "sent", sent)


def nobody_says_where_lent_memory_is(patch: pytest.MonkeyPatch) -> None:
    real = phases.ask

    def ask(core: Any, update: Update, member: Any) -> None:
        if update.phase != "transfer":
            real(core, update, member)

    for module in (phases, transaction):
        patch.setattr(module, "ask", ask)


def early_requests_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def sort(self: Any, group: Group) -> None:
        """Nothing."""

    patch.setattr("enginepool.coordinator.requests.lifecycle.RequestLifecycle.reweigh", sort)


def recalled_work_is_not_put_back(patch: pytest.MonkeyPatch) -> None:
    def returned(self: Any, batch: Any) -> None:
        """Nothing."""

    patch.setattr("enginepool.coordinator.requests.lifecycle.RequestLifecycle.returned", returned)


def a_held_group_finishes_requests_that_were_cut(patch: pytest.MonkeyPatch) -> None:
    def busy(worker: Worker) -> bool:
        return bool(worker.batches or worker.texts) or any(request.state == QUEUED for request in worker.group.cut)

    patch.setattr(Worker, "busy", property(busy))


def a_lease_is_not_renewed(patch: pytest.MonkeyPatch) -> None:
    def renew(update: Update, now: float) -> None:
        """Nothing."""

    patch.setattr(publishers, "_renew", renew)


def a_lease_ends_with_the_link(patch: pytest.MonkeyPatch) -> None:
    """A publisher that says hello again is given up at once, as if it had been silent for its whole lease."""
    real = Transactions.watch

    def watch(self: Transactions) -> None:
        for update in self.core.updates.values():
            if update.client.incarnation > 1:
                update.lease_until = self.core.now
        real(self)

    patch.setattr(Transactions, "watch", watch)


def a_worker_on_a_new_link_is_given_up(patch: pytest.MonkeyPatch) -> None:
    def returned(self: Transactions, worker: Worker) -> None:
        update = self.core.update_of(worker.group)
        if update is not None and not update.loading:
            self.ending.abort(update, "update_aborted", f"{worker.name} has lost its link")

    patch.setattr(Transactions, "returned", returned)


def a_worker_that_comes_back_starts_on_the_configured_model(patch: pytest.MonkeyPatch) -> None:
    real = WorkerSlots._start  # pyright: ignore[reportPrivateUsage]

    def start(self: WorkerSlots, slot: WorkerSlot) -> None:
        real(self, slot)
        effect = self.core.effects[-1]
        assert isinstance(effect, StartWorker)
        if slot.uncommitted_weights is None:
            effect.weights = None

    patch.setattr(WorkerSlots, "_start", start)


def a_restarted_worker_answers_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    real = Worker.holds

    def holds(self: Worker) -> bool:
        assert real.fget is not None
        return real.fget(self) or (self.slot is not None and self.slot.on_uncommitted and self.stage == "ready")

    patch.setattr(Worker, "holds", property(holds))


def all_workers_leave_for_a_rolling_restart(patch: pytest.MonkeyPatch) -> None:
    real = Restarts._leave  # pyright: ignore[reportPrivateUsage]

    def leave(self: Restarts, update: Update, member: Member) -> None:
        for other in update.members.values():
            if not other.restart:
                real(self, update, other)

    patch.setattr(Restarts, "_leave", leave)


def a_lost_member_ends_every_restart_as_a_success(patch: pytest.MonkeyPatch) -> None:
    """The journal is written although no worker has come up."""

    def advance(self: Restarts, update: Update) -> bool:
        for member in update.members.values():
            member.loaded, member.restart = True, "ready"
        return True

    patch.setattr(Restarts, "advance", advance)


def who_left_an_update_counts_as_updated(patch: pytest.MonkeyPatch) -> None:
    """A worker without staging memory stays on the old version, and answers."""
    real = ending.UpdateOutcomes.commit

    def commit(self: ending.UpdateOutcomes, update: Update, weights: ev.GroupWeights) -> None:
        for worker in update.group.workers.values():
            if worker.name in update.left_members:
                worker.version, worker.digest = weights.version, weights.digest
        real(self, update, weights)

    patch.setattr(ending.UpdateOutcomes, "commit", commit)


def who_has_no_staging_memory_aborts(patch: pytest.MonkeyPatch) -> None:
    def may_leave(self: Transactions, update: Update, member: Member) -> bool:
        return False

    patch.setattr(Transactions, "_may_leave", may_leave)


def who_cannot_be_restored_leaves(patch: pytest.MonkeyPatch) -> None:
    def may_leave(self: Transactions, update: Update, member: Member) -> bool:
        return not update.offer.partial and member.worker.incarnation in update.pending and len(update.members) > 1

    patch.setattr(Transactions, "_may_leave", may_leave)


def gentle_schedules() -> None:
    for seed in SEEDS:
        if Plan(Random(seed), 1 + seed % 8, updates=Random(seed + 1)).gentle:
            simulate(seed, 1 + seed % 8, updates=True)


def external_schedules() -> None:
    for seed in SEEDS:
        simulate(seed, 1 + seed % 8, updates=True, external=True)


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (a_lease_is_not_renewed, "silent"),
        (a_lease_ends_with_the_link, "silent"),
        (a_worker_on_a_new_link_is_given_up, "has lost its link"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_abort_without_a_reason_is_found_where_nothing_but_links_breaks(
    mutate: Mutate, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There an update that is right succeeds, unless its publisher was really cut off for a whole lease."""
    mutate(monkeypatch)
    with pytest.raises(Failed, match=rf"\AAssertionError: <Offer .* update_aborted: .*{said}"):
        gentle_schedules()


@pytest.mark.parametrize(
    "mutate",
    [
        digests_are_not_compared,
        the_publisher_hears_before_the_journal,
        a_held_group_goes_on,
        late_workers_finish_old_work,
        who_failed_lives_on,
        only_the_version_counts,
        a_lease_lasts_for_ever,
        a_drain_has_no_end,
        engines_take_weights_beside_work,
        nothing_is_asked_again_on_a_new_link,
        answers_are_said_once,
        nobody_is_restored,
        a_lost_member_is_not_missed,
        the_group_stays_held,
        versions_may_go_back,
        a_process_group_is_kept_whoever_is_in_it,
        a_publisher_that_lends_is_believed,
        nobody_says_where_lent_memory_is,
        early_requests_are_forgotten,
        recalled_work_is_not_put_back,
        a_held_group_finishes_requests_that_were_cut,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_updates_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, updates=True))


@pytest.mark.parametrize(
    "mutate",
    [
        a_worker_that_comes_back_starts_on_the_configured_model,
        a_restarted_worker_answers_before_the_commit,
        all_workers_leave_for_a_rolling_restart,
        a_lost_member_ends_every_restart_as_a_success,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_restarts_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, updates=True, restarts=True))


@pytest.mark.parametrize(
    ("mutate", "said"),
    [
        (who_left_an_update_counts_as_updated, "answered on|wrong scores|no answer for"),
        (who_has_no_staging_memory_aborts, "has no stager"),
        (who_cannot_be_restored_leaves, "nothing can restore"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_planted_in_updates_without_staging_memory_is_found(
    mutate: Mutate, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Failed, match=said):
        external_schedules()
