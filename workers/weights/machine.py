"""The worker's half of a weight update: what was asked, what was answered, what the engine holds. Pure, a part of `machine`.

How it thinks. One update is open at a time, the one of the latest `prepare`. Each question of it is given to the shell once
(`RunWeights`); a copy of it is answered with the kept answer, or ignored while the first is still with the shell. After each
`accept` all answers of the open update are said again: one of them may be lost with its link, and the coordinator drops copies.

    prepare → prepared    join → joined    (by itself, or: verify →) staged    load → loaded    committed | release

`load` and `restore` need the engine to themselves: they are `wanted` until what is inside has left, and `taking` until
their answer; the machine holds work back meanwhile. A `restore` that comes while another one is taken waits for it.

A higher epoch ends the open update: no commit can follow any more. Before `load` that is a `release`. After it the new
coordinator knows from the journal what was committed: what was staged stays until it says `committed`, `restore` or `prepare`.
In the middle of a direct transfer the worker ends: what is in its engine, nobody knows.
"""

from enginepool.protocol.basis import TaskId
from enginepool.protocol.layout import layered
from enginepool.protocol.updates import (
    Committed,
    Inspected,
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
from enginepool.workers.events import Answered, Asked, Frame, RunWeights, SendToCoordinator, WorkerEffect

#: the answer to each question of an update
_ANSWER: dict[type, type[Prepared | Joined | Staged | WeightsLoaded]] = {
    Prepare: Prepared,
    Join: Joined,
    VerifyWeights: Staged,
    LoadWeights: WeightsLoaded,
}


class WorkerUpdates:
    """What a worker knows about its weights."""

    def __init__(self) -> None:
        #: of the weights in the engine; "" for those of its checkpoint
        self.version = 0
        self.digest = ""
        #: run and version of what a coordinator called committed last
        self.committed: tuple[int, int] = (0, 0)
        #: `version` or `digest` changed in a way that the coordinator has to hear by `ready`
        self.changed = False
        #: the open update
        self.prepare: Prepare | None = None
        #: questions of it that the shell has, or has answered
        self.given: set[type] = set()
        #: its answers, in the order in which they came
        self.answers: dict[type, SendToCoordinator] = {}
        #: what waits for the engine to be empty; what the engine takes now
        self.wanted: LoadWeights | Restore | None = None
        self.taking: LoadWeights | Restore | None = None
        #: the latest update ever prepared; older ones are over
        self.latest: TaskId = (0, 0)
        #: what the engine takes, or took last, is a part over what was there
        self.partial = False
        #: questions that the shell has
        self.inspecting: set[TaskId] = set()

    @property
    def busy(self) -> bool:
        """The engine takes weights, or is about to: no work may enter it."""
        return self.wanted is not None or self.taking is not None

    @property
    def exposed(self) -> bool:
        """The engine takes bytes straight from the publisher: what is in it meanwhile, nobody knows."""
        return isinstance(self.taking, LoadWeights) and self.prepare is not None and self.prepare.transfer == "direct"

    def asked(self, message: Asked, frames: tuple[Frame, ...], epoch: int, *, ready: bool) -> list[WorkerEffect]:
        """The coordinator wants something."""
        if isinstance(message, Prepare):
            return self._prepare(message, frames, epoch, ready)
        if isinstance(message, Join | VerifyWeights | LoadWeights):
            return self._next(message, epoch)
        if isinstance(message, Committed):
            return self._committed(message)
        if isinstance(message, ReleaseWeights):
            return self._release(message.update, message.reason)
        if isinstance(message, Restore):
            # Before the engine is there it cannot; the coordinator says it again when it is.
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
        effects = self._leave_behind()
        self.prepare, self.latest = message, update
        self.given = {Prepare}
        return [*effects, RunWeights(message, frames)]

    def _leave_behind(self) -> list[WorkerEffect]:
        """Another update begins: the open one was committed, if this engine took it and lives, or given up."""
        if self.prepare is None:
            return []
        update, taken = self.prepare.update, WeightsLoaded in self.answers
        if not taken:
            return self._release(update, "another update begins")
        self._close()
        return [RunWeights(Committed(update, self.version, self.digest))]

    def _again(self, update: TaskId, answer: type) -> list[WorkerEffect]:
        """The kept answer, if this is the open update and it has one."""
        mine = self.prepare is not None and self.prepare.update == update and answer in self.answers
        return [self.answers[answer]] if mine else []

    def _next(self, message: Join | VerifyWeights | LoadWeights, epoch: int) -> list[WorkerEffect]:
        kind = type(message)
        if self.prepare is None or self.prepare.update != message.update:
            if message.update[0] != epoch:
                return []
            unknown = "this worker has no such update open"
            return [SendToCoordinator(_ANSWER[kind](message.update, code="update_aborted", message=unknown))]
        if kind in self.given:
            return self._again(message.update, _ANSWER[kind])
        self.given.add(kind)
        if isinstance(message, LoadWeights):
            self.wanted = message
            self.partial = self.prepare.partial
            return []
        return [RunWeights(message)]

    def _committed(self, message: Committed) -> list[WorkerEffect]:
        if message.version != self.version:
            return []
        # Of a checkpoint the coordinator may know a better name than the engine.
        self.digest = message.digest
        self.committed = message.run, message.version
        prepare = self.prepare
        if prepare is not None and (prepare.update == message.update or WeightsLoaded in self.answers):
            # A `committed` that was lost with its link is said again without the update's name.
            message = Committed(prepare.update, message.version, message.digest, message.snapshot)
            self._close()
        return [RunWeights(message)]

    def _release(self, update: TaskId, reason: str) -> list[WorkerEffect]:
        if self.prepare is None or self.prepare.update != update:
            return []
        self._close()
        return [RunWeights(ReleaseWeights(update, reason))]

    def _close(self) -> None:
        self.prepare = None
        self.given = set()
        self.answers.clear()

    def _restore(self, message: Restore) -> list[WorkerEffect]:
        effects: list[WorkerEffect] = []
        if self.prepare is not None and WeightsLoaded in self.answers:
            # Its `release` was lost with a link.
            effects = self._release(self.prepare.update, "other weights are committed")
        if self.taking is None and self._holds(message):
            self._restored(message)
        elif message != self.taking:
            self.wanted = message
        return effects

    def _holds(self, message: Restore) -> bool:
        return (self.version, self.digest) == (message.version, message.digest)

    def _restored(self, message: Restore) -> None:
        """Its engine holds them already."""
        self.wanted = None
        self.committed = message.run, message.version
        self.changed = True

    def take(self) -> list[WorkerEffect]:
        """The engine is empty: what waited for that begins."""
        if isinstance(self.wanted, Restore) and self.taking is None and self._holds(self.wanted):
            self._restored(self.wanted)
        if self.wanted is None or self.taking is not None:
            return []
        self.taking, self.wanted = self.wanted, None
        return [RunWeights(self.taking)]

    def answered(self, answer: Answered, frames: tuple[Frame, ...]) -> list[SendToCoordinator]:
        """The shell has done, or could not do, what it was given. Returns what the coordinator hears."""
        said = SendToCoordinator(answer, frames)
        if isinstance(answer, Inspected):
            self.inspecting.discard(answer.task)
            return [said]
        if isinstance(answer, Restored):
            self.taking = None
            return [said]
        prepare = self.prepare
        mine = prepare is not None and prepare.update == answer.update
        if isinstance(answer, WeightsLoaded):
            self.taking = None
            if not answer.code:
                self.version = answer.version
                self.digest = layered(self.digest, answer.digest) if self.partial else answer.digest
                # An update that is not open any more was of a coordinator that is gone: its successor has to know. So has one
                # that heard on a new link, meanwhile, that the engine takes weights.
                self.changed = self.changed or not mine
        if not mine:
            return []
        self.answers[type(answer)] = said
        return [said]

    def taken(self, version: int, digest: str) -> None:
        """A restore was done."""
        if isinstance(self.taking, Restore):
            self.committed = self.taking.run, self.taking.version
        self.taking = None
        self.version, self.digest = version, digest
        self.changed = True

    def owed(self) -> list[SendToCoordinator]:
        """What the coordinator may not have heard."""
        return list(self.answers.values())

    def new_epoch(self) -> list[WorkerEffect]:
        """Another coordinator: the open update is over."""
        if isinstance(self.wanted, LoadWeights):
            self.wanted = None
        prepare = self.prepare
        if prepare is None:
            return []
        handed = WeightsLoaded in self.answers or isinstance(self.taking, LoadWeights)
        self._close()
        return [] if handed else [RunWeights(ReleaseWeights(prepare.update, "another coordinator has taken over"))]

    def check(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.prepare is not None or not (self.given or self.answers)
        assert LoadWeights in self.given or WeightsLoaded not in self.answers
        assert not isinstance(self.wanted, LoadWeights) or LoadWeights in self.given
