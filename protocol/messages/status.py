"""Messages for operators: the status of the pool, and the restart of a worker."""

import msgspec

from enginepool.protocol.basis import Message
from enginepool.protocol.capabilities import Kind


class Status(Message, tag="status"):
    """Ask for a `status_report`."""

    id: int = 0


class RestartWorker(Status, tag="restart"):
    """Restart worker `worker` of `group`, a name of the status report, if its process still is `incarnation` ("": it has none).

    Answered with a `status_report`, when the restart has begun.
    """

    group: str = ""
    worker: str = ""
    incarnation: str = ""


class WorkerStatus(msgspec.Struct, omit_defaults=True):
    """One worker in a status report. Times in seconds. `pace`: its pace in tokens, as learned from its batches (0: no matter);
    each row counts there as `forward_row_tokens` tokens more. `prompt_tokens`: of the prompts that it began to continue;
    `cached_tokens`: of them, those that its engine had in its prefix cache. `batches` and `tokens` are of rows and sequences;
    `sequences`: those that it generates now. `asleep`: released parts of its engine's memory.
    `engine`, `device`, `dtype`, `parallel`: as in `capabilities`, once it is loaded.
    """

    name: str
    incarnation: str
    stage: str
    pid: int = 0
    host: str = ""
    version: int | None = None
    batches: int = 0
    tokens: int = 0
    done: int = 0
    silent_s: float = 0.0
    detail: str = ""
    restarts: int = 0
    packed: bool = False
    pace: int = 0
    forward_row_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sequences: int = 0
    asleep: list[str] = []
    engine: str = ""
    device: str = ""
    dtype: str = ""
    parallel: tuple[int, int, int, int] = (1, 1, 1, 1)


class GroupLimits(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a request to a group may ask for: anything else is refused with `bad_request`. `context`: the longest row, query and
    item together, in tokens. `operations`, `embedding`,
    `dimensions`, `features`, `adapters`, `sequence_context`: as in `capabilities`.
    """

    kind: Kind
    vocab: int
    context: int
    items: int
    labels: int = 0
    hidden: int = 0
    text: bool = True
    operations: tuple[str, ...] = ("score",)
    embedding: int = 0
    dimensions: list[int] = []
    features: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    sequence_context: int = 0


class AdapterStatus(msgspec.Struct, omit_defaults=True):
    """A LoRA adapter that was loaded while engines run. `path`: where it lies; empty: it came as tensors, of `nbytes`."""

    name: str
    version: int
    digest: str
    path: str = ""
    nbytes: int = 0


class GroupStatus(msgspec.Struct, omit_defaults=True):
    """One group in a status report. `queued` and `running` count requests, `split_batches` batches of more than one forward,
    `packed_batches` batches of packed rows; `early` of the queued wait for a later weight version. `update`: phase and version
    of the open transaction. `halvings`: how often its workers' budgets were halved, because engines ran out of memory.
    `limits`: None while not known. `no_worker`: only external workers serve it, and none is connected. `workers` has lost
    external workers too, for five minutes (`lost`). `prompt_tokens`, `cached_tokens`: of all its workers. `asleep`: the parts
    of all its engines that are to sleep; `paused`: it starts no work: its requests wait meanwhile. `adapters`: those that were
    loaded while engines run.
    """

    name: str
    queued: int = 0
    running: int = 0
    queued_tokens: int = 0
    oldest_s: float = 0.0
    version: int | None = None
    answered: int = 0
    failed: int = 0
    batches: int = 0
    forwards: int = 0
    split_batches: int = 0
    packed_batches: int = 0
    lost_batches: int = 0
    poisoned: int = 0
    model: str = ""
    down: str = ""
    digest: str = ""
    early: int = 0
    update: str = ""
    needs_weights: str = ""
    halvings: int = 0
    workers: list[WorkerStatus] = []
    limits: GroupLimits | None = None
    no_worker: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    asleep: list[str] = []
    paused: bool = False
    adapters: list[AdapterStatus] = []


class ClientStatus(msgspec.Struct, omit_defaults=True):
    """One client in a status report: its requests without an answer, and their items. `id`: the first 8 hex digits of its own
    id; where others begin so, too, also `-` and the number that the coordinator gave it. `oldest`: the id of the request that
    it asked for first, `oldest_s` seconds ago.
    """

    id: str
    requests: int
    items: int
    oldest: int
    oldest_s: float


class StatusReport(Message, tag="status_report"):
    """What the pool is doing. `pauses` counts garbage collections of the coordinator and their total time in µs. `busiest`: the
    clients with the most requests, 32 at most.
    """

    epoch: int
    id: int = 0
    uptime_s: float = 0.0
    clients: int = 0
    answers_kept: int = 0
    answers_bytes: int = 0
    client_unread_bytes: int = 0
    worker_unread_bytes: int = 0
    pauses: tuple[int, int] = (0, 0)
    draining: bool = False
    groups: list[GroupStatus] = []
    busiest: list[ClientStatus] = []
