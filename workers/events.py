"""What happens to a worker (events), what its machine wants done about it (effects), and how its process may end."""

from enum import IntEnum

import msgspec

from enginepool.protocol.basis import Message, TaskId
from enginepool.protocol.messages import (
    Batch,
    Capabilities,
    Done,
    Exiting,
    FrameSpec,
    GenerationProgress,
    PrefixBlocks,
    Stage,
    StartGeneration,
    Step,
    Tokenize,
    Tokenized,
)
from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter
from enginepool.protocol.messages.control import Command, Commanded, MemoryTag
from enginepool.protocol.messages.weight_reports import Inspect, Inspected
from enginepool.protocol.messages.weights import Committed, ReleaseWeights, Restore, Restored
from enginepool.workers.engine import PauseMode
from enginepool.workers.engine_weights import NewWeights
from enginepool.workers.weights.worker_update import Answer, Request, WorkerUpdate

Frame = bytes | memoryview
#: what a coordinator asks about weights, and what is answered
Asked = Request | Committed | ReleaseWeights | Restore | Inspect
Answered = Answer | Restored | Inspected


class Exit(IntEnum):
    """Exit codes of a worker process. Everything else (a signal, a Python traceback) is an accident."""

    DRAINED = 0
    #: the configuration cannot work; a restart would end the same way
    UNUSABLE = 78
    #: the engine is lost; `exiting` and stderr say why
    ENGINE_DIED = 70
    #: the engine ran out of memory in a batch, or in its first ones: less at a time may help
    OUT_OF_MEMORY = 71
    #: the owner's end of the lifeline closed
    OWNER_GONE = 72
    #: no coordinator was heard for `orphan_s`
    ORPHANED = 75
    #: the coordinator will never accept this incarnation
    REFUSED = 76


# --- events: every one carries `now`, seconds on the worker's monotonic clock ------------------------------------------


class WorkerEvent(msgspec.Struct, frozen=True, gc=False):
    """Base of all events."""

    now: float


class Connected(WorkerEvent, frozen=True):
    """The link to the coordinator is up, for the first time or again."""


class Disconnected(WorkerEvent, frozen=True):
    """The link is down; its queued messages are gone."""


class FromCoordinator(WorkerEvent, frozen=True):
    """A message of the coordinator (one of `protocol.messages.ToWorker`) with its payload frames.

    `unreadable`: why the header of a batch, a tokenizing task or a generation cannot be read; `message` then names the task,
    and a batch has as many parts as it should have, all empty.
    """

    message: Message
    frames: tuple[Frame, ...] = ()
    unreadable: str = ""


class EngineStage(WorkerEvent, frozen=True):
    """The engine reports what it is doing before it is ready."""

    stage: str
    detail: str = ""


class EngineReady(WorkerEvent, frozen=True):
    """The engine is loaded and warm."""

    capabilities: Capabilities
    version: int = 0
    digest: str = ""


class WorkDone(WorkerEvent, frozen=True):
    """A batch, or the texts of a task, have left the engine. `answer` is what the coordinator is to hear, also of a failure."""

    task: TaskId
    answer: Done | Tokenized
    frames: tuple[Frame, ...] = ()


class StepsDone(WorkerEvent, frozen=True):
    """The generations of an epoch have new tokens: the fields and frames of one `GenerationProgress`."""

    epoch: int
    steps: list[Step]
    specs: list[FrameSpec]
    frames: tuple[Frame, ...]
    cached: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    lengths: list[tuple[int, int]] = []
    experts: list[tuple[int, int, int]] = []

    def progress(self, version: int) -> GenerationProgress:
        """As the coordinator hears it. `version`: of the weights in the engine."""
        told = self.steps, self.specs, self.cached, self.prompts, self.lengths, self.experts
        return GenerationProgress(self.epoch, version, *told)


class PrefixesChanged(WorkerEvent, frozen=True):
    """What changed in the engine's prefix cache, as the coordinator is to hear it."""

    message: PrefixBlocks
    frames: tuple[Frame, ...]


class SnapshotReported(WorkerEvent, frozen=True):
    """What the stager says of the snapshot of the committed weights: a message to the coordinator."""

    message: Stage
    frames: tuple[Frame, ...] = ()


#: events whose message is sent to the coordinator unchanged
PassedOn = PrefixesChanged | SnapshotReported


class GenerationLeft(WorkerEvent, frozen=True):
    """A generation has left the engine: all its sequences have ended, it failed, or it was cancelled. Its last tokens, or the
    error, were in a `StepsDone` before."""

    task: TaskId


class CommandDone(WorkerEvent, frozen=True):
    """What became of a `RunCommand`. `asleep`: what is released of the engine's memory since then; None: it did not change.
    `lost_weights`: with its weights, which the engine does not have again when their memory is taken back. `adapters`: those
    that are loaded, after a change of them."""

    answer: Commanded | AdapterChanged
    asleep: list[MemoryTag] | None = None
    lost_weights: bool = False
    adapters: tuple[str, ...] | None = None


#: how Python, torch, and CUDA's libraries say that a forward needs more memory than there is
_OUT_OF_MEMORY = ("MemoryError", "CUDA error: out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")


