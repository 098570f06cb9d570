"""The valid golden messages: at least one of every type in every direction, then the corners of each."""

from typing import Any

from tests.wire.golden import Array, Raw, Valid, floats, ids, lengths, pack, text
from tests.wire.golden_adapters import VALID as ADAPTERS
from tests.wire.golden_generate import VALID as GENERATIONS
from tests.wire.golden_updates import UPDATES

CLIENT = bytes(range(16))
TOKEN = bytes(range(240, 256))
EPOCH = 1_700_000_000_000_000
WORKER = "5f1d7a3c9b2e4d6f8a0b1c2d3e4f5a6b"
MAX_ID = 2**63 - 1

QUERY = ids("query", 11, 12, 13)
ITEMS = ids("items", 21, 22, 23)
ITEM_LENGTHS = lengths("item_lengths", 2, 1)
EMBEDDINGS = floats("embeddings", (2, 2), 1.0, 0.0, 0.0, -1.0)
LOGPROBS = floats("logprobs", (2, 2), -0.25, -1.5, -2.0, 0.0)
LABELS = floats("labels", (2, 4), -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, 0.0, 0.0)
TOP_IDS = Array("top_ids", "int32", (2, 4), (21, 7, 22, 8, 23, 9, 0, 0))
TOP_LOGPROBS = floats("top_logprobs", (2, 4), -0.25, -1.0, -1.5, -1.75, -2.0, -3.0, 0.0, 0.0)
SCORES = floats("scores", (2, 2), 0.75, 0.25, 0.5, 0.5)

CAUSAL: dict[str, Any] = {
    "kind": "causal",
    "vocab": 1000,
    "context": 16,
    "batch_tokens": 64,
    "batch_rows": 8,
    "inflight_tokens": 128,
    "inflight_rows": 16,
    "token_bytes": 4,
}
CLASSIFIER: dict[str, Any] = {**CAUSAL, "kind": "classifier", "labels": 1, "hidden": 4, "text": False, "token_bytes": 0}
EMBEDDING: dict[str, Any] = {**CAUSAL, "kind": "embedding", "operations": ["embed"], "embedding": 4, "dimensions": [2, 4]}
CROSS_ENCODER: dict[str, Any] = {**CAUSAL, "kind": "classifier", "labels": 1, "separator": 20, "activation": "sigmoid"}


def _specs(*arrays: Array) -> list[Any]:
    return [array.spec() for array in arrays]


def _score(name: str, about: str, *arrays: Array, after: dict[str, Any], sent: dict[str, Any] | Raw | None = None) -> Valid:
    header = {"type": "score", "id": 1, "frames": _specs(*arrays), **after}
    # Our own encoder leaves room for a long map wherever a message may have over 15 keys.
    return Valid(name, "client-coordinator", about, header, arrays, sent, exact=len(header) > 15)


_SCORE: dict[str, Any] = {
    "type": "score",
    "id": 1,
    "frames": _specs(QUERY, ITEMS, ITEM_LENGTHS),
    "labels": [5, 6],
    "softmax": True,
    "timeout_ms": 30000,
}


_DECODE: dict[str, Any] = {"type": "decode", "id": 3, "frames": _specs(ITEMS, ITEM_LENGTHS)}
_TEXTS = (text("texts", "Grüße👍"), lengths("text_lengths", 7, 4))
_EMBED: dict[str, Any] = {"type": "embed", "id": 1, "frames": _specs(ITEMS, ITEM_LENGTHS)}
_LOGPROBS: dict[str, Any] = {"type": "logprobs", "id": 1, "frames": _specs(QUERY, ITEMS, ITEM_LENGTHS)}
_PAIRS = (ids("query", 11, 12, 13), lengths("query_lengths", 1, 2), ITEMS, ITEM_LENGTHS)
_ROW_LABELS = Array("labels", "int32", (2, 2), (5, 6, 7, 5))
_CHATS = (
    text("items", '[{"role":"user","content":"Grüße"}][{"role":"system","content":""},{"role":"user","content":"b"}]'),
    lengths("item_lengths", 37, 62),
)
_EMBED_TEXT = (text("items", "JaGrüße👍"), lengths("item_lengths", 2, 7, 4))
_TOKENIZE: dict[str, Any] = {"type": "tokenize_texts", "id": 4, "frames": _specs(*_EMBED_TEXT)}


def _variant(name: str, about: str, sent: dict[str, Any] | Raw) -> Valid:
    return Valid(name, "client-coordinator", about, _SCORE, (QUERY, ITEMS, ITEM_LENGTHS), sent)


