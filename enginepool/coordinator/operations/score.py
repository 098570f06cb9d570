"""The operation `score`: what a model gives for each item, read with its query.

A causal model scores label tokens, a classifier returns the outputs of its head, and pooled hidden states if asked.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from enginepool.coordinator.operations.base import Operation, Work, longest_row, refuse_ids, refuse_length, signature
from enginepool.coordinator.requests.memory import UNKNOWN_HIDDEN, UNKNOWN_LABELS, labels_charge
from enginepool.protocol.chat import MAX_CHAT_BYTES, MAX_TEMPLATE_TOKENS, ChatTemplate
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import LEAST_TEMPERATURE, MAX_TEMPERATURE, Capabilities, Part, Score, TaskId, Tokenize
from enginepool.protocol.packing import cheap_to_repeat
from enginepool.protocol.ragged import ITEMS, MAX_TOKENS, PAIRED, SHARED, bad, read_rows
from enginepool.protocol.row_labels import LABELS_FRAME, check_row_labels

_SCORES, _WITH_HIDDEN = signature(0), signature(0, 1)
_ROWS, _CHATS = (SHARED, PAIRED), (ITEMS,)


class ScoreWork(Work, frozen=True, gc=False):
    """A score request. `columns`: how many labels it names. `max_label`: the largest of them, or -1. `raw`: rows need no
    separator. `label_texts`: labels whose tokens are not known yet. `chat`: its text is chats."""

    columns: int = 0
    max_label: int = -1
    raw: bool = False
    label_texts: tuple[str, ...] = ()
    chat: ChatTemplate | None = None


class ScoreOperation(Operation[ScoreWork]):
    """Rows of query and item, scored."""

    name = "score"
    shares = True

    def open(self, message: Score, frames: Sequence[Buffer]) -> ScoreWork:
        labels, chat, temperature = message.labels, message.chat, message.temperature
        max_label = _check_labels(message) if labels else -1
        if temperature != 1.0:
            _check_temperature(message)
        specs = message.frames
        row_labels: Buffer = b""
        if specs and specs[-1].name == LABELS_FRAME and len(specs) == len(frames):
            specs, frames, row_labels = specs[:-1], frames[:-1], frames[-1]
        layouts = _ROWS if chat is None else _CHATS
        rows, tokens, longest, max_id, shared, text = read_rows(specs, frames, layouts, "a score request")
        if chat is not None:
            _check_chat(message, frames, text)
            tokens += MAX_TEMPLATE_TOKENS * rows
        if specs is not message.frames:
            max_label = _check_row_labels(message, row_labels, rows)
        columns = len(labels) or message.columns(frames)
        if message.softmax and columns == 1:
            wrong = "softmax: over one label it is always 1.0; name more labels, or leave softmax out"
            raise bad("softmax", wrong, "2")
        if message.item_first:
            shared = 0
        nbytes = sum(map(len, frames)) + len(row_labels)
        hidden = message.hidden
        part = Part(specs, labels, message.softmax, message.item_first, message.logprobs, hidden, temperature=temperature)
        shape: tuple[object, ...] = (
            message.group, tuple(labels), message.softmax, message.item_first, message.logprobs, message.raw, hidden,
            temperature, message.truncation,
        )  # fmt: skip
        label_texts, values = (), len(labels)
        if chat is not None or message.label_texts or row_labels:
            label_texts, values = tuple(message.label_texts), message.values
            shape = (*shape, label_texts, msgspec.msgpack.encode(chat), row_labels)
        digest = hash((*shape, message.min_version, message.version, len(specs), *frames))
        charge = None if text or hidden or not labels else labels_charge(rows, values, nbytes)
        return ScoreWork(
            self, _WITH_HIDDEN if hidden else _SCORES, message.group, rows, tokens, longest, max_id, text or label_texts != (),
            nbytes, digest, part, tuple(frames), shared, values, charge, message.truncation, 0, row_labels, "", columns,
            max_label, message.raw or chat is not None, label_texts, chat,
        )  # fmt: skip

    def refuse(self, work: ScoreWork, can: Capabilities) -> WireError | None:
        if work.label_texts and not can.text:
            return bad("label_texts", "label_texts: the model has no tokenizer: name labels by their token ids", "0")
        if work.chat is not None and work.text and "chat_template" not in can.features:
            return bad("chat", "chat: this model has no chat template; send the text of each chat, or its ids", "")
        if can.kind == "causal" and not work.columns:
            return bad("labels", "labels: a causal model scores label token ids; name at least one", "1")
        if can.kind == "classifier":
            if work.columns:
                return bad("labels", f"labels: a classifier has its own {can.labels} labels; name none", "0")
            if wrong := _check_outputs(work, can):
                return wrong
        if work.max_label >= can.vocab:
            return bad("labels", f"labels: id {work.max_label} is outside the vocabulary of {can.vocab}", str(can.vocab))
        if (work.text or work.max_id >= can.vocab) and (wrong := refuse_ids(work, can)):
            return wrong
        if can.separator is not None and not work.text and not work.raw:
            if work.truncation in ("left", "right"):
                text = "truncation: ids would lose separators of this model; send text, or truncate them and leave it out"
                return bad("truncation", text, "error")
            if wrong := _check_separated(work, can.separator):
                return wrong
        if work.part.hidden and not can.hidden:
            return bad("hidden", "hidden: this model returns no pooled hidden states", "0")
        return refuse_length(work, can)

    def packs(self, work: ScoreWork, can: Capabilities) -> bool:
        """A row has a sequence of its own at worst: two delimiters. Whole rows are items."""
        query = 0 if cheap_to_repeat(work.shared, 1) else work.shared
        return (
            can.packs
            and not work.row_labels
            and (work.shared > 0 or not _has_empty_item(work))
            and work.longest - query <= can.max_item
            and work.longest + 2 <= longest_row(can)
        )

    def outputs(self, work: ScoreWork, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        labels = work.columns or (UNKNOWN_LABELS if can is None else can.labels)
        if not work.part.hidden:
            return (("scores", labels),)
        return (("scores", labels), ("hidden", (0 if can is None else can.hidden) or UNKNOWN_HIDDEN))

    def knows_outputs(self, work: ScoreWork, can: Capabilities | None) -> bool:
        if work.part.hidden:
            return can is not None and can.hidden > 0
        return can is not None or work.columns > 0

    def tokenize(self, work: ScoreWork, task: TaskId) -> Tokenize:
        frames = work.part.frames if work.of_text else []
        labels, share = list(work.label_texts), self.shares and work.of_text
        return Tokenize(task, frames, work.part.item_first, work.raw, labels=labels, chat=work.chat, share=share)


def _has_empty_item(work: ScoreWork) -> bool:
    """Whether that is why rows behind one query share none."""
    return len(work.frames) == 3 and len(work.frames[0]) > 0 and not work.part.item_first


def _check_labels(message: Score) -> int:
    """The largest of the labels in the header. Raises WireError where one is no token id, or there are texts of labels, too."""
    labels = message.labels
    most = max(labels)
    if min(labels) < 0 or most >= MAX_TOKENS:
        at = next(i for i, label in enumerate(labels) if not 0 <= label < MAX_TOKENS)
        limit = str(MAX_TOKENS - 1)
        raise bad("labels", f"labels[{at}]: {labels[at]}; a token id is 0 to {limit}", limit)
    if message.label_texts:
        raise bad("label_texts", "label_texts: the request has labels, too; name either ids or texts", "0")
    return most


def _check_row_labels(message: Score, frame: Buffer, rows: int) -> int:
    """The largest of the labels that each row has for itself. Raises WireError where there are others, or they are none."""
    if message.labels or message.label_texts:
        raise bad("labels", "labels: the header has labels, too; name them there or for each row", "0")
    return check_row_labels(message.frames[-1], frame, rows)


def _check_chat(message: Score, frames: Sequence[Buffer], of_text: bool) -> None:
    """Raises WireError for an option or a frame that chats cannot have."""
    if not of_text:
        raise bad("items", "items: int32; chats are text", "utf8")
    if (size := len(frames[0])) > MAX_CHAT_BYTES:
        raise bad("items", f"items: {size} bytes of chats; at most {MAX_CHAT_BYTES}", str(MAX_CHAT_BYTES))
    if message.truncation == "right":
        raise bad(
            "truncation", "truncation: 'right' would cut where the answer of a chat begins; 'left' cuts its beginning", "left"
        )
    for field in ("item_first", "raw"):
        if getattr(message, field):
            raise bad(field, f"{field}: a chat is one text, without a query; leave it out", "false")


def _check_temperature(message: Score) -> None:
    """Raises WireError where the temperature is out of range, or given without `softmax`."""
    temperature = message.temperature
    if temperature == 1.0:
        return
    if not LEAST_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        text = f"temperature: {temperature} is outside {LEAST_TEMPERATURE:g}..{MAX_TEMPERATURE:g}"
        raise bad("temperature", text, f"{LEAST_TEMPERATURE:g}..{MAX_TEMPERATURE:g}")
    if not message.softmax:
        text = f"temperature: {temperature} without softmax, which alone divides by it; add softmax, or leave temperature out"
        raise bad("temperature", text, "1")


def _check_outputs(work: ScoreWork, can: Capabilities) -> WireError | None:
    """Why a classifier's head cannot give the outputs that `work` asks for, or None."""
    if work.part.softmax and can.labels == 1:
        return bad("softmax", "softmax: this model's head has one output, over which it is always 1.0; leave it out", "2")
    if work.part.logprobs and not work.part.softmax and not can.activation:
        return bad("logprobs", "logprobs: this model's head gives logits, not probabilities; add softmax", "")
    return None


