"""What a worker and its stager say to each other over a Unix socket, and what a stager is told at its start.

Each message is a msgpack map behind its length as a little-endian uint32. A stager serves one worker at a time, the last one
that said so; its owner (the coordinator's supervisor) keeps a connection open and says nothing.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import Literal

import msgspec

from enginepool.protocol.basis import Message, TaskId
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.workers.engine import MemoryRegion

#: the environment variable that holds the JSON of a `StagerSpec`
VARIABLE = "ENGINEPOOL_STAGER"
_LENGTH = 4
_LONGEST = 256 << 20


class StagerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of a stager.

    socket: path of the Unix socket that it listens at.
    name: of its worker slot, for the operator.
    device: `cpu`; `cuda`: its regions are on the first `gpus` GPUs that it sees; `auto`: on those if there are some.
    lifeline_fd: read end of an inherited pipe; at its end of file the owner is gone and the stager ends at once.
    orphan_s: seconds without an owner or a worker before it ends.
    """

    socket: str
    name: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: int = 1
    lifeline_fd: int | None = None
    orphan_s: float = 60.0


def read_spec(environment: Mapping[str, str]) -> StagerSpec:
    """The stager's configuration.

    Raises:
        ValueError: the variable is not set, or holds something else; one line.
    """
    text = environment.get(VARIABLE)
    if text is None:
        raise ValueError(f"{VARIABLE} is not set: it holds the stager's configuration as JSON")
    try:
        spec = msgspec.json.decode(text, type=StagerSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    if spec.gpus < 1 or not math.isfinite(spec.orphan_s) or spec.orphan_s < 0:
        raise ValueError(f"{VARIABLE}: gpus = {spec.gpus} must be more than 0, orphan_s = {spec.orphan_s} seconds")
    return spec


# --- who connects --------------------------------------------------------------------------------------------------------


class WorkerHello(Message, tag="worker"):
    """The worker that the stager serves from now on."""

    incarnation: str = ""


# --- worker to stager ----------------------------------------------------------------------------------------------------


class Room(Message, tag="room"):
    """Take device memory for an update of `nbytes` before the engine takes what there is. Answered by `reserved`."""

    nbytes: int


class Reserve(Message, tag="reserve"):
    """Make room for these tensors; an update before, if it is not committed, is forgotten. Answered by `reserved`.

    `targets`: the dtype in which the engine will hold each, or "" where that is its own; [] where all are their own.
    """

    update: TaskId
    manifest: list[Tensor]
    bucket_bytes: int
    targets: list[str] = []


class JoinGroup(Message, tag="join_group"):
    """Join the process group, or keep the one of last time if it is that, and receive. Answered by `in_group`, `received`."""

    update: TaskId
    rendezvous: str
    address: str
    world: int
    rank: int
    backend: str


class Forget(Message, tag="forget"):
    """The update is aborted: leave its process group."""

    update: TaskId


class Keep(Message, tag="keep"):
    """The update is committed. What was received is what is held from now on, and goes to the file `snapshot` in the
    background, if it is not there yet. Of an update (0, 0) only `digest` counts: what is held, or was received, stays if it
    is that."""

    update: TaskId
    version: int
    digest: str
    snapshot: str = ""


class AskHeld(Message, tag="ask_held"):
    """Are the committed weights here that have this digest? Answered by `held`."""

    digest: str = ""


FromWorker = WorkerHello | Room | Reserve | JoinGroup | Forget | Keep | AskHeld

# --- stager to worker ----------------------------------------------------------------------------------------------------


class Reserved(Message, tag="reserved"):
    """There is room of kind `staging`, in `regions`; none: `message` says why. `peer` names this side of the process group.
    `most`: bytes of it on the GPU that holds the most of them.

    A stager has one room of kind `device`: its space is the same in each update, until one needs more. `sharded`, here and
    below: `regions` are not one for each GPU, but parts of one, in their order."""

    update: TaskId = (0, 0)
    staging: Literal["", "device", "host"] = ""
    peer: str = ""
    message: str = ""
    regions: list[MemoryRegion] = []
    sharded: bool = False
    most: int = 0


class InGroup(Message, tag="in_group"):
    """In the group, or why not."""

    update: TaskId
    message: str = ""


class BytesReceived(Message, tag="received"):
    """All bytes are in `regions`; or why not, and whether that is the process group's fault."""

    update: TaskId
    digest: str = ""
    findings: list[Finding] = []
    regions: list[MemoryRegion] = []
    message: str = ""
    broken: bool = False
    sharded: bool = False


class StagerHolds(Message, tag="held"):
    """The weights that were asked for: those that are kept, or an update that was received and whose commit was not heard
    here, since the worker died with it. If they are not here: what is kept, without a digest if that is nothing."""

    version: int = 0
    digest: str = ""
    manifest: list[Tensor] = []
    regions: list[MemoryRegion] = []
    sharded: bool = False


FromStager = Reserved | InGroup | BytesReceived | StagerHolds

_encoder = msgspec.msgpack.Encoder()
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_from_stager = msgspec.msgpack.Decoder(FromStager)


def packet(message: Message) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


async def from_worker(reader: asyncio.StreamReader) -> FromWorker | None:
    """The next message at the stager; None at the end. Raises ValueError when it is none."""
    body = await _body(reader)
    return None if body is None else _from_worker.decode(body)


async def from_stager(reader: asyncio.StreamReader) -> FromStager | None:
    """The next message at the worker; None at the end. Raises ValueError when it is none."""
    body = await _body(reader)
    return None if body is None else _from_stager.decode(body)


async def _body(reader: asyncio.StreamReader) -> bytes | None:
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