def _from_client() -> list[Valid]:
    way = "client-coordinator"
    empty = ids("query")
    pairs = (ids("query", 11, 12, 13), lengths("query_lengths", 1, 2), ids("items", 21, 22, 23), lengths("item_lengths", 2, 1))
    return [
        Valid("hello", way, "a client says who it is, on its first link", {"type": "hello", "client": CLIENT, "token": TOKEN}),
        Valid(
            "hello-again",
            way,
            "the same client on its third link, with all fields",
            {
                "type": "hello",
                "client": CLIENT,
                "token": TOKEN,
                "incarnation": 2,
                "agent": "example/0.1 (C++)",
                "capabilities": ["something-new"],
                "max_message_bytes": 8388608,
                "epoch": EPOCH,
            },
        ),
        Valid("score", way, "two items of 2 and 1 ids behind a query of 3", _SCORE, (QUERY, ITEMS, ITEM_LENGTHS), exact=False),
        _score(
            "score-pairs",
            "each item has a query of its own: rows 11 21 22 and 12 13 23",
            *pairs,
            after={"labels": [5]},
        ),
        _score(
            "score-text",
            "text, to be tokenized by a worker; lengths count bytes",
            text("query", "Is it good? "),
            text("items", "JaGrüße👍"),
            lengths("item_lengths", 2, 7, 4),
            after={"labels": [9, 10]},
        ),
        _score(
            "score-text-pairs",
            "text, each item with its own query",
            text("query", "ab"),
            lengths("query_lengths", 1, 1),
            text("items", "cde"),
            lengths("item_lengths", 1, 2),
            after={"labels": [5]},
        ),
        _score("score-row-labels", "each row has labels of its own", QUERY, ITEMS, ITEM_LENGTHS, _ROW_LABELS, after={}),
        _score(
            "score-label-texts",
            "labels by their texts; the rows are ids all the same",
            QUERY,
            ITEMS,
            ITEM_LENGTHS,
            after={"label_texts": ["yes", "no", "später"]},
        ),
        _score(
            "score-chats",
            "two chats, for which the template of the model is asked not to let it think",
            *_CHATS,
            after={"labels": [5], "chat": {"kwargs": {"enable_thinking": False}}},
        ),
        _score(
            "score-all-fields",
            "every field differs from its default; a classifier would be asked for hidden states",
            QUERY,
            ITEMS,
            ITEM_LENGTHS,
            after={
                "group": "reward",
                "labels": [5, 6],
                "softmax": True,
                "item_first": True,
                "hidden": True,
                "priority": -1000,
                "timeout_ms": 1,
                "min_version": 4,
                "version": 5,
                "logprobs": True,
                "raw": True,
                "temperature": 0.5,
                "truncation": "right",
            },
        ),
        Valid("embed", way, "two rows of 2 and 1 ids", _EMBED, (ITEMS, ITEM_LENGTHS)),
        Valid(
            "embed-text-all-fields",
            way,
            "text, and every field differs from its default",
            {
                "type": "embed",
                "id": 2,
                "frames": _specs(*_EMBED_TEXT),
                "group": "documents",
                "dimensions": 2,
                "normalize": False,
                "priority": -1000,
                "timeout_ms": 1,
                "min_version": 4,
                "version": 5,
                "truncation": "error",
            },
            _EMBED_TEXT,
        ),
        Valid("decode", way, "two rows of 2 and 1 ids", _DECODE, (ITEMS, ITEM_LENGTHS)),
        Valid(
            "decode-all-fields",
            way,
            "every field differs from its default",
            {**_DECODE, "group": "policy", "skip_special_tokens": False, "priority": -1000, "timeout_ms": 1},
            (ITEMS, ITEM_LENGTHS),
        ),
        Valid("tokenize-texts", way, "two texts", _TOKENIZE, _EMBED_TEXT),
        Valid(
            "tokenize-texts-all-fields",
            way,
            "every field differs from its default",
            {**_TOKENIZE, "group": "policy", "add_special_tokens": False, "priority": -1000, "timeout_ms": 1},
            _EMBED_TEXT,
        ),
        Valid("logprobs", way, "two responses to one prompt", _LOGPROBS, (QUERY, ITEMS, ITEM_LENGTHS)),
        Valid(
            "logprobs-pairs-all-fields",
            way,
            "each response has its own prompt, and every field differs from its default",
            {
                "type": "logprobs",
                "id": 2,
                "frames": _specs(*_PAIRS),
                "group": "policy",
                "labels": [5, 6],
                "priority": -1000,
                "timeout_ms": 1,
                "min_version": 4,
                "version": 5,
                "truncation": "left",
                "top_logprobs": 2,
            },
            _PAIRS,
        ),
        _score("score-top-priority", "the highest priority", QUERY, ITEMS, ITEM_LENGTHS, after={"priority": 1000}),
        _score(
            "score-empty-query",
            "the rows are whole prompts",
            empty,
            ITEMS,
            ITEM_LENGTHS,
            after={"labels": [5]},
        ),
        _score(
            "score-empty-item",
            "the second item is empty: row 1 is the query alone",
            QUERY,
            ids("items", 21),
            lengths("item_lengths", 1, 0),
            after={"labels": [5]},
        ),
        _score(
            "score-empty-items-frame",
            "one item, and it is empty: the frame `items` has 0 bytes",
            QUERY,
            ids("items"),
            lengths("item_lengths", 0),
            after={"labels": [5]},
        ),
        _score(
            "score-largest-ids",
            "the largest token ids that int32 holds; whether the model has them is another question",
            ids("query", 2**31 - 1),
            ids("items", 0),
            lengths("item_lengths", 1),
            after={"labels": [0, 2**31 - 1]},
        ),
        Valid(
            "score-largest-request-id",
            way,
            "request ids go up to 2^63 - 1",
            {"type": "score", "id": MAX_ID, "frames": _specs(QUERY, ITEMS, ITEM_LENGTHS)},
            (QUERY, ITEMS, ITEM_LENGTHS),
            exact=False,
        ),
        Valid(
            "score-request-id-0",
            way,
            "and begin at 0",
            {"type": "score", "id": 0, "frames": _specs(QUERY, ITEMS, ITEM_LENGTHS)},
            (QUERY, ITEMS, ITEM_LENGTHS),
            exact=False,
        ),
        _variant(
            "score-unknown-keys",
            "keys that version 1 does not know are ignored, with any value",
            {**_SCORE, "trace": {"a": [1, None, 2.5]}, "blob": b"\x00\xff"},
        ),
        _variant(
            "score-nested-32-deep",
            "as deep as MAX_NESTING allows: the map, and in a key that version 1 does not know 31 arrays in each other",
            {**_SCORE, "later": Raw(b"\x91" * 31 + b"\xc0")},
        ),
        _variant("score-other-order", "the order of keys is free", dict(reversed(_SCORE.items()))),
        _variant(
            "score-defaults-written",
            "a field may be sent although it holds its default",
            {**_SCORE, "group": "", "item_first": False, "hidden": False, "priority": 0},
        ),
        _variant(
            "score-wide-integers",
            "an integer may be sent in a wider format than it needs: id as int 64, labels as uint 32 and int 32",
            {
                **_SCORE,
                "id": Raw(bytes.fromhex("d30000000000000001")),
                "labels": [Raw(bytes.fromhex("ce00000005")), Raw(bytes.fromhex("d200000006"))],
            },
        ),
        _variant(
            "score-wide-containers",
            "the map as map 32, a string as str 8",
            Raw(
                bytes.fromhex("df00000006")
                + bytes.fromhex("d904")
                + b"type"
                + pack("score")
                + b"".join(pack(key) + pack(value) for key, value in _SCORE.items() if key != "type")
            ),
        ),
        _variant(
            "score-longer-frame-spec",
            "further elements of an array structure are ignored",
            {**_SCORE, "frames": [[*spec, "later"] for spec in _SCORE["frames"]]},
        ),
        Valid("cancel", way, "take request 1 back", {"type": "cancel", "id": 1}),
        Valid("ack", way, "the answer of request 1 has arrived", {"type": "ack", "ids": [1]}),
        Valid("ack-many", way, "many at once, in any order", {"type": "ack", "ids": [3, 128, 2, 65536, MAX_ID]}),
        Valid("goodbye", way, "the client leaves for good", {"type": "goodbye"}),
        Valid("status", way, "what is the pool doing?", {"type": "status", "id": 7}),
        Valid(
            "restart",
            way,
            "restart this worker, if it still is this process",
            {"type": "restart", "id": 8, "group": "policy", "worker": "policy-0", "incarnation": "policy-0.1f.3"},
        ),
        Valid("restart-retired", way, "start a worker that has no process", {"type": "restart", "id": 9, "worker": "policy-1"}),
        Valid("ping-from-client", way, "are you there?", {"type": "ping", "at": 123456}),
        Valid("pong-from-client", way, "a client answers a ping", {"type": "pong", "at": 99}),
    ]


