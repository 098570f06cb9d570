"""What a worker knows about its weights, and the one state machine of a weight update in a worker. Pure, a part of `machine`.

One update is open at a time, the one of the latest `prepare`. Each request of it is given to the executor once (`RunWeights`).
A repeated request is answered with the kept answer, or ignored while the executor still has the first. After each `accept` all
answers of the open update are sent again: one of them may be lost with its link, and the coordinator drops copies.

    request     what the executor reports                                  answer
    prepare     `WeightsAnswered`, with what the engine will load          prepared
    join        `WeightsAnswered`                                          joined
                `WeightsAnswered` with `staged` and `LoadPrepared`,
                in any order                                               staged, when both are there
                `StagerLost`, before the engine loads                      staged, with an error
    verify      `WeightsAnswered`, with the opened regions                 staged
    load        `WeightsAnswered`                                          loaded; with an error, a paused engine goes on
    restore     `WeightsAnswered`                                          `ready` with its version, or restored, with an error
    committed   nothing
    release     nothing

`load` and `restore` need an empty engine: they are `waiting` until the work inside has left, and `loading` until their answer.
The machine holds work back meanwhile. With `generations` of `prepare`, generations stay: the executor pauses the engine for the
`load`, and sends tokens again with `committed` or `release`. A `restore` that arrives during another one waits for it.

A higher epoch ends the open update, which can no longer be committed. Before `load` that is a `release`. After `load` the new
coordinator knows from the journal what was committed: staged bytes stay until it says `committed`, `restore` or `prepare`.
In the middle of a direct transfer the worker ends, because the content of its engine is unknown.
"""

from dataclasses import replace
from typing import Any

from enginepool.protocol.basis import TaskId
from enginepool.protocol.capabilities import Capabilities
from enginepool.protocol.layout import layered
from enginepool.protocol.messages.control import MemoryTag
from enginepool.protocol.messages.tasks import Ready
from enginepool.protocol.messages.weight_reports import Inspected
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
from enginepool.workers.events import (
    Asked,
    CommandDone,
    Frame,
    LoadPrepared,
    ResumeEngine,
    RunWeights,
    SendToCoordinator,
    WeightsAnswered,
    WeightsReport,
    WorkerEffect,
)
from enginepool.workers.weights.worker_update import Answer, WorkerUpdate

#: the answer to each request of an update
_ANSWER: dict[type, type[Answer]] = {Prepare: Prepared, Join: Joined, VerifyWeights: Staged, LoadWeights: WeightsLoaded}


