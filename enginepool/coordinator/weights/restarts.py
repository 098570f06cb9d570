"""Updates by restart: engines that take weights only when they start are started again, on the new checkpoint.

The decision is one for the whole group: if one member says in `prepared` that it takes this checkpoint by a restart, all are
restarted. Nothing is committed before a worker runs on the new checkpoint and has verified its digest.

    rolling     one member after the other leaves, is ended, and its slot starts on the new checkpoint; the others answer on
                the old version meanwhile. When half of the members (at least one) run on the new checkpoint, the group is held
                for the switch: journal, and the other members are started again. If the first one fails, the update is aborted
                and its slot starts on the committed weights; a later one that fails starts again after the commit.
    at_once     the group is held, all members start on the new checkpoint, and requests wait. One that succeeds is a commit.

A member on its way is `leaving` (it finishes what it has), `starting` (its slot ends one process and starts another), then
`ready`. Until the commit its weights are not the committed ones, so that it gets no work.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.transitions import leave
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.update import RESTART, Member, Refusal, Update


class Restarts:
    """The restarts of open transactions."""

    def __init__(self, core: Context, ending: UpdateOutcomes) -> None:
        self.core = core
        self.ending = ending
        self.fleet: WorkerRegistry = ending.fleet

    def advance(self, update: Update) -> bool:
        """One step in phase `restart`; whether it is over. It may have aborted the transaction."""
        for member in list(update.members.values()):
            slot = member.worker.slot
            if member.restart == "leaving" and (update.at_once or update.recalls_now or not member.worker.busy):
                self._end(update, member)
            elif member.restart == "starting" and slot is not None and slot.on_uncommitted and slot.state is not SlotState.UP:
                self._failed(update, member, slot.end_reason)
        members = list(update.members.values())
        loaded = [member for member in members if member.loaded]
        moving = [member for member in members if member.restart in ("leaving", "starting")]
        waiting = [member for member in members if not member.restart]
        enough = len(members) if update.at_once else max(1, update.members_at_start // 2)
        if update.restart_failed and not update.at_once:
            waiting = []
        if len(loaded) + len(moving) < enough and waiting and (update.at_once or not moving):
            for member in waiting if update.at_once else waiting[:1]:
                self._leave(update, member)
            return self.advance(update)
        if moving:
            return False
        if not loaded:
            why = update.restart_failed or "no worker is left to start on it"
            self.ending.abort(update, "update_aborted", f"no engine runs on it: {why}")
            return False
        return True

    def _leave(self, update: Update, member: Member) -> None:
        """It gets no more work. Its batches in flight finish, if that is wanted."""
        member.restart = "leaving"
        leave(self.core, member.worker)
        offer = update.offer
        update.recalls_now = update.at_once or offer.in_flight == "abort"
        update.due = self.core.now + offer.drain_ms / 1000 if not update.recalls_now else float("inf")

    def _end(self, update: Update, member: Member) -> None:
        """Its process ends, and its slot starts on the new checkpoint."""
        worker, slot = member.worker, member.worker.slot
        assert slot is not None, worker
        update.due = float("inf")
        update.recalls_now = False
        update.recalled_batches += len(worker.batches)
        self.fleet.recall(worker)
        member.restart = "starting"
        slot.uncommitted_weights = self.ending.new_weights(update, member.digest)
        slot.on_uncommitted, slot.loss_excused = False, True
        self.fleet.lose(worker, f"it starts on weight version {update.offer.version}", kill=True)

    def loaded(self, worker: Worker) -> None:
        """A worker is ready: perhaps a member on the new checkpoint, under another name than before."""
        update = self.core.update_of(worker.group)
        if update is None or update.phase != RESTART or worker.slot is None or not worker.slot.on_uncommitted:
            return
        for incarnation, member in list(update.members.items()):
            if member.restart == "starting" and member.worker.slot is worker.slot:
                del update.members[incarnation]
                update.members[worker.incarnation] = member
                member.worker = worker
                if worker.version != update.offer.version:
                    self._failed(update, member, f"it runs on version {worker.version}")
                elif worker.digest != member.digest:
                    self._failed(
                        update, member, f"it runs on version {worker.version} with other weights than the checkpoint's"
                    )
                else:
                    member.restart, member.loaded = "ready", True

    def lost(self, update: Update, member: Member, reason: str) -> None:
        """A member is lost in phase `restart`. One that is starting was ended on purpose, or `advance` sees it."""
        if member.restart == "starting":
            return
        if member.loaded:
            update.restart_failed = f"{member.worker.name}: lost: {reason}"
        self._forget(update, member)

    def _failed(self, update: Update, member: Member, why: str) -> None:
        update.restart_failed = f"{member.worker.name} did not start on it: {why}"
        self.ending.turn_back(member)
        self._forget(update, member)

    def _forget(self, update: Update, member: Member) -> None:
        for incarnation, other in list(update.members.items()):
            if other is member:
                del update.members[incarnation]
        slot = member.worker.slot
        if slot is not None:
            slot.uncommitted_weights, slot.on_uncommitted = None, False


def why_not_restarted(update: Update) -> Refusal | None:
    """Why not all members can be restarted on the same checkpoint."""
    members = list(update.members.values())
    for member in members:
        name = member.worker.name
        if member.worker.slot is None:
            return Refusal("unsupported", f"{name} takes weights only at its start, and this pool did not start it")
        if not member.digest:
            return Refusal("unsupported", f"{name} takes weights without a restart, and others of its group do not")
        if member.digest != members[0].digest:
            text = f"{members[0].worker.name} and {name} see different files in {update.offer.path}: "
            return Refusal("weights_refused", text + "copy the same checkpoint to each of their hosts")
    return update.version_conflict(members[0].digest)
