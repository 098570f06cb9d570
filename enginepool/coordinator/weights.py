"""Weight updates: the transaction between a publisher, this coordinator and a group's workers, decided here and nowhere else.

How it thinks. Tensors pass by: they go from the publisher to the workers' side in a process group of their own. What is decided
here is who takes part, when engines change weights, and which version the group is on. Members are the workers that are ready
when it opens; nobody joins later. Each phase waits for one answer of each member, `pending`, and has a deadline.

    phase       it waits for                      then                                     too late, a refusal or a loss
    open        prepared of all                   join, or without a process group:        abort
                                                  transfer, or (no bytes) staged
    join        joined of all                     transfer; direct: hold, after `commit`   abort
    transfer    staged of all, and `sent`         digests and findings: staged, or abort   abort; the lease: abort
    staged      `commit`                          hold                                     abort; the lease: abort
    hold        nothing in hand of members        hand_over                                drain: put back, go on; a loss: abort
    hand_over   handed_over of all                one loaded: journal; none: fail          the member has failed
                direct: and `sent`                all loaded: journal                      fail
    journal     the journal is written            committed                                it could not be: fail

    abort   no engine was touched: `release` to the members, `error` to the publisher, the group goes on
    fail    every member is killed and comes back on the committed weights; `error` to the publisher

The journal is the commit point: before it the group is on the old version, and whoever loaded the new one and ends up without a
commit is killed; after it on the new one, and whoever did not load is killed or restored. A group is held from the hold to the
end, and nobody gets work on any but the committed weights (`Worker.able`), so that no answer mixes versions.

The lease: as long as a transaction needs its publisher (until `sent` and `commit`), the publisher must say something about it
every `lease_ms`. Its last words are kept like other answers. A publish that comes again under its id is attached.
"""

from enginepool.coordinator import events as ev
from enginepool.coordinator.core import Core
from enginepool.coordinator.effects import ToClient, ToWorker, WriteJournal
from enginepool.coordinator.events import GroupWeights
from enginepool.coordinator.fleet import Fleet
from enginepool.coordinator.holding import hold, recall, release, unfinished, working
from enginepool.coordinator.requests import Requests
from enginepool.coordinator.restoring import Restoring
from enginepool.coordinator.state import Client, Group, Worker
from enginepool.coordinator.update import (
    HAND_OVER,
    HOLD,
    JOIN,
    JOURNAL,
    OPEN,
    STAGED,
    TRANSFER,
    Member,
    Ring,
    Update,
)
from enginepool.protocol.layout import layered
from enginepool.protocol.messages import Failure, Message
from enginepool.protocol.updates import (
    Abandon,
    Commit,
    Committed,
    HandedOver,
    HandOver,
    Join,
    Joined,
    Phase,
    Prepare,
    Prepared,
    Published,
    Release,
    Sent,
    Staged,
    UpdateRecord,
)

#: codes with which a member may refuse, that are the publisher's to hear; all others become `update_aborted`
_TOLD = frozenset({"weights_refused", "unsupported", "bad_request"})
#: which phase an answer belongs to
_PHASE = {Prepared: OPEN, Joined: JOIN, Staged: TRANSFER, HandedOver: HAND_OVER}


