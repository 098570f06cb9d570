"""The transactions of all groups: what members and the journal answer, lost members, and deadlines.

`phases` tells what a transaction is and goes through.
"""

from math import inf

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import CheckJournal, ToWorker
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.outgoing import ask, say_phase
from enginepool.coordinator.weights.phases import Phases
from enginepool.coordinator.weights.update import (
    HOLD,
    JOIN,
    LOAD,
    OPEN,
    RESTART,
    TRANSFER,
    Member,
    Update,
)
from enginepool.coordinator.weights.verification import ask_for_zeros
from enginepool.protocol.messages.weights import Joined, Prepared, ReleaseWeights, Sent, Staged, WeightsLoaded

#: codes with which a member may refuse, that are the publisher's to hear; all others become `update_aborted`
_TOLD = frozenset({"weights_refused", "unsupported", "bad_request"})
#: which phase an answer belongs to
_PHASE = {Prepared: OPEN, Joined: JOIN, Staged: TRANSFER, WeightsLoaded: LOAD}
#: seconds in which a peer may say why a process group broke
REASON_S = 1.0


class Transactions:
    """The transactions of all groups."""

    def __init__(self, core: Context, ending: UpdateOutcomes) -> None:
        self.core = core
        self.ending = ending
        self.phases = Phases(core, ending)

    def begin(self, update: Update) -> None:
        """Open a transaction: ask its members whether they can."""
        self.core.updates[update.group.name] = update
        self.phases.enter(update, OPEN, self.core.config.timing.update_prepare_s)
        self.core.effects.append(CheckJournal(update.id))
        self.phases.ask_all(update)

    def answered(self, worker: Worker, message: Prepared | Joined | Staged | WeightsLoaded) -> None:
        """A member has finished its step, or says why it could not."""
        update = self.core.update_of(worker.group)
        if update is None or message.update != update.id or worker.incarnation not in update.members:
            return
        member = update.members[worker.incarnation]
        if isinstance(message, Staged) and message.broken and not update.loading:
            self.process_group_broke(update, f"{worker.name}: {message.message}", member)
            return
        if isinstance(message, Prepared) and message.no_staging and self._may_leave(update, member):
            self._leave(update, member, message.message)
            return
        if message.code and not update.loading:
            code = message.code if message.code in _TOLD else "update_aborted"
            field = message.field if isinstance(message, Prepared) else ""
            self.ending.abort(update, code, f"{worker.name}: {message.message}", field)
            return
        if _PHASE[type(message)] != update.phase or worker.incarnation not in update.pending:
            return
        if isinstance(message, Prepared):
            if (mode := update.offer.generations) != message.generations:
                # An older worker would drop them at its load, and say nothing of that.
                how = "takes this checkpoint only by a restart" if message.restart else "does not know that mode"
                text = f"{worker.name}: generations {mode}: it {how}"
                self.ending.abort(update, "unsupported", text, "in_flight", "drain, abort")
                return
            member.peer, member.ranks, member.on_host = message.peer, message.ranks, message.message
            if message.restart:
                member.digest, update.by_restart = message.digest, True
        elif isinstance(message, Staged):
            member.digest, member.findings = message.digest, message.findings
            self.bytes_arrived(update)
        elif isinstance(message, WeightsLoaded):
            self._loaded(update, member, message)
        del update.pending[worker.incarnation]

    def _may_leave(self, update: Update, member: Member) -> bool:
        """Whether the update goes on without a member that has no staging memory. There must be another one. The worker is to
        serve again after the commit: its only way is a snapshot, unless it has lost the present weights as well."""
        worker, group = member.worker, update.group
        others = [other.worker for other in update.members.values() if other is not member]
        if update.phase != OPEN or worker.incarnation not in update.pending or update.offer.partial or not others:
            return False
        kept = bool(self.ending.snapshots.get(group.config.snapshot))
        # A snapshot in memory is written by the stager of another member on the worker's own host.
        near = group.config.snapshot != "memory" or any(other.host == worker.host for other in others)
        return not worker.holds or (kept and near)

    def _leave(self, update: Update, member: Member, why: str) -> None:
        """A worker is no longer a member. It goes on serving."""
        worker = member.worker
        del update.members[worker.incarnation], update.pending[worker.incarnation]
        update.left_members[worker.name] = why
        self.core.effects.append(ToWorker(worker.link, ReleaseWeights(update.id, why)))

    def _loaded(self, update: Update, member: Member, message: WeightsLoaded) -> None:
        """A member's engine has loaded the weights, or has kept its old ones."""
        if message.code:
            member.failure = f"{message.code}: {message.message}"
        elif message.version != update.offer.version:
            member.failure = f"it took version {message.version}"
        elif not update.direct and message.digest != member.digest and update.sends_bytes:
            member.failure = "it took other bytes than it had staged"
        else:
            member.loaded = True
            member.digest = message.digest
            for part, us in (("prepare", message.prepare_us), ("copy", message.copy_us), ("flush", message.flush_us)):
                if us:
                    update.times[part] = max(us, update.times.get(part, 0))

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: messages on the old one may be lost."""
        update = self.core.update_of(worker.group)
        if update is not None and worker.incarnation in update.pending:
            ask(self.core, update, update.pending[worker.incarnation])
        if update is not None and update.inspecting is not None and update.inspecting[1] is worker:
            ask_for_zeros(self.core, update)

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is lost. No other worker becomes a member in its stead."""
        update = self.core.update_of(worker.group)
        member = update.members.get(worker.incarnation) if update is not None else None
        if update is None or member is None or member.worker is not worker:
            return
        if update.phase == RESTART:
            self.phases.restarts.lost(update, member, reason)
        elif not update.loading:
            self.ending.abort(update, "update_aborted", f"{worker.name} was lost: {reason}")
        elif update.pending.pop(worker.incarnation, None) is not None:
            self._never_loaded(member, f"lost: {reason}")

    def process_group_broke(self, update: Update, reason: str, member: Member | None = None) -> None:
        """A member or the publisher reports that the process group broke. The peer that knows the reason may report later."""
        if member is not None:
            member.broken = True
        if not update.broken_reason:
            update.broken_reason = reason
            update.due = min(update.due, self.core.now + REASON_S)

    def bytes_arrived(self, update: Update) -> None:
        """Bytes arrived: the deadline of the phase moves."""
        if update.phase == TRANSFER and not update.broken_reason:
            update.due = self.core.now + self.core.config.timing.update_stall_s
        elif update.phase == LOAD and update.direct:
            update.due = self.core.now + self.core.config.timing.update_load_s

    def sent(self, update: Update, message: Sent) -> None:
        """The publisher has sent all bytes, or named the memory that the members open now."""
        update.sent_digest, update.regions = message.digest, message.regions
        self.bytes_arrived(update)
        if update.phase == TRANSFER:
            self.phases.ask_all(update)

    def checked(self, e: ev.JournalChecked) -> None:
        """Whether a commit could be journaled: if not, no engine is touched."""
        update = next((update for update in self.core.updates.values() if update.id == e.update), None)
        if update is None:
            return
        update.journal_unchecked = False
        if e.error:
            self.ending.abort(update, "update_aborted", f"the journal cannot be written: {e.error}")

    def journaled(self, e: ev.JournalWritten) -> None:
        """The commit point is passed, or could not be."""
        update = next((update for update in self.core.updates.values() if update.id == e.update), None)
        if update is None or update.weights is None:
            return
        weights, update.weights = update.weights, None
        if e.error:
            self.ending.fail(update, f"the journal could not be written: {e.error}")
        else:
            self.ending.commit(update, weights)

    # --- time ----------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Act on every deadline that has passed."""
        now = self.core.now
        for update in list(self.core.updates.values()):
            gone = self.core.clients.get(update.client.id) is not update.client
            if not update.loading and update.needs_publisher and (gone or now >= update.lease_until):
                what = "its publisher is gone" if gone else f"its publisher was silent for {update.offer.lease_ms} ms"
                self.ending.abort(update, "update_aborted", what)
            elif update.direct and update.loading and update.sent_digest is None and (gone or now >= update.lease_until):
                self._overdue(update, "the publisher is gone, or silent")
            elif now >= update.due:
                self._overdue(update, f"nothing for {now - update.phase_began:.1f} s")
            elif update.told_finished != len(update.members) - len(update.pending):
                say_phase(self.core, update)

    def _overdue(self, update: Update, why: str) -> None:
        if update.broken_reason:
            self.ending.abort(update, "update_aborted", update.broken_reason)
        elif update.phase in (HOLD, RESTART):
            update.recalls_now = True
            update.due = inf
        elif update.phase == LOAD:
            for member in update.pending.values():
                self._never_loaded(member, f"not loaded: {why}")
            update.pending = {}
            if update.sent_digest is None and update.direct:
                self.ending.fail(update, why)
        else:
            names = ", ".join(member.worker.name for member in list(update.pending.values())[:3])
            who = names or ("the journal" if update.journal_unchecked else "the publisher")
            self.ending.abort(update, "update_aborted", f"{update.phase} took too long, waiting for {who}: {why}")

    def _never_loaded(self, member: Member, why: str) -> None:
        """A member never answered `load`. The requests that were in its engine may be the cause."""
        member.failure = why
        self.ending.requests.blame(member.recalled, f"{member.worker.name}: {why}")

    def next(self) -> float:
        """When the next deadline is due."""
        updates = self.core.updates
        return min(update.due for update in updates.values()) if updates else inf

    def extend(self, gap: float) -> None:
        """The coordinator itself stood still for `gap` seconds."""
        for update in self.core.updates.values():
            update.due += gap
            update.lease_until += gap

    def drain(self) -> None:
        """The pool ends: what has not touched an engine is given up."""
        for update in list(self.core.updates.values()):
            if not update.loading:
                self.ending.abort(update, "update_aborted", "the coordinator is draining")
