"""The operation `logprobs`: how probable a causal model finds each token of a response, given its prompt and the tokens before.

Rows are those of a score request: the query is the prompt, the item is the response. Rows of the answer are as long as the
longest response of the request, also where the request is cut: `columns` of each part says how long that is.
"""

from collections.abc import Sequence

import numpy as np

from enginepool.coordinator.operations.base import Operation, Work, refuse_ids, refuse_length, signature
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import MAX_PLACE_LABELS, MAX_TOP_LOGPROBS, Capabilities, Logprobs, Part, TaskId, Tokenize
from enginepool.protocol.ragged import MAX_TOKENS, PAIRED, SHARED, bad, read_rows

_SIGNATURE = signature(3)
_TEXT = "text; send token ids of prompt and response, each tokenized for itself: joined text may have other tokens"


class LogprobsOperation(Operation[Work]):
    """Rows of prompt and response, read by one prefill."""

    name = "logprobs"
    truncates = "query"

    def open(self, message: Logprobs, frames: Sequence[Buffer]) -> Work:
        labels, specs = message.labels, message.frames
        if message.truncation == "right":
            text = "truncation: 'right' would cut what responses follow; 'left' cuts prompts at their beginning"
            raise bad("truncation", text, "left")
        if len(labels) > MAX_PLACE_LABELS:
            most = str(MAX_PLACE_LABELS)
            raise bad("labels", f"labels: {len(labels)} ids; at most {most} in a request for logprobs", most)
        for i, label in enumerate(labels):
            if not 0 <= label < MAX_TOKENS:
                most = str(MAX_TOKENS - 1)
                raise bad("labels", f"labels[{i}]: {label}; a token id is 0 to {most}", most)
        if not 0 <= message.top_logprobs <= MAX_TOP_LOGPROBS:
            most = str(MAX_TOP_LOGPROBS)
            raise bad("top_logprobs", f"top_logprobs: {message.top_logprobs}; 0 to {most}", most)
        rows, tokens, longest, max_id, shared, text = read_rows(specs, frames, (SHARED, PAIRED), "a request for logprobs")
        if text:
            raise bad("items", f"items: {_TEXT}", "int32")
        columns = _longest_response(frames)
        part = Part(specs, labels, operation=self.name, columns=columns, top_logprobs=message.top_logprobs)
        versions = message.min_version, message.version
        wanted = tuple(labels), message.top_logprobs
        digest = hash((self.name, message.group, wanted, *versions, message.truncation, len(specs), *frames))
        nbytes = sum(map(len, frames))
        return Work(
            self, _SIGNATURE, message.group, rows, tokens, longest, max_id, False, nbytes, digest, part, tuple(frames), shared,
            len(labels), truncation=message.truncation,
        )  # fmt: skip

    def refuse(self, work: Work, can: Capabilities) -> WireError | None:
        labels = work.part.labels
        if labels and (label := max(labels)) >= can.vocab:
            return bad("labels", f"labels: id {label} is outside the vocabulary of {can.vocab}", str(can.vocab))
        if (top := work.part.top_logprobs) > can.vocab:
            return bad("top_logprobs", f"top_logprobs: {top}; the vocabulary has {can.vocab} tokens", str(can.vocab))
        return refuse_ids(work, can) or refuse_length(work, can)

    def outputs(self, work: Work, can: Capabilities | None) -> Sequence[tuple[str, int]]:
        part = work.part
        found = [("logprobs", part.columns)]
        if part.labels:
            found.append(("labels", part.columns * len(part.labels)))
        if top := part.columns * part.top_logprobs:
            found += [("top_ids", top), ("top_logprobs", top)]
        return found

    def knows_outputs(self, work: Work, can: Capabilities | None) -> bool:
        return True

    def tokenize(self, work: Work, task: TaskId) -> Tokenize:
        raise AssertionError("text is refused")


def _longest_response(frames: Sequence[Buffer]) -> int:
    """Tokens of the longest response. Raises WireError where a prompt or a response is empty."""
    lengths = np.frombuffer(frames[-1], np.uint32)
    if not lengths.all():
        at = f"items[{int((lengths == 0).argmax())}]"
        raise bad(at, f"{at}: empty; a response has at least one token", "1")
    if len(frames) == 3:
        if not frames[0]:
            raise bad("query", "query: empty; a prompt has at least one token", "1")
    elif not (prompts := np.frombuffer(frames[1], np.uint32)).all():
        at = f"query[{int((prompts == 0).argmax())}]"
        raise bad(at, f"{at}: empty; a prompt has at least one token", "1")
    return int(lengths.max())


LOGPROBS = LogprobsOperation()