class Weights:
    """The transactions of all groups."""

    def __init__(self, core: Core, requests: Requests, fleet: Fleet, restoring: Restoring) -> None:
        self.core = core
        self.requests = requests
        self.fleet = fleet
        self.restoring = restoring
        #: by group: at most one each
        self.open: dict[str, Update] = {}
        #: folders of snapshots, by the group option
        self.snapshots: dict[str, str] = {}

    # --- the publisher -------------------------------------------------------------------------------------------------

    def publish(self, e: ev.PublishAsked) -> None:
        """Somebody offers weights: a transaction opens, or a resend is attached to it or its answer."""
        core, offer = self.core, e.message
        client = core.links.get(e.link)
        if client is None:
            core.refuse(e.link, offer.id, "hello_required", "this link has not said hello to this coordinator")
            return
        client.heard = e.now
        if self._known_already(client, e):
            return
        if core.draining:
            core.refuse(e.link, offer.id, "shutting_down", "the coordinator is draining")
            return
        group = core.group_of(offer.group)
        if group is None:
            core.unknown_group(e.link, offer.id, offer.group)
            return
        if group.down:
            core.refuse(e.link, offer.id, "pool_down", group.down)
            return
        if (other := group.update) is not None:
            name = other.client.id.hex()[:8]
            text = f"client {name} is publishing version {other.offer.version}, now in phase {other.phase}"
            core.refuse(e.link, offer.id, "publishing", text, field="group", limit=name)
            return
        least = group.version if group.needs else group.version + 1
        if offer.version < least and not offer.new_run:
            text = f"version: {offer.version}, and {group.version} is committed; at least {least}, or a new run"
            core.refuse(e.link, offer.id, "version_backwards", text, field="version", limit=str(group.version))
            return
        self._begin(client, group, e)

    def _known_already(self, client: Client, e: ev.PublishAsked) -> bool:
        core, id_ = self.core, e.message.id
        update = self._of(client, id_)
        kept = None if update is not None else core.answers.get(client, id_)
        digest = update.offer_digest if update is not None else kept.digest if kept is not None else None
        if digest is None and id_ not in client.live:
            return False
        if digest != e.digest:
            core.refuse(e.link, id_, "id_reused", f"id: {id_} was used before for another content", field="id")
        elif kept is not None:
            core.effects.append(ToClient(e.link, kept.message, kept.frames))
        elif update is not None:
            self._renew(update)
            if update.ring is not None:
                self._say_join(update, update.ring)
            self._say_phase(update)
        return True

    def _of(self, client: Client, id: int) -> Update | None:
        found = (update for update in self.open.values() if update.client is client and update.offer.id == id)
        return next(found, None)

    def _begin(self, client: Client, group: Group, e: ev.PublishAsked) -> None:
        core, offer = self.core, e.message
        # What is laid over the present weights needs them there.
        over = offer.partial or offer.transfer == "relabel"
        workers = [w for w in group.workers.values() if _may_take(w) and (w.holds or not over)]
        if not workers:
            what = "is ready with the committed weights" if over else "is ready"
            core.refuse(e.link, offer.id, "update_aborted", f"no worker of group {group.name!r} {what}")
            return
        update = Update(core.task_id(), client, group, offer, e.manifest, e.frames, e.digest, e.now)
        workers.sort(key=lambda w: (w.place.index if w.place is not None else len(group.places), w.order))
        update.members = {w.incarnation: Member(w) for w in workers}
        group.update = update
        self.open[group.name] = update
        self._enter(update, OPEN, core.config.timing.update_prepare_s)
        for member in update.members.values():
            self._ask(update, member)

    def said(self, e: ev.PublisherSaid) -> None:
        """The publisher of a transaction lives, and may have more to say."""
        core, message = self.core, e.message
        client = core.links.get(e.link)
        if client is None:
            core.refuse(e.link, message.id, "hello_required", "this link has not said hello to this coordinator")
            return
        client.heard = e.now
        update = self._of(client, message.id)
        if update is None:
            kept = core.answers.get(client, message.id)
            if kept is not None:
                core.effects.append(ToClient(e.link, kept.message, kept.frames))
            else:
                core.refuse(e.link, message.id, "update_aborted", "no such transaction is open here")
            return
        self._renew(update)
        if isinstance(message, Abandon):
            if not update.forward:
                self._abort(update, "update_aborted", f"abandoned by its publisher: {message.reason or 'no reason given'}")
        elif isinstance(message, Commit):
            update.commit = True
        else:
            if message.sent_bytes > update.sent_bytes:
                update.sent_bytes = message.sent_bytes
                self._moves(update)
            if isinstance(message, Sent) and update.sent_digest is None:
                update.sent_digest = message.digest
                self._moves(update)

    def _renew(self, update: Update) -> None:
        update.lease_until = self.core.now + update.offer.lease_ms / 1000

    def _moves(self, update: Update) -> None:
        """Bytes pass: the phase in which they do goes on."""
        if update.phase == TRANSFER:
            update.until = self.core.now + self.core.config.timing.update_stall_s
        elif update.phase == HAND_OVER and update.direct:
            update.until = self.core.now + self.core.config.timing.update_hand_over_s

    # --- the members ---------------------------------------------------------------------------------------------------

    def _ask(self, update: Update, member: Member) -> None:
        """Send a member what this phase wants of it. It may have it already, and does it once."""
        offer, id_ = update.offer, update.id
        message: Message
        if update.phase == OPEN:
            specs = offer.frames
            message = Prepare(id_, offer.version, offer.transfer, offer.partial, offer.bucket_bytes, offer.path, specs)
            self.core.effects.append(ToWorker(member.worker.link, message, update.frames))
            return
        if update.phase == JOIN and update.ring is not None:
            ring, world = update.ring, _world(update)
            message = Join(ring.name, world, member.rank, ring.address, ring.backend, update=id_)
        elif update.phase == HAND_OVER:
            message = HandOver(id_, offer.version)
        else:
            return
        self.core.effects.append(ToWorker(member.worker.link, message))

    def answered(self, e: ev.MemberSaid) -> None:
        """A member has done what was asked of it, or says why not."""
        worker = self.fleet.of(e.link)
        if worker is None:
            return
        update, message = worker.group.update, e.message
        if update is None or message.update != update.id or worker.incarnation not in update.members:
            return
        member = update.members[worker.incarnation]
        if message.code and not update.forward:
            code = message.code if message.code in _TOLD else "update_aborted"
            self._abort(update, code, f"{worker.name}: {message.message}")
            return
        if _PHASE[type(message)] != update.phase or worker.incarnation not in update.pending:
            return
        if isinstance(message, Prepared):
            member.peer, member.ranks = message.peer, message.ranks
        elif isinstance(message, Staged):
            member.digest, member.findings = message.digest, message.findings
            self._moves(update)
        elif isinstance(message, HandedOver):
            self._took(update, member, message)
        del update.pending[worker.incarnation]

    def _took(self, update: Update, member: Member, message: HandedOver) -> None:
        """A member's engine has taken the weights, or has kept its old ones."""
        if message.code:
            member.failure = f"{message.code}: {message.message}"
        elif message.version != update.offer.version:
            member.failure = f"it took version {message.version}"
        elif not update.direct and message.digest != member.digest and update.broadcasts:
            member.failure = f"it took digest {message.digest}, and {member.digest} was staged"
        else:
            member.loaded = True
            member.digest = message.digest

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: what was sent on the old one may be lost with it."""
        update = worker.group.update
        if update is not None and worker.incarnation in update.pending:
            self._ask(update, update.pending[worker.incarnation])

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is gone; members are fixed, so that it leaves a gap that nobody fills."""
        update = worker.group.update
        member = update.members.get(worker.incarnation) if update is not None else None
        if update is None or member is None or member.worker is not worker:
            return
        if not update.forward:
            self._abort(update, "update_aborted", f"{worker.name} was lost: {reason}")
        elif update.pending.pop(worker.incarnation, None) is not None:
            member.failure = f"lost: {reason}"

    def advance(self) -> None:
        """After events were handled: let open transactions go on as far as they can."""
        for update in list(self.open.values()):
            before = ""
            while self.open.get(update.group.name) is update and before != update.phase:
                before = update.phase
                self._advance(update)

    # --- the phases ----------------------------------------------------------------------------------------------------

    def _enter(self, update: Update, phase: str, seconds: float = float("inf")) -> None:
        now = self.core.now
        if now > update.since or update.phase != phase:
            update.times[update.phase] = int((now - update.since) * 1e6)
        update.phase = phase
        update.since = now
        update.until = now + seconds
        update.pending = {} if phase in (STAGED, HOLD, JOURNAL) else dict(update.members)
        self._say_phase(update)

    def _advance(self, update: Update) -> None:
        """One step, when the phase has all that it waits for."""
        if update.pending:
            return
        timing = self.core.config.timing
        if update.phase == OPEN:
            if update.rings:
                self._join(update)
            elif update.broadcasts:
                self._enter(update, TRANSFER, timing.update_stall_s)
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
            if update.sent_digest is not None and self._verified(update):
                self._enter(update, STAGED)
        elif update.phase == STAGED:
            if update.commit:
                self._hold(update)
        elif update.phase == HOLD:
            members = [member.worker for member in update.members.values()]
            if not working(members) and not unfinished(update):
                self._hand_over(update)
        elif update.phase == HAND_OVER:
            self._handed_over(update)

    def _join(self, update: Update) -> None:
        """Ranks for all; the process group of last time is kept when the same sides are in it."""
        group, offer = update.group, update.offer
        rank = 1
        for member in update.members.values():
            member.rank = rank
            rank += member.ranks
        sides = ((offer.peer, 1), *((member.peer, member.ranks) for member in update.members.values()))
        stands = group.ring
        warm = stands is not None and offer.peer and stands == Ring(stands.name, offer.address, offer.backend, sides)
        if warm and stands is not None:
            update.ring = stands
        else:
            update.ring = Ring(f"{group.name}-{update.id[0]:x}-{update.id[1]}", offer.address, offer.backend, sides)
        group.ring = None
        self._enter(update, JOIN, self.core.config.timing.update_join_s)
        self._say_join(update, update.ring)
        for member in update.members.values():
            self._ask(update, member)

    def _verified(self, update: Update) -> bool:
        """Whether all members staged what was sent, and nothing in it is wrong; otherwise the transaction is aborted."""
        for member in update.members.values():
            if member.digest != update.sent_digest:
                text = f"{member.worker.name} staged digest {member.digest}, and {update.sent_digest} was sent"
                self._abort(update, "update_aborted", text)
                return False
            for finding in member.findings:
                if finding.kind != "zero":
                    text = f"{finding.name}: {finding.count} elements are {finding.kind}"
                    self._abort(update, "weights_refused", text, field=finding.name)
                    return False
        known = update.group.zeros
        if known is not None:
            for name in sorted(zero_matrices(update) - known):
                text = f"{name}: all zero, and it was not in version {update.group.version}"
                self._abort(update, "weights_refused", text, field=name)
                return False
        return True

    def _hold(self, update: Update) -> None:
        offer = update.offer
        hold(update)
        drains = offer.in_flight == "drain"
        self._enter(update, HOLD, offer.drain_ms / 1000 if drains else 0.0)
        self.core.wake(update.group)
        if not drains:
            self._stop_draining(update)

    def _stop_draining(self, update: Update) -> None:
        """What members have in hand is put back, and runs on the new weights."""
        update.begun = []
        update.recalled += recall(self.fleet, [member.worker for member in update.members.values()])

    def _hand_over(self, update: Update) -> None:
        update.times["drain"] = int((self.core.now - update.since) * 1e6)
        self._enter(update, HAND_OVER, self.core.config.timing.update_hand_over_s)
        for member in update.members.values():
            self._ask(update, member)

    def _handed_over(self, update: Update) -> None:
        """All members have answered: is it a commit?"""
        members = list(update.members.values())
        loaded = [member for member in members if member.loaded]
        if update.direct:
            if len(loaded) < len(members):
                self._fail(update, _failures(members))
                return
            if update.sent_digest is None:
                return
            wrong = [m for m in members if m.digest != update.sent_digest]
            if wrong:
                name, digest = wrong[0].worker.name, wrong[0].digest
                self._fail(update, f"{name} took digest {digest}, and {update.sent_digest} was sent")
                return
        if not loaded:
            self._fail(update, _failures(members))
            return
        for member in loaded[1:]:
            # Of a checkpoint nobody else knows the digest.
            if member.digest != loaded[0].digest:
                member.loaded = False
                member.failure = f"it took digest {member.digest}, and {loaded[0].worker.name} {loaded[0].digest}"
        self._enter(update, JOURNAL)
        update.weights = self._weights(update, loaded[0].digest)
        self.core.effects.append(WriteJournal(update.id, update.group.name, update.weights))

    def _weights(self, update: Update, digest: str) -> GroupWeights:
        """What is committed if all goes well."""
        group, offer = update.group, update.offer
        before = group.weights
        run = before.run + offer.new_run
        publisher = update.client.id.hex()
        if offer.transfer == "relabel":
            return GroupWeights(offer.version, before.digest, before.snapshot, before.path, run, publisher)
        if offer.partial:
            # Nobody's bytes are all of it: whoever holds less than both must not be asked to restore it.
            return GroupWeights(offer.version, layered(before.digest, digest), run=run, publisher=publisher)
        folder = self.snapshots.get(group.config.snapshot, "")
        keeps = bool(folder) and offer.transfer in ("staged", "handles")
        snapshot = f"{folder}/{group.name}-{digest}" if keeps else ""
        return GroupWeights(offer.version, digest, snapshot, offer.path, run, publisher)

    # --- the end -------------------------------------------------------------------------------------------------------

    def journalled(self, e: ev.JournalWritten) -> None:
        """The commit point is passed, or could not be."""
        update = next((update for update in self.open.values() if update.id == e.update), None)
        if update is None or update.weights is None:
            return
        if e.error:
            self._fail(update, f"the journal could not be written: {e.error}")
            return
        group, weights, before = update.group, update.weights, update.group.version
        self._count(update)
        update.weights = None
        group.weights = weights
        group.version = weights.version
        group.zeros = frozenset(zero_matrices(update)) if update.broadcasts and not update.direct else None
        group.ring = update.ring
        group.needs = ""
        self._close(update)
        loaded = [member for member in update.members.values() if member.loaded]
        record = self._record(update, "committed", _note(update))
        record.committed, record.digest = len(loaded), weights.digest
        group.first = record, e.now
        for member in update.members.values():
            worker = member.worker
            if worker.lost:
                continue
            if not member.loaded:
                self.fleet.lose(worker, f"it did not take weight version {weights.version}: {member.failure}", kill=True)
                continue
            worker.version, worker.digest = weights.version, weights.digest
            worker.lacks = None
            message = Committed(update.id, weights.version, weights.digest, weights.snapshot)
            self.core.effects.append(ToWorker(worker.link, message))
        for worker in list(group.workers.values()):
            if worker.incarnation not in update.members and worker.capabilities is not None:
                # Its answers would be of the old version.
                recall(self.fleet, [worker])
                self.restoring.risen(worker)
        self.requests.reweigh(group, before)
        release(self.core, group)
        self._finish(update, Published(update.offer.id, weights.version, record))

    def _abort(self, update: Update, code: str, reason: str, *, field: str = "") -> None:
        """Give up before any engine was touched."""
        assert not update.forward, update
        self._count(update)
        held = update.holds
        self._close(update)
        for member in update.members.values():
            if not member.worker.lost:
                self.core.effects.append(ToWorker(member.worker.link, Release(update.id, reason)))
        if held:
            release(self.core, update.group)
        self._end(update, code, reason, field)

    def _fail(self, update: Update, reason: str) -> None:
        """Engines were touched, and nothing is committed: whoever was touched comes back on the committed weights."""
        self._count(update)
        self._close(update)
        for member in update.members.values():
            if not member.worker.lost:
                self.fleet.lose(member.worker, f"a weight update failed: {reason}", kill=True)
        release(self.core, update.group)
        self._end(update, "update_aborted", f"no engine runs on it: {reason}", "")

    def _count(self, update: Update) -> None:
        """The last phase ends."""
        update.times[update.phase] = int((self.core.now - update.since) * 1e6)

    def _close(self, update: Update) -> None:
        update.group.update = None
        del self.open[update.group.name]

    def _record(self, update: Update, outcome: str, message: str) -> UpdateRecord:
        core, offer = self.core, update.offer
        record = UpdateRecord(offer.version, outcome, offer.transfer, message)
        record.at = round(core.epoch / 1e6 + update.began - core.started, 3)
        record.members = len(update.members)
        record.sent_bytes = update.sent_bytes
        record.phases = update.times
        record.aborted_batches = update.recalled
        update.group.history.append(record)
        return record

    def _end(self, update: Update, code: str, reason: str, field: str) -> None:
        seen = f"{update.offer.transfer} of version {update.offer.version} given up in phase {update.phase}: {reason}"
        self._record(update, code, seen)
        self._finish(update, Failure(code, seen, update.offer.id, field=field))

    def _finish(self, update: Update, message: Message) -> None:
        """The publisher's final answer."""
        core, client = self.core, update.client
        if core.clients.get(client.id) is client:
            core.answers.add(client, update.offer.id, update.offer_digest, message, (), core.now)
            self._tell(update, message)

    # --- time ----------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Act on every deadline that has passed."""
        now = self.core.now
        for update in list(self.open.values()):
            gone = self.core.clients.get(update.client.id) is not update.client
            if not update.forward and update.needs_publisher and (gone or now >= update.lease_until):
                what = "its publisher is gone" if gone else f"its publisher was silent for {update.offer.lease_ms} ms"
                self._abort(update, "update_aborted", what)
            elif update.direct and update.forward and update.sent_digest is None and (gone or now >= update.lease_until):
                self._overdue(update, "the publisher is gone, or silent")
            elif now >= update.until:
                self._overdue(update, f"nothing for {now - update.since:.1f} s")
            elif update.told != (done := len(update.members) - len(update.pending)):
                self._say_phase(update, done)

    def _overdue(self, update: Update, why: str) -> None:
        if update.phase == HOLD:
            self._stop_draining(update)
            update.until = float("inf")
        elif update.phase == HAND_OVER:
            for member in update.pending.values():
                member.failure = f"not handed over: {why}"
            update.pending = {}
            if update.sent_digest is None and update.direct:
                self._fail(update, why)
        else:
            names = ", ".join(member.worker.name for member in list(update.pending.values())[:3])
            who = names or "the publisher"
            self._abort(update, "update_aborted", f"{update.phase} took too long, waiting for {who}: {why}")

    def next(self) -> float:
        """When the next deadline is due."""
        return min((update.until for update in self.open.values()), default=float("inf"))

    def extend(self, gap: float) -> None:
        """The coordinator itself stood still for `gap` seconds."""
        for update in self.open.values():
            update.until += gap
            update.lease_until += gap

    def drain(self) -> None:
        """The pool ends: what has not touched an engine is given up."""
        for update in list(self.open.values()):
            if not update.forward:
                self._abort(update, "update_aborted", "the coordinator is draining")

    # --- words to the publisher ----------------------------------------------------------------------------------------

    def _tell(self, update: Update, message: Message) -> None:
        if update.client.link is not None:
            self.core.effects.append(ToClient(update.client.link, message))

    def _say_join(self, update: Update, ring: Ring) -> None:
        self._tell(update, Join(ring.name, _world(update), 0, ring.address, ring.backend, id=update.offer.id))

    def _say_phase(self, update: Update, done: int = 0) -> None:
        update.told = done
        if update.phase == JOURNAL:
            return
        # Of a direct transfer, engines take the bytes as the publisher sends them.
        sends = update.phase == HAND_OVER and update.direct and update.sent_digest is None
        self._tell(update, Phase(update.offer.id, TRANSFER if sends else update.phase, len(update.members), done))


