"""What every message is made of: the base of all messages, the description of payload frames, task ids and bounds."""

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 1
MAX_PRIORITY = 1000
MAX_LABELS = 4096
#: Ids in one `ack`.
MAX_ACKS = 4096
#: Payload frames of a client's message, and sides of a payload frame.
MAX_FRAMES, MAX_SIDES = 16, 2
#: Names in `capabilities` of a `hello`.
MAX_CAPABILITIES = 256
MAX_ID = 2**63 - 1
#: The largest epoch that a coordinator with a lower one follows: above it there is room for all starts to come.
MAX_EPOCH = 2**62
#: Characters of a text for people, where the message would not fit frame 0 with all of it.
MAX_TEXT = 500
#: Findings in one message.
MAX_FINDINGS = 4096
#: UTF-8 bytes of a name, an address or a path in a message of a publisher: each is sent on to workers
MAX_NAME_BYTES = 4096
#: Frame 0 over this many bytes is refused before it is decoded.
MAX_HEADER_BYTES = 1 << 20
#: elements of a weight in one answer
MAX_CHUNK = 1 << 20
#: Maps and arrays in frame 0 that lie in each other, with the map that it is.
MAX_NESTING = 32
#: Values in frame 0 of a client's message: the keys and entries of its maps and arrays, without those of `labels` and `ids`.
MAX_VALUES = 32_768

# What a request and its answer count in the window and in the coordinator's total, in bytes ("Window and `busy`").
#: a request without its payload, and each of its labels
REQUEST_BYTES = 2048
LABEL_BYTES = 40
#: the header of an answer, and what each row adds to it
RESULT_BYTES = 512
ROW_BYTES = 2
#: of the names of workers in an answer, which its header has room for
NAMES_BYTES = 224
#: of the answer to `generate`, what each sequence adds: its end, and its spans and places while few weight versions and workers
#: computed it
SEQUENCE_BYTES = 128
#: an element of an answer (float32), and an id of tokenized text (int32)
ELEMENT_BYTES = 4
#: an expert (int16) to which a layer routed a token
EXPERT_BYTES = 2

Dtype = Literal["int32", "uint32", "uint64", "float32", "utf8", "uint8", "int16"]

#: What becomes of a row that is longer than its model takes: an error, or it loses tokens on one side. "": an error, but texts
#: for a model with a separator are cut as its tokenizer cuts pairs.
Truncation = Literal["", "error", "left", "right"]


class FrameSpec(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One payload frame: [name, dtype, shape]. For `utf8` the shape is [bytes]."""

    name: str
    dtype: Dtype
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_SIDES)]


class Message(msgspec.Struct, tag_field="type", omit_defaults=True, gc=False):
    """Base of all messages. Subclasses set their own tag."""


#: (epoch, counter): fresh for every attempt; an answer with an unknown one is dropped.
TaskId = tuple[int, int]
