"""Registration: a worker opens a link, for the first time or again, or a program asks for the settings to start a worker."""

import msgspec

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.epochs import RAISES_BY_WORKERS, rise_above
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.core.secondary import WorkerReturned
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.transitions import confirm_epoch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.scheduling.batches import post_batch, post_text
from enginepool.protocol.messages import Accept, WorkerSettings


class Registration:
    """Enters workers into the registry."""

    def __init__(self, core: Context, workers: WorkerRegistry) -> None:
        self.core = core
        self.workers = workers
        #: creation number of the latest worker
        self._order = 0

    def register(self, e: ev.WorkerRegistered) -> None:
        """A worker opens a link: the worker of a slot, an external worker, or a worker that returns on a new link."""
        core = self.core
        group = core.groups.get(e.group)
        if group is None:
            wrong = self._unknown_group(e.link, e.group)
            core.log(f"worker {e.incarnation} of {e.host} is refused: {wrong}", "refused")
            return
        if self.workers.is_refused(e.incarnation):
            self.workers.give_up(e.link, e.incarnation, "it was given up before")
            core.log(f"worker {e.incarnation} of {e.host} is refused: it was given up before", "refused")
            return
        if e.epoch > core.epoch and not core.draining:
            # The worker ignores messages of this epoch. The coordinator raises its epoch and accepts the next registration.
            if why := rise_above(core, e.epoch, f"worker {e.incarnation}", RAISES_BY_WORKERS):
                self.workers.refuse(e.link, "superseded", why)
            return
        worker = group.workers.get(e.incarnation)
        before = core.worker_links.get(e.link)
        if before is not None and before is not worker:
            # The link belongs to the new incarnation, which must not be told to end.
            self.workers.lose(before, f"its link registered another incarnation, {e.incarnation}", kill=True, tell=False)
        if worker is not None:
            core.worker_links.pop(worker.link, None)
            if worker.link != e.link:
                worker.link, worker.unread_media = e.link, 0
        else:
            slot = next((p for p in group.slots if p.incarnation == e.incarnation), None)
            if slot is not None and slot.state is not SlotState.UP:
                self.workers.give_up(e.link, e.incarnation, "its process is being ended")
                return
            self._order += 1
            worker = Worker(e.incarnation, group, e.link, slot, self._order, e.now)
            worker.pid, worker.host = e.pid, e.host
            _forget_lost(worker)
            group.workers[e.incarnation] = worker
        worker.heard = e.now
        if e.epoch == core.epoch:
            # The worker dropped all older work when it heard this epoch. Its `idle` may be lost with the old link.
            confirm_epoch(core, worker)
        core.wake(group)
        core.worker_links[e.link] = worker
        orphan_s = core.config.timing.orphan_s
        staged = group.weights.staged
        accept = Accept(core.epoch, orphan_s=orphan_s, halvings=worker.halvings, counter=core.counter, staged=staged)
        core.effects.append(ToWorker(e.link, accept))
        # Tokens that were on their way are lost with the old link, and so are orders to stop.
        self.workers.recall_streams(worker)
        # Batches that were sent on the old link may be lost, so they are sent again. The worker runs a batch id once.
        for batch in worker.batches.values():
            post_batch(core, batch)
        for task in worker.texts:
            post_text(core, worker, task, worker.texts[task])
        core.secondary.append(WorkerReturned(worker))

    def settings(self, e: ev.SettingsAsked) -> None:
        """A program that starts workers asks for the settings of a group."""
        group = self.core.group_of(e.group)
        if group is None:
            self._unknown_group(e.link, e.group)
            return
        weights = group.weights if group.weights.restart else GroupWeights()
        settings = msgspec.json.encode(group.config).decode()
        drain_s = self.core.config.timing.drain_s
        answer = WorkerSettings(group.name, settings, drain_s, weights.path, weights.digest, weights.version)
        self.core.effects.append(ToWorker(e.link, answer))

    def _unknown_group(self, link: Link, name: str) -> str:
        """Refuse the message. Returns the error."""
        wrong = self.core.no_group(name)
        self.workers.refuse(link, "unknown_group", wrong)
        return wrong


def _forget_lost(worker: Worker) -> None:
    """Forget a lost external worker: its process has registered again under another incarnation."""
    lost = worker.group.lost_external
    for entry in [entry for entry in lost if (entry[1].host, entry[1].pid) == (worker.host, worker.pid)]:
        lost.remove(entry)