def _to_client() -> list[Valid]:
    way = "coordinator-client"
    hidden = floats("hidden", (2, 4), 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.25, -0.25)
    reward = floats("scores", (2, 1), -1.5, 3.25)
    return [
        Valid(
            "welcome",
            way,
            "the answer to hello",
            {
                "type": "welcome",
                "epoch": EPOCH,
                "capabilities": ["something-new"],
                "groups": ["policy", "reward"],
                "window_requests": 4096,
                "window_bytes": 268435456,
                "max_message_bytes": 67108864,
            },
        ),
        Valid(
            "welcome-again",
            way,
            "the answer to `hello-again`: its incarnation comes back",
            {"type": "welcome", "epoch": EPOCH, "groups": ["policy"], "ping_ms": 500, "incarnation": 2},
        ),
        Valid(
            "result-embed",
            way,
            "the answer to `embed`",
            {
                "type": "result",
                "id": 2,
                "version": 3,
                "forwards": [1],
                "usage": [2, 3],
                "timings": [150, 4200],
                "frames": _specs(EMBEDDINGS),
            },
            (EMBEDDINGS,),
        ),
        Valid(
            "result-tokenize-texts",
            way,
            "the answer to `tokenize-texts`",
            {
                "type": "result",
                "id": 4,
                "version": 3,
                "forwards": [],
                "usage": [2, 3],
                "timings": [150, 0],
                "frames": _specs(ITEMS, ITEM_LENGTHS),
                "workers": ["policy/0"],
            },
            (ITEMS, ITEM_LENGTHS),
        ),
        Valid(
            "result-decode",
            way,
            "the answer to `decode`",
            {
                "type": "result",
                "id": 3,
                "version": 3,
                "forwards": [],
                "usage": [2, 3],
                "timings": [150, 0],
                "frames": _specs(*_TEXTS),
                "workers": ["policy/0"],
            },
            _TEXTS,
        ),
        Valid(
            "result-logprobs",
            way,
            "the answer to `logprobs`, with labels",
            {
                "type": "result",
                "id": 2,
                "version": 3,
                "forwards": [1],
                "usage": [2, 6],
                "timings": [150, 4200],
                "frames": _specs(LOGPROBS, LABELS),
            },
            (LOGPROBS, LABELS),
        ),
        Valid(
            "result-logprobs-top",
            way,
            "the answer to `logprobs`, with the two most probable ids in the place of each id",
            {
                "type": "result",
                "id": 2,
                "version": 3,
                "forwards": [1],
                "usage": [2, 6],
                "timings": [150, 4200],
                "frames": _specs(LOGPROBS, TOP_IDS, TOP_LOGPROBS),
            },
            (LOGPROBS, TOP_IDS, TOP_LOGPROBS),
        ),
        Valid(
            "result",
            way,
            "the answer to `score`: one whole batch, weight version 3",
            {
                "type": "result",
                "id": 1,
                "version": 3,
                "forwards": [1],
                "usage": [2, 9],
                "timings": [150, 4200],
                "frames": _specs(SCORES),
            },
            (SCORES,),
        ),
        Valid(
            "result-hidden",
            way,
            "a reward model: one column, and hidden states of size 4; the request was cut into two batches, at two workers",
            {
                "type": "result",
                "id": 300,
                "version": 0,
                "forwards": [1, 1],
                "usage": [2, 9],
                "timings": [0, 70000],
                "frames": _specs(reward, hidden),
                "workers": ["reward-0", "reward-1"],
            },
            (reward, hidden),
        ),
        Valid(
            "result-truncated",
            way,
            "one of the two rows was cut",
            {
                "type": "result",
                "id": 1,
                "version": 3,
                "forwards": [1],
                "usage": [2, 9],
                "timings": [150, 4200],
                "frames": _specs(SCORES),
                "truncated": 1,
            },
            (SCORES,),
        ),
        Valid(
            "error-bad-request",
            way,
            "a refusal at the door names the field and the limit",
            {
                "type": "error",
                "code": "bad_request",
                "message": "priority: 1001 is outside ±1000",
                "id": 1,
                "field": "priority",
                "limit": "1000",
            },
        ),
        Valid(
            "error-busy",
            way,
            "a bound is reached; the id stays free",
            {"type": "error", "code": "busy", "message": "the queue is full", "id": 1, "retry_after_ms": 250},
        ),
        Valid(
            "error-poisoned",
            way,
            "workers died of this request; how, is in the evidence",
            {
                "type": "error",
                "code": "poisoned",
                "message": "3 workers died while the request ran alone",
                "id": 1,
                "evidence": ["policy-0: killed by signal 9", "policy-1: killed by signal 9", "policy-0: silent for 10 s"],
            },
        ),
        Valid(
            "error-without-id",
            way,
            "about a message in which no id could be read",
            {
                "type": "error",
                "code": "malformed",
                "message": "frame 0 is not msgpack: Input data was truncated",
                "field": "frame 0",
            },
        ),
        Valid(
            "error-to-hello",
            way,
            "the answer to a hello of incarnation 2, while a link of incarnation 3 exists",
            {
                "type": "error",
                "code": "superseded",
                "message": "hello: a newer link of this client exists",
                "field": "incarnation",
                "incarnation": 2,
            },
        ),
        Valid(
            "error-hello-required",
            way,
            "this link has not said hello to this coordinator",
            {"type": "error", "code": "hello_required", "message": "say hello first"},
        ),
        Valid(
            "status-report",
            way,
            "a group with one worker; GroupStatus has so many fields that some encoders write its map as map 16",
            {
                "type": "status_report",
                "epoch": EPOCH,
                "id": 7,
                "uptime_s": 12.5,
                "clients": 1,
                "answers_kept": 2,
                "answers_bytes": 640,
                "client_unread_bytes": 128,
                "worker_unread_bytes": 4096,
                "pauses": [3, 900],
                "groups": [
                    {
                        "name": "policy",
                        "queued": 4,
                        "running": 2,
                        "queued_tokens": 800,
                        "oldest_s": 0.25,
                        "version": 3,
                        "answered": 10,
                        "batches": 5,
                        "forwards": 5,
                        "model": "tiny",
                        "digest": "0123456789abcdef0123456789abcdef",
                        "early": 1,
                        "update": "transfer of version 4",
                        "needs_weights": "nobody holds version 3",
                        "no_worker": "no worker is connected",
                        "adapters": [{"name": "fr", "version": 2, "digest": "00", "path": "/a/fr", "nbytes": 3}],
                        "workers": [
                            {
                                "name": "policy-0",
                                "incarnation": WORKER,
                                "stage": "ready",
                                "pid": 4242,
                                "host": "node-1",
                                "version": 3,
                                "batches": 1,
                                "tokens": 9,
                                "done": 5,
                                "silent_s": 0.5,
                            }
                        ],
                    }
                ],
            },
            exact=False,
        ),
        Valid(
            "status-report-limits",
            way,
            "what requests may ask for: a causal model, and a reward model that returns hidden states",
            {
                "type": "status_report",
                "epoch": EPOCH,
                "groups": [
                    {
                        "name": "policy",
                        "limits": {
                            "kind": "causal",
                            "vocab": 1000,
                            "context": 16,
                            "items": 1000000,
                            "features": ["deterministic"],
                        },
                    },
                    {
                        "name": "reward",
                        "limits": {
                            "kind": "classifier",
                            "vocab": 1000,
                            "context": 14,
                            "items": 1000000,
                            "labels": 1,
                            "hidden": 4,
                            "text": False,
                        },
                    },
                ],
            },
            exact=False,
        ),
        Valid(
            "status-report-halved",
            way,
            "a group whose engines ran out of memory twice",
            {"type": "status_report", "epoch": EPOCH, "groups": [{"name": "policy", "halvings": 2}]},
            exact=False,
        ),
        Valid(
            "status-report-paced",
            way,
            "a worker's pace as learned from its batches: 9,000 tokens, where each row counts for 180 more",
            {
                "type": "status_report",
                "epoch": EPOCH,
                "groups": [
                    {
                        "name": "policy",
                        "workers": [
                            {
                                "name": "policy-0",
                                "incarnation": WORKER,
                                "stage": "ready",
                                "pace": 9000,
                                "forward_row_tokens": 180,
                                "engine": "sglang 0.5.23",
                                "device": "cuda",
                                "dtype": "bfloat16",
                                "parallel": [2, 1, 1, 1],
                            }
                        ],
                    }
                ],
            },
            exact=False,
        ),
        Valid(
            "status-report-asleep",
            way,
            "a group that sleeps, and what sleeps in the engine of its worker",
            {
                "type": "status_report",
                "epoch": EPOCH,
                "groups": [
                    {
                        "name": "policy",
                        "workers": [
                            {"name": "policy-0", "incarnation": WORKER, "stage": "asleep", "asleep": ["kv_cache", "weights"]}
                        ],
                        "asleep": ["kv_cache"],
                        "paused": True,
                    }
                ],
            },
            exact=False,
        ),
        Valid(
            "status-report-busiest",
            way,
            "a client with two requests",
            {
                "type": "status_report",
                "epoch": EPOCH,
                "clients": 3,
                "busiest": [{"id": "70756230", "requests": 2, "items": 9, "oldest": 42, "oldest_s": 12.5}],
            },
        ),
        Valid(
            "status-report-empty",
            way,
            "nothing but the epoch, while it ends",
            {"type": "status_report", "epoch": EPOCH, "draining": True},
        ),
        Valid("ping-to-client", way, "a coordinator may ping too", {"type": "ping", "at": 99}),
        Valid("pong-to-client", way, "with the epoch", {"type": "pong", "at": 123456, "epoch": EPOCH}),
    ]


