"""Simulated weights: process groups, stagers, snapshots, and what an engine becomes when it takes some.

Bytes are not simulated. Weights are their digest: what an engine answers follows from the digest of what was really put into
it, under any version that it reports, so that a mixture or a wrong label shows in the scores.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from enginepool.protocol.basis import TaskId
from enginepool.protocol.layout import layered
from enginepool.protocol.manifest import Tensor, decode_manifest, difference
from enginepool.protocol.messages.weight_reports import Finding, Inspect, Inspected
from enginepool.protocol.messages.weights import (
    Committed,
    Join,
    Joined,
    LoadWeights,
    Prepare,
    Prepared,
    ReleaseWeights,
    Restore,
    Restored,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.workers.engine_weights import LOST_WEIGHTS
from enginepool.workers.events import LoadPrepared, RunWeights, WeightsAnswered
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.sim_worker import SimWorker

#: where every worker is
HOST = "sim"
#: what every simulated model consists of
MODEL = [Tensor("w", "float32", (4, 3)), Tensor("b", "float32", (3,)), Tensor("v", "bfloat16", (3, 3))]


def content_of(digest: str, base: int) -> int:
    """The number from which an engine's scores follow. `base`: that of the checkpoint, whose digest is empty."""
    return zlib.crc32(digest.encode()) if digest else base


class Side:
    """A rank of a process group. `told` hears once whether it formed, then each broadcast, or that it broke."""

    def __init__(self, name: str, told: "Callable[[str, str, list[Finding]], None]") -> None:
        self.name = name
        #: (what, digest, findings): what is `formed`, `bytes` or `broken`
        self.told = told


class Ring:
    """One process group."""

    def __init__(self, world: World, name: str, size: int) -> None:
        self.world = world
        self.name = name
        self.size = size
        self.ranks: dict[int, Side] = {}
        self.formed = False
        self.broken = False

    def join(self, rank: int, side: Side) -> None:
        """Once all are there everybody is told; a group that stands tells at once."""
        before = self.ranks.get(rank)
        if self.broken or (before is not None and before.name != side.name):
            self.world.after(0.01, side.told, "broken", "", [])
            return
        self.ranks[rank] = side
        if self.formed:
            self.world.after(0.001, side.told, "formed", "", [])
        elif len(self.ranks) == self.size:
            self.formed = True
            for one in self.ranks.values():
                self.world.after(self.world.between(0.001, 0.05), one.told, "formed", "", [])

    def broadcast(self, digest: str, findings: list[Finding]) -> None:
        """Rank 0 has sent everything."""
        for rank, side in self.ranks.items():
            if rank:
                self.world.after(self.world.between(0.001, 0.05), self._arrive, side, digest, findings)

    def _arrive(self, side: Side, digest: str, findings: list[Finding]) -> None:
        if not self.broken:
            side.told("bytes", digest, findings)

    def leave(self) -> None:
        """A rank is gone: no collective can succeed."""
        if self.broken:
            return
        self.broken = True
        for side in self.ranks.values():
            self.world.after(self.world.between(0.001, 1.0), side.told, "broken", "", [])


class Lent:
    """Memory of a publisher. Who has opened it keeps it when its owner dies; when its owner uses it again, its seal is gone."""

    def __init__(self, path: str, digest: str, findings: list[Finding]) -> None:
        self.path = path
        self.digest = digest
        self.findings = findings
        self.sealed = True


