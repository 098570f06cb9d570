"""The end of a transaction: committed, aborted before any engine was touched, or failed after.

`weights` says which. Here is what each of them means for the group, its workers, its history, and for the publisher.
"""

import msgspec

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KeepHistory, ToWorker
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.transitions import commit_weights, have_weights, release, stay
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.requests.exact_version import end_passed
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.reply_cache import OVERHEAD
from enginepool.coordinator.weights.outgoing import tell
from enginepool.coordinator.weights.restoring import Restoring
from enginepool.coordinator.weights.update import Member, Update, failures, zero_matrices
from enginepool.protocol.layout import layered
from enginepool.protocol.messages import ErrorReply, Message
from enginepool.protocol.messages.weight_reports import HELD, UpdateRecord
from enginepool.protocol.messages.weights import Committed, Published, ReleaseWeights

#: characters that the history keeps of a message
RECORD_TEXT = 1000


class UpdateOutcomes:
    """Ends transactions."""

    def __init__(self, core: Context, requests: RequestLifecycle, fleet: WorkerRegistry, restoring: Restoring) -> None:
        self.core = core
        self.requests = requests
        self.fleet = fleet
        self.restoring = restoring
        #: folders of snapshots, by the group option
        self.snapshots: dict[str, str] = {}

    def new_weights(self, update: Update, digest: str) -> GroupWeights:
        """What is committed if all goes well. `digest`: of what engines took."""
        staged = update.offer.transfer == "staged" or update.group.weights.staged
        return msgspec.structs.replace(self._taken(update, digest), staged=staged, publisher=update.publisher)

    def _taken(self, update: Update, digest: str) -> GroupWeights:
        group, offer = update.group, update.offer
        before = group.weights
        run = max(before.run, group.heard_committed[0]) + offer.new_run
        if offer.transfer == "set_version" and not group.journal_behind:
            return GroupWeights(offer.version, before.digest, before.snapshot, before.path, run, before.restart)
        if update.by_restart:
            return GroupWeights(offer.version, digest, path=offer.path, run=run, restart=True)
        if offer.partial:
            # No process has all of the bytes. A worker that does not hold both parts must not be asked to restore them.
            return GroupWeights(offer.version, layered(before.digest, digest), run=run)
        folder = self.snapshots.get(group.config.snapshot, "")
        # A set_version takes up weights that the journal has lost: a stager may hold them, and its snapshot may be there.
        keeps = bool(folder) and offer.transfer in ("staged", "set_version")
        # Versions of different runs cannot be compared, and a stager removes what is older than what it writes.
        name = f"{group.name}+{run}" if run else group.name
        snapshot = f"{folder}/{name}-{digest}" if keeps else ""
        return GroupWeights(offer.version, digest, snapshot, offer.path, run)

    def commit(self, update: Update, weights: GroupWeights) -> None:
        """The journal has it: these are the weights of the group from now on."""
        group, before = update.group, update.group.version
        self._count(update)
        loaded_at = update.phase_began
        commit_weights(group, weights)
        group.zeros = _zeros(update)
        if update.process_group is not None:
            group.process_group = update.process_group
        if not group.journal_behind:
            group.weights_lost = ""
        self._close(update)
        loaded = [member for member in update.members.values() if member.loaded]
        record = self._record(update, "committed", _note(update))
        record.committed, record.digest = sum(not member.worker.lost for member in loaded), weights.digest
        group.first_answer = record, loaded_at
        for member in update.members.values():
            worker = member.worker
            if worker.lost:
                continue
            if not member.loaded:
                why = "did not load" if member.failure else "starts on"
                self.fleet.recall_streams(worker)
                self._replace(
                    worker, f"it {why} weight version {weights.version}{': ' if member.failure else ''}{member.failure}"
                )
                continue
            worker.version, worker.digest = weights.version, weights.digest
            self.fleet.give_time(worker)
            if worker.missing_weights:
                worker.detail = ""
            have_weights(self.core, worker)
            message = Committed(update.id, weights.version, weights.digest, weights.snapshot, weights.run)
            self.core.effects.append(ToWorker(worker.link, message))
        for worker in list(group.workers.values()):
            worker.missing_snapshot = ""
            if worker.incarnation not in update.members and worker.capabilities is not None:
                if not worker.holds:
                    # Its answers would be of the old version. One that holds these weights runs on: it would not drop its work.
                    self.fleet.recall(worker)
                self.restoring.changed(worker)
        end_passed(self.requests, group, before)
        self.requests.reweigh(group, before)
        release(self.core, group)
        self._finish(update, Published(update.offer.id, weights.version, record))

    def abort(self, update: Update, code: str, reason: str, field: str = "", limit: str = "") -> None:
        """Give up before any engine was touched."""
        assert not update.loading, update
        self._count(update)
        held = update.holds_group
        for member in update.members.values():
            self.turn_back(member)
        self._close(update)
        for member in update.members.values():
            if not member.worker.lost:
                self.core.effects.append(ToWorker(member.worker.link, ReleaseWeights(update.id, reason)))
        if held:
            release(self.core, update.group)
        self._end(update, code, reason, field, limit)

    def fail(self, update: Update, reason: str) -> None:
        """Engines were touched, and nothing is committed: each of them comes back to the committed weights."""
        self._count(update)
        for member in update.members.values():
            self.turn_back(member)
        self._close(update)
        for member in update.members.values():
            if update.keeps_generations and not member.worker.lost:
                self.fleet.recall_streams(member.worker)
            # In an update by restart, of those on the old weights only the engine of a recalled one still has work.
            if member.worker.lost or not (member.recalled or not update.by_restart):
                continue
            if self._returns(update, member):
                self._take_back(update, member, reason)
            else:
                self._replace(member.worker, f"a weight update failed: {reason}")
        release(self.core, update.group)
        self._end(update, "update_aborted", f"no engine runs on it: {reason}")

    def _returns(self, update: Update, member: Member) -> bool:
        """Whether its engine runs on all of the new weights, and can take the committed ones without a new process."""
        # An empty digest is that of the checkpoint, which an engine loads at its start.
        known = bool(update.group.weights.digest) or update.offer.transfer == "set_version"
        if update.group.journal_behind:
            known = update.offer.transfer == "set_version"
        return member.loaded and not update.by_restart and known

    def _take_back(self, update: Update, member: Member, reason: str) -> None:
        """It runs on weights that were not committed, until it says otherwise."""
        worker, offer = member.worker, update.offer
        self.core.effects.append(ToWorker(worker.link, ReleaseWeights(update.id, reason)))
        worker.version = offer.version
        worker.digest = worker.digest if offer.transfer == "set_version" else member.digest
        if not worker.group.journal_behind:
            self.restoring.take_back(worker)

    def turn_back(self, member: Member) -> None:
        """A member of an update by restart is wanted on the committed weights again."""
        worker, slot, restart = member.worker, member.worker.slot, member.restart
        member.restart = ""
        if slot is None or not restart:
            return
        slot.uncommitted_weights = None
        if restart == "leaving":
            stay(self.core, worker)
        elif restart == "ready" and not worker.lost:
            self._replace(worker, "the weights that it started on were not committed")
        elif slot.on_uncommitted:
            slot.loss_excused = True
            if slot.worker is not None:
                self.fleet.lose(slot.worker, "the weights that it starts on were not committed", kill=True)
            else:
                self.fleet.slots.end(slot, "the weights that it starts on were not committed")
        slot.on_uncommitted = False

    def _replace(self, worker: Worker, reason: str) -> None:
        """Kill a worker whose engine does not hold what it should. That is no reason to retire its slot one day."""
        if worker.slot is not None:
            worker.slot.loss_excused = True
        self.fleet.lose(worker, reason, kill=True)

    def _count(self, update: Update) -> None:
        """The last phase ends."""
        update.time_phase(self.core.now)
        if update.holds_group:
            parts = (*HELD, "restart") if update.at_once else HELD
            update.times["hold"] = sum(update.times.get(part, 0) for part in parts)

    def _close(self, update: Update) -> None:
        del self.core.updates[update.group.name]
        for slot in update.group.slots:
            slot.uncommitted_weights, slot.on_uncommitted = None, False

    def _record(self, update: Update, outcome: str, message: str) -> UpdateRecord:
        core, offer = self.core, update.offer
        record = UpdateRecord(offer.version, outcome, offer.transfer, message[:RECORD_TEXT])
        record.at = round(core.epoch / 1e6 + update.began - core.started, 3)
        record.members = len(update.members)
        record.sent_bytes = update.sent_bytes
        record.phases = update.times
        record.aborted_batches = update.recalled_batches
        record.publisher = update.publisher
        update.group.history.append(record)
        why = f": {message}" if message else ""
        how = f"{offer.transfer}, {record.members} worker{'' if record.members == 1 else 's'}"
        core.log(f"update of {update.group.name} to version {offer.version} ({how}): {outcome}{why}", "update")
        core.effects.append(KeepHistory(update.group.name, list(update.group.history)))
        return record

    def _end(self, update: Update, code: str, reason: str, field: str = "", limit: str = "") -> None:
        seen = f"{update.offer.transfer} of version {update.offer.version} given up in phase {update.phase}: {reason}"
        self._record(update, code, seen)
        self._finish(update, ErrorReply(code, seen, update.offer.id, field=field, limit=limit))

    def _finish(self, update: Update, message: Message) -> None:
        """The publisher's final answer."""
        core, client = self.core, update.client
        if core.clients.get(client.id) is client:
            # It may have said nothing for as long as it was not needed: it has time to ask for this.
            client.heard = max(client.heard, core.now)
            # It is kept although no room was reserved for it. Older answers make room, so that one such answer at most is over.
            core.answers.shrink(max(0, core.config.limits.buffer_bytes - core.live_bytes - OVERHEAD))
            core.answers.add(client, update.offer.id, update.offer_digest, message, (), core.now)
            tell(self.core, update, message)


