"""The worker's decisions as one function: `handle(event) -> list[Effect]`. No clock, socket, thread or engine in here.

A worker serves one coordinator at a time, known by its epoch. It sends `register` on every new link, and when the coordinator
is silent or asks for it. `accept` makes the link usable and carries the epoch:

    epoch of accept   what follows
    higher            work of earlier epochs is dropped; idle is sent, then ready or stage
    the same          the same messages again, since the first may be lost; then answers that were finished without a link
    lower             ignored: that coordinator has been replaced

Work is accepted only in this epoch and only while `ready`. A dropped batch may still be inside the engine. Work of the new
epoch waits until the last dropped batch has left: two batches in one forward would exceed the budget of one. A batch that is
delivered twice runs once: its copy is ignored while it runs, and answered with the kept answer afterwards. While the engine
loads weights (`updates`), and before that while it empties for them, work waits in the same way.

A generation is work too, and its tokens are sent as they come. It ends with the link, on which a stop for it may be lost: the
coordinator starts others on a new link. The engine is told to drop a stopped one; only new weights wait until it has left.

A worker whose link was silent for too long receives `expired`. It drops its work as for a higher epoch, takes a new incarnation
and registers again; the engine and its weights stay. An `external` worker, which no coordinator started, has an owner that ends
it, and waits for a coordinator without a limit.

    stage: starting -> loading -> compiling -> ready -> draining; any of them -> the end (`EndProcess`), after which no event
    has an effect.
"""

from collections.abc import Callable
from typing import Any, get_args

from enginepool.protocol import messages as wire
from enginepool.protocol.messages.control import Command
from enginepool.workers import events as ev
from enginepool.workers.adapter_state import AdapterState
from enginepool.workers.draining import Draining
from enginepool.workers.events import SendToCoordinator, WorkerEffect, farewell
from enginepool.workers.ledger import Run, TaskLedger
from enginepool.workers.memory_state import MemoryState
from enginepool.workers.silence import CoordinatorSilence
from enginepool.workers.weights.invariants import check_updates
from enginepool.workers.weights.machine import WorkerUpdates

#: how often the shell sends `Tick`
TICK_S = 0.25
#: refusals after which this incarnation can never be served
FINAL_REFUSALS = frozenset({"superseded", "forbidden", "unauthorized", "protocol_version", "unknown_group"})


