"""What a worker and its stager say to each other over a Unix socket, and what a stager is told at its start.

Each message is a msgpack map behind its length as a little-endian uint32. The worker passes on these messages of the
coordinator as they are, and the stager answers them as the coordinator is to hear it:

    join        be in the process group and receive      joined, and when all bytes are received, or cannot be: staged
    release     the update is aborted
    committed   keep what was received, and save it as a snapshot. Only `digest` counts if the update is (0, 0).

A stager serves one worker at a time: the latest one that sent a message. Its owner (the coordinator's supervisor) keeps a
connection open and sends nothing.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from enginepool.protocol.basis import Message, TaskId
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import Committed, Join, Joined, MemoryRegion, ReleaseWeights, Staged

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
    gpus: Annotated[int, msgspec.Meta(ge=1)] = 1
    lifeline_fd: int | None = None
    orphan_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0


def read_spec(environment: Mapping[str, str]) -> StagerSpec:
    """The stager's configuration.

    Raises:
        ValueError: the variable is not set, or holds something else. The message is one line.
    """
    text = environment.get(VARIABLE)
    if text is None:
        raise ValueError(f"{VARIABLE} is not set: it holds the stager's configuration as JSON")
    try:
        return msgspec.json.decode(text, type=StagerSpec)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


# --- worker to stager, also `join`, `release` and `committed` of the coordinator, unchanged -----------------------------


class Room(Message, tag="room"):
    """Take device memory for an update of `nbytes` before the engine takes what there is. Answered by `reserved`."""

    nbytes: int


class Reserve(Message, tag="reserve"):
    """Make room for these tensors; an update before, if it is not committed, is given up. Answered by `reserved`.

    `targets`: the dtype in which the engine will hold each, or "" where that is its own; [] where all are their own.
    """

    update: TaskId
    manifest: list[Tensor]
    bucket_bytes: int
    targets: list[str] = []


class AskHeld(Message, tag="ask_held"):
    """Are the committed weights here that have this digest? Answered by `held`."""

    digest: str = ""


FromWorker = Room | Reserve | Join | ReleaseWeights | Committed | AskHeld

# --- stager to worker, also `joined` and `staged` as the coordinator gets them ----------------------------------------------


class Reserved(Message, tag="reserved"):
    """There is room of kind `staging`, in `regions`; none: `message` says why, as it does where GPUs have no room, and the host
    has. `peer` names this side of the process group.
    `most`: bytes of it on the GPU that holds the most of them.

    A stager has one room of kind `device`: its space is the same in each update, until one needs more. `sharded`, here and
    below: `regions` are not one for each GPU, but parts of one, in their order."""

    staging: Literal["", "device", "host"] = ""
    peer: str = ""
    message: str = ""
    regions: list[MemoryRegion] = []
    sharded: bool = False
    most: int = 0


class StagerHolds(Message, tag="held"):
    """The weights that were asked for: those that are kept, or an update that was received and whose commit was not heard
    here, since the worker died with it. If they are not here: what is kept, without a digest if that is nothing."""

    version: int = 0
    digest: str = ""
    manifest: list[Tensor] = []
    regions: list[MemoryRegion] = []
    sharded: bool = False


class SnapshotMissing(Message, tag="snapshot_missing"):
    """Why the committed weights have no snapshot, in one line. Said after each try that failed. `why` is "" when there is one
    after all. Answers nothing."""

    why: str = ""


FromStager = Reserved | Joined | Staged | StagerHolds | SnapshotMissing

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromWorker | FromStager)


def packet(message: Message) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH, "little") + body


async def next_message(reader: asyncio.StreamReader) -> FromWorker | FromStager | None:
    """The next message, on either side; None at the end. Raises ValueError: it is invalid."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "little")
        if length > _LONGEST:
            raise ValueError(f"a message has {length} bytes, at most {_LONGEST} are allowed")
        return _decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
