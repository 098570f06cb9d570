"""Operations: what a request can ask of an engine. The rest of the coordinator knows only this interface.

An operation of the row shape is one file here and one entry in `table.py`. Its requests carry ragged rows, as in
`protocol/ragged.py`. They wait, are cut into whole batches and are answered in parts by code that does not know which operation
it is. A request that was interrupted runs again. The operation answers these questions:

    open             is the message a valid request, and what does it weigh?
    refuse           can a worker of these capabilities serve it?
    impossible       does a worker say of itself what cannot be?
    packs            can its rows be packed, joined into sequences?
    outputs          which frames does its answer have? Memory is charged by them, and a worker's answer is checked by them.
    tokenize         what is a worker asked that turns its text into ids?

A `Work` carries its operation. Only works of one `signature` share a batch, so a batch never mixes operations.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_ID, MAX_PRIORITY, Capabilities, FrameSpec, Part, TaskId, Tokenize, Truncation
from enginepool.protocol.ragged import bad, id_outside, row_lengths


class Work(msgspec.Struct, frozen=True, gc=False):
    """The content of a request, validated: counts for deciding, buffers for forwarding. An operation may add fields.

    `text`: a worker's tokenizer has to see it first. `tokens` and `longest` are the sum and the maximum of the rows' lengths,
    query and item together (bytes of rows that are text).
    `part` has the operation's own fields; it and `frames` are forwarded as they are. `digest` tells equal contents from others
    within this process. `shared`: the length of a query that all rows begin with and that can be computed once; 0: there is
    none. `values`: how many numbers `part` holds besides its frames. `charge`: what `memory.charge` says, where that is known
    before any worker is ready. `truncation`: of rows that are too long; `truncated`: how many were cut. `row_labels`: a
    further frame of the parts of this work, with as many elements for each row. `text_truncation`: `truncation` of the text
    from which its ids come; they are not cut themselves.
    """

    operation: "Operation[Any]"
    signature: int
    group: str
    rows: int
    tokens: int
    longest: int
    max_id: int
    text: bool
    nbytes: int
    digest: int
    part: Part
    frames: Sequence[Buffer]
    shared: int = 0
    values: int = 0
    charge: tuple[int, int] | None = None
    truncation: Truncation = ""
    truncated: int = 0
    row_labels: Buffer = b""
    text_truncation: Truncation = ""

    @property
    def of_text(self) -> bool:
        """Whether its rows are text."""
        return self.part.frames[0].dtype == "utf8"

    def without_payload(self) -> "Work":
        """What a queue reads of a request that has its answer."""
        return Work(
            self.operation, self.signature, self.group, self.rows, self.tokens, self.longest, self.max_id, self.text, 0,
            self.digest, self.part, (),
        )  # fmt: skip


W = TypeVar("W", bound=Work, contravariant=True)

#: Frames of answers that hold token ids, int32. All others are float32.
ID_FRAMES = frozenset({"top_ids"})


class Operation(Protocol[W]):
    """One operation of the row shape."""

    #: as in `operations` of a worker's capabilities, and of the parts of a batch
    name: str
    #: what truncation cuts
    truncates: Literal["items", "query"] = "items"
    #: the tokens that all rows of a text begin with may be computed once
    shares: bool = False
    #: a worker's tokenizer answers it, and no engine runs it: all workers serve it
    of_tokenizer: bool = False

    def open(self, message: Any, frames: Sequence[Buffer]) -> Work:
        """The work that `message` asks for, as far as it can be checked without knowing the model.

        Raises:
            WireError: `malformed` for frames that do not fit their header, `bad_request` for a value that no model could serve.
        """
        ...

    def refuse(self, work: W, can: Capabilities) -> WireError | None:
        """Why workers of these capabilities cannot serve `work`, or None."""
        ...

    def impossible(self, can: Capabilities) -> bool:
        """Whether no engine has the fields of these capabilities that are for this operation."""
        return False

    def packs(self, work: W, can: Capabilities) -> bool:
        """Whether workers of these capabilities may compute `work` packed."""
        return False

    def outputs(self, work: W, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        """(name, columns) of the frames of its answer, which have one row for each row of `work`: float32, but for `ID_FRAMES`.

        Without capabilities, as no worker was ready yet: an upper bound of usual models.
        """
        ...

    def knows_outputs(self, work: W, can: Capabilities | None) -> bool:
        """Whether `outputs` are exact. Otherwise they are a guess, and no request is finally refused because of a guess."""
        ...

    def charge(self, work: W, can: Capabilities | None) -> tuple[int, int] | None:
        """What `memory.charge` says, of an operation whose answers are no rows of `outputs`."""
        return None

    def describe(self, work: W, can: Capabilities | None) -> str:
        """What its answer is made of, for an error about its size."""
        return f"{work.rows} rows of {sum(columns for _, columns in self.outputs(work, can))} float32"

    def tokenize(self, work: W, task: TaskId) -> Tokenize:
        """The message that asks a worker for the ids of `work`, which is text."""
        ...

    def check_answer(self, work: W, most: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> int:
        """Of an operation `of_tokenizer`: check what a tokenizer has answered, for which `most` bytes are charged. Returns the
        number of token ids.

        Raises:
            WireError: it is no answer to `work`.
        """
        raise RuntimeError(f"{self.name} is no operation of tokenizers")


def check_ragged(
    values: tuple[str, str, int], rows: int, most: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]
) -> None:
    """Check that these are so many rows: a frame `values`, (name, dtype, bytes of an element), and one of lengths, with at
    most `most` bytes together.

    Raises:
        WireError: they are not.
    """
    name, dtype, unit = values
    lengths_name = f"{name.removesuffix('s')}_lengths"
    found = [(spec.name, spec.dtype, len(spec.shape)) for spec in specs]
    if found != [(name, dtype, 1), (lengths_name, "uint32", 1)]:
        text = f"tokenized: its frames are {found}; expected {name}, {dtype}, and {lengths_name}, uint32"
        raise WireError("malformed", text, field="frames")
    lengths, size = np.frombuffer(frames[1], np.uint32), len(frames[0])
    total = int(lengths.sum(dtype=np.int64)) * unit
    if len(lengths) != rows or total != size:
        text = f"tokenized: {len(lengths)} rows of {total} bytes; expected {rows} of {size}"
        raise WireError("malformed", text, field=lengths_name)
    if size + len(frames[1]) > most:
        raise WireError("malformed", f"tokenized: {name} has {size} bytes; at most {most}", field=name)


def signature(number: int, variant: int = 0) -> int:
    """Of the works of operation `number` that can share a batch. The lowest bit is free: whether they can be packed."""
    return (number << 4 | variant) << 1


#: The operation whose rows are sequences, which have slots and no batches.
GENERATION = 2


def of_sequences(signature: int) -> bool:
    """Whether works of this signature are generated."""
    return signature >> 5 == GENERATION


class RequestMessage(Protocol):
    """The fields that the messages of all operations have."""

    @property
    def id(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def timeout_ms(self) -> int | None: ...
    @property
    def min_version(self) -> int: ...
    @property
    def version(self) -> int | None: ...


def check_request(message: RequestMessage) -> None:
    """Check the fields that all operations have.

    Raises:
        WireError: `bad_request`, with the field and its limit.
    """
    if not 0 <= message.id <= MAX_ID:
        raise bad("id", f"id: {message.id} is outside 0..{MAX_ID}", str(MAX_ID))
    if not -MAX_PRIORITY <= message.priority <= MAX_PRIORITY:
        raise bad("priority", f"priority: {message.priority} is outside ±{MAX_PRIORITY}", str(MAX_PRIORITY))
    if not 0 <= message.min_version <= MAX_ID:
        raise bad("min_version", f"min_version: {message.min_version} is outside 0..{MAX_ID}", str(MAX_ID))
    if (version := message.version) is not None and not 0 <= version <= MAX_ID:
        raise bad("version", f"version: {version} is outside 0..{MAX_ID}", str(MAX_ID))
    if version is not None and message.min_version > version:
        text = f"min_version: {message.min_version} with version = {version}; at most version"
        raise bad("min_version", text, str(version))
    if message.timeout_ms is not None and message.timeout_ms <= 0:
        raise bad("timeout_ms", f"timeout_ms: {message.timeout_ms}; at least 1", "1")


def longest_row(can: Capabilities) -> int:
    """Tokens of the longest row that a worker of these capabilities is given."""
    return min(can.context, can.inflight_tokens - (can.page - 1))


def refuse_ids(work: Work, can: Capabilities) -> WireError | None:
    """Why a model of these capabilities cannot take the text or the ids of `work`, or None."""
    if work.text and not can.text:
        field = work.part.frames[0].name
        return bad(field, f"{field}: the model has no tokenizer: send token ids", "")
    return id_outside(work.frames, can.vocab) if work.max_id >= can.vocab else None


def refuse_length(work: Work, can: Capabilities) -> WireError | None:
    """Why a worker of these capabilities cannot take the longest row of `work`, or None."""
    if work.text or (work.longest <= can.context and work.longest < can.inflight_tokens - can.page + 2):
        return None
    longest = longest_row(can)
    row, length = next((i, n) for i, n in enumerate(row_lengths(work.frames)) if n > longest)
    with_query = " with its query" if len(work.frames) > 2 else ""
    why = ""
    if can.reserved and longest == can.context:
        why = f": the model's context of {can.context + can.reserved}, less {can.reserved} that the engine reserves"
    elif can.context >= can.inflight_tokens and not can.halvings:
        why = ": a row is one forward, and a worker of this group has no more in flight; see max_batch_tokens"
    return bad(f"items[{row}]", f"items[{row}]: {length} tokens{with_query}; at most {longest}{why}", str(longest))
