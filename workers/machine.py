"""The worker's decisions as one function: `handle(event) -> list[Effect]`. No clock, socket, thread or engine in here.

How it thinks. A worker serves one coordinator at a time, known by its epoch. On every new link, and when the coordinator is
silent or asks for it, the worker says `register`; `accept` makes the link usable and carries the epoch:

    epoch of accept   what follows
    higher            work of earlier epochs is dropped; send idle, then ready or stage
    the same          the same again, since the first may have been lost with its link; then the answers that were finished
                      while the link was unusable
    lower             ignored: that coordinator has been replaced

Work is taken only in the accepted epoch and only while `ready`. A dropped batch may still be inside the engine, where it takes
room; work of the new epoch is therefore held back here until the last dropped one has left, or two batches could share a
forward budget that was counted for one, and be cut. A batch that comes twice runs once: while it runs the copy is ignored,
afterwards the kept answer is sent again.

A worker whose link was silent for too long is told `expired`. It drops its work as for a higher epoch, takes a new incarnation
and registers again: the engine, and the weights in it, stay. An `external` worker, which no coordinator started, has an owner
that ends it, and waits for a coordinator without a limit.

What an update of the weights asks of a worker is in `updates`; while the engine takes weights, and before that while it empties
for them, work is held back in the same way.

    stage: starting -> loading -> compiling -> ready -> draining, and from each of them the end (`EndProcess`), after which
    nothing has an effect.
"""

from collections.abc import Callable
from typing import Any

from enginepool.protocol.control import Command, Commanded
from enginepool.protocol.messages import (
    Accept,
    Batch,
    Capabilities,
    Drain,
    ErrorReply,
    Exiting,
    Expired,
    Idle,
    Ready,
    Register,
    Stage,
    TaskId,
    Tokenize,
)
from enginepool.workers import events as ev
from enginepool.workers.engine import ran_out_of_memory
from enginepool.workers.events import (
    Asked,
    EndProcess,
    Exit,
    Frame,
    Note,
    RunBatch,
    RunCommand,
    RunTokenize,
    SendToCoordinator,
    WorkerEffect,
)
from enginepool.workers.ledger import Run, TaskLedger, scored, tokenized
from enginepool.workers.weights.machine import WorkerUpdates

#: how often the shell sends `Tick`
TICK_S = 0.25
#: a registered worker that hears nothing for this long says `register` again
SILENCE_S = 5.0
#: a silence of the coordinator that is as long is a line in the worker's log, and so is its end
NOTED_SILENCE_S = 10.0
#: an unanswered `register` is repeated after this
ASK_AGAIN_S = 1.0
#: no event for this long, though ticks are due, means that this process stood still; the coordinator is not blamed for it
STALL_S = 2.0
#: refusals after which this incarnation can never be served
FINAL_REFUSALS = frozenset({"superseded", "forbidden", "unauthorized", "protocol_version", "unknown_group"})


