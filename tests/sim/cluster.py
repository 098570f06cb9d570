"""The machines that workers run on: the supervisor of the coordinator's own workers, and external workers.

Processes outlive coordinators. A coordinator hears of the ends of those that it started or adopted, each once, after all of the
process group has ended.
"""

from collections import Counter
from typing import Protocol

from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker, GroupWeights
from enginepool.coordinator.launchers.exit_reasons import failed_by_itself
from enginepool.workers.events import Exit
from tests.sim.network import Network
from tests.sim.oracle import Oracle
from tests.sim.sim_engine import Profile
from tests.sim.sim_stager import Disks, Stager
from tests.sim.sim_worker import SimWorker
from tests.sim.world import World


class Watcher(Protocol):
    """A coordinator that wants to hear of exits."""

    def exited(self, event: WorkerExited) -> None: ...


class Cluster:
    """All worker processes."""

    def __init__(self, network: Network, oracle: Oracle, profiles: dict[str, Profile], orphan_s: float, drain_s: float) -> None:
        self.network = network
        self.world: World = network.world
        self.oracle = oracle
        self.profiles = profiles
        self._limits = (orphan_s, drain_s)
        self.workers: dict[str, SimWorker] = {}
        #: group and index of the coordinator's own
        self._places: dict[str, tuple[str, int]] = {}
        #: who is told of the end
        self._watchers: dict[str, Watcher] = {}
        #: a supervisor outside the pool keeps so many workers alive for each group
        self.external = True
        self._external_count = 0
        #: how probably an external worker has no stager; one of each group has
        self.unstaged = 0.0
        #: a start that cannot work, however often: probability
        self.unusable = 0.0
        #: of a group, the first so many places have an engine that never loads; whether nothing else befalls workers
        self.unloadable: dict[str, int] = {}
        #: a start on a checkpoint that cannot work: probability
        self.unstartable = 0.0
        self.strict = False
        #: processes that the present coordinator has started at each place
        self._starts: Counter[tuple[str, int]] = Counter()
        #: what weights lie in, and who holds them for each place
        self.disks = Disks(network.world)
        self.stagers: dict[str, Stager] = {}

    def start(self, watcher: Watcher, group: str, index: int, incarnation: str, weights: GroupWeights | None = None) -> None:
        """Start a process for a place of the coordinator, on the checkpoint of `weights`."""
        self._places[incarnation] = (group, index)
        self._watchers[incarnation] = watcher
        worker = self._spawn(group, incarnation, self.profiles[group])
        if weights is not None:
            engine = worker.engine
            assert engine.profile.only_at_start, f"{incarnation} could take its weights in place"
            engine.version, engine.digest = weights.version, self.disks.checkpoints[weights.path]
            if engine.digest != weights.digest or self.world.chance(self.unstartable):
                engine.broken = engine.by_chance("it does not start on this checkpoint")
                committed = any(one.committed and one.version == weights.version for one in self.oracle.weights[group])
                engine.unusable = not committed and sum(incarnation.encode()) % 2 == 0
        if index < self.unloadable.get(group, 0):
            pid, address = self.world.random.randint(2, 1 << 22), self.world.random.getrandbits(47)
            worker.engine.broken = f"[pid {pid}] {incarnation}: <Loader at {address:#x}> finds no such model"
            self._starts[group, index] += 1
            assert not self.strict or self._starts[group, index] <= 2, f"{incarnation} fails in the same way again"
        if self.world.chance(self.unusable):
            self.world.after(self.world.between(0, 0.3), worker.gone, "unusable")

    def dial_in(self, group: str) -> None:
        """An external worker."""
        self._external_count += 1
        incarnation = f"external-{group}-{self._external_count}"
        others = (worker.stager for worker in self.workers.values() if worker.external and worker.group == group)
        if any(stager.staging for stager in others) and self.unstaged and self.world.chance(self.unstaged):
            self.stagers[incarnation] = Stager(self.disks, incarnation, staging=False)
        self._spawn(group, incarnation, self.profiles[group])

    def stages(self, name: str) -> bool:
        """Whether the worker that people know by this name has staging memory."""
        stager = self.stagers.get(name.partition("+")[0])
        return stager is not None and stager.staging

    def _spawn(self, group: str, incarnation: str, profile: Profile) -> SimWorker:
        orphan_s, drain_s = self._limits
        place = self._places.get(incarnation)
        name = f"{place[0]}-{place[1]}" if place is not None else incarnation
        stager = self.stagers.setdefault(name, Stager(self.disks, name))
        worker = self.workers[incarnation] = SimWorker(
            self.network, self.oracle, profile, group, incarnation, stager, orphan_s, drain_s, self._ended,
            external=place is None,
        )  # fmt: skip
        return worker

    def kill(self, incarnation: str) -> None:
        """SIGKILL to the process group."""
        worker = self.workers.get(incarnation)
        if worker is not None:
            self.world.after(self.world.between(0, 0.05), worker.kill)

    def survivors(self, watcher: Watcher) -> list[EarlierWorker]:
        """Processes of an earlier coordinator; from now on `watcher` hears of them."""
        self._starts.clear()
        found: list[EarlierWorker] = []
        for incarnation, worker in self.workers.items():
            place = self._places.get(incarnation)
            if place is not None and worker.alive:
                self._watchers[incarnation] = watcher
                found.append(EarlierWorker(*place, incarnation))
        return found

    def _ended(self, worker: SimWorker, reason: str) -> None:
        self.oracle.workers_lost += 1
        del self.workers[worker.incarnation]
        place = self._places.get(worker.incarnation)
        if place is None:
            self.stagers.pop(worker.incarnation).kill()
            if self.external:
                self.world.after(self.world.between(0.1, 2.0), self._again, worker.group)
            return
        watcher = self._watchers[worker.incarnation]
        exited = WorkerExited(
            self.world.now,
            worker.incarnation,
            reason,
            permanent=reason == "unusable" or worker.code == Exit.UNUSABLE,
            failed=failed_by_itself(worker.code),
            out_of_memory=worker.code == Exit.OUT_OF_MEMORY,
        )
        self.world.after(self.world.between(0, 0.5), watcher.exited, exited)

    def _again(self, group: str) -> None:
        if self.external:
            self.dial_in(group)
