"""Weight updates: the transaction between a publisher, this coordinator and a group's workers, decided here and nowhere else.

How it thinks. Tensors pass by: they go from the publisher to the workers' side in a process group of their own, or lie in
memory that it lends (`ipc`), which members look at when `sent` says where. What is decided here is who takes part, when
engines change weights, and which version the group is on. Members are the workers that are ready when it opens; no worker joins
later. Each phase waits for one answer of each member, `pending`, and has a deadline. A member without memory for a staged
transfer leaves when it says so: it serves the old version until the commit, and is then restored like a worker that returns.

    phase       it waits for                      then                                     too late, a refusal or a loss
    open        prepared of all, and the journal  join, or without a process group:        abort
                (it could take a commit)          transfer, or (no bytes) staged
    join        joined of all                     transfer; direct: hold, after `commit`   abort
    transfer    staged of all, and `sent`         digests and findings: staged, or abort   abort; the lease: abort
    staged      `commit`                          hold; by restart: restart                abort; the lease: abort
    restart     enough members run on it          hold, or with `at_once` (held): journal  see `restarts`
    hold        nothing in flight at members      load                                drain: put back, go on; a loss: abort
    load   loaded of all                one loaded: journal; none, or all who    the member has failed
                                                  did are lost and nobody else has it: fail
                direct: and `sent`                all loaded: journal                      fail
    journal     the journal is written            committed                                it could not be: fail

    When the process group breaks before the hand-over, whoever was in it says so, and sooner than anybody says why. So the
    abort waits a moment for a better reason.

    abort   no engine was touched: `release` to the members, `error` to the publisher, the group goes on
    fail    `error` to the publisher. A member that runs on the new weights whole takes the committed ones again, where a
            running engine can take them. Every other member is killed and comes back on the committed weights.

The journal is the commit point: before it the group is on the old version, and whoever loaded the new one and ends up without a
commit is killed; after it on the new one, and whoever did not load is killed or restored. A group is held from the hold to the
end, and nobody gets work on any but the committed weights (`Worker.able`), so that no answer mixes versions.

The lease: as long as a transaction needs its publisher (until `sent` and `commit`; if it lends memory, until the hand-over),
the publisher must say something about it every `lease_ms`. Its last words are kept like other answers. A publish that comes
again under its id is attached.
"""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import CheckJournal, ToWorker, WriteJournal
from enginepool.coordinator.core.transitions import hold
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.outgoing import ask, say_join, say_phase
from enginepool.coordinator.weights.process_group_info import ProcessGroupInfo
from enginepool.coordinator.weights.quiesce import working
from enginepool.coordinator.weights.restarts import Restarts
from enginepool.coordinator.weights.update import (
    HOLD,
    JOIN,
    JOURNAL,
    LOAD,
    OPEN,
    RESTART,
    STAGED,
    TRANSFER,
    Member,
    Stand,
    Update,
    failures,
)
from enginepool.coordinator.weights.verification import Verifying
from enginepool.protocol.updates import Joined, Prepared, ReleaseWeights, Sent, Staged, WeightsLoaded

#: codes with which a member may refuse, that are the publisher's to hear; all others become `update_aborted`
_TOLD = frozenset({"weights_refused", "unsupported", "bad_request"})
#: which phase an answer belongs to
_PHASE = {Prepared: OPEN, Joined: JOIN, Staged: TRANSFER, WeightsLoaded: LOAD}
#: seconds in which somebody may say why a process group broke
REASON_S = 1.0


