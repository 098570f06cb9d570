"""Workers and adapters: an engine is brought to the committed versions, and to the one that is about to be committed.

A worker has at most one task of this kind. It first unloads what is neither wanted nor used by a sequence, and then loads what
is missing. A worker without a committed version gets no work. One that sleeps keeps what it
has loaded, and is told nothing until it is awake. One that cannot load it is asked again after a while. A worker
that does not answer in time, or cannot unload, is lost: what its engine has is not known.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.transitions import facts_changed
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.weights.adapter_changes import AdapterChanges
from enginepool.protocol.adapters import LOADS_ADAPTERS
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter

_ENDING = frozenset({WorkerState.LEAVING, WorkerState.DRAINING, WorkerState.LOST})


class AdapterWorkers:
    """What each worker is told about adapters."""

    def __init__(self, core: Context, fleet: WorkerRegistry, changes: AdapterChanges) -> None:
        self.core = core
        self.fleet = fleet
        self.changes = changes

    def settle(self) -> None:
        """Let every group with something to do go on. Groups whose workers have what they are to have cost nothing."""
        for group in self.core.groups.values():
            if group.adapters.stale or group.name in self.changes.open:
                self._settle(group)

    def _settle(self, group: Group) -> None:
        self.changes.clear(group)
        before = self.changes.open.get(group.name)
        stale, wanted = False, self._wanted(group)
        for worker in list(group.workers.values()):
            self._next(worker, wanted)
            stale = stale or worker.adapters.loaded != wanted.keys()
        group.adapters.stale = stale
        self.changes.advance((worker for worker in group.workers.values() if _can(worker)), group)
        if before is not None and before.phase == "load" and group.name not in self.changes.open:
            self._settle(group)  # what it had loaded is not wanted any more

    def _wanted(self, group: Group) -> dict[str, AdapterVersion]:
        """By the engine's names, what the engines of `group` are to have."""
        wanted = {one.engine_name: one for one in group.adapters.committed.values()}
        if (candidate := self.changes.candidate(group)) is not None:
            wanted[candidate.engine_name] = candidate
        return wanted

    def _next(self, worker: Worker, wanted: dict[str, AdapterVersion]) -> None:
        mine = worker.adapters
        if (mine.loaded == wanted.keys() and not mine.missing) or mine.task is not None or not _can(worker):
            return
        if others := mine.loaded - wanted.keys() - _used(worker):
            self._give(worker, min(others))
            return
        for name, adapter in wanted.items():
            committed = worker.group.adapters.committed.get(adapter.name) is adapter
            if name not in mine.loaded and not (committed and self.core.now < mine.again_at):
                self._give(worker, adapter)
                return
        if mine.missing and wanted.keys() <= mine.loaded:  # what it could not load was unloaded
            worker.detail = "" if worker.detail == mine.missing else worker.detail
            mine.missing = ""

    def _give(self, worker: Worker, wanted: AdapterVersion | str) -> None:
        mine = worker.adapters
        mine.wanted, mine.task = wanted, self.core.task_id()
        mine.until = self.core.now + self.core.config.timing.update_load_s
        if isinstance(wanted, str):
            mine.loaded.discard(wanted)  # from now on nothing counts on it
            mine.unasked.discard(wanted)
        else:
            worker.detail = f"loads adapter {wanted.engine_name}"
        self._post(worker)

    def _post(self, worker: Worker) -> None:
        task, wanted = worker.adapters.task, worker.adapters.wanted
        assert task is not None
        if isinstance(wanted, str):
            message = ChangeAdapter(task, "unload", wanted)
        else:
            message = ChangeAdapter(task, "load", wanted.engine_name, wanted.path, wanted.digest, wanted.nbytes > 0)
        self.core.effects.append(ToWorker(worker.link, message))

    def answered(self, worker: Worker, message: AdapterChanged) -> None:
        """A worker has done its task, or could not."""
        mine, wanted = worker.adapters, worker.adapters.wanted
        if mine.task is None or message.task != mine.task:
            return
        mine.task = None
        worker.group.adapters.stale = True  # until it was looked at
        if isinstance(wanted, str):
            if message.code == "pool_down":
                return  # it is not ready, and says so
            if message.code:
                self.fleet.lose(worker, f"it did not unload adapter {wanted}: {message.message}", kill=True)
                return
        elif message.code == "pool_down":
            return  # it is not ready, and says so
        elif message.code:
            self._failed(worker, wanted, message)
        else:
            mine.missing = worker.detail = ""
            mine.loaded.add(wanted.engine_name)
            if wrong := self.changes.loaded(worker, wanted, message.digest):
                self.fleet.lose(worker, wrong, kill=True)
                return
        facts_changed(self.core, worker)

    def _failed(self, worker: Worker, wanted: AdapterVersion, message: AdapterChanged) -> None:
        group = worker.group
        code = message.code if message.code in CODES else "engine_error"
        worker.detail = ""
        if self.changes.failed(worker, wanted, code, message.message) or wanted not in group.adapters.committed.values():
            return
        again_s = self.core.config.timing.restore_again_s
        mine = worker.adapters
        mine.again_at = self.core.now + again_s
        detail = f"cannot load adapter {wanted.engine_name}: {message.message}"
        if detail != mine.missing:  # it tries again every few seconds
            again = f"it gets no work, and tries again every {again_s:g} s"
            self.fleet.log(worker, f"worker {worker.name} {detail}; {again}")
        mine.missing = worker.detail = detail

    def returned(self, worker: Worker) -> None:
        """A worker is on a new link: its task, or the answer, may be lost with the old one."""
        if worker.adapters.task is not None:
            self._post(worker)

    def lost(self, worker: Worker, reason: str) -> None:
        """A worker is lost: what it was loading is not loaded."""
        wanted = worker.adapters.wanted
        if worker.adapters.task is not None and not isinstance(wanted, str):
            self.changes.failed(worker, wanted, "update_aborted", f"it was lost: {reason}")

    def watch(self) -> None:
        """Workers that did not answer in time are lost."""
        for worker in list(self.core.worker_links.values()):
            mine = worker.adapters
            if mine.task is not None and self.core.now >= mine.until:
                what = f"unload {mine.wanted}" if isinstance(mine.wanted, str) else f"load {mine.wanted.engine_name}"
                within = self.core.config.timing.update_load_s
                self.fleet.lose(worker, f"it did not {what} within {within:g} s", kill=True)
        self.changes.watch()

    def extend(self, gap: float) -> None:
        """The coordinator stood still for so long."""
        for worker in self.core.worker_links.values():
            worker.adapters.until += gap
        for change in self.changes.open.values():
            change.until += gap


def _used(worker: Worker) -> set[str]:
    """The adapters of its sequences."""
    return {batch.adapter for batch in worker.batches.values()}


def _can(worker: Worker) -> bool:
    """Whether its engine can load and unload now."""
    can = worker.capabilities
    ready = worker.stage == "ready" and worker.epoch_confirmed and worker.state not in _ENDING
    return ready and not worker.sleeps and can is not None and LOADS_ADAPTERS in can.features
