"""Restoring: a worker that is ready on other weights than the committed ones is brought to them before it gets work.

It is told where they may lie: with its stager, in a snapshot, in a checkpoint. One that cannot have them says so, and tries
again after a while. When every worker has said so and none is still to come, the weights exist nowhere: requests are answered
with needs_weights, and every client is asked for them, until a publish succeeds or a worker finds them.

A worker that heard of a later commit than the journal has shows that the journal was lost, or is an old one. Its weights may be
the only copy, and older ones must not answer: no worker of the group is restored or given work, and clients are asked for the
weights as above, until a publisher brings them or an operator set_version what those workers hold.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient, ToWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.states import SlotState, WorkerState
from enginepool.coordinator.core.transitions import fail_restore, fall_behind, have_weights, start_restore
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.protocol.messages.weights import Committed, Restore, Restored, WeightsNeeded

#: states of workers that do not have the committed weights, and are not being restored
_WITHOUT = frozenset({WorkerState.OTHER_WEIGHTS, WorkerState.MISSING_WEIGHTS})


class Restoring:
    """Workers on other weights than the committed ones."""

    def __init__(self, core: Context, requests: RequestLifecycle, fleet: WorkerRegistry) -> None:
        self.core = core
        self.requests = requests
        self.fleet = fleet

    def changed(self, worker: Worker) -> None:
        """Other weights are committed. What it says it holds may be what an earlier restore is about to replace."""
        if worker.state is WorkerState.RESTORING:
            self._restore(worker)
        else:
            self.loaded(worker)

    def take_back(self, worker: Worker) -> None:
        """A worker took weights that were not committed after all."""
        if worker.digest == worker.group.weights.digest:
            self._ask(worker)  # the same bytes: no engine needs to start for their version
        else:
            self._restore(worker)

    def loaded(self, worker: Worker) -> None:
        """A worker says what it holds, or what is committed has changed."""
        group, weights = worker.group, worker.group.weights
        if worker.lost or worker.stage != "ready":
            return
        if worker.committed > group.heard_committed:
            group.heard_committed = worker.committed
            if group.journal_behind:
                self._fall_behind(worker)
        if group.journal_behind:
            return
        if not worker.holds and worker.state is WorkerState.ASLEEP:
            return  # what sleeps may be its weights; it says `ready` again when it is woken
        if not worker.holds:
            # Members of an open transaction are about to take other weights, or have.
            update = self.core.update_of(group)
            if update is None or worker.incarnation not in update.members:
                self._restore(worker)
            return
        if worker.state is WorkerState.RESTORING:
            self.fleet.log(worker, f"worker {worker.name} has restored the committed weight version {weights.version}")
        have_weights(self.core, worker)
        group.weights_lost = ""
        if weights.digest or worker.committed != (weights.run, weights.version):
            # It or its stager may not have heard that what it holds is committed.
            message = Committed((0, 0), weights.version, weights.digest, weights.snapshot, weights.run)
            self.core.effects.append(ToWorker(worker.link, message))

    def _fall_behind(self, worker: Worker) -> None:
        """The journal does not have what `worker` heard to be committed."""
        group, version = worker.group, worker.committed[1]
        group.weights_lost = (
            f"the journal is behind: {worker.name} holds the committed weight version {version} of group {group.name!r}, "
            f"and the journal knows version {group.version}; publish version {version} or a later one, or set_version to "
            f"version {version} to go on with what the workers hold"
        )
        self.fleet.log(worker, group.weights_lost)
        fall_behind(self.core, group)
        for other in group.workers.values():
            self.fleet.recall(other)
        self._tell_all(group)

    def _restore(self, worker: Worker) -> None:
        worker.missing_weights = ""
        if worker.group.weights.restart and worker.slot is not None:
            # Its engine takes them only at its start.
            worker.slot.loss_excused = True
            self.fleet.lose(worker, f"it starts on weight version {worker.group.version}", kill=True)
            return
        if worker.digest and not worker.group.weights.digest and worker.slot is not None:
            worker.slot.loss_excused = True  # it ends, to start on the checkpoint of its model again
        self._ask(worker)

    def _ask(self, worker: Worker) -> None:
        if worker.state not in (WorkerState.LEAVING, WorkerState.DRAINING):
            start_restore(self.core, worker, self.core.now + self.core.config.timing.loading_s)
            self._post(worker)

    def _post(self, worker: Worker) -> None:
        weights = worker.group.weights
        message = Restore(weights.version, weights.digest, weights.snapshot, weights.path, weights.run)
        self.core.effects.append(ToWorker(worker.link, message))

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: messages on the old one may be lost."""
        update = self.core.update_of(worker.group)
        handed = update is not None and update.loading and worker.incarnation in update.members
        if worker.state is WorkerState.RESTORING and not handed:
            self._post(worker)

    def failed(self, worker: Worker, message: Restored) -> None:
        """A worker could not have the committed weights."""
        if worker.state is not WorkerState.RESTORING or message.version != worker.group.version:
            return
        again_s = self.core.config.timing.restore_again_s
        fail_restore(self.core, worker, f"{message.code}: {message.message}", self.core.now + again_s)
        detail = f"cannot restore weight version {message.version}: {message.message}"
        if detail != worker.detail:  # it tries again every few seconds
            again = f"it gets no work, and tries again every {again_s:g} s"
            self.fleet.log(worker, f"worker {worker.name} {detail}; {again}")
        worker.detail = detail

    def watch(self) -> None:
        """Try again, and see whether the weights of a group exist nowhere."""
        for group in self.core.groups.values():
            update = self.core.update_of(group)
            members = update.members if update is not None else {}
            if group.journal_behind:
                continue
            for worker in group.workers.values():
                if worker.state not in _WITHOUT:
                    continue
                if worker.incarnation in members or (worker.missing_weights and self.core.now < worker.restore_due):
                    continue
                self._needs(group)
                # What it said last stands until it says otherwise: of many workers one is being asked again at any time.
                self._ask(worker)

    def _needs(self, group: Group) -> None:
        """Whether every worker that there may be has said that it cannot have the committed weights."""
        update = self.core.update_of(group)
        if group.weights_lost or self.core.draining or (update is not None and update.loading):
            return
        if any(not worker.missing_weights for worker in group.workers.values()):
            return
        if any(slot.state is not SlotState.RETIRED and slot.worker is None for slot in group.slots):
            return
        why = next(worker.missing_weights for worker in group.workers.values())
        group.weights_lost = (
            f"weight version {group.version} of group {group.name!r} is held nowhere; publish it or a later one ({why})"
        )
        self._tell_all(group)

    def _tell_all(self, group: Group) -> None:
        """The requests of the group end, and clients are asked for the weights."""
        self.requests.fail_all(group, "needs_weights", group.weights_lost)
        for client in self.core.clients.values():
            self._ask_for(client, group)

    def hello(self, client: Client) -> None:
        """A client is on a link: it is asked for the weights that groups lost."""
        for group in self.core.groups.values():
            if group.weights_lost:
                self._ask_for(client, group)

    def _ask_for(self, client: Client, group: Group) -> None:
        # Of all clients: a trainer that was restarted is another one than that which published them.
        if client.link is not None:
            self.core.effects.append(
                ToClient(client.link, WeightsNeeded(group.name, max(group.version, group.heard_committed[1])))
            )