def ran_out_of_memory(reason: str) -> bool:
    """Whether an engine that ended with these words died of a batch that was too large for its memory."""
    return any(mark in reason for mark in _OUT_OF_MEMORY)


class EngineLost(WorkerEvent, frozen=True):
    """The engine is gone or hangs; `unusable`: it can never start like this."""

    reason: str
    unusable: bool = False


def farewell(event: EngineLost, *, worked: bool) -> tuple[Exiting, Exit]:
    """What the coordinator hears of an engine that is lost, and the exit code. `worked`: it may have run a batch then."""
    memory = worked and ran_out_of_memory(event.reason)
    code = Exit.UNUSABLE if event.unusable else Exit.OUT_OF_MEMORY if memory else Exit.ENGINE_DIED
    return Exiting(event.reason, failed=True, permanent=event.unusable, out_of_memory=memory), code


class WeightsAnswered(WorkerEvent, frozen=True):
    """What a `RunWeights` led to, as the coordinator is to hear it. A `restored` without a code is not sent: the engine runs on
    the weights. `weights`: with `prepared` and with `staged` as the answer to `verify`, what the engine will load. `found`:
    with a `restored` that failed, the digest of what the engine has loaded instead."""

    answer: Answered
    frames: tuple[Frame, ...] = ()
    weights: NewWeights | None = None
    found: str | None = None


class LoadPrepared(WorkerEvent, frozen=True):
    """The engine has prepared the load of an update, which kept it from forwards for so many seconds, or it cannot."""

    update: TaskId
    seconds: float


class StagerLost(WorkerEvent, frozen=True):
    """The stager is gone, with all bytes that it had."""

    reason: str


WeightsReport = WeightsAnswered | LoadPrepared | StagerLost


class DrainWanted(WorkerEvent, frozen=True):
    """A process on this host asks the worker to finish and end (SIGTERM)."""

    reason: str


class LifelineClosed(WorkerEvent, frozen=True):
    """The process that owns this worker is gone."""


class WorkerTick(WorkerEvent, frozen=True):
    """Time passes. Comes at least every `machine.TICK_S` seconds unless the process is stalled."""


# --- effects ------------------------------------------------------------------------------------------------------------


class WorkerEffect(msgspec.Struct, frozen=True, gc=False):
    """Base of all effects."""


class SendToCoordinator(WorkerEffect, frozen=True):
    """Send to the coordinator, in order. Nothing arrives while the link is down."""

    message: Message
    frames: tuple[Frame, ...] = ()


class RunBatch(WorkerEffect, frozen=True):
    """Give a batch to the engine; exactly one `WorkDone` follows, unless the engine is lost."""

    batch: Batch
    frames: tuple[Frame, ...] = ()
    #: why it cannot be read: it fails with this
    unreadable: str = ""


class RunTokenize(WorkerEffect, frozen=True):
    """Give texts to the engine's tokenizer; exactly one `WorkDone` follows, unless the engine is lost."""

    task: Tokenize
    frames: tuple[Frame, ...] = ()
    unreadable: str = ""


class RunGeneration(WorkerEffect, frozen=True):
    """Give a generation to the engine: `StepsDone` with its tokens, and exactly one `GenerationLeft` follow, unless the engine
    is lost."""

    message: StartGeneration
    frames: tuple[Frame, ...] = ()
    unreadable: str = ""


class CancelGenerations(WorkerEffect, frozen=True):
    """The engine drops these generations within one step. `GenerationLeft` follows for each of them, and no more tokens."""

    tasks: list[TaskId]


class ReportPrefixes(WorkerEffect, frozen=True):
    """The coordinator knows nothing of the engine's prefix cache: `PrefixesChanged` with all of it follows, if the engine tells
    what it has."""


class RunCommand(WorkerEffect, frozen=True):
    """Run a command between two batches of the engine, or a change of adapters at once. Exactly one `CommandDone`
    follows, unless the engine is lost."""

    command: Command | ChangeAdapter


class RunWeights(WorkerEffect, frozen=True):
    """Carry out a request about weights. Each is answered by one `WeightsAnswered`; `join` of a staged update by a second one
    when its bytes are received; `committed` and `release` by none. `load` and `restore` come only while the engine is empty,
    or `running`, and nothing enters it before their answer.

    `update`: the update that the request belongs to, which is only read; None: it is not open here. `running`: how the engine
    is paused for the `load`, since generations run in it; it stays paused until `committed`, `release` or `ResumeEngine`."""

    message: Asked
    frames: tuple[Frame, ...] = ()
    update: WorkerUpdate | None = None
    running: PauseMode | None = None


class ResumeEngine(WorkerEffect, frozen=True):
    """The engine goes on, if it is paused for a `load`: nothing that it generates for this is wanted any more."""


class FreeStopped(WorkerEffect, frozen=True):
    """New weights wait for generations that were cancelled: they leave an engine that a command keeps paused."""


class Note(WorkerEffect, frozen=True):
    """One line for the operator (stderr)."""

    line: str


class EndProcess(WorkerEffect, frozen=True):
    """The process ends. `close`: the engine is closed in peace first; otherwise everything is killed at once."""

    code: Exit
    reason: str
    close: bool