def _check_separated(work: ScoreWork, separator: int) -> WireError | None:
    """The first row whose query and item have no separator between them; rows of one of the two have nothing to separate."""
    frames = work.frames
    rows = len(frames[-1]) // 4
    texts = [
        (np.frombuffer(frames[0], np.int32), frames[1] if len(frames) == 4 else None),
        (np.frombuffer(frames[-2], np.int32), frames[-1]),
    ]
    first, second = reversed(texts) if work.part.item_first else texts
    last, some = _edge(*first, rows, end=True)
    next_, more = _edge(*second, rows, end=False)
    wrong = np.flatnonzero(some & more & (last != separator) & (next_ != separator))
    if not wrong.size:
        return None
    at = f"items[{wrong[0]}]"
    text = f"{at}: no separator token {separator} between query and item; end the query with it, or say raw=True"
    return bad(at, text, str(separator))


def _edge(
    ids: npt.NDArray[np.int32], lengths: Buffer | None, rows: int, *, end: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """(the last id of each row, or the first one, which rows have any); without `lengths` all rows are `ids`."""
    if lengths is None:
        return np.full(rows, ids[-1 if end else 0] if ids.size else 0, np.int32), np.full(rows, ids.size > 0)
    sizes = np.frombuffer(lengths, np.uint32).astype(np.int64)
    ends = np.cumsum(sizes)
    some = sizes > 0
    edges = np.zeros(rows, np.int32)
    edges[some] = ids[(ends - 1 if end else ends - sizes)[some]]
    return edges, some


SCORE = ScoreOperation()