def _may_take(worker: Worker) -> bool:
    """Whether it can be a member: ready, and not busy with a restore that may still succeed."""
    ready = worker.capabilities is not None and worker.idle and not worker.lost and worker.stage == "ready"
    return ready and (worker.restore_until is None or bool(worker.group.needs))


def _world(update: Update) -> int:
    return 1 + sum(member.ranks for member in update.members.values())


def zero_matrices(update: Update) -> set[str]:
    """Matrices that are all zero in the bytes that were staged; vectors may well be."""
    matrices = {tensor.name for tensor in update.manifest if len(tensor.shape) > 1}
    found = {finding.name for member in update.members.values() for finding in member.findings if finding.kind == "zero"}
    return found & matrices


def _failures(members: list[Member]) -> str:
    failed = [f"{member.worker.name}: {member.failure}" for member in members if member.failure]
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return "; ".join(failed[:3]) + more


def _note(update: Update) -> str:
    """What the history says of a committed transaction beside its numbers."""
    zeros = sorted({finding.name for member in update.members.values() for finding in member.findings})
    said = [f"all zero: {', '.join(zeros[:3])}{' …' if len(zeros) > 3 else ''}"] if zeros else []
    failed = _failures(list(update.members.values()))
    return "; ".join([*said, *([f"not on {failed}"] if failed else [])])