class WorkerMachine:
    """The state of one worker process.

    Args:
        now: the clock at the start; silence is counted from here until a coordinator speaks.
        orphan_s, external: as `CoordinatorSilence` has them.
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
        self.group = group
        self.pid, self.host = pid, host
        #: the latest time of any event; never goes back
        self.now = now
        #: the highest epoch accepted; 0 before the first
        self.epoch = 0
        self.linked = False
        #: `accept` came on the present link; implies linked
        self.registered = False
        self.silence = CoordinatorSilence(now, orphan_s, external=external)
        self.stage, self.detail = "starting", ""
        #: how often an engine that is started now should halve its budgets; whether it leaves memory for staged updates by need
        self.halvings, self.staged = 0, False
        #: set once the engine is loaded
        self.capabilities: wire.Capabilities | None = None
        #: the weights in the engine, and what is asked about them; what of its memory is released; its LoRA adapters
        self.updates, self.memory, self.adapters = WorkerUpdates(), MemoryState(), AdapterState()
        #: the batches, texts and generations that it was given
        self.work = TaskLedger()
        self.draining = Draining(drain_s)
        self.ended: ev.EndProcess | None = None
        self._handlers: dict[type[ev.WorkerEvent], Callable[[Any], list[WorkerEffect]]] = {
            ev.FromCoordinator: self._received,
            ev.WorkDone: lambda event: self._finished(event.task, SendToCoordinator(event.answer, event.frames)),
            ev.StepsDone: self._generated,
            ev.GenerationLeft: self._generation_left,
            **dict.fromkeys(get_args(ev.PassedOn), lambda e: self._allowed([SendToCoordinator(e.message, e.frames)])),
            ev.CommandDone: self._commanded,
            ev.WorkerTick: self._tick,
            ev.Connected: self._connected,
            ev.Disconnected: self._disconnected,
            ev.EngineStage: self._engine_stage,
            ev.EngineReady: self._engine_ready,
            ev.EngineLost: self._engine_lost,
            **dict.fromkeys(get_args(ev.WeightsReport), self._weights_reported),
            ev.DrainWanted: lambda event: self._drain(event.reason),
            ev.LifelineClosed: lambda _: self._end(ev.Exit.OWNER_GONE, "its owner is gone", close=False),
        }
        self._messages = self._message_handlers()

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
            self.silence.pass_time(self.now, event.now)
            self.now = event.now
        return self._handlers[type(event)](event)

    def _connected(self, event: ev.Connected) -> list[WorkerEffect]:
        self.linked, self.registered = True, False
        return [*self.work.stop_all(), *self._register()]

    def _disconnected(self, event: ev.Disconnected) -> list[WorkerEffect]:
        self.linked = self.registered = False
        return [*self.work.stop_all(), *self._end_if_drained()]

    def _register(self) -> list[WorkerEffect]:
        self.silence.asked_at = self.now
        me = wire.Register(self.group, self.incarnation, pid=self.pid, host=self.host, epoch=self.epoch)
        return [SendToCoordinator(me)]

    def _ask(self) -> list[WorkerEffect]:
        return self._register() if self.silence.may_ask(self.now) else []

    def _received(self, event: ev.FromCoordinator) -> list[WorkerEffect]:
        line = self.silence.end(self.now)
        act = self._messages.get(type(event.message))
        effects = act(event, event.message) if act is not None else []
        return [ev.Note(line), *effects] if line else effects

    def _message_handlers(self) -> dict[type[wire.Message], Callable[[ev.FromCoordinator, Any], list[WorkerEffect]]]:
        return {
            wire.Batch: lambda e, m: self._work(m.batch, ev.RunBatch(m, e.frames, e.unreadable)),
            wire.Tokenize: lambda e, m: self._work(m.task, ev.RunTokenize(m, e.frames, e.unreadable)),
            wire.StartGeneration: lambda e, m: self._start(m, ev.RunGeneration(m, e.frames, e.unreadable)),
            wire.StopGeneration: lambda _, m: self.work.stop(m.epoch, m.tasks, self.updates.waiting) + self._end_if_drained(),
            wire.Accept: lambda _, m: self._accept(m),
            wire.ErrorReply: lambda _, m: self._refused(m),
            wire.Expired: lambda _, m: self._expired(m),
            wire.Drain: lambda _, m: self._drain("the coordinator asked for it"),
            Command: lambda _, m: self._allowed([self.memory.take(m, self.epoch, self.stage, self.updates, self.work)]),
            wire.ChangeAdapter: lambda _, m: self._allowed(self.adapters.take(m, self.epoch, self.stage)),
            **dict.fromkeys(get_args(ev.Asked), lambda e, m: self._weights(m, e.frames)),
        }

    def _accept(self, message: wire.Accept) -> list[WorkerEffect]:
        if message.epoch < self.epoch:
            return [ev.Note(f"ignored: accept of epoch {message.epoch}, a coordinator of epoch {self.epoch} was heard")]
        self.linked = self.registered = True
        self.silence.orphan_s = message.orphan_s
        self.halvings, self.staged = message.halvings, message.staged
        effects: list[WorkerEffect] = []
        if message.epoch > self.epoch:
            self.epoch = message.epoch
            effects += self._drop_all("a coordinator ended")
        if self.ended:
            return effects
        effects += [*self.work.stop_up_to((self.epoch, message.counter)), ev.ReportPrefixes()]
        effects += [SendToCoordinator(wire.Idle(self.epoch)), self._say_stage()]
        return [*effects, *self.work.unsaid(), *self.updates.kept_answers(), *self._end_if_drained()]

    def _drop_all(self, why: str) -> list[WorkerEffect]:
        """Drop the work of a coordinator that has forgotten this worker."""
        cancel = self.work.drop()
        self.adapters.forget()
        if self.updates.exposed:
            # The rest of what the engine receives, and whether it is committed, will never be known.
            reason = f"{why} while the engine took weights from its publisher"
            return [SendToCoordinator(wire.Exiting(reason, failed=True)), *self._end(ev.Exit.ENGINE_DIED, reason, close=False)]
        return [*cancel, *self.updates.new_epoch()]

    def _expired(self, message: wire.Expired) -> list[WorkerEffect]:
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
        return [*effects, ev.Note(line), *self._register()]

    def _refused(self, message: wire.ErrorReply) -> list[WorkerEffect]:
        if message.code == "hello_required":
            self.registered = False
            return self._ask()
        if message.code in FINAL_REFUSALS:
            return self._end(ev.Exit.REFUSED, f"refused by the coordinator: {message.code}: {message.message}", close=False)
        return [ev.Note(f"the coordinator reports {message.code}: {message.message}")]

    def _work(self, task: wire.TaskId, run: Run) -> list[WorkerEffect]:
        work = self.work
        if task in work.running or task in work.unsent:
            return []
        if task in work.answers:
            return [work.answers[task]] if self.registered else []
        if self.stage == "draining":
            why = f"this worker drains and takes no work: {task}"
            return [SendToCoordinator(wire.ErrorReply("shutting_down", why, id=task[1]))]
        if task[0] != self.epoch or self.stage != "ready" or self.memory.closed:
            doing = "asleep" if self.memory.closed else self.stage
            why = f"work {task} is refused: epoch {self.epoch} is accepted here, stage {doing}"
            refusal: list[WorkerEffect] = [SendToCoordinator(wire.ErrorReply("hello_required", why, id=task[1]))]
            return refusal if self.registered else refusal + self._ask()
        return work.begin(task, run, hold=self.updates.busy)

    def _start(self, message: wire.StartGeneration, run: Run) -> list[WorkerEffect]:
        """A generation that is delivered twice runs once."""
        return [] if self.work.is_copy(message.task) else self._work(message.task, run)

    def _generated(self, event: ev.StepsDone) -> list[WorkerEffect]:
        if event.epoch != self.epoch or not self.registered:
            return []
        return [SendToCoordinator(event.progress(self.updates.version), event.frames)]

    def _generation_left(self, event: ev.GenerationLeft) -> list[WorkerEffect]:
        if self.work.generation_left(event.task):
            return self._end_if_drained()
        return [] if self.work.leaving else self._emptied()

    def _commanded(self, event: ev.CommandDone) -> list[WorkerEffect]:
        self.memory.done(event)
        self.updates.memory_changed(event)
        unknown = self.adapters.done(event)
        return [*self._resumed(), *self._allowed([self._say_stage() if unknown else SendToCoordinator(event.answer)])]

    def _finished(self, task: wire.TaskId, answer: SendToCoordinator) -> list[WorkerEffect]:
        """`task` has left the engine. Its answer is sent, kept or, when its epoch is over, dropped."""
        work = self.work
        if task in work.leaving:
            work.leaving.remove(task)
            return [] if work.leaving else self._emptied()
        if not work.finish(task, answer, said=self.registered):
            return []
        return [answer, *self._end_if_drained()] if self.registered else self._end_if_drained()

    def _emptied(self) -> list[WorkerEffect]:
        """No dropped work is inside the engine: weights first, then the work that was held back."""
        waits = self.work.stopped or self.memory.commanded
        hurry = self.work.hurry(self.updates.waiting is not None)
        effects = hurry if waits else self._allowed(self.updates.load(generates=self.work.generates))
        if not self.updates.busy:
            effects += self.work.release()
        return effects

    def _weights(self, message: ev.Asked, frames: tuple[ev.Frame, ...]) -> list[WorkerEffect]:
        effects = self.work.drop() if self.updates.gives_up(message) else []
        effects += self._allowed(self.updates.asked(message, frames, self.epoch, ready=self.memory.takes_weights(self.stage)))
        if self.updates.waiting is not None:
            # The work inside runs again, elsewhere or on the new weights: its answers are not needed. Generations may stay.
            effects += self.work.drop(generations=not self.updates.keeps_generations)
        return effects + self._resumed()

    def _allowed(self, effects: list[WorkerEffect]) -> list[WorkerEffect]:
        """Nothing is sent without a usable link; kept answers are sent after `accept`."""
        return effects if self.registered else [effect for effect in effects if not isinstance(effect, SendToCoordinator)]

    def _weights_reported(self, event: ev.WeightsReport) -> list[WorkerEffect]:
        return self._allowed(list(self.updates.reported(event))) + self._resumed()

    def _resumed(self) -> list[WorkerEffect]:
        """The engine may have other weights now, and be free again."""
        effects = [] if self.work.leaving else self._emptied()
        if not self.updates.changed:
            return effects
        self.updates.changed = False
        return [self._say_stage(), *effects] if self.registered else effects

    def _say_stage(self) -> SendToCoordinator:
        updates = self.updates
        if self.stage == "ready" and (updates.busy or self.memory.commanded):
            # Work that is sent now would wait here, and run on other weights than its sender expects.
            updates.changed = True
            return SendToCoordinator(wire.Stage("loading", "takes weights" if updates.busy else "sleeps or wakes"))
        if self.stage == "ready" and self.capabilities is not None:
            return SendToCoordinator(updates.ready(self.capabilities, self.memory.asleep, self.adapters.loaded))
        return SendToCoordinator(wire.Stage(self.stage, self.detail))  # pyright: ignore[reportArgumentType]

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
        worked = self.stage in ("compiling", "ready", "draining") and not (self.updates.busy or self.memory.asleep)
        bye, code = farewell(event, worked=worked)
        return [SendToCoordinator(bye), *self._end(code, event.reason, close=False)]

    def _drain(self, reason: str) -> list[WorkerEffect]:
        if not self.draining.begin(self.now, reason):
            return []
        self.stage, self.detail = "draining", reason
        return [*([self._say_stage()] if self.registered else []), *self._end_if_drained()]

    def _end_if_drained(self) -> list[WorkerEffect]:
        reason = self.draining.over(self.now, self.work.owed)
        return [SendToCoordinator(wire.Exiting(reason)), *self._end(ev.Exit.DRAINED, reason, close=True)] if reason else []

    def _tick(self, event: ev.WorkerTick) -> list[WorkerEffect]:
        silence = self.silence
        if silence.orphaned(self.now):
            return self._end(ev.Exit.ORPHANED, f"no word from a coordinator for {silence.orphan_s:g} s", close=True)
        effects: list[WorkerEffect] = [ev.Note(line)] if (line := silence.line(self.now)) else []
        effects += self._end_if_drained()
        if self.ended is None and self.linked and silence.must_ask(self.now, registered=self.registered):
            effects += self._register()
        return effects

    def _end(self, code: ev.Exit, reason: str, *, close: bool) -> list[WorkerEffect]:
        self.ended = ev.EndProcess(code, reason, close)
        return [self.ended]

    def check(self) -> None:
        """Raise AssertionError when an invariant of the state does not hold."""
        check_updates(self.updates, self.work, bool(self.memory.commanded))
        self.work.check(self.epoch, registered=self.registered, loaded=self.capabilities is not None)
        self.silence.check(self.now)
        assert not self.registered or self.linked
        assert self.stage != "ready" or self.capabilities is not None
        assert (self.stage == "draining") == (self.draining.until is not None)
