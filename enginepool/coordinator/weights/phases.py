"""The phases of a weight update: the transaction between a publisher, the coordinator and the workers of a group.

How it thinks. The coordinator sees no tensors. They go from the publisher to the workers through a process group, or lie in
memory of the publisher (`ipc`), which the members open when `sent` names it. The coordinator decides which workers take part,
when engines change weights, and which version the group is on. Members are the workers that are ready when the transaction
opens; no worker joins later. In each phase every member owes one answer (`pending`), and the phase has a deadline. A member
that has no memory for a staged transfer says so and leaves. It serves the old version until the commit, and is then restored.

    phase       it waits for                      then                                     too late, a refusal or a loss
    open        prepared of all, and the journal  join, or without a process group:        abort
                (it could take a commit)          transfer, or (no bytes) staged
    join        joined of all                     transfer; direct: hold, after `commit`   abort
    transfer    staged of all, and `sent`         digests and findings: staged, or abort   abort; the lease: abort
    staged      `commit`                          hold; by restart: restart                abort; the lease: abort
    restart     enough members run on it          hold, or with `at_once` (held): journal  see `restarts`
    hold        nothing in flight at members      load                                     put back, go on; a loss: abort
                (or generations that stay)
    load        loaded of all                     one loaded: journal; none: fail          the member has failed
                                                  all that loaded are lost, and only their
                                                  engines had the weights: fail
                direct: and `sent`                all loaded: journal                      fail
    journal     the journal is written            committed                                it could not be: fail

    abort   no engine was touched: `release` to the members, `error` to the publisher, the group goes on
    fail    `error` to the publisher. A member whose engine has all of the new weights loads the committed ones again, if a
            running engine can. Every other member is killed and comes back on the committed weights.

When the process group breaks before the load, all of its peers report that, and the report with the reason may come last. So
the abort waits a moment for a better reason.

The journal is the commit point. Before it, the group is on the old version: a worker that loaded the new one without a commit
is killed or restored. After it, the group is on the new version: a worker that did not load it is killed or restored. The
group is on hold from `hold` to the end, and no worker gets work on other weights than the committed ones, so that no answer
mixes versions.

With `in_flight` `in_place` or `retract`, generations stay in their engines, each of which pauses between two steps. Its member
sends no tokens from then on until it hears `committed` or `release`. So all tokens that the coordinator gets are of committed
weights: those before the pause of the old ones, those after it of the new ones. If it fails, the generations of every member
are taken back before it sends more, and continue after their last token.

A hold lets the batches in flight finish, or puts them back. What is left of a request of which some rows were given to workers
waits in the queue like all others: a large request would hold the group for as long as all its rows take. Rows of it that are
computed count if the group stays on their version, as after an abort. If it does not, they run again.

The lease. As long as a transaction needs its publisher (until `sent` and `commit`; with `ipc`, until the load), the publisher
must send a message about it every `lease_ms`. The final answer is kept like other answers. A publish that arrives again under
its id is attached to the open transaction.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import WriteJournal
from enginepool.coordinator.core.transitions import hold
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.outcomes import UpdateOutcomes
from enginepool.coordinator.weights.outgoing import ask, say_join, say_phase
from enginepool.coordinator.weights.process_group_info import ProcessGroupInfo
from enginepool.coordinator.weights.restarts import Restarts, why_not_restarted
from enginepool.coordinator.weights.update import (
    HOLD,
    JOIN,
    JOURNAL,
    LOAD,
    OPEN,
    RESTART,
    STAGED,
    TRANSFER,
    Phase,
    Refusal,
    Update,
    failures,
)
from enginepool.coordinator.weights.verification import asks_for_zeros, why_refused


class Phases:
    """Moves transactions from phase to phase."""

    def __init__(self, core: Context, ending: UpdateOutcomes) -> None:
        self.core = core
        self.ending = ending
        self.restarts = Restarts(core, ending)

    def enter(self, update: Update, phase: Phase, seconds: float = float("inf")) -> None:
        now = self.core.now
        if update.phase != phase:
            update.time_phase(now)
        update.phase = phase
        update.phase_began = now
        update.due = now + seconds
        waits = phase not in (STAGED, RESTART, HOLD, JOURNAL) and not (update.by_restart and phase == LOAD)
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
        if group.journal_behind and update.heard_committed != group.heard_committed and not update.loading:
            self.ending.abort(update, "update_aborted", group.weights_lost)
            return
        if update.broken_reason and all(member.broken for member in update.pending.values()):
            self.ending.abort(update, "update_aborted", update.broken_reason)
            return
        if update.pending or update.journal_unchecked:
            return
        timing = self.core.config.timing
        if update.phase == OPEN:
            if update.by_restart:
                update.members_at_start = len(update.members)
                self._stage(update, why_not_restarted(update))
            elif update.uses_process_group:
                self._join(update)
            elif update.sends_bytes:
                self.enter(update, TRANSFER, timing.update_stall_s)
                self.ask_all(update)
            else:
                self.enter(update, STAGED)
        elif update.phase == JOIN:
            if not update.direct:
                self.enter(update, TRANSFER, timing.update_stall_s)
            elif update.commit_asked:
                self._hold(update)
            else:
                update.due = float("inf")
        elif update.phase == TRANSFER:
            if update.sent_digest is not None:
                self._stage(update, why_refused(update))
        elif update.phase == STAGED:
            if update.commit_asked and update.by_restart and not update.at_once:
                self.enter(update, RESTART)
            elif update.commit_asked:
                self._hold(update)
        elif update.phase == RESTART:
            if self.restarts.advance(update):
                if update.at_once:
                    self._load(update)
                else:
                    self._hold(update)
        elif update.phase == HOLD:
            if update.recalls_now:
                self._stop_draining(update)
            if not any(_waited_for(update, member.worker) for member in update.members.values()):
                if update.at_once:
                    self.enter(update, RESTART)
                else:
                    self._load(update)
        elif update.phase == LOAD:
            self._loaded(update)

    def _stage(self, update: Update, refusal: Refusal | None) -> None:
        """The members have the weights: go on, unless something is wrong with them, or that is not known yet."""
        if refusal is not None:
            self.ending.abort(update, *refusal)
        elif not asks_for_zeros(self.core, update):
            self.enter(update, STAGED)

    def _join(self, update: Update) -> None:
        """Give ranks to all. The process group of the last update is used again if it has the same peers."""
        group, offer = update.group, update.offer
        rank = 1
        for member in update.members.values():
            member.rank = rank
            rank += member.ranks
        sides = ((offer.peer, 1), *((member.peer, member.ranks) for member in update.members.values()))
        last = group.process_group
        warm = last is not None and offer.peer and last == ProcessGroupInfo(last.name, offer.address, offer.backend, sides)
        if warm and last is not None:
            update.process_group = last
        else:
            update.process_group = ProcessGroupInfo(
                f"{group.name}-{update.id[0]:x}-{update.id[1]}", offer.address, offer.backend, sides
            )
        group.process_group = None
        self.enter(update, JOIN, self.core.config.timing.update_join_s)
        say_join(self.core, update)
        self.ask_all(update)

    def _hold(self, update: Update) -> None:
        offer = update.offer
        hold(self.core, update.group)
        update.keeps_generations = offer.in_flight in ("in_place", "retract")
        # The generations of a paused group stand still: to wait for them is no use.
        update.recalls_now = offer.in_flight == "abort" or (offer.in_flight == "drain" and update.group.holds.keeps)
        self.enter(update, HOLD, 0.0 if update.recalls_now else offer.drain_ms / 1000)

    def _stop_draining(self, update: Update) -> None:
        """Put back the work of the members: it runs on the new weights. The load follows at once: until then their engines have
        more work than the coordinator counts. Generations may stay, as the offer says."""
        keeps = update.keeps_generations = update.offer.generations != "abort" and not update.at_once
        for member in update.members.values():
            worker = member.worker
            update.recalled_batches += len(worker.batches) - (worker.generations if keeps else 0)
            member.recalled += self.ending.fleet.recall(worker, streams=not keeps)

    def _load(self, update: Update) -> None:
        self.enter(update, LOAD, self.core.config.timing.update_load_s)
        self.ask_all(update)

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
        if not update.recoverable and all(member.worker.lost for member in loaded):
            names = ", ".join(member.worker.name for member in loaded[:3])
            self.ending.fail(update, "; ".join(filter(None, (f"lost after they had taken it: {names}", failures(members)))))
            return
        for member in loaded[1:]:
            # Only the members know the digest of a checkpoint.
            if member.digest != loaded[0].digest:
                member.loaded = False
                member.failure = f"it took other weights than {loaded[0].worker.name}"
        if wrong := update.version_conflict(loaded[0].digest):
            self.ending.fail(update, wrong.reason)
            return
        self.enter(update, JOURNAL)
        update.weights = self.ending.new_weights(update, loaded[0].digest)
        self.core.effects.append(WriteJournal(update.id, update.group.name, update.weights))

    def ask_all(self, update: Update) -> None:
        for member in update.pending.values():
            ask(self.core, update, member)


def _waited_for(update: Update, worker: Worker) -> bool:
    """Whether the load waits for work that this member has in hand."""
    return bool(worker.texts or worker.row_batches or (worker.generations and not update.keeps_generations))