class Disks:
    """What outlives processes: process groups by name, snapshots and checkpoints by path (each a digest); and what is lent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rings: dict[str, Ring] = {}
        self.snapshots: dict[str, str] = {}
        self.checkpoints: dict[str, str] = {}
        self.lent: dict[str, Lent] = {}
        self.count = 0

    def ring(self, name: str, size: int) -> Ring:
        ring = self.rings.get(name)
        if ring is None:
            ring = self.rings[name] = Ring(self.world, name, size)
        assert ring.size == size, f"{name}: {size} ranks, and it has {ring.size}"
        return ring

    def lend(self, digest: str, findings: list[Finding]) -> Lent:
        """Memory that can be opened by its path."""
        self.count += 1
        lent = Lent(f"/proc/1/fd/{self.count}", digest, findings)
        self.lent[lent.path] = lent
        return lent

    def take_back(self, lent: Lent) -> None:
        """Its owner uses it for something else."""
        lent.sealed = False
        lent.digest = self.fresh("reused")
        self.lent.pop(lent.path, None)

    def fresh(self, what: str) -> str:
        """A name that was never used."""
        self.count += 1
        return f"{what}-{self.count}"


class Stager:
    """The second process of a worker. It receives weights, and outlives the worker."""

    def __init__(self, disks: Disks, name: str, *, staging: bool = True) -> None:
        self.disks = disks
        self.world = disks.world
        self.name = name
        self.peer = disks.fresh("peer")
        self.worker: SimWorker | None = None
        self.prepare: Prepare | None = None
        self.manifest: list[Tensor] = []
        self.ring: Ring | None = None
        #: digest of what was staged; of what is committed, and kept for a successor
        self.staged = ""
        self.kept = ""
        #: there is memory for a staged transfer
        self.staging = staging
        #: the next bytes arrive damaged
        self.damaged = False
        #: a direct transfer is waited for by the engine
        self.direct: LoadWeights | None = None
        #: what was broadcast to it before that: a collective waits for everybody
        self.early = ""
        #: what the engine has open of a publisher's memory
        self.opened: Lent | None = None
        #: the engine takes weights, and is to go on when it has them
        self.loads = self.resumes = False

    def host(self, worker: "SimWorker") -> None:
        """Its next worker starts: the requests of the one before are over."""
        self.worker, self.prepare, self.direct, self.early = worker, None, None, ""
        self.opened = None
        self.loads = self.resumes = False

    def kill(self) -> None:
        """The process dies, and another one takes its place."""
        ring, prepare, worker, opened, turns = self.ring, self.prepare, self.worker, self.opened, (self.loads, self.resumes)
        self.__init__(self.disks, self.name, staging=self.staging)  # type: ignore[misc]
        self.opened = opened
        self.loads, self.resumes = turns
        if ring is not None:
            ring.leave()
        self.prepare, self.worker = prepare, worker
        if prepare is not None and prepare.transfer != "ipc":
            self._say(Staged(prepare.update, code="engine_error", message="the stager died"))

    def resume(self) -> None:
        """The engine goes on, if it is paused; not in the middle of a load."""
        self.resumes = self.loads
        if self.worker is not None and not self.loads:
            self.worker.engine.generator.resume("weights")

    def _say(self, answer: "Prepared | Joined | Staged | WeightsLoaded | Restored | Inspected") -> None:
        if self.worker is not None and self.worker.alive and not self.worker.engine.dead:
            if isinstance(answer, WeightsLoaded):
                self.loads = False
                if answer.code or self.resumes:
                    self.resume()
            if isinstance(answer, Prepared) and self.prepare is not None and not answer.restart:
                answer.generations = self.prepare.generations
            if isinstance(answer, Staged):
                self.worker.post(LoadPrepared(self.world.now, answer.update, 0.0))
            self.worker.post(WeightsAnswered(self.world.now, answer))

    # --- what the worker asks ------------------------------------------------------------------------------------------

    def run(self, effect: RunWeights) -> None:
        """Do it, after a while."""
        message = effect.message
        if isinstance(message, Prepare):
            self.prepare, self.staged, self.early = message, "", ""
            manifest = bytes(effect.frames[0]) if effect.frames else b""
            self._later(0.02, self._prepare, message, manifest)
        elif isinstance(message, Join):
            self._later(0.01, self._join, message)
        elif isinstance(message, VerifyWeights):
            self._later(0.2, self._verify, message)
        elif isinstance(message, LoadWeights):
            assert self.worker is not None
            engine, load, self.loads = self.worker.engine, partial(self._later, 0.1, self._load, message), True
            if effect.running is None:
                assert not engine.inside, f"{self.name}: weights are taken during work"
                load()
            else:
                assert engine.only_generates, f"{self.name}: weights are taken during batches"
                engine.generator.pause("weights", effect.running, load)
        elif isinstance(message, Restore):
            assert self.worker is not None and not self.worker.engine.inside, f"{self.name}: weights are taken during work"
            self._later(0.5, self._restore, message)
        elif isinstance(message, Committed):
            self._committed(message)
            self.resume()
        elif isinstance(message, ReleaseWeights):
            self.resume()
            self._release(message)
        else:
            self._later(0.1, self._inspect, message)

    def _later(self, most: float, do: "Callable[..., None]", *args: object) -> None:
        worker = self.worker

        def go() -> None:
            if worker is not None and worker is self.worker and worker.alive and not worker.engine.dead:
                do(*args)

        self.world.after(self.world.between(0.0005, most), go)

    @property
    def only_at_start(self) -> bool:
        """Of the engine of its worker."""
        return self.worker is not None and self.worker.profile.only_at_start

    def _mine(self, update: TaskId) -> bool:
        return self.prepare is not None and self.prepare.update == update

    def _prepare(self, message: Prepare, manifest: bytes) -> None:
        if not self._mine(message.update):
            return
        if manifest:
            self.manifest = decode_manifest(manifest)
            if wrong := difference(self.manifest, MODEL, partial=message.partial):
                self._say(Prepared(message.update, code="weights_refused", message=wrong[1], field=wrong[0]))
                return
        elif message.transfer == "checkpoint" and message.path not in self.disks.checkpoints:
            self._say(Prepared(message.update, code="bad_request", message=f"path: {message.path} is not there"))
            return
        if self.only_at_start and message.transfer == "checkpoint":
            self._say(Prepared(message.update, restart=True, digest=self.disks.checkpoints[message.path]))
            return
        if self.only_at_start and message.transfer != "set_version":
            self._say(Prepared(message.update, code="unsupported", message="the engine takes weights only at its start"))
            return
        if message.transfer == "ipc" and message.host != HOST:
            self._say(Prepared(message.update, code="unsupported", message="the publisher is on another host"))
            return
        if message.transfer == "staged" and not self.staging:
            self.prepare = None  # a release of it changes nothing: process groups that stand go on
            why = "no staged transfer: this worker has no stager"
            self._say(Prepared(message.update, code="unsupported", message=why, no_staging=True))
            return
        self._say(Prepared(message.update, peer=self.peer, staging="host"))

    def _verify(self, message: VerifyWeights) -> None:
        if not self._mine(message.update):
            return
        self.opened = lent = self.disks.lent.get(message.regions[0].path)
        if lent is None:
            self._say(Staged(message.update, code="update_aborted", message="there is no such memory"))
        else:
            self._say(Staged(message.update, lent.digest, lent.findings))

    def _join(self, message: Join) -> None:
        if not self._mine(message.update):
            return
        self.ring = ring = self.disks.ring(message.rendezvous, message.world)
        update, peer = message.update, self.peer

        def told(what: str, digest: str, findings: list[Finding]) -> None:
            if self.peer == peer:
                self._told(update, ring, what, digest, findings)

        ring.join(message.rank, Side(self.name, told))

    def _told(self, update: TaskId, ring: Ring, what: str, digest: str, findings: list[Finding]) -> None:
        if ring is not self.ring or not self._mine(update):
            return
        if what == "formed":
            self._say(Joined(update))
        elif what == "broken":
            self.ring = None
            if self.direct is not None:
                self._break_engine()
            elif not self.staged:
                self._say(Staged(update, code="engine_error", message="the process group broke", broken=True))
        else:
            if self.damaged:
                digest, self.damaged = self.disks.fresh("damaged"), False
            if self.direct is not None:
                self._take(self.direct, digest)
            elif self.prepare is not None and self.prepare.transfer == "direct":
                self.early = digest
            else:
                self.staged = digest
                self._say(Staged(update, digest, findings))

    def _break_engine(self) -> None:
        """The content of the engine is unknown now."""
        self.direct = None
        worker = self.worker
        if worker is not None and worker.alive:
            worker.engine.digest = self.disks.fresh("broken")
            worker.engine.crash("the process group broke while the engine took weights")

    def _load(self, message: LoadWeights) -> None:
        if not self._mine(message.update) or self.prepare is None or self.worker is None:
            return
        assert "weights" not in self.worker.engine.asleep, f"{self.name}: takes weights while its weights sleep"
        fault, self.worker.take_fault = self.worker.take_fault, ""
        if fault == "error":
            self._say(WeightsLoaded(message.update, code="engine_error", message="the load failed"))
        elif fault == "crash":
            self.worker.engine.crash("the engine crashed while it took weights")
        elif self.prepare.transfer == "direct":
            self.direct = message
            if self.early:
                self._take(message, self.early)
            elif self.ring is None:
                self._break_engine()
        elif self.prepare.transfer == "ipc":
            self._take_lent(message)
        elif self.prepare.transfer == "checkpoint":
            self._take(message, self.disks.checkpoints[self.prepare.path])
        elif self.prepare.transfer == "set_version":
            self.worker.engine.version = message.version
            self._say(WeightsLoaded(message.update, message.version, self.worker.engine.digest))
        elif not self.staged:
            self._say(WeightsLoaded(message.update, code="engine_error", message="nothing is staged"))
        else:
            self._take(message, self.staged)

    def _take_lent(self, message: LoadWeights) -> None:
        assert self.worker is not None and self.opened is not None
        engine, lent = self.worker.engine, self.opened
        if lent.sealed:
            self._take(message, lent.digest)
        else:
            engine.digest = lent.digest
            engine.crash("the memory that the weights came from was given to something else meanwhile")

    def _take(self, message: LoadWeights, digest: str) -> None:
        assert self.worker is not None and self.prepare is not None
        self.direct = None
        engine = self.worker.engine
        engine.digest = layered(engine.digest, digest) if self.prepare.partial else digest
        engine.version = message.version
        self._say(WeightsLoaded(message.update, message.version, digest))

    def _committed(self, message: Committed) -> None:
        if self._mine(message.update):
            self.prepare = self.opened = None
        if self.staged == message.digest:
            self.kept = self.staged
            if self.prepare is None:  # the engine of an update that goes on loads from that memory
                self.staged = ""
            if message.snapshot:
                self.world.after(self.world.between(0.01, 2.0), self._snapshot, message.snapshot, message.digest)

    def _snapshot(self, path: str, digest: str) -> None:
        if self.kept == digest:
            self.disks.snapshots[path] = digest

    def _release(self, message: ReleaseWeights) -> None:
        if self._mine(message.update):
            self.prepare, self.staged, self.opened = None, "", None
            if self.ring is not None:
                self.ring.leave()
                self.ring = None

    def _restore(self, message: Restore) -> None:
        assert self.worker is not None
        engine, want = self.worker.engine, message.digest
        if self.only_at_start and want != engine.digest:
            engine.crash("other weights are committed than those that the engine started on")
            return
        assert "weights" not in engine.asleep, f"{self.name}: restored while its weights sleep"
        if not want and engine.digest == LOST_WEIGHTS:
            engine.crash("the committed weights are those of the checkpoint; the engine starts with them again")
            return
        if not self.has(message):
            self._say(Restored(message.version, "needs_weights", "no stager, no snapshot, no checkpoint"))
            return
        engine.version, engine.digest = message.version, want
        self.kept = want
        self._say(Restored(message.version, code="", message=""))

    def has(self, message: Restore) -> bool:
        """Whether these weights can be had here."""
        disks, want = self.disks, message.digest
        engine = "" if self.worker is None else self.worker.engine.digest
        files = (disks.snapshots.get(message.snapshot, ""), disks.checkpoints.get(message.path, ""))
        return not want or want in (engine, self.kept, self.staged, *files)

    def _inspect(self, message: Inspect) -> None:
        assert self.worker is not None
        assert "weights" not in self.worker.engine.asleep, f"{self.name}: is asked about weights that sleep"
        self._say(Inspected(message.task, self.worker.engine.digest, [Finding("b", "zero", 3)]))