def _from_worker() -> list[Valid]:
    way = "worker-coordinator"
    tokens = (ids("items", 2, 73, 115, 2, 74), lengths("item_lengths", 3, 2))
    shared = (ids("query", 2), ids("items", 73, 115, 74), lengths("item_lengths", 2, 1))
    first = floats("scores", (1, 2), 0.75, 0.25)
    second = floats("scores", (2, 1), 0.125, 1.0)
    reward = floats("scores", (1, 1), -1.5)
    hidden = floats("hidden", (1, 4), 1.0, -1.0, 0.5, -0.5)
    return [
        Valid(
            "register",
            way,
            "a new worker process",
            {"type": "register", "group": "policy", "incarnation": WORKER, "pid": 4242, "host": "node-1"},
        ),
        Valid(
            "register-again",
            way,
            "the same process on a new link; it has heard an epoch",
            {
                "type": "register",
                "group": "policy",
                "incarnation": WORKER,
                "epoch": EPOCH,
                "capabilities": ["something-new"],
            },
        ),
        Valid("ask-settings", way, "before there is a worker", {"type": "get_settings", "group": "policy"}),
        Valid("ask-settings-bare", way, "of the only group", {"type": "get_settings"}),
        Valid("stage", way, "loading", {"type": "stage", "stage": "loading", "detail": "shard 2 of 4"}),
        Valid("stage-bare", way, "without detail", {"type": "stage", "stage": "compiling"}),
        Valid(
            "ready",
            way,
            "a causal model; fields with defaults left out",
            {"type": "ready", "capabilities": CAUSAL},
            exact=False,
        ),
        Valid(
            "ready-parallel",
            way,
            "an engine on eight GPUs",
            {"type": "ready", "capabilities": {**CAUSAL, "dtype": "bfloat16", "parallel": [8, 1, 2, 4]}},
            exact=False,
        ),
        Valid(
            "ready-asleep",
            way,
            "parts of its engine's memory are released, and its weights are lost with them",
            {"type": "ready", "capabilities": CAUSAL, "digest": "lost", "asleep": ["cuda_graph", "weights"]},
            exact=False,
        ),
        Valid(
            "ready-cross-encoder",
            way,
            "a model that scores pairs of texts, with a separator between them",
            {"type": "ready", "capabilities": CROSS_ENCODER},
            exact=False,
        ),
        Valid(
            "ready-operations",
            way,
            "it has another operation than score",
            {"type": "ready", "capabilities": {**CAUSAL, "operations": ["score", "example"]}},
            exact=False,
        ),
        Valid(
            "ready-embedding",
            way,
            "a model that embeds, with two sizes to choose from",
            {"type": "ready", "capabilities": EMBEDDING},
            exact=False,
        ),
        Valid(
            "ready-classifier",
            way,
            "a reward model with hidden states and no tokenizer, at weight version 3",
            {
                "type": "ready",
                "capabilities": {
                    **CAUSAL,
                    "kind": "classifier",
                    "page": 16,
                    "labels": 1,
                    "hidden": 4,
                    "model": "tiny-reward",
                    "engine": "example 0.1",
                    "device": "cpu",
                    "text": False,
                },
                "version": 3,
                "adapters": ["french@2"],
                "digest": "0123456789abcdef0123456789abcdef",
            },
            exact=False,
        ),
        Valid(
            "ready-packed",
            way,
            "a worker that can join rows of one query into sequences, and knows how much it computes then",
            {"type": "ready", "capabilities": {**CAUSAL, "max_item": 65535, "pace": 12, "packed_pace": 9}},
            exact=False,
        ),
        Valid(
            "ready-paced",
            way,
            "a worker that knows how much it computes while others may wait",
            {"type": "ready", "capabilities": {**CAUSAL, "pace": 12}},
            exact=False,
        ),
        Valid(
            "ready-slow",
            way,
            "a worker whose forwards have to be longer than those of a GPU",
            {"type": "ready", "capabilities": {**CAUSAL, "pace": 12, "forward_ms": 400}},
            exact=False,
        ),
        Valid(
            "ready-caching",
            way,
            "a worker that computes a long query once for the rows that share it",
            {"type": "ready", "capabilities": {**CAUSAL, "cached_query": 8, "cached_tokens": 96}},
            exact=False,
        ),
        Valid(
            "ready-committed",
            way,
            "a worker that heard that its weights are committed, in the second run of versions",
            {"type": "ready", "capabilities": CAUSAL, "version": 3, "digest": "d" * 32, "committed": [1, 3]},
            exact=False,
        ),
        Valid(
            "ready-halved",
            way,
            "a worker whose budgets were halved once",
            {"type": "ready", "capabilities": {**CAUSAL, "halvings": 1}},
            exact=False,
        ),
        Valid("idle", way, "it holds nothing older than this epoch", {"type": "idle", "epoch": EPOCH}),
        Valid(
            "done",
            way,
            "the batch of one part is finished: one forward pass",
            {
                "type": "done",
                "batch": [EPOCH, 1],
                "parts": [{"frames": _specs(SCORES)}],
                "version": 3,
                "run_us": 4200,
            },
            (SCORES,),
        ),
        Valid(
            "done-three-parts",
            way,
            "the second part failed, its neighbors did not; the engine needed two passes",
            {
                "type": "done",
                "batch": [EPOCH, 2],
                "parts": [
                    {"frames": _specs(first)},
                    {"code": "engine_error", "message": "the engine refused the prompt"},
                    {"frames": _specs(second)},
                ],
                "version": 3,
                "forwards": 2,
                "run_us": 9000,
            },
            (first, second),
        ),
        Valid(
            "done-embed",
            way,
            "a batch of `embed` is finished",
            {"type": "done", "batch": [EPOCH, 7], "parts": [{"frames": _specs(EMBEDDINGS)}]},
            (EMBEDDINGS,),
        ),
        Valid(
            "done-logprobs",
            way,
            "a batch of `logprobs` is finished: one part without more, and one with two labels and the two most probable ids",
            {
                "type": "done",
                "batch": [EPOCH, 8],
                "parts": [{"frames": _specs(LOGPROBS)}, {"frames": _specs(LOGPROBS, LABELS, TOP_IDS, TOP_LOGPROBS)}],
            },
            (LOGPROBS, LOGPROBS, LABELS, TOP_IDS, TOP_LOGPROBS),
        ),
        Valid(
            "done-hidden",
            way,
            "a row of a reward model with its hidden state",
            {"type": "done", "batch": [EPOCH, 3], "parts": [{"frames": _specs(reward, hidden)}]},
            (reward, hidden),
        ),
        Valid(
            "tokenized",
            way,
            "two rows of ids",
            {"type": "tokenized", "task": [EPOCH, 4], "frames": _specs(*tokens)},
            tokens,
        ),
        Valid(
            "tokenized-shared",
            way,
            "the answer to `tokenize-share`: both rows begin with the query",
            {"type": "tokenized", "task": [EPOCH, 15], "frames": _specs(*shared)},
            shared,
        ),
        Valid(
            "tokenized-decode",
            way,
            "two rows of texts",
            {"type": "tokenized", "task": [EPOCH, 14], "frames": _specs(*_TEXTS)},
            _TEXTS,
        ),
        Valid(
            "tokenized-failed",
            way,
            "the tokenizer refused",
            {"type": "tokenized", "task": [EPOCH, 4], "code": "engine_error", "message": "no tokenizer"},
        ),
        Valid(
            "tokenized-labels",
            way,
            "the tokens of two labels",
            {"type": "tokenized", "task": [EPOCH, 11], "labels": [9693, 2152]},
        ),
        Valid(
            "tokenized-truncated",
            way,
            "one of the two rows was cut",
            {"type": "tokenized", "task": [EPOCH, 4], "frames": _specs(*tokens), "truncated": 1},
            tokens,
        ),
        Valid(
            "tokenized-refused",
            way,
            "the caller can mend this",
            {
                "type": "tokenized",
                "task": [EPOCH, 4],
                "code": "bad_request",
                "message": "items[0]: 40 tokens of its query, which is not truncated",
                "field": "items[0]",
                "limit": "31",
            },
        ),
        Valid("exiting", way, "drained", {"type": "exiting", "reason": "drained"}),
        Valid("bye-failed", way, "the engine broke", {"type": "exiting", "reason": "the engine hangs", "failed": True}),
        Valid(
            "bye-permanent",
            way,
            "the engine can never start like this",
            {"type": "exiting", "reason": "no such model", "failed": True, "permanent": True},
        ),
        Valid(
            "bye-out-of-memory",
            way,
            "a batch was too large for the engine's memory",
            {"type": "exiting", "reason": "CUDA out of memory", "failed": True, "out_of_memory": True},
        ),
        Valid(
            "error-from-worker",
            way,
            "it drains, and does not take batch 5",
            {"type": "error", "code": "shutting_down", "message": "this worker drains and takes no work", "id": 5},
        ),
        Valid("ping-from-worker", way, "are you there?", {"type": "ping", "at": 5}),
        Valid("pong-from-worker", way, "with the stage", {"type": "pong", "at": 77, "stage": "ready"}),
    ]


