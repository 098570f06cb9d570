"""The messages of a weight update: one transaction between a publisher (a client), the coordinator and a group's workers.

WEIGHTS.md, "Life of a weight update", tells the story. Tensors never pass through here: they go from the publisher to the
workers' side in a process group of their own (NCCL or gloo), whose rank 0 the publisher is, or lie in memory that it lends, or
in files; these messages say when, where and what. `layout.py` says how tensors become bytes, `manifest.py` how they are
described.
"""

import re
from typing import Annotated, Literal

import msgspec

from enginepool.protocol.basis import MAX_FRAMES, FrameSpec, Message, TaskId
from enginepool.protocol.messages.weight_reports import Finding, UpdateRecord

#: An hour: the longest drain of a group, and the longest lease.
MAX_MS = 3_600_000
#: bytes of a seal
SEAL_BYTES = 16
#: the path of lent memory: a descriptor of the publisher's own process, whose PID is the group
DESCRIPTOR = re.compile(r"/proc/([1-9][0-9]{0,9})/fd/[0-9]{1,9}", re.ASCII)
#: regions in one message: one for each rank of every worker
MAX_REGIONS = 1024

#: How new weights reach an engine.
#: staged: broadcast into a stager next to each worker, which serves meanwhile; handed over inside the device.
#: direct: broadcast directly into the engines, which do not serve meanwhile.
#: ipc: engines of the publisher's own host open memory that it lends, and copy out of it.
#: checkpoint: each worker reads a directory that it can see.
#: set_version: the weights stay; only their version changes.
Transfer = Literal["staged", "direct", "ipc", "checkpoint", "set_version"]
#: What happens to generations that run when the engines load.
#: abort: they are taken back, and go on from their last token on the new weights, on any worker.
#: in_place: the engine pauses between two steps, and they go on over the keys and values of the old weights.
#: retract: the engine pauses, and they go on once it has computed their prompts and tokens again on the new weights.
RunningGenerations = Literal["abort", "in_place", "retract"]
#: What happens to work in flight when the group is held. drain: it finishes, for at most `drain_ms`; then as `after_drain`.
#: abort: it is put back into the queue at once, and runs again on the new weights. in_place, retract: batches of rows finish,
#: as in drain, and generations stay in their engines.
InFlight = Literal["drain", "abort", "in_place", "retract"]
#: open: members answer `prepare`. join: the process group forms. transfer: rank 0 sends. staged: all members hold
#: verified bytes and wait for `commit`. restart: engines that take weights only at their start are started on them. hold: no
#: new work starts. load: engines take the new weights. Then `published`, or `error`.
PhaseName = Literal["open", "join", "transfer", "staged", "restart", "hold", "load"]


