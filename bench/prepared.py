"""The messages of the wire benchmark, made once: one score request of 120 query and 10 x 180 item token ids, and its answer."""

import json
import struct

import msgspec
import numpy as np

from enginepool.protocol.messages import FrameSpec, Result, Score, Timings, Usage

QUERY, ITEMS, ITEM, LABELS = 120, 10, 180, (9454, 2753)
#: Ids are drawn below this, the vocabulary of Qwen3.
VOCAB = 151_643
#: Different requests that are sent in turn, so that no peer profits from a prompt it has seen a moment ago.
VARIANTS = 64
#: From here on msgpack writes an integer as 0xcf and eight bytes, so that only those eight differ between requests.
FIRST_ID = 1 << 32
_PLACE = (1 << 62) + 0x5EED


class Template:
    """An encoded message in which one id of fixed width is put in place."""

    def __init__(self, encoded: bytes) -> None:
        head, tail = encoded.split(struct.pack(">Q", _PLACE))
        self._head, self._tail, self._pack = head, tail, struct.Struct(">Q").pack

    def of(self, number: int) -> bytes:
        """The message with `number` as its id."""
        return self._head + self._pack(number) + self._tail


def token_ids(variant: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Random token ids of one request: the query's, then the items'."""
    return np.random.default_rng(variant).integers(0, VOCAB, QUERY + ITEMS * ITEM, dtype=np.int32)


def score_requests(group: str) -> list[tuple[Template, list[bytes]]]:
    """Header and payload frames of each variant, with labels, a deadline and one of three priorities."""
    lengths = np.full(ITEMS, ITEM, np.uint32).tobytes()
    frames = [
        FrameSpec("query", "int32", (QUERY,)),
        FrameSpec("items", "int32", (ITEMS * ITEM,)),
        FrameSpec("item_lengths", "uint32", (ITEMS,)),
    ]
    requests: list[tuple[Template, list[bytes]]] = []
    for variant in range(VARIANTS):
        ids = token_ids(variant)
        header = Score(
            id=_PLACE,
            frames=frames,
            group=group,
            labels=list(LABELS),
            softmax=True,
            priority=variant % 3,
            timeout_ms=30_000,
        )
        payload = [ids[:QUERY].tobytes(), ids[QUERY:].tobytes(), lengths]
        requests.append((Template(msgspec.msgpack.encode(header)), payload))
    return requests


def scores_frame(rows: int) -> tuple[FrameSpec, bytes]:
    """The scores that a worker returns for `rows` items."""
    scores = np.linspace(0.0, 1.0, rows * len(LABELS), dtype=np.float32)
    return FrameSpec("scores", "float32", (rows, len(LABELS))), scores.tobytes()


def result() -> tuple[Template, bytes]:
    """What a client gets in the end: the header of the answer and its one frame."""
    spec, scores = scores_frame(ITEMS)
    usage, timings = Usage(ITEMS, QUERY + ITEMS * ITEM), Timings(0, 0)
    header = Result(id=_PLACE, version=0, forwards=[1], usage=usage, timings=timings, frames=[spec])
    return Template(msgspec.msgpack.encode(header)), scores


def http_requests(host: str) -> list[bytes]:
    """The same requests as POST /generate, whole HTTP/1.1 messages, in the form that SGLang takes: ids of one long prompt."""
    requests: list[bytes] = []
    for variant in range(VARIANTS):
        body = {
            "input_ids": token_ids(variant).tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "token_ids_logprob": list(LABELS),
            "priority": variant % 3,
        }
        text = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST /generate HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        )
        requests.append(head.encode() + text)
    return requests


def http_answer_body() -> bytes:
    """What an HTTP worker answers to /generate, in SGLang's form: two log-probabilities for each of ten items."""
    rows = [[[-0.125 * (item + 1), label, None] for label in LABELS] for item in range(ITEMS)]
    meta = {
        "id": "f3b0c44298fc1c149afbf4c8996fb924",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": QUERY + ITEMS * ITEM,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "e2e_latency": 0.0,
        "input_token_ids_logprobs": rows,
    }
    return json.dumps({"text": "", "output_ids": [], "meta_info": meta}, separators=(",", ":")).encode()


def http_answer(body: bytes) -> bytes:
    """A whole HTTP/1.1 answer."""
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
