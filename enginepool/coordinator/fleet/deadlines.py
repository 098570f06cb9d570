"""The deadlines of workers: pings, and when a worker must have reported or finished something.

There are two kinds of deadlines. A worker that is silent (`silence_s` without any message) has lost its process or its link. A
worker that misses the deadline of a stage or of a forward is alive but makes no progress. In both cases the worker is lost.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.transitions import facts_changed
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import GOODBYE_S, WorkerRegistry
from enginepool.protocol.messages import Ping


class WorkerDeadlines:
    """Checks the deadlines of the workers, and of the slots whose workers have not registered yet."""

    def __init__(self, core: Context, fleet: WorkerRegistry, slots: WorkerSlots) -> None:
        self.core = core
        self.fleet = fleet
        self.slots = slots
        self._pinged = 0.0

    def check(self) -> None:
        """Ping, and act on every deadline that has passed."""
        core, timing = self.core, self.core.config.timing
        silence_s = timing.silence_s
        ping = core.now - self._pinged >= timing.ping_s
        if ping:
            self._pinged = core.now
        for worker in list(core.worker_links.values()):
            if worker.lost:
                continue
            if (silence := core.now - worker.heard) > silence_s:
                self.fleet.lose(worker, f"it was silent for {silence:.1f} s", kill=True, silent=True)
                continue
            if reason := self._overdue(worker):
                self.fleet.lose(worker, reason, kill=True)
                continue
            if worker.batches:
                facts_changed(core, worker)  # the oldest batch may be late
            if ping:
                core.effects.append(ToWorker(worker.link, Ping(int(core.now * 1000))))
        self.slots.watch()

    def _overdue(self, worker: Worker) -> str:
        now = self.core.now
        if worker.stage != "ready":
            allowed = self._allowed(worker)
            if allowed is not None and now - worker.since > allowed:
                return f"it was {worker.stage} for more than {allowed:.0f} s"
        if worker.batches:
            update = self.core.update_of(worker.group)
            # An engine that stands still while it takes weights has the deadline of the update.
            stands_still = update is not None and update.loading and worker.incarnation in update.members
            for batch in () if stands_still else worker.owed():
                if now > batch.deadline:
                    return f"a batch of {batch.rows} rows and {batch.cost} tokens was not done in time"
        if (due := worker.texts.due()) is not None and now > due:
            return "a text was not tokenized in time"
        if worker.state is WorkerState.RESTORING and now > worker.restore_due:
            return "the committed weights were not restored in time"
        return ""

    def _allowed(self, worker: Worker) -> float | None:
        """How long `worker` may be in its stage."""
        timing = self.core.config.timing
        if worker.stage == "draining":
            # A worker that has no work left should have said goodbye.
            return None if worker.busy else timing.drain_s + GOODBYE_S
        return {"starting": timing.starting_s, "loading": timing.loading_s, "compiling": timing.compiling_s}.get(worker.stage)

    def extend(self, gap: float) -> None:
        """The coordinator itself was suspended for `gap` seconds: the workers did not cause this silence."""
        for worker in self.core.worker_links.values():
            worker.heard += gap
            worker.since += gap
            if worker.state is WorkerState.RESTORING:
                worker.restore_due += gap
            for batch in worker.batches.values():
                batch.deadline += gap
                batch.late += gap
            worker.texts.extend(gap)
        self.slots.extend(gap)
        for client in self.core.clients.values():
            client.heard += gap