class WorkerUpdates:
    """What a worker knows about its weights."""

    def __init__(self) -> None:
        #: of the weights in the engine; "" for those of its checkpoint
        self.version, self.digest = 0, ""
        #: run and version of the weights that a coordinator called committed last
        self.committed: tuple[int, int] = (0, 0)
        #: the coordinator has to hear by `ready` that `version` or `digest` changed
        self.changed = False
        self.update: WorkerUpdate | None = None
        #: the request that waits for the engine to be empty; the one that the engine runs now
        self.waiting: LoadWeights | Restore | None = None
        self.loading: LoadWeights | Restore | None = None
        #: the latest update ever prepared; older ones are over
        self.latest: TaskId = (0, 0)
        #: the latest load brings a part of the weights
        self.partial = False
        #: the name of the engine's side of a process group in direct transfer, while it may still be in one
        self.peer = ""
        #: inspections that the executor has
        self.inspecting: set[TaskId] = set()

    def memory_changed(self, event: CommandDone) -> None:
        """Memory of the engine was released or taken back, perhaps; weights that were lost with it mean nothing from now on."""
        self.changed = self.changed or event.asleep is not None
        if isinstance(self.waiting, Restore) and "weights" in (event.asleep or ()):
            self.waiting = None
        if event.lost_weights:
            self.version, self.digest = 0, LOST_WEIGHTS

    def ready(self, can: Capabilities, asleep: list[MemoryTag], adapters: tuple[str, ...]) -> Ready:
        """What the coordinator hears of an engine that is loaded."""
        return Ready(can, self.version, self.digest, self.committed, asleep, [*adapters])

    @property
    def busy(self) -> bool:
        """The engine loads weights, or is about to: no work may enter it."""
        return self.waiting is not None or self.loading is not None

    @property
    def keeps_generations(self) -> bool:
        """What waits for the engine is a load during which generations stay in it."""
        return isinstance(self.waiting, LoadWeights) and self.update is not None and self.update.prepare.generations != "abort"

    def gives_up(self, message: Asked) -> bool:
        """It ends an update whose weights a paused engine may have: what that would generate is not wanted."""
        mine = self.open(message.update) if isinstance(message, ReleaseWeights) else None
        return mine is not None and (WeightsLoaded in mine.answers or isinstance(self.loading, LoadWeights))

    @property
    def exposed(self) -> bool:
        """The engine receives bytes straight from the publisher: its content is unknown meanwhile."""
        return isinstance(self.loading, LoadWeights) and self.update is not None and self.update.prepare.transfer == "direct"

    def open(self, update: TaskId) -> WorkerUpdate | None:
        """The open update, if it is this one."""
        return self.update if self.update is not None and self.update.prepare.update == update else None

    # --- requests of the coordinator ------------------------------------------------------------------------------------

    def asked(self, message: Asked, frames: tuple[Frame, ...], epoch: int, *, ready: bool) -> list[WorkerEffect]:
        """The coordinator has a request."""
        if isinstance(message, Prepare):
            return self._prepare(message, frames, epoch, ready)
        if isinstance(message, Join | VerifyWeights | LoadWeights):
            return self._next(message, epoch)
        if isinstance(message, Committed):
            return self._committed(message)
        if isinstance(message, ReleaseWeights):
            return self._release(message.update, message.reason)
        if isinstance(message, Restore):
            # The engine cannot before it is ready, or while its weights sleep; the coordinator repeats the request then.
            return self._restore(message) if ready else []
        if message.task in self.inspecting:
            return []
        self.inspecting.add(message.task)
        return [RunWeights(message, frames)]

    def _prepare(self, message: Prepare, frames: tuple[Frame, ...], epoch: int, ready: bool) -> list[WorkerEffect]:
        update = message.update
        if update <= self.latest:
            return self._again(update, Prepared)
        if update[0] != epoch or not ready:
            return [SendToCoordinator(Prepared(update, code="shutting_down", message="this worker is not ready in that epoch"))]
        effects: list[WorkerEffect] = []
        if self.update is not None:
            before = self.update.prepare.update
            if WeightsLoaded in self.update.answers:
                # This engine loaded it and lives: it was committed.
                effects = [RunWeights(Committed(before, self.version, self.digest), update=self._close())]
            else:
                effects = self._release(before, "another update begins")
        self.update, self.latest = WorkerUpdate(message, self.peer), update
        return [*effects, RunWeights(message, frames, self.update)]

    def _again(self, update: TaskId, kind: type[Answer]) -> list[WorkerEffect]:
        """The kept answer, if this is the open update and it has one."""
        mine = self.open(update)
        return [SendToCoordinator(mine.answers[kind])] if mine is not None and kind in mine.answers else []

    def _next(self, message: Join | VerifyWeights | LoadWeights, epoch: int) -> list[WorkerEffect]:
        kind, update = type(message), self.open(message.update)
        if update is None:
            if message.update[0] != epoch:
                return []
            unknown = "this worker has no such update open"
            return [SendToCoordinator(_ANSWER[kind](message.update, code="update_aborted", message=unknown))]
        if kind in update.requested:
            return self._again(message.update, _ANSWER[kind])
        update.requested.add(kind)
        if isinstance(message, LoadWeights):
            self.waiting = message
            self.partial = update.prepare.partial
            return []
        if isinstance(message, Join) and update.prepare.transfer == "direct":
            update.weights = replace(update.weights, group=message.rendezvous)
        return [RunWeights(message, (), update)]

    def _committed(self, message: Committed) -> list[WorkerEffect]:
        if message.version != self.version:
            return []
        # The coordinator may know a better digest of a checkpoint than the engine.
        self.digest = message.digest
        self.committed = message.run, message.version
        update = self.update
        if update is None or not (update.prepare.update == message.update or WeightsLoaded in update.answers):
            return [RunWeights(message)]
        # A `committed` that was lost with its link is repeated without the update's name.
        message = Committed(update.prepare.update, message.version, message.digest, message.snapshot)
        return [RunWeights(message, update=self._close())]

    def _release(self, update: TaskId, reason: str) -> list[WorkerEffect]:
        if self.open(update) is None:
            return []
        return [RunWeights(ReleaseWeights(update, reason), update=self._close())]

    def _close(self) -> WorkerUpdate | None:
        """The update is committed or aborted."""
        update, self.update = self.update, None
        if update is not None:
            update.closed = True
            if update.joins_engine:
                self.peer = ""  # which group the engine will be in is unknown
        return update

    def _restore(self, message: Restore) -> list[WorkerEffect]:
        effects: list[WorkerEffect] = []
        if self.update is not None and WeightsLoaded in self.update.answers:
            # Its `release` was lost with a link.
            effects = self._release(self.update.prepare.update, "other weights are committed")
        if self.loading is None and self._has(message):
            self._restored(message)
        elif message != self.loading:
            self.waiting = message
        return effects

    def _has(self, message: Restore) -> bool:
        return (self.version, self.digest) == (message.version, message.digest)

    def _restored(self, message: Restore) -> None:
        """The engine has these weights already."""
        self.waiting = None
        self.committed = message.run, message.version
        self.changed = True

    def load(self, *, generates: bool = False) -> list[WorkerEffect]:
        """The engine is empty, or `generates` what may stay in it: what waited for that begins."""
        request = self.waiting
        if isinstance(request, Restore) and self.loading is None and self._has(request):
            self._restored(request)
            return []
        if request is None or self.loading is not None:
            return []
        keeps, self.waiting = self.keeps_generations, None
        update = self.update
        if update is not None and isinstance(request, LoadWeights) and (missing := update.missing()):
            return list(self._answer(update, WeightsLoaded(request.update, code="update_aborted", message=missing)))
        self.loading = request
        running: Any = update.prepare.generations if update is not None and keeps and generates else None
        return [RunWeights(request, (), update, running)]

    # --- reports of the executor ----------------------------------------------------------------------------------------

    def reported(self, event: WeightsReport) -> list[SendToCoordinator]:
        """The executor reports. Returns what the coordinator hears."""
        if isinstance(event, WeightsAnswered):
            return self._answered(event)
        return self._load_prepared(event) if isinstance(event, LoadPrepared) else self._stager_lost(event.reason)

    def _answered(self, event: WeightsAnswered) -> list[SendToCoordinator]:
        """A request was carried out, or could not be."""
        answer = event.answer
        if isinstance(answer, Inspected):
            self.inspecting.discard(answer.task)
            return [SendToCoordinator(answer, event.frames)]
        if isinstance(answer, Restored):
            return self._restore_over(answer, event.found)
        update = self.open(answer.update)
        if isinstance(answer, WeightsLoaded):
            self.loading = None
            if not answer.code:
                self.version = answer.version
                self.digest = layered(self.digest, answer.digest) if self.partial else answer.digest
                # A closed update belonged to a coordinator that is gone: its successor has to know. So has a coordinator that
                # heard on a new link, meanwhile, that the engine loads weights.
                self.changed = self.changed or update is None
        if update is None:
            return []
        if event.weights is not None:
            update.weights = event.weights
        if isinstance(answer, Staged):
            update.received = answer
            return self._staged(update)
        said = self._answer(update, answer)
        if isinstance(answer, Prepared) and update.prepare.transfer == "direct" and not answer.code:
            self.peer = answer.peer
        if isinstance(answer, Joined):
            if update.prepare.transfer == "direct" and answer.code:
                self.peer = ""
            said += self._staged(update)
        return said

    def _answer(self, update: WorkerUpdate, answer: Answer) -> list[SendToCoordinator]:
        update.answers[type(answer)] = answer
        return [SendToCoordinator(answer)]

    def _load_prepared(self, event: LoadPrepared) -> list[SendToCoordinator]:
        """The engine has prepared a load, or cannot."""
        update = self.open(event.update)
        if update is None:
            return []
        update.prepared_s = event.seconds
        return self._staged(update)

    def _staged(self, update: WorkerUpdate) -> list[SendToCoordinator]:
        """`staged`: with an error at once, else as soon as the engine has prepared its load, and after `joined`."""
        received = update.received
        if received is None or Staged in update.answers:
            return []
        joins = Join in update.requested and not update.succeeded(Joined)
        return self._answer(update, received) if received.code or not (joins or update.prepared_s is None) else []

    def _stager_lost(self, reason: str) -> list[SendToCoordinator]:
        """The stager is gone. Bytes that it had received are lost too, unless the engine loads them already."""
        update, staged = self.update, None if self.update is None else self.update.answers.get(Staged)
        if update is None or update.prepare.transfer != "staged" or not update.succeeded(Joined):
            return []
        loads = LoadWeights in update.requested and not isinstance(self.waiting, LoadWeights)
        if loads or (staged is not None and staged.code):
            return []
        return self._answer(update, Staged(update.prepare.update, code="update_aborted", message=reason))

    def _restore_over(self, answer: Restored, found: str | None) -> list[SendToCoordinator]:
        """A restore was done, which `ready` says; or not, and the answer says why. `found` belongs to no version."""
        request, self.loading = self.loading, None
        if found is not None:
            self.version, self.digest = 0, found
        if answer.code or not isinstance(request, Restore):
            return [SendToCoordinator(answer)]
        self.version, self.digest = request.version, request.digest
        self.committed = request.run, request.version
        self.changed = True
        return []

    # --- links and epochs -----------------------------------------------------------------------------------------------

    def kept_answers(self) -> list[SendToCoordinator]:
        """Answers that the coordinator may not have heard."""
        return [] if self.update is None else [SendToCoordinator(answer) for answer in self.update.answers.values()]

    def new_epoch(self) -> list[WorkerEffect]:
        """Another coordinator: the open update is over."""
        self.waiting = None if isinstance(self.waiting, LoadWeights) else self.waiting
        if self.update is None:
            return []
        if WeightsLoaded in self.update.answers or isinstance(self.loading, LoadWeights):
            self._close()
            return [ResumeEngine()]
        return self._release(self.update.prepare.update, "another coordinator has taken over")