def _zeros(update: Update) -> frozenset[str] | None:
    """What is zero in the weights that are committed now, as far as it is known."""
    before, offer = update.group.zeros, update.offer
    if offer.transfer == "set_version":
        return before
    if not update.sends_bytes or update.direct:
        return None
    found = frozenset(zero_matrices(update))
    if not offer.partial:
        return found
    return None if before is None else found | before - {tensor.name for tensor in update.manifest}


def _note(update: Update) -> str:
    """What the history says of a committed transaction besides its numbers."""
    zeros = sorted({finding.name for member in update.members.values() for finding in member.findings})
    said = [f"all zero: {', '.join(zeros[:3])}{' …' if len(zeros) > 3 else ''}"] if zeros else []
    failed = failures(list(update.members.values()))
    then = "restored after it" if update.group.weights.snapshot else "left out"
    left = [f"{then}: {name}: {why}" for name, why in list(update.left_members.items())[:3]]
    more = [f"and {len(update.left_members) - 3} more"] if len(update.left_members) > 3 else []
    return "; ".join([*said, *([f"not on {failed}"] if failed else []), *left, *more, *_on_host(update)])


def _on_host(update: Update) -> list[str]:
    """Which engines on GPUs copied the weights out of memory of the host, which is slower, and what helps."""
    found = [member for member in update.members.values() if member.on_host]
    if not found:
        return []
    names = ", ".join(member.worker.name for member in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    by_need = update.group.config.reserve_staging is None
    then = ", which workers that are restarted from now on reserve" if by_need else ""
    return [f"{names}{more} staged it in memory of the host: {found[0].on_host}{then}"]