class WorkerMachine:
    """The state of one worker process.

    Args:
        now: the clock at the start; silence is counted from here until a coordinator speaks.
        orphan_s: seconds without a word from a coordinator before the process ends; `accept` replaces it.
        external: `orphan_s` does not count.
        drain_s: how long begun work may take to finish once the worker drains.
    """

    def __init__(
        self,
        incarnation: str,
        group: str,
        *,
        now: float,
        pid: int = 0,
        host: str = "",
        orphan_s: float = 60.0,
        external: bool = False,
        drain_s: float = 10.0,
    ) -> None:
        #: the present one; the first one of this process, and how many it had
        self.incarnation = self.first_incarnation = incarnation
        self.incarnations = 1
        self.external = external
        self.group = group
        self.pid = pid
        self.host = host
        self.orphan_s = orphan_s
        self.drain_s = drain_s
        #: the latest time of any event; never goes back
        self.now = now
        #: the highest epoch accepted; 0 before the first
        self.epoch = 0
        self.linked = False
        #: `accept` came on the present link; implies linked
        self.registered = False
        self.heard_at = now
        #: the log has a line on the present silence
        self.silence_noted = False
        self.asked_at = -ASK_AGAIN_S
        self.stage = "starting"
        self.detail = ""
        #: how often an engine that is started now should halve its budgets
        self.halvings = 0
        #: set once the engine is loaded
        self.capabilities: Capabilities | None = None
        #: the weights in the engine, and what is asked about them
        self.updates = WorkerUpdates()
        #: the batches and texts that it was given
        self.work = TaskLedger()
        self.drain_until: float | None = None
        self.drain_reason = ""
        self.ended: EndProcess | None = None
        self._handlers: dict[type[ev.WorkerEvent], Callable[[Any], list[WorkerEffect]]] = {
            ev.FromCoordinator: self._received,
            ev.EngineBatchDone: lambda event: self._finished(event.batch, scored(event)),
            ev.TextDone: lambda event: self._finished(event.task, tokenized(event)),
            ev.WorkFailed: lambda event: self._finished(event.task, self.work.failed(event, self.updates.version)),
            ev.CommandDone: lambda event: self._allowed([SendToCoordinator(event.answer)]),
            ev.WorkerTick: self._tick,
            ev.Connected: self._connected,
            ev.Disconnected: self._disconnected,
            ev.EngineStage: self._engine_stage,
            ev.EngineReady: self._engine_ready,
            ev.EngineLost: self._engine_lost,
            ev.WeightsAnswered: lambda event: self._weights_reported(self.updates.answered(event)),
            ev.LoadPrepared: lambda event: self._weights_reported(self.updates.load_prepared(event)),
            ev.WeightsReceived: lambda event: self._weights_reported(self.updates.received(event)),
            ev.StagerLost: lambda event: self._weights_reported(self.updates.stager_lost(event.reason)),
            ev.WeightsTaken: self._weights_taken,
            ev.DrainWanted: lambda event: self._drain(event.reason),
            ev.LifelineClosed: self._lifeline_closed,
        }

    def __repr__(self) -> str:
        state = "ended" if self.ended else self.stage
        return (
            f"<WorkerMachine {self.group}/{self.incarnation} {state} epoch={self.epoch}"
            f" {'registered' if self.registered else 'linked' if self.linked else 'unlinked'} {self.work}>"
        )

    def handle(self, event: ev.WorkerEvent) -> list[WorkerEffect]:
        """Take one event; return what is to be done, in order."""
        if self.ended is not None:
            return []
        if event.now > self.now:
            gap = event.now - self.now
            if gap > STALL_S:
                # A sum of differences is rounded, and may lie after the clock.
                self.heard_at = min(self.heard_at + gap, event.now)
                self.asked_at = min(self.asked_at + gap, event.now)
            self.now = event.now
        return self._handlers[type(event)](event)

    # --- the link -------------------------------------------------------------------------------------------------------

    def _connected(self, event: ev.Connected) -> list[WorkerEffect]:
        self.linked = True
        self.registered = False
        return self._register()

    def _disconnected(self, event: ev.Disconnected) -> list[WorkerEffect]:
        self.linked = self.registered = False
        return []

    def _register(self) -> list[WorkerEffect]:
        self.asked_at = self.now
        me = Register(self.group, self.incarnation, pid=self.pid, host=self.host, epoch=self.epoch)
        return [SendToCoordinator(me)]

    def _ask(self) -> list[WorkerEffect]:
        """Register, unless the last one may still be answered."""
        return self._register() if self.now - self.asked_at >= ASK_AGAIN_S else []

    def _received(self, event: ev.FromCoordinator) -> list[WorkerEffect]:
        silent, self.heard_at = self.now - self.heard_at, self.now
        if self.silence_noted:
            self.silence_noted = False
            return [Note(f"the coordinator speaks again, after {silent:.0f} s"), *self._act_on(event)]
        return self._act_on(event)

    def _act_on(self, event: ev.FromCoordinator) -> list[WorkerEffect]:
        message = event.message
        if isinstance(message, Batch):
            return self._work(message.batch, len(message.parts), RunBatch(message, event.frames, event.unreadable))
        if isinstance(message, Tokenize):
            return self._work(message.task, None, RunTokenize(message, event.frames, event.unreadable))
        if isinstance(message, Accept):
            return self._accept(message)
        if isinstance(message, ErrorReply):
            return self._refused(message)
        if isinstance(message, Expired):
            return self._expired(message)
        if isinstance(message, Drain):
            return self._drain("the coordinator asked for it")
        if isinstance(message, Command):
            return self._command(message)
        if isinstance(message, Asked):
            return self._weights(message, event.frames)
        return []

    def _accept(self, message: Accept) -> list[WorkerEffect]:
        if message.epoch < self.epoch:
            return [Note(f"ignored: accept of epoch {message.epoch}, a coordinator of epoch {self.epoch} was heard")]
        self.linked = self.registered = True
        self.orphan_s = message.orphan_s
        self.halvings = message.halvings
        effects: list[WorkerEffect] = []
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            effects += self._drop_all("a coordinator ended")
            if self.ended:
                return effects
        effects += [SendToCoordinator(Idle(self.epoch)), self._say_stage(), *self.work.unsaid(), *self.updates.kept_answers()]
        return effects + self._end_if_drained()

    def _drop_all(self, why: str) -> list[WorkerEffect]:
        """Drop what was begun for a coordinator that does not know this worker any more."""
        self.work.drop()
        if self.updates.exposed:
            # The rest of what the engine receives, and whether it is committed, will never be known.
            reason = f"{why} while the engine took weights from its publisher"
            return [SendToCoordinator(Exiting(reason, failed=True)), *self._end(Exit.ENGINE_DIED, reason, close=False)]
        return list(self.updates.new_epoch())

    def _expired(self, message: Expired) -> list[WorkerEffect]:
        """Only the link failed: go on under a new incarnation. A repeated message names an older one."""
        if message.incarnation != self.incarnation:
            return []
        effects = self._drop_all(f"the coordinator gave up {self.incarnation}")
        if self.ended:
            return effects
        self.registered = False
        self.incarnations += 1
        self.incarnation = f"{self.first_incarnation}+{self.incarnations}"
        line = f"{message.incarnation} was given up: {message.reason}; registering again as {self.incarnation}"
        return [*effects, Note(line), *self._register()]

    def _refused(self, message: ErrorReply) -> list[WorkerEffect]:
        if message.code == "hello_required":
            self.registered = False
            return self._ask()
        if message.code in FINAL_REFUSALS:
            return self._end(Exit.REFUSED, f"refused by the coordinator: {message.code}: {message.message}", close=False)
        return [Note(f"the coordinator reports {message.code}: {message.message}")]

    # --- work -----------------------------------------------------------------------------------------------------------

    def _work(self, task: TaskId, parts: int | None, run: Run) -> list[WorkerEffect]:
        work = self.work
        if task in work.running or task in work.unsent:
            return []
        if task in work.answers:
            return [work.answers[task]] if self.registered else []
        if self.stage == "draining":
            return [SendToCoordinator(ErrorReply("shutting_down", f"this worker drains and takes no work: {task}", id=task[1]))]
        if task[0] != self.epoch or self.stage != "ready":
            why = f"work {task} is refused: epoch {self.epoch} is accepted here, stage {self.stage}"
            refusal: list[WorkerEffect] = [SendToCoordinator(ErrorReply("hello_required", why, id=task[1]))]
            return refusal if self.registered else refusal + self._ask()
        return work.begin(task, parts, run, hold=self.updates.busy)

    def _command(self, message: Command) -> list[WorkerEffect]:
        """A command that comes twice runs twice: the first answer may be lost with its link."""
        if message.task[0] != self.epoch or self.stage != "ready":
            failure = Commanded(message.task, "pool_down", f"not ready: {self.stage}")
            return [SendToCoordinator(failure)] if self.registered else []
        return [RunCommand(message)]

    def _finished(self, task: TaskId, answer: SendToCoordinator) -> list[WorkerEffect]:
        """`task` has left the engine. Its answer is sent, kept or, when its epoch is over, dropped."""
        work = self.work
        if task in work.leaving:
            work.leaving.remove(task)
            return [] if work.leaving else self._emptied()
        if not work.finish(task, answer, said=self.registered):
            return []
        return [answer, *self._end_if_drained()] if self.registered else self._end_if_drained()

    def _emptied(self) -> list[WorkerEffect]:
        """Nothing that nobody waits for is inside the engine: weights first, then the work that was held back."""
        effects = self._allowed(self.updates.load())
        if not self.updates.busy:
            effects += self.work.release()
        return effects

    # --- weights --------------------------------------------------------------------------------------------------------

    def _weights(self, message: Asked, frames: tuple[Frame, ...]) -> list[WorkerEffect]:
        effects = self._allowed(self.updates.asked(message, frames, self.epoch, ready=self.stage == "ready"))
        if self.updates.waiting is not None:
            # Nobody waits for the answers of what is inside: it runs again on the new weights.
            self.work.drop()
        return effects + self._resumed()

    def _allowed(self, effects: list[WorkerEffect]) -> list[WorkerEffect]:
        """Without a usable link nothing is said; what is owed then is said after `accept`."""
        return effects if self.registered else [effect for effect in effects if not isinstance(effect, SendToCoordinator)]

    def _weights_reported(self, effects: list[SendToCoordinator]) -> list[WorkerEffect]:
        return self._allowed(list(effects)) + self._resumed()

    def _weights_taken(self, event: ev.WeightsTaken) -> list[WorkerEffect]:
        self.updates.restored(event)
        return self._resumed()

    def _resumed(self) -> list[WorkerEffect]:
        """The engine may have other weights now, and be free again."""
        effects = [] if self.work.leaving else self._emptied()
        if not self.updates.changed:
            return effects
        self.updates.changed = False
        return [self._say_stage(), *effects] if self.registered else effects

    # --- the engine -----------------------------------------------------------------------------------------------------

    def _say_stage(self) -> SendToCoordinator:
        if self.stage == "ready" and self.updates.busy:
            # Work that is sent now would wait here, and run on weights that nobody expected.
            self.updates.changed = True
            return SendToCoordinator(Stage("loading", "takes weights"))
        if self.stage == "ready" and self.capabilities is not None:
            return SendToCoordinator(
                Ready(self.capabilities, self.updates.version, self.updates.digest, self.updates.committed)
            )
        return SendToCoordinator(Stage(self.stage, self.detail))  # pyright: ignore[reportArgumentType]

    def _engine_stage(self, event: ev.EngineStage) -> list[WorkerEffect]:
        if self.stage in ("ready", "draining"):
            return []
        self.stage, self.detail = event.stage, event.detail
        return [self._say_stage()] if self.registered else []

    def _engine_ready(self, event: ev.EngineReady) -> list[WorkerEffect]:
        self.capabilities = event.capabilities
        self.updates.version, self.updates.digest = event.version, event.digest
        if self.stage == "draining":
            return []
        self.stage, self.detail = "ready", ""
        return [self._say_stage()] if self.registered else []

    def _engine_lost(self, event: ev.EngineLost) -> list[WorkerEffect]:
        worked = self.stage in ("compiling", "ready", "draining") and not self.updates.busy
        memory = worked and ran_out_of_memory(event.reason)
        bye = SendToCoordinator(Exiting(event.reason, failed=True, permanent=event.unusable, out_of_memory=memory))
        code = Exit.UNUSABLE if event.unusable else Exit.OUT_OF_MEMORY if memory else Exit.ENGINE_DIED
        return [bye, *self._end(code, event.reason, close=False)]

    # --- the end --------------------------------------------------------------------------------------------------------

    def _drain(self, reason: str) -> list[WorkerEffect]:
        if self.drain_until is not None:
            return []
        self.drain_until = self.now + self.drain_s
        self.drain_reason = reason
        self.stage, self.detail = "draining", reason
        if self.registered:
            return [self._say_stage(), *self._end_if_drained()]
        return self._end_if_drained()

    def _end_if_drained(self) -> list[WorkerEffect]:
        if self.drain_until is None:
            return []
        owed = self.work.owed
        if owed and self.now < self.drain_until:
            return []
        reason = f"drained: {self.drain_reason}"
        if owed:
            reason += f"; {owed} unfinished after {self.drain_s:g} s"
        return [SendToCoordinator(Exiting(reason)), *self._end(Exit.DRAINED, reason, close=True)]

    def _lifeline_closed(self, event: ev.LifelineClosed) -> list[WorkerEffect]:
        return self._end(Exit.OWNER_GONE, "the process that owns this worker is gone", close=False)

    def _tick(self, event: ev.WorkerTick) -> list[WorkerEffect]:
        silent = self.now - self.heard_at
        if silent >= self.orphan_s and not self.external:
            return self._end(Exit.ORPHANED, f"no word from a coordinator for {self.orphan_s:g} s", close=True)
        return self._note_silence(silent) + self._keep_up()

    def _note_silence(self, silent: float) -> list[WorkerEffect]:
        if silent < NOTED_SILENCE_S or self.silence_noted:
            return []
        self.silence_noted = True
        then = "keeps its model and waits" if self.external else f"ends after {self.orphan_s:g} s of silence"
        return [Note(f"no word from a coordinator for {silent:.0f} s: this worker {then}")]

    def _keep_up(self) -> list[WorkerEffect]:
        """End what has drained; register where the coordinator is to be asked."""
        effects = self._end_if_drained()
        if effects or not self.linked:
            return effects
        wait = SILENCE_S if self.registered else ASK_AGAIN_S
        since = self.now - (max(self.heard_at, self.asked_at) if self.registered else self.asked_at)
        return self._register() if since >= wait else []

    def _end(self, code: Exit, reason: str, *, close: bool) -> list[WorkerEffect]:
        self.ended = EndProcess(code, reason, close)
        return [self.ended]

    def check(self) -> None:
        """Raise AssertionError when an invariant of the state does not hold."""
        work = self.work
        work.check(self.epoch)
        self.updates.check()
        assert not self.registered or self.linked
        assert work.leaving or self.updates.busy or not work.held, "work is held back and nothing is leaving"
        assert self.updates.loading is None or not work.leaving, "weights are taken beside work"
        assert self.updates.loading is None or work.running.keys() == work.held.keys(), "weights are taken beside work"
        assert self.updates.waiting is None or work.leaving or self.updates.loading, "weights wait for nothing"
        assert not self.registered or not work.unsent, "the link is usable and answers are not sent"
        assert self.stage != "ready" or self.capabilities is not None
        assert (self.stage == "draining") == (self.drain_until is not None)
        assert self.capabilities is not None or not work.running
        assert self.heard_at <= self.now and self.asked_at <= self.now