def _to_worker() -> list[Valid]:
    way = "coordinator-worker"
    one = (QUERY, ITEMS, ITEM_LENGTHS)
    embed = (ITEMS, ITEM_LENGTHS)
    two = (ids("query"), ids("items", 2, 73, 115), lengths("item_lengths", 3))
    packed = (ids("query", 2), ids("items", 73, 115, 74), lengths("item_lengths", 2, 1))
    pairs = (ids("query", 1, 2), lengths("query_lengths", 1, 1), ids("items", 3, 4), lengths("item_lengths", 1, 1))
    words = (text("query", "Is it good? "), text("items", "JaGrüße👍"), lengths("item_lengths", 2, 7, 4))
    return [
        Valid("accept", way, "the answer to register", {"type": "accept", "epoch": EPOCH}),
        Valid("accept-halvings", way, "engines ran out of memory twice", {"type": "accept", "epoch": EPOCH, "halvings": 2}),
        Valid("accept-staged", way, "reserve memory for staged updates", {"type": "accept", "epoch": EPOCH, "staged": True}),
        Valid("accept-again", way, "generations up to task 17 end", {"type": "accept", "epoch": EPOCH, "counter": 17}),
        Valid("accept-orphan", way, "with another patience", {"type": "accept", "epoch": EPOCH + 1, "orphan_s": 2.5}),
        Valid(
            "settings",
            way,
            "the group's settings, as in the pool's file",
            {"type": "settings", "group": "policy", "settings": '{"model":"m","engine":"sim"}'},
        ),
        Valid(
            "settings-checkpoint",
            way,
            "an engine that takes weights only at its start starts on the committed checkpoint",
            {
                "type": "settings",
                "group": "policy",
                "settings": '{"model":"m"}',
                "drain_s": 2.5,
                "path": "/models/7",
                "digest": "00ff",
                "version": 7,
            },
        ),
        Valid(
            "expired",
            way,
            "the link was silent for too long; register again under a new name",
            {"type": "expired", "incarnation": WORKER, "reason": "it was silent for 10.2 s"},
        ),
        Valid("expired-bare", way, "without a reason", {"type": "expired", "incarnation": WORKER}),
        Valid(
            "batch",
            way,
            "one part: the payload frames of `score`, as they came",
            {
                "type": "batch",
                "batch": [EPOCH, 1],
                "parts": [{"frames": _specs(*one), "labels": [5, 6], "softmax": True}],
            },
            one,
        ),
        Valid(
            "batch-embed",
            way,
            "rows of two requests to embed",
            {
                "type": "batch",
                "batch": [EPOCH, 7],
                "parts": [
                    {"frames": _specs(*embed), "operation": "embed"},
                    {"frames": _specs(*embed), "operation": "embed", "dimensions": 2, "normalize": False},
                ],
            },
            (*embed, *embed),
        ),
        Valid(
            "batch-logprobs",
            way,
            "rows of two requests for logprobs; the longest response of the second one is in another batch",
            {
                "type": "batch",
                "batch": [EPOCH, 8],
                "parts": [
                    {"frames": _specs(*one), "operation": "logprobs", "columns": 2},
                    {"frames": _specs(*_PAIRS), "labels": [5, 6], "operation": "logprobs", "columns": 7, "top_logprobs": 2},
                ],
            },
            (*one, *_PAIRS),
        ),
        Valid(
            "batch-three-parts",
            way,
            "rows of three requests; the payload frames follow part by part",
            {
                "type": "batch",
                "batch": [EPOCH, 2],
                "parts": [
                    {"frames": _specs(*one), "labels": [5, 6], "softmax": True},
                    {"frames": _specs(*two), "labels": [7]},
                    {"frames": _specs(*pairs), "labels": [8], "item_first": True, "logprobs": True},
                ],
                "priority": -3,
            },
            (*one, *two, *pairs),
        ),
        Valid(
            "batch-row-labels",
            way,
            "rows with labels of their own",
            {"type": "batch", "batch": [EPOCH, 14], "parts": [{"frames": _specs(*one, _ROW_LABELS), "logprobs": True}]},
            (*one, _ROW_LABELS),
        ),
        Valid(
            "batch-temperature",
            way,
            "softmax divides logits by it",
            {
                "type": "batch",
                "batch": [EPOCH, 10],
                "parts": [{"frames": _specs(*one), "labels": [5, 6], "softmax": True, "temperature": 2.5}],
            },
            one,
        ),
        Valid(
            "batch-packed",
            way,
            "a batch whose rows are joined into one sequence",
            {
                "type": "batch",
                "batch": [EPOCH, 16],
                "parts": [{"frames": _specs(*packed), "labels": [5, 6]}],
                "packed": True,
            },
            packed,
        ),
        Valid(
            "batch-hidden",
            way,
            "hidden states are wanted",
            {"type": "batch", "batch": [EPOCH, 3], "parts": [{"frames": _specs(*two), "hidden": True}]},
            two,
        ),
        Valid(
            "tokenize",
            way,
            "the text of `score-text`",
            {"type": "tokenize", "task": [EPOCH, 4], "frames": _specs(*words)},
            words,
        ),
        Valid(
            "tokenize-share",
            way,
            "what all rows begin with may be answered as a query",
            {"type": "tokenize", "task": [EPOCH, 15], "frames": _specs(*words), "share": True},
            words,
        ),
        Valid(
            "tokenize-item-first",
            way,
            "rows are item + query",
            {"type": "tokenize", "task": [EPOCH, 5], "frames": _specs(*words), "item_first": True},
            words,
        ),
        Valid(
            "tokenize-raw",
            way,
            "a cross-encoder joins these texts without a separator",
            {"type": "tokenize", "task": [EPOCH, 6], "frames": _specs(*words), "raw": True},
            words,
        ),
        Valid(
            "tokenize-chats",
            way,
            "two chats, rendered to where an answer would begin",
            {"type": "tokenize", "task": [EPOCH, 12], "frames": _specs(*_CHATS), "chat": {}},
            _CHATS,
        ),
        Valid(
            "tokenize-chats-all-options",
            way,
            "and with all options",
            {
                "type": "tokenize",
                "task": [EPOCH, 13],
                "frames": _specs(*_CHATS),
                "truncation": "left",
                "longest": 32,
                "labels": ["yes"],
                "chat": {"add_generation_prompt": False, "kwargs": {"n": 1, "x": 0.5, "s": "a", "none": None, "t": True}},
            },
            _CHATS,
        ),
        Valid(
            "tokenize-labels",
            way,
            "labels of rows that are ids",
            {"type": "tokenize", "task": [EPOCH, 11], "frames": [], "labels": ["yes", "no"]},
        ),
        Valid(
            "tokenize-truncated",
            way,
            "rows of more than 32 tokens lose the end of their items",
            {"type": "tokenize", "task": [EPOCH, 9], "frames": _specs(*words), "truncation": "right", "longest": 32},
            words,
        ),
        Valid(
            "batch-operation",
            way,
            "another operation than score",
            {"type": "batch", "batch": [EPOCH, 7], "parts": [{"frames": _specs(*two), "operation": "example"}]},
            two,
        ),
        Valid(
            "tokenize-operation",
            way,
            "the text of another operation than score",
            {"type": "tokenize", "task": [EPOCH, 8], "frames": _specs(*words), "operation": "example"},
            words,
        ),
        Valid(
            "tokenize-decode",
            way,
            "the ids of `decode-all-fields`",
            {
                "type": "tokenize",
                "task": [EPOCH, 14],
                "frames": _specs(ITEMS, ITEM_LENGTHS),
                "operation": "decode",
                "skip_special_tokens": False,
            },
            (ITEMS, ITEM_LENGTHS),
        ),
        Valid(
            "tokenize-texts-to-worker",
            way,
            "the texts of `tokenize-texts-all-fields`",
            {
                "type": "tokenize",
                "task": [EPOCH, 15],
                "frames": _specs(*_EMBED_TEXT),
                "raw": True,
                "operation": "tokenize",
                "add_special_tokens": False,
                "long": True,
            },
            _EMBED_TEXT,
        ),
        Valid("drain", way, "finish and end", {"type": "drain"}),
        Valid(
            "error-to-worker",
            way,
            "this incarnation was declared lost",
            {"type": "error", "code": "superseded", "message": "this incarnation was declared lost"},
        ),
        Valid("ping-to-worker", way, "every second", {"type": "ping", "at": 77}),
        Valid("pong-to-worker", way, "with the epoch", {"type": "pong", "at": 5, "epoch": EPOCH}),
    ]


VALID = [*_from_client(), *_to_client(), *_from_worker(), *_to_worker(), *UPDATES, *GENERATIONS, *ADAPTERS]
