"""Commands to all workers of a group: asked by an operator or a publisher, run by each worker, one outcome each."""

from typing import Literal

import msgspec

from enginepool.protocol.basis import Message, TaskId
from enginepool.protocol.messages.weights import RunningGenerations

CommandName = Literal["flush", "sleep", "wake", "pause", "resume", "abort", "start_profile", "stop_profile", "save"]
#: commands of operators: they take the work of others, or write files
OF_ADMINS: frozenset[CommandName] = frozenset({"abort", "start_profile", "stop_profile", "save"})
#: seconds and forwards of a profile, of which an engine keeps everything in its memory
MAX_PROFILE_S, MAX_PROFILE_STEPS = 300, 10_000
#: a part of an engine's memory, by SGLang's names
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


class Control(Message, tag="control"):
    """Run `command` on all workers of `group`, or on `worker` alone; answered by `control_report`.

    flush: forget all prefixes that engines keep. sleep, wake: release or take back the parts `tags` of the engines' memory ([]:
    all parts). pause, resume: start no work of the group; start work again. `mode`: what happens to generations that run.
    abort: end all requests of the group, of all clients; or those of `client` alone, in all groups or in `group`; or the one
    with the id `request`; no worker is asked. start_profile: engines write what they compute into files under `profile_root` of
    the group, for `steps` forwards (0: without a limit), and at most `seconds`. stop_profile: end that. save: one worker writes
    the weights of its engine into `path`, a new folder or redis://HOST:PORT/NAME, under `save_roots` of the group.
    """

    id: int
    command: CommandName
    group: str = ""
    worker: str = ""
    tags: list[MemoryTag] = []
    seconds: float = 10.0
    steps: int = 0
    path: str = ""
    mode: RunningGenerations = "abort"
    client: str = ""
    request: int | None = None


class WorkerOutcome(msgspec.Struct, omit_defaults=True):
    """What became of a command at one worker. `code`, `message`: why it failed. Without `code` it did not; `message` is then
    a remark."""

    name: str
    code: str = ""
    message: str = ""


class ControlReport(Message, tag="control_report"):
    """The answer to `control`: a row for each worker of the group, or for the named one. `aborted`: requests that ended."""

    id: int
    group: str
    command: CommandName
    workers: list[WorkerOutcome] = []
    aborted: int = 0


class Command(Message, tag="command"):
    """Run a command of `control` between two batches; those about profiles and `save` at once. `mode`: as there. Answered by
    `commanded`."""

    task: TaskId
    command: CommandName
    tags: list[MemoryTag] = []
    seconds: float = 10.0
    steps: int = 0
    path: str = ""
    mode: RunningGenerations = "abort"


class Commanded(Message, tag="commanded"):
    """The answer to `command`. `message`: why it failed, or a remark without `code`."""

    task: TaskId
    code: str = ""
    message: str = ""