class MemoryRegion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The bytes of an update in memory that other processes of its host can open, laid out by `layout.py`.

    kind: `file`, a path to map, often shared memory; `cuda`, memory of a GPU, opened by the CUDA IPC `handle`: the values of
    torch's `_share_cuda_` as a msgpack array. `nbytes`: of all of it. `gpu`: the UUID of the GPU; its index differs between
    processes. `seal`: is at the very end as long as the content is unchanged; a worker that copied out of lent memory checks
    it afterwards.
    """

    kind: Literal["file", "cuda"]
    nbytes: int
    path: str = ""
    handle: bytes = b""
    gpu: str = ""
    seal: bytes = b""


# --- client to coordinator ---------------------------------------------------------------------------------------------


class Publish(Message, tag="publish"):
    """Open a transaction. Answered by `join` and `phase`s, then by `published` or `error`. Frame: `manifest` utf8, but for
    `checkpoint` and `set_version`.

    `address`: HOST:PORT of the publisher's TCP store, `peer`: a random name of the publisher's side of the process group, new
    whenever that side was lost. `path`: the directory of `checkpoint`. `partial`: the manifest may lack names of the model.
    `lease_ms`: without a `renew` for so long the transaction is aborted. `new_run`: versions begin again, as an operator wants.
    `host`, `gpu`: where the memory of `ipc` is: the identity of its host, the UUID of its GPU (empty: memory of the host).
    `after_drain`: what happens to generations that `drain` did not wait for.
    """

    id: int
    version: int
    group: str = ""
    transfer: Transfer = "staged"
    in_flight: InFlight = "drain"
    drain_ms: int = 10_000
    lease_ms: int = 10_000
    partial: bool = False
    new_run: bool = False
    backend: Literal["nccl", "gloo"] = "gloo"
    bucket_bytes: int = 512 << 20
    address: str = ""
    peer: str = ""
    path: str = ""
    frames: Annotated[list[FrameSpec], msgspec.Meta(max_length=MAX_FRAMES)] = []
    host: str = ""
    gpu: str = ""
    after_drain: RunningGenerations = "abort"

    @property
    def generations(self) -> RunningGenerations:
        """What happens to generations that run when the engines load."""
        return self.after_drain if self.in_flight == "drain" else self.in_flight


class Renew(Message, tag="renew"):
    """The publisher of transaction `id` lives; `sent_bytes` of it are broadcast."""

    id: int
    sent_bytes: int = 0


class Sent(Message, tag="sent"):
    """All bytes of transaction `id` are broadcast; `digest` is that of `layout.py` over them. In `ipc` they lie in
    `regions`, each of which holds all of them, unchanged until the final answer: one, or one for each GPU of an engine."""

    id: int
    digest: str
    sent_bytes: int
    regions: Annotated[list[MemoryRegion], msgspec.Meta(max_length=MAX_REGIONS)] = []


class Commit(Message, tag="commit"):
    """Transaction `id` may hold the group and hand over as soon as all members are staged. Welcome any time after `publish`."""

    id: int


class AbortUpdate(Message, tag="abort"):
    """Abort transaction `id`, unless its hand-over has begun; a direct one also then, until `sent`. Answered by its end.
    `broken`: the process group broke; a member may know why."""

    id: int
    reason: str = ""
    broken: bool = False


# --- coordinator to client ---------------------------------------------------------------------------------------------


class Phase(Message, tag="phase"):
    """Where transaction `id` stands: in `phase`, which `done` of `members` workers have finished."""

    id: int
    phase: PhaseName
    members: int = 0
    done: int = 0


class Published(Message, tag="published"):
    """The transaction is committed: every answer from now on is of `version`."""

    id: int
    version: int
    record: UpdateRecord


class WeightsNeeded(Message, tag="weights_needed"):
    """To every client: the committed `version` of `group` is lost. A publisher that has it publishes it or a later one."""

    group: str
    version: int


# --- coordinator to publisher and to worker ----------------------------------------------------------------------------


class Join(Message, tag="join"):
    """Be rank `rank` of `world` in process group `rendezvous` at `address`; one that you are in already is kept, and is warm.

    To a publisher `id` names its transaction and its rank is 0; to a worker `update` does, and its ranks begin at `rank`.
    """

    rendezvous: str
    world: int
    rank: int = 0
    address: str = ""
    backend: str = "gloo"
    id: int = 0
    update: TaskId = (0, 0)


# --- coordinator to worker ---------------------------------------------------------------------------------------------


class Prepare(Message, tag="prepare"):
    """Can you take these weights? Nothing moves yet. Frame: `manifest`; this and all others as in `publish`. `generations`:
    what is to happen to those that run at `load`. Answered by `prepared`."""

    update: TaskId
    version: int
    transfer: Transfer
    partial: bool = False
    bucket_bytes: int = 512 << 20
    path: str = ""
    frames: list[FrameSpec] = []
    host: str = ""
    gpu: str = ""
    generations: RunningGenerations = "abort"


class VerifyWeights(Message, tag="verify"):
    """In `ipc`: the bytes of the update lie in `regions`. Open them, keep them open, and look at every byte while the engine
    serves. Answered by `staged`."""

    update: TaskId
    regions: list[MemoryRegion]


class LoadWeights(Message, tag="load"):
    """Finish or drop what is in the engine, then take the prepared weights as `version`. Answered by `loaded`.

    In `direct` transfer the bytes are broadcast now. Answers of batches that were in the engine are no longer wanted. With
    `generations` of `prepare`, those stay: the engine is paused from before the load until `committed` or `release`.
    """

    update: TaskId
    version: int


class Committed(Message, tag="committed"):
    """The update is journaled. What a stager holds is now what a successor of this worker gets; `snapshot`: a file in which to
    keep it, in the background, when it is not there yet. Said again, with `update` (0, 0), to a worker that is ready with it.
    `run`: how often versions have begun again.
    """

    update: TaskId
    version: int
    digest: str
    snapshot: str = ""
    run: int = 0


class ReleaseWeights(Message, tag="release"):
    """The update is aborted: forget it. After `load` only where the commit could not be journaled; `restore` follows."""

    update: TaskId
    reason: str = ""


class Restore(Message, tag="restore"):
    """Take the committed weights, without their publisher: from your engine or your stager if it holds `digest`, else
    `snapshot`, else `path`, the checkpoint that they came from. An empty `digest` is that of the engine's own checkpoint.
    Answered by `ready` with that version, or by `restored` with an error."""

    version: int
    digest: str
    snapshot: str = ""
    path: str = ""
    run: int = 0


# --- worker to coordinator ---------------------------------------------------------------------------------------------


class Prepared(Message, tag="prepared"):
    """Yes, with `ranks` ranks whose side is named `peer`, in memory of kind `staging`; or no: `code` and `message` say why, and
    `field` names the tensor at fault, if it is one.
    Without a code, `message` says why the bytes of an engine on GPUs will lie on the host.

    `restart`: the engine takes this checkpoint only by starting on it; `digest`: of the checkpoint's files, then.
    `no_staging`: it only has no memory for a staged transfer. The others go on without it, if it can be restored after
    the commit.
    `generations`: as in the `prepare`, where this worker can do that.
    """

    update: TaskId
    peer: str = ""
    ranks: int = 1
    staging: Literal["", "device", "host"] = ""
    code: str = ""
    message: str = ""
    restart: bool = False
    digest: str = ""
    no_staging: bool = False
    generations: RunningGenerations = "abort"
    field: str = ""


class Joined(Message, tag="joined"):
    """This worker's ranks are in the process group, or why not."""

    update: TaskId
    code: str = ""
    message: str = ""


class Staged(Message, tag="staged"):
    """All bytes are here, verified, and their digest is `digest`; or why not. Findings are reported, not refused. `broken`: the
    process group broke; another member may know why."""

    update: TaskId
    digest: str = ""
    findings: list[Finding] = []
    code: str = ""
    message: str = ""
    broken: bool = False


class WeightsLoaded(Message, tag="loaded"):
    """The engine runs on `version`: `copy_us` took the weights, `flush_us` the caches; `prepare_us` of preparation had kept it
    from its work before. An error: its weights are as before, and whole. A worker that cannot promise that ends itself instead.
    """

    update: TaskId
    version: int = 0
    digest: str = ""
    copy_us: int = 0
    flush_us: int = 0
    prepare_us: int = 0
    code: str = ""
    message: str = ""


class Restored(Message, tag="restored"):
    """The committed weights could not be had here."""

    version: int
    code: str
    message: str
