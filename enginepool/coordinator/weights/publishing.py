"""The publisher's side of a transaction: who may open one, and what its publisher says while it is open.

The order of the checks in `publish` is a promise, as in `requests`: who are you (link), have I answered this already
(duplicate), is there a group that can take it (group, path), is it allowed now (another publisher, versions).
"""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.weights.outgoing import say_join, say_phase
from enginepool.coordinator.weights.publish_validation import outside
from enginepool.coordinator.weights.transaction import Transactions
from enginepool.coordinator.weights.update import Member, Update
from enginepool.protocol.messages.weights import AbortUpdate, Commit, Publish, Sent


class Publishers:
    """What publishers say."""

    def __init__(self, core: Context, weights: Transactions) -> None:
        self.core = core
        self.weights = weights

    def publish(self, e: ev.PublishAsked) -> None:
        """A client offers weights: a transaction opens, or a resend is attached to it or to its answer."""
        core, offer = self.core, e.message
        client = core.client_of(e.link, offer.id)
        if client is None or self._known_already(client, e):
            return
        group = core.open_group(e.link, offer.id, offer.group)
        if group is None:
            return
        roots = group.config.checkpoint_roots
        if offer.transfer == "checkpoint" and (wrong := outside(offer.path, roots)):
            core.refuse(e.link, offer.id, "bad_request", wrong, field="path", limit=", ".join(roots) or "none")
            return
        if (other := core.update_of(group)) is not None:
            name = other.client.id.hex()[:8]
            text = f"client {name} is publishing version {other.offer.version}, now in phase {other.phase}"
            core.refuse(e.link, offer.id, "publishing", text, field="group", limit=name)
            return
        # Lost weights may be published again under the committed version. An update over present weights needs a later one.
        present = group.committed_version
        again = group.journal_behind or (group.weights_lost and not _over(offer))
        least = present if again else present + 1
        if offer.version < least and not offer.new_run:
            text = f"version: expected {least} or higher, or a new run, since {present} is committed; got {offer.version}"
            core.refuse(e.link, offer.id, "version_backwards", text, field="version", limit=str(present))
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
            _renew(update, self.core.now)
            say_join(self.core, update)
            say_phase(self.core, update)
        return True

    def _of(self, client: Client, id: int) -> Update | None:
        found = (update for update in self.core.updates.values() if update.client is client and update.offer.id == id)
        return next(found, None)

    def _begin(self, client: Client, group: Group, e: ev.PublishAsked) -> None:
        core, offer = self.core, e.message
        over = _over(offer)
        workers = [w for w in group.workers.values() if _may_take(w) and (not over or _present(w, offer))]
        if not workers:
            what = "is ready with the committed weights" if over else "is ready"
            if any(worker.weights_asleep for worker in group.workers.values()):
                what += "; weights of engines sleep: wake them first"
            core.refuse(e.link, offer.id, "update_aborted", f"no worker of group {group.name!r} {what}")
            return
        update = Update(core.task_id(), client, group, e)
        workers.sort(key=lambda w: (w.slot.index if w.slot is not None else len(group.slots), w.order))
        update.members = {w.incarnation: Member(w) for w in workers}
        self.weights.begin(update)

    def said(self, e: ev.PublisherSaid) -> None:
        """The publisher of a transaction lives, and may have more to say."""
        core, message = self.core, e.message
        client = core.client_of(e.link, message.id)
        if client is None:
            return
        update = self._of(client, message.id)
        if update is None:
            kept = core.answers.get(client, message.id)
            if kept is not None:
                core.effects.append(ToClient(e.link, kept.message, kept.frames))
            else:
                core.refuse(e.link, message.id, "update_aborted", "no such transaction is open here")
            return
        _renew(update, self.core.now)
        if isinstance(message, AbortUpdate):
            why = f"aborted by its publisher: {message.reason or 'no reason given'}"
            if message.broken and not update.loading:
                self.weights.process_group_broke(update, why)
            elif not update.loading:
                self.weights.ending.abort(update, "update_aborted", why)
            elif update.direct and update.sent_digest is None:
                # The engines wait for bytes that will never arrive.
                self.weights.ending.fail(update, why)
        elif isinstance(message, Commit):
            update.commit_asked = True
        else:
            if message.sent_bytes > update.sent_bytes:
                update.sent_bytes = message.sent_bytes
                self.weights.bytes_arrived(update)
            if isinstance(message, Sent) and update.sent_digest is None:
                self.weights.sent(update, message)


def _over(offer: Publish) -> bool:
    """It is laid over the present weights, and needs them there."""
    return offer.partial or offer.transfer == "set_version"


def _present(worker: Worker, offer: Publish) -> bool:
    """Whether its engine has the weights that the offer is laid over. `set_version` takes up weights that the journal lost."""
    return worker.holds_lost and offer.transfer == "set_version" if worker.group.journal_behind else worker.holds


def _renew(update: Update, now: float) -> None:
    update.lease_until = now + update.offer.lease_ms / 1000


def _may_take(worker: Worker) -> bool:
    """Whether it can be a member: ready, with memory for weights, and not busy with a restore that may still succeed."""
    ready = worker.capabilities is not None and worker.epoch_confirmed and not worker.lost and worker.stage == "ready"
    return (
        ready and not worker.weights_asleep and (worker.state is not WorkerState.RESTORING or bool(worker.group.weights_lost))
    )