class Transactions:
    """The transactions of all groups."""

    def __init__(self, core: Context, ending: UpdateOutcomes) -> None:
        self.core = core
        self.ending = ending
        self.fleet = ending.fleet
        self.verifying = Verifying(core, ending)
        self.restarts = Restarts(core, ending)

    def begin(self, update: Update) -> None:
        """Open a transaction: ask its members whether they can."""
        self.core.updates[update.group.name] = update
        self._enter(update, OPEN, self.core.config.timing.update_prepare_s)
        self.core.effects.append(CheckJournal(update.id))
        self._ask_all(update)

    # --- the members ---------------------------------------------------------------------------------------------------

    def answered(self, e: ev.MemberSaid) -> None:
        """A member has done what was asked of it, or says why not."""
        worker = self.fleet.of(e.link)
        if worker is None:
            return
        update, message = self.core.update_of(worker.group), e.message
        if update is None or message.update != update.id or worker.incarnation not in update.members:
            return
        member = update.members[worker.incarnation]
        if isinstance(message, Staged) and message.broken and not update.forward:
            self.broke(update, f"{worker.name}: {message.message}", member)
            return
        if isinstance(message, Prepared) and message.no_staging and self._may_leave(update, member):
            self._leave(update, member, message.message)
            return
        if message.code and not update.forward:
            code = message.code if message.code in _TOLD else "update_aborted"
            self.ending.abort(update, code, f"{worker.name}: {message.message}")
            return
        if _PHASE[type(message)] != update.phase or worker.incarnation not in update.pending:
            return
        if isinstance(message, Prepared):
            member.peer, member.ranks = message.peer, message.ranks
            if message.restart:
                member.digest, update.restarts = message.digest, True
        elif isinstance(message, Staged):
            member.digest, member.findings = message.digest, message.findings
            self.moves(update)
        elif isinstance(message, WeightsLoaded):
            self._took(update, member, message)
        del update.pending[worker.incarnation]

    def _may_leave(self, update: Update, member: Member) -> bool:
        """Whether the update goes on without a member that has no staging memory. Requests that only its class can serve need
        another member of that class. A partial update is in no snapshot from which the worker could be restored."""
        asked = update.phase == OPEN and member.worker.incarnation in update.pending
        others = (other.worker.class_ for other in update.members.values() if other is not member)
        return asked and not update.offer.partial and member.worker.class_ in others

    def _leave(self, update: Update, member: Member, why: str) -> None:
        """It is no member any more, and serves on."""
        worker = member.worker
        del update.members[worker.incarnation], update.pending[worker.incarnation]
        update.left[worker.name] = why
        self.core.effects.append(ToWorker(worker.link, ReleaseWeights(update.id, why)))

    def _took(self, update: Update, member: Member, message: WeightsLoaded) -> None:
        """A member's engine has taken the weights, or has kept its old ones."""
        if message.code:
            member.failure = f"{message.code}: {message.message}"
        elif message.version != update.offer.version:
            member.failure = f"it took version {message.version}"
        elif not update.direct and message.digest != member.digest and update.broadcasts:
            member.failure = "it took other bytes than it had staged"
        else:
            member.loaded = True
            member.digest = message.digest
            for part, us in (("prepare", message.prepare_us), ("copy", message.copy_us), ("flush", message.flush_us)):
                if us:
                    update.times[part] = max(us, update.times.get(part, 0))

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: what was sent on the old one may be lost with it."""
        update = self.core.update_of(worker.group)
        if update is not None and worker.incarnation in update.pending:
            ask(self.core, update, update.pending[worker.incarnation])
        if update is not None and update.inspecting is not None and update.inspecting[1] is worker:
            self.verifying.ask(update)

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is gone; members are fixed, so that it leaves a gap that nobody fills."""
        update = self.core.update_of(worker.group)
        member = update.members.get(worker.incarnation) if update is not None else None
        if update is None or member is None or member.worker is not worker:
            return
        if update.phase == RESTART:
            self.restarts.lost(update, member, reason)
        elif not update.forward:
            self.ending.abort(update, "update_aborted", f"{worker.name} was lost: {reason}")
        elif update.pending.pop(worker.incarnation, None) is not None:
            self._gave_out(member, f"lost: {reason}")

    def broke(self, update: Update, reason: str, member: Member | None = None) -> None:
        """The process group broke, says a member or the publisher; the one that knows why may not have spoken yet."""
        if member is not None:
            member.broken = True
        if not update.broken:
            update.broken = reason
            update.until = min(update.until, self.core.now + REASON_S)

    def moves(self, update: Update) -> None:
        """Bytes pass: the phase in which they do goes on."""
        if update.phase == TRANSFER and not update.broken:
            update.until = self.core.now + self.core.config.timing.update_stall_s
        elif update.phase == LOAD and update.direct:
            update.until = self.core.now + self.core.config.timing.update_load_s

    def sent(self, update: Update, message: Sent) -> None:
        """The publisher has sent everything. What it lends instead, the members look at now."""
        update.sent_digest, update.regions = message.digest, message.regions
        self.moves(update)
        if update.phase == TRANSFER:
            self._ask_all(update)

    def _ask_all(self, update: Update) -> None:
        for member in update.pending.values():
            ask(self.core, update, member)

    # --- the phases ----------------------------------------------------------------------------------------------------

    def _enter(self, update: Update, phase: Stand, seconds: float = float("inf")) -> None:
        now = self.core.now
        if update.phase != phase:
            update.time_phase(now)
        update.phase = phase
        update.since = now
        update.until = now + seconds
        waits = phase not in (STAGED, RESTART, HOLD, JOURNAL) and not (update.restarts and phase == LOAD)
        update.pending = dict(update.members) if waits else {}
        say_phase(self.core, update)

    def advance(self) -> None:
        """After events were handled: let open transactions go on as far as they can."""
        for update in list(self.core.updates.values()):
            before = ""
            while self.core.updates.get(update.group.name) is update and before != update.phase:
                before = update.phase
                self._advance(update)

    def _advance(self, update: Update) -> None:
        """One step, when the phase has all that it waits for."""
        group = update.group
        if group.journal_behind and update.heard_committed != group.heard_committed and not update.forward:
            self.ending.abort(update, "update_aborted", group.weights_lost)
            return
        if update.broken and all(member.broken for member in update.pending.values()):
            self.ending.abort(update, "update_aborted", update.broken)
            return
        if update.pending or update.unchecked:
            return
        timing = self.core.config.timing
        if update.phase == OPEN:
            if update.restarts:
                update.before = len(update.members)
                if self.restarts.possible(update):
                    self._enter(update, STAGED)
            elif update.rings:
                self._join(update)
            elif update.broadcasts:
                self._enter(update, TRANSFER, timing.update_stall_s)
                self._ask_all(update)
            else:
                self._enter(update, STAGED)
        elif update.phase == JOIN:
            if not update.direct:
                self._enter(update, TRANSFER, timing.update_stall_s)
            elif update.commit:
                self._hold(update)
            else:
                update.until = float("inf")
        elif update.phase == TRANSFER:
            if update.sent_digest is not None and self.verifying.passes(update):
                self._enter(update, STAGED)
        elif update.phase == STAGED:
            if update.commit and update.restarts and not update.at_once:
                self._enter(update, RESTART)
            elif update.commit:
                self._hold(update)
        elif update.phase == RESTART:
            if self.restarts.advance(update):
                if update.at_once:
                    self._load(update)
                else:
                    self._hold(update)
        elif update.phase == HOLD:
            if update.recalls:
                self._stop_draining(update)
            members = [member.worker for member in update.members.values()]
            if not working(members):
                if update.at_once:
                    self._enter(update, RESTART)
                else:
                    self._load(update)
        elif update.phase == LOAD:
            self._loaded(update)

    def _join(self, update: Update) -> None:
        """Ranks for all; the process group of last time is kept when the same sides are in it."""
        group, offer = update.group, update.offer
        rank = 1
        for member in update.members.values():
            member.rank = rank
            rank += member.ranks
        sides = ((offer.peer, 1), *((member.peer, member.ranks) for member in update.members.values()))
        stands = group.process_group
        warm = (
            stands is not None and offer.peer and stands == ProcessGroupInfo(stands.name, offer.address, offer.backend, sides)
        )
        if warm and stands is not None:
            update.ring = stands
        else:
            update.ring = ProcessGroupInfo(f"{group.name}-{update.id[0]:x}-{update.id[1]}", offer.address, offer.backend, sides)
        group.process_group = None
        self._enter(update, JOIN, self.core.config.timing.update_join_s)
        say_join(self.core, update)
        self._ask_all(update)

    def _hold(self, update: Update) -> None:
        offer = update.offer
        hold(self.core, update.group)
        drains = offer.in_flight == "drain"
        self._enter(update, HOLD, offer.drain_ms / 1000 if drains else 0.0)
        update.recalls = not drains

    def _stop_draining(self, update: Update) -> None:
        """What members have in hand is put back, and runs on the new weights. The hand-over follows at once: until then their
        engines are fuller than the ledger says."""
        for member in update.members.values():
            update.recalled += len(member.worker.batches)
            member.recalled += self.fleet.recall(member.worker)

    def _load(self, update: Update) -> None:
        self._enter(update, LOAD, self.core.config.timing.update_load_s)
        self._ask_all(update)

    def _loaded(self, update: Update) -> None:
        """All members have answered: is it a commit?"""
        members = list(update.members.values())
        loaded = [member for member in members if member.loaded]
        if update.direct:
            if len(loaded) < len(members):
                self.ending.fail(update, failures(members))
                return
            if update.sent_digest is None:
                return
            wrong = [m for m in members if m.digest != update.sent_digest]
            if wrong:
                self.ending.fail(update, f"{wrong[0].worker.name} took other bytes than were sent")
                return
        if not loaded:
            self.ending.fail(update, failures(members))
            return
        if not update.kept and all(member.worker.lost for member in loaded):
            names = ", ".join(member.worker.name for member in loaded[:3])
            self.ending.fail(update, "; ".join(filter(None, (f"lost after they had taken it: {names}", failures(members)))))
            return
        for member in loaded[1:]:
            # Of a checkpoint nobody else knows the digest.
            if member.digest != loaded[0].digest:
                member.loaded = False
                member.failure = f"it took other weights than {loaded[0].worker.name}"
        if wrong := update.clash(loaded[0].digest):
            self.ending.fail(update, wrong)
            return
        self._enter(update, JOURNAL)
        update.weights = self.ending.new_weights(update, loaded[0].digest)
        self.core.effects.append(WriteJournal(update.id, update.group.name, update.weights))

    def checked(self, e: ev.JournalChecked) -> None:
        """Whether a commit could be journaled: if not, no engine is touched."""
        update = next((update for update in self.core.updates.values() if update.id == e.update), None)
        if update is None:
            return
        update.unchecked = False
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
            if not update.forward and update.needs_publisher and (gone or now >= update.lease_until):
                what = "its publisher is gone" if gone else f"its publisher was silent for {update.offer.lease_ms} ms"
                self.ending.abort(update, "update_aborted", what)
            elif update.direct and update.forward and update.sent_digest is None and (gone or now >= update.lease_until):
                self._overdue(update, "the publisher is gone, or silent")
            elif now >= update.until:
                self._overdue(update, f"nothing for {now - update.since:.1f} s")
            elif update.told != len(update.members) - len(update.pending):
                say_phase(self.core, update)

    def _overdue(self, update: Update, why: str) -> None:
        if update.broken:
            self.ending.abort(update, "update_aborted", update.broken)
        elif update.phase in (HOLD, RESTART):
            update.recalls = True
            update.until = float("inf")
        elif update.phase == LOAD:
            for member in update.pending.values():
                self._gave_out(member, f"not handed over: {why}")
            update.pending = {}
            if update.sent_digest is None and update.direct:
                self.ending.fail(update, why)
        else:
            names = ", ".join(member.worker.name for member in list(update.pending.values())[:3])
            who = names or ("the journal" if update.unchecked else "the publisher")
            self.ending.abort(update, "update_aborted", f"{update.phase} took too long, waiting for {who}: {why}")

    def _gave_out(self, member: Member, why: str) -> None:
        """A member never answered the hand-over. What was in its engine may be why."""
        member.failure = why
        self.ending.requests.blame(member.recalled, f"{member.worker.name}: {why}")

    def next(self) -> float:
        """When the next deadline is due."""
        return min((update.until for update in self.core.updates.values()), default=float("inf"))

    def extend(self, gap: float) -> None:
        """The coordinator itself stood still for `gap` seconds."""
        for update in self.core.updates.values():
            update.until += gap
            update.lease_until += gap

    def drain(self) -> None:
        """The pool ends: what has not touched an engine is given up."""
        for update in list(self.core.updates.values()):
            if not update.forward:
                self.ending.abort(update, "update_aborted", "the coordinator is draining")
