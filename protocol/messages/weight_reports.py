"""What is known of weights: the history of updates, and the answers of workers about what they hold."""

from hashlib import blake2b
from typing import Literal

import msgspec

from enginepool.protocol.basis import FrameSpec, Message, TaskId


class InspectWeights(Message, tag="inspect_weights"):
    """Ask about weights; answered by `weights_report`.

    versions: what each worker holds, and the history. digest: of every worker's weights as they are in its engine. validate:
    NaN, infinity and all-zero tensors in every engine. tensor: of the weight with the checkpoint name `name`, from one
    worker, the elements from `offset` on, at most `count` (0: as many as one answer has, MAX_CHUNK at most).
    """

    id: int
    group: str = ""
    what: Literal["versions", "digest", "validate", "tensor"] = "versions"
    name: str = ""
    offset: int = 0
    count: int = 0


#: The parts of `UpdateRecord.phases["hold"]`, one after the other.
HELD = ("drain", "load", "journal")


def publisher_of(client: bytes, id: int) -> str:
    """What the history calls the one who sent a `publish`: of the `client` and the `id` of that message. It does not give away
    the client, whose name another peer could take after a restart of the coordinator."""
    return blake2b(client + b"%d" % id, digest_size=16).hexdigest()


class UpdateRecord(msgspec.Struct, omit_defaults=True):
    """One transaction in the history. `outcome`: `committed`, or the error's code. `publisher`: as `publisher_of` says.

    `phases`: microseconds (µs), by name. A name is missing where the transaction had no such phase. One after the other:

        open        until every member said that it can take the weights
        join        until the process group stood; in `direct`, until `commit` as well
        transfer    until every member had staged and verified all bytes
        staged      until `commit`
        hold        the whole time in which the group started no work: drain + load + journal, exactly

    Parts of `hold`, one after the other, never to be added to it:

        drain       until batches in flight were answered or put back
        load   until every engine had taken the weights; in `direct` the bytes are broadcast here
        journal     until the commit was on the disk

    Parts of `load`, of the member that took longest in each: `copy` (the engine took the weights), `flush` (its caches).
    Outside of these: `prepare`, work before the hold that kept the engine from its requests, of the slowest member;
    `first_answer`, from the end of `load` to the first answer of the new weights, which overlaps `journal`.
    """

    version: int
    outcome: str
    transfer: str = "staged"
    message: str = ""
    at: float = 0.0
    members: int = 0
    committed: int = 0
    sent_bytes: int = 0
    digest: str = ""
    phases: dict[str, int] = {}
    aborted_batches: int = 0
    publisher: str = ""


class Finding(msgspec.Struct, omit_defaults=True):
    """Something about one tensor: `kind` is nan, infinity, overflow or zero, `count` its elements.

    Overflow: they are finite, and infinity in the dtype in which the engine holds them.
    """

    name: str
    kind: Literal["nan", "infinity", "overflow", "zero"]
    count: int = 0


class WorkerWeights(msgspec.Struct, omit_defaults=True):
    """One worker in a weights report. `digest`: as was asked; `code`, `message`: why it could not say."""

    name: str
    version: int = 0
    digest: str = ""
    findings: list[Finding] = []
    code: str = ""
    message: str = ""


class WeightsReport(Message, tag="weights_report"):
    """The answer to `inspect_weights`. Elements of a tensor come as the frame `tensor` float32, one-dimensional; `dtype` and
    `shape` are those of the whole tensor in the engine. `publisher`: of the weights that are committed."""

    id: int
    group: str
    version: int = 0
    digest: str = ""
    workers: list[WorkerWeights] = []
    history: list[UpdateRecord] = []
    dtype: str = ""
    frames: list[FrameSpec] = []
    shape: list[int] = []
    publisher: str = ""


class Inspect(Message, tag="inspect"):
    """A question about this worker's weights, as in `inspect_weights`. Answered by `inspected`."""

    task: TaskId
    what: Literal["digest", "validate", "tensor"]
    name: str = ""
    offset: int = 0
    count: int = 0


class Inspected(Message, tag="inspected"):
    """The answer to `inspect`; elements of a tensor come as in `weights_report`."""

    task: TaskId
    digest: str = ""
    findings: list[Finding] = []
    dtype: str = ""
    code: str = ""
    message: str = ""
    frames: list[FrameSpec] = []
    shape: list[int] = []
