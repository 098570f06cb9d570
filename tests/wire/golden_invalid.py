"""The golden messages that must be refused, each wrong in one way, with the error that says so."""

import math
from typing import Any

from tests.wire.golden import Array, Invalid, Piece, Raw, floats, ids, lengths, pack, text
from tests.wire.golden_adapters import INVALID as ADAPTERS
from tests.wire.golden_generate import INVALID as GENERATIONS
from tests.wire.golden_valid import CLIENT, EPOCH, ITEM_LENGTHS, ITEMS, QUERY, TOKEN

SHARED = (QUERY, ITEMS, ITEM_LENGTHS)
HUGE = 1 << 20


def _specs(*arrays: Array) -> list[Any]:
    return [array.spec() for array in arrays]


def _hex(header: Any, *arrays: Array) -> list["str | list[Piece]"]:
    return [pack(header).hex(), *(array.payload().hex() for array in arrays)]


def _header(**changes: Any) -> dict[str, Any]:
    """A good score header with some fields put in or replaced; None takes one out."""
    header = {"type": "score", "id": 1, "frames": _specs(*SHARED), "labels": [5, 6], **changes}
    return {key: value for key, value in header.items() if value is not None}


def _many(header: dict[str, Any], field: str, array: str, entry: str, times: int) -> list[Piece]:
    """`header` with an array of equal entries as its last field; `array` and `entry` in hex."""
    empty = pack({**header, field: Raw(bytes.fromhex(array))}).hex()
    return [empty, {"hex": entry, "times": times}]


def _score(
    name: str,
    about: str,
    code: str,
    field: str,
    *,
    stage: str,
    model: str = "",
    arrays: tuple[Array, ...] = SHARED,
    **changes: Any,
) -> Invalid:
    header = _header(**{"frames": _specs(*arrays), **changes})
    return Invalid(name, "client-coordinator", about, code, field, stage, _hex(header, *arrays), model)


def _frame0(name: str, about: str, data: "bytes | list[Piece]", code: str, field: str) -> Invalid:
    frame = data.hex() if isinstance(data, bytes) else data
    return Invalid(name, "client-coordinator", about, code, field, "header", [frame])


def _unreadable() -> list[Invalid]:
    """Frame 0 cannot be read, or is no message."""
    good = pack(_header())
    unknown_key = pack({"type": "goodbye", "x": None})[:-1]
    padded: list[Piece] = [unknown_key.hex() + "c600100000", {"hex": "00", "times": HUGE}]
    at = "frame 0"
    return [
        _frame0("header-empty", "frame 0 has no bytes", b"", "malformed", at),
        _frame0("header-truncated", "the map breaks off", good[:-2], "malformed", at),
        _frame0("header-cut-in-key", "the map breaks off inside its first key", good[:4], "malformed", at),
        _frame0("header-trailing-bytes", "bytes after the map", good + b"\x00", "malformed", at),
        _frame0("header-json", "JSON is not msgpack", b'{"type":"goodbye"}', "malformed", at),
        _frame0("header-http", "neither is HTTP", b"GET / HTTP/1.1\r\n\r\n", "malformed", at),
        _frame0("header-pickle", "nor a pickle", b"(dp0\n.", "malformed", at),
        _frame0("header-invalid-opcode", "0xc1 is never used in msgpack", unknown_key + b"\xc1", "malformed", at),
        _frame0("header-array", "an array in place of a map", pack(["goodbye"]), "malformed", at),
        _frame0("header-nil", "nil in place of a map", b"\xc0", "malformed", at),
        _frame0("header-integer-key", "a key that is no string", pack({"type": "goodbye", 1: 2}), "malformed", at),
        _frame0(
            "header-string-not-utf8",
            "a string in the header is not UTF-8",
            pack(_header(group="ab")).replace(b"\xa2ab", b"\xa2\xff\xfe"),
            "malformed",
            at,
        ),
        _frame0(
            "header-array-length-lies",
            "an unknown key claims 2^32 - 1 elements; nothing may be allocated for them",
            unknown_key + bytes.fromhex("ddffffffff"),
            "malformed",
            at,
        ),
        _frame0(
            "header-bytes-length-lies",
            "an unknown key claims 2^32 - 1 bytes",
            unknown_key + bytes.fromhex("c6ffffffff"),
            "malformed",
            at,
        ),
        _frame0(
            "header-nested-too-deep",
            "an unknown key holds arrays in arrays, 100,000 deep: a recursive decoder must not fall",
            [unknown_key.hex(), {"hex": "91", "times": 100_000}, "c0"],
            "malformed",
            at,
        ),
        _frame0(
            "header-nested-33-deep",
            "one level more than MAX_NESTING, in an unknown key: the map, and 32 arrays in each other",
            [unknown_key.hex(), {"hex": "91", "times": 32}, "c0"],
            "malformed",
            at,
        ),
        _frame0(
            "header-many-values",
            "an unknown key holds a million empty arrays",
            [unknown_key.hex(), "dd000f4240", {"hex": "90", "times": 1_000_000}],
            "malformed",
            at,
        ),
        _frame0("header-too-large", "frame 0 is over 1 MiB, by an unknown key", padded, "too_large", at),
        _frame0("type-missing", "a map without type", pack({"id": 1}), "bad_request", "type"),
        _frame0(
            "type-unknown", "a type that version 1 does not know", pack({"type": "example", "id": 1}), "unsupported", "type"
        ),
        _frame0("type-integer", "a type that is no string", pack({"type": 7}), "unsupported", "type"),
        _frame0(
            "type-of-other-direction",
            "a client does not send results; to the coordinator's client endpoint the type is unknown",
            pack({"type": "result", "id": 1}),
            "unsupported",
            "type",
        ),
    ]


def _fields() -> list[Invalid]:
    """A field is missing, or has a value of another type."""
    h, bad = "header", "bad_request"
    way = "client-coordinator"
    frames = _specs(*SHARED)
    return [
        _score("id-missing", "score without id", bad, "id", stage=h, id=None),
        Invalid("frames-missing", way, "score without frames", bad, "frames", h, _hex(_header(frames=None))),
        _score("id-string", "an id is an int", bad, "id", stage=h, id="1"),
        _score("id-bool", "true is no int", bad, "id", stage=h, id=True),
        _score("priority-nan", "a priority is an int, and NaN is none", bad, "priority", stage=h, priority=float("nan")),
        _score("priority-float", "a whole float is no int either", bad, "priority", stage=h, priority=1.0),
        _score("priority-string", "nor is a string", bad, "priority", stage=h, priority="high"),
        _score("priority-nil", "nil stands only where the table says so", bad, "priority", stage=h, priority=Raw(b"\xc0")),
        _score("timeout-float", "milliseconds are an int", bad, "timeout_ms", stage=h, timeout_ms=1.5),
        _score("softmax-integer", "1 is no bool", bad, "softmax", stage=h, softmax=1),
        _score("chat-option-list", "options are plain values", bad, "chat.kwargs[...]", stage=h, chat={"kwargs": {"a": [1]}}),
        _score("chat-unknown-key", "no such key", bad, "chat", stage=h, chat={"template": "x"}),
        _score("label-text-empty", "a text has 1 to 64 characters", bad, "label_texts[1]", stage=h, label_texts=["yes", ""]),
        _score("label-text-long", "65 characters", bad, "label_texts[0]", stage=h, label_texts=["y" * 65]),
        _score("truncation-unknown", "error, left or right", bad, "truncation", stage=h, truncation="middle"),
        _score("labels-integer", "labels is an array", bad, "labels", stage=h, labels=5),
        _score("label-string", "a label is a token id", bad, "labels[1]", stage=h, labels=[5, "yes"]),
        _score("label-float", "not a float", bad, "labels[0]", stage=h, labels=[5.5]),
        _score("group-bytes", "a group's name is a str", bad, "group", stage=h, group=b"policy"),
        _score("frames-map", "frames is an array", bad, "frames", stage=h, frames={"query": 1}),
        _score(
            "frame-spec-short",
            "an entry has three elements",
            bad,
            "frames[1]",
            stage=h,
            frames=[frames[0], ["items", "int32"], frames[2]],
        ),
        _score(
            "dtype-unknown",
            "float64 is no dtype",
            bad,
            "frames[1][1]",
            stage=h,
            frames=[frames[0], ["items", "float64", [3]], frames[2]],
        ),
        _score(
            "dtype-big-endian",
            "a dtype has no byte order: all are little-endian",
            bad,
            "frames[0][1]",
            stage=h,
            frames=[["query", ">i4", [3]], *frames[1:]],
        ),
        _score(
            "shape-float",
            "a dimension is an int",
            bad,
            "frames[0][2][0]",
            stage=h,
            frames=[["query", "int32", [3.0]], *frames[1:]],
        ),
        Invalid("cancel-id-missing", way, "cancel what?", bad, "id", h, _hex({"type": "cancel"})),
        Invalid("ack-ids-integer", way, "ids is an array", bad, "ids", h, _hex({"type": "ack", "ids": 1})),
        Invalid("ack-too-many", way, "4097 ids", bad, "ids", h, [_many({"type": "ack"}, "ids", "dc1001", "05", 4097)]),
        Invalid(
            "labels-too-many",
            way,
            "4097 labels",
            bad,
            "labels",
            h,
            [
                _many({"type": "score", "id": 1, "frames": _specs(*SHARED)}, "labels", "dc1001", "05", 4097),
                *(array.payload().hex() for array in SHARED),
            ],
        ),
        Invalid(
            "frames-too-many",
            way,
            "17 payload frames",
            bad,
            "frames",
            h,
            [_many({"type": "score", "id": 1}, "frames", "dc0011", pack(["query", "int32", [1]]).hex(), 17)],
        ),
        _score(
            "shape-too-many-sides",
            "three dimensions",
            bad,
            "frames[0][2]",
            stage=h,
            frames=[["query", "int32", [1, 1, 3]], *frames[1:]],
        ),
        Invalid(
            "capabilities-too-many",
            way,
            "257 capabilities",
            bad,
            "capabilities",
            h,
            [_many({"type": "hello", "client": CLIENT, "token": TOKEN}, "capabilities", "dc0101", "a0", 257)],
        ),
        Invalid("hello-client-missing", way, "hello: no client", bad, "client", h, _hex({"type": "hello", "token": TOKEN})),
        Invalid(
            "hello-client-string",
            way,
            "the id is bin, not str",
            bad,
            "client",
            h,
            _hex({"type": "hello", "client": "0123456789abcdef", "token": TOKEN}),
        ),
    ]


def _payload() -> list[Invalid]:
    """The payload frames are not what the header says, or not what a score request has."""
    f, c, bad = "frames", "content", "malformed"
    way = "client-coordinator"
    frames = _specs(*SHARED)
    good = [array.payload().hex() for array in SHARED]

    def raw(name: str, about: str, field: str, payload: list[str], specs: list[Any] | None = None) -> Invalid:
        header = pack(_header(frames=frames if specs is None else specs)).hex()
        return Invalid(name, way, about, bad, field, f, [header, *payload])

    return [
        raw("payload-none", "the header alone", "frames", []),
        raw("payload-too-few", "the last frame is missing", "frames", good[:2]),
        raw("payload-too-many", "a frame more than the header lists", "frames", [*good, ""]),
        raw("payload-truncated", "the items lack their last byte", "items", [good[0], good[1][:-2], good[2]]),
        raw("payload-longer", "the items have one id more", "items", [good[0], good[1] + "00000000", good[2]]),
        raw("payload-empty-frame", "the lengths have 0 bytes", "item_lengths", [good[0], good[1], ""]),
        raw("shape-negative", "a negative dimension", "query", good, [["query", "int32", [-3]], *frames[1:]]),
        raw("shape-two-negatives", "their product would be right", "query", good, [["query", "int32", [-3, -1]], *frames[1:]]),
        raw("shape-mismatch", "the shape says 4, the frame has 3", "query", good, [["query", "int32", [4]], *frames[1:]]),
        raw("shape-no-sides", "no dimension at all", "query", good, [["query", "int32", []], *frames[1:]]),
        raw(
            "shape-overflow-32",
            "2^30 + 3 elements: in 32 bits the length would be right",
            "query",
            good,
            [["query", "int32", [2**30 + 3]], *frames[1:]],
        ),
        raw(
            "shape-overflow-64",
            "2^62 + 3 elements: in 64 bits the length would be right",
            "query",
            good,
            [["query", "int32", [2**62 + 3]], *frames[1:]],
        ),
        raw(
            "shape-overflow-product",
            "two dimensions whose product is 2^64 bytes more than 0",
            "query",
            ["", *good[1:]],
            [["query", "int32", [2**31, 2**31]], *frames[1:]],
        ),
        _score("frames-none", "a score request without frames", bad, "frames", stage=c, arrays=()),
        _score("frames-lengths-missing", "items without lengths", bad, "frames", stage=c, arrays=SHARED[:2]),
        _score("frames-other-order", "items before the query", bad, "frames", stage=c, arrays=(ITEMS, ITEM_LENGTHS, QUERY)),
        _score("frames-other-name", "prompt in place of query", bad, "frames", stage=c, arrays=(ids("prompt", 1), *SHARED[1:])),
        _score("frames-repeated", "the query twice", bad, "frames", stage=c, arrays=(QUERY, QUERY, ITEMS, ITEM_LENGTHS)),
        _score(
            "dtype-mixed",
            "a query of ids with items of text",
            bad,
            "items",
            stage=c,
            arrays=(QUERY, text("items", "abc"), ITEM_LENGTHS),
        ),
        _score(
            "dtype-query-float",
            "token ids are no floats",
            bad,
            "query",
            stage=c,
            arrays=(Array("query", "float32", (1,), (1.0,)), *SHARED[1:]),
        ),
        _score(
            "dtype-lengths-signed",
            "lengths are uint32",
            bad,
            "item_lengths",
            stage=c,
            arrays=(QUERY, ITEMS, ids("item_lengths", 2, 1)),
        ),
        _score(
            "shape-two-sides",
            "ids have one dimension",
            bad,
            "items",
            stage=c,
            arrays=(QUERY, Array("items", "int32", (3, 1), (21, 22, 23)), ITEM_LENGTHS),
        ),
        _score(
            "lengths-sum-short",
            "an id belongs to no item",
            bad,
            "item_lengths",
            stage=c,
            arrays=(QUERY, ITEMS, lengths("item_lengths", 1, 1)),
        ),
        _score(
            "lengths-sum-long",
            "an item reaches past the frame",
            bad,
            "item_lengths",
            stage=c,
            arrays=(QUERY, ITEMS, lengths("item_lengths", 2, 2)),
        ),
        _score(
            "lengths-sum-wraps",
            "in 32 bits the sum would be right",
            bad,
            "item_lengths",
            stage=c,
            arrays=(QUERY, ITEMS, lengths("item_lengths", 2**32 - 1, 4)),
        ),
        _score(
            "query-lengths-rows",
            "three queries for two items",
            bad,
            "query_lengths",
            stage=c,
            arrays=(QUERY, lengths("query_lengths", 1, 1, 1), ITEMS, ITEM_LENGTHS),
        ),
        _score(
            "query-lengths-sum",
            "an id of the queries belongs to no row",
            bad,
            "query_lengths",
            stage=c,
            arrays=(QUERY, lengths("query_lengths", 1, 1), ITEMS, ITEM_LENGTHS),
        ),
    ]


def _embed(
    name: str,
    about: str,
    code: str,
    field: str,
    *,
    stage: str,
    model: str = "",
    arrays: tuple[Array, ...] = SHARED[1:],
    **changes: Any,
) -> Invalid:
    header = {"type": "embed", "id": 1, "frames": _specs(*arrays), **changes}
    return Invalid(name, "client-coordinator", about, code, field, stage, _hex(header, *arrays), model)


def _decodes() -> list[Invalid]:
    """Requests to decode that are wrong."""
    h, c, m, bad = "header", "content", "model", "bad_request"

    def decode(name: str, about: str, code: str, field: str, stage: str, model: str = "", **changes: Any) -> Invalid:
        arrays: tuple[Array, ...] = changes.pop("arrays", SHARED[1:])
        header = {"type": "decode", "id": 1, "frames": _specs(*arrays), **changes}
        return Invalid(name, "client-coordinator", about, code, field, stage, _hex(header, *arrays), model)

    words = (text("items", "ab"), lengths("item_lengths", 2))
    outside = (ids("items", 21, 1000), lengths("item_lengths", 1, 1))
    return [
        decode("decode-skip-integer", "1 is no bool", bad, "skip_special_tokens", h, skip_special_tokens=1),
        decode("decode-text", "text is text already", bad, "items", c, arrays=words),
        decode("decode-with-query", "it has no query", "malformed", "frames", c, arrays=SHARED),
        decode("decode-row-empty", "row 1", bad, "items[1]", c, arrays=(ids("items", 21), lengths("item_lengths", 1, 0))),
        decode("decode-outside", "the vocabulary has 1000", bad, "items[1][0]", m, model="causal", arrays=outside),
        decode("tokenize-ids", "ids are ids already", bad, "items", c, type="tokenize_texts"),
        decode(
            "tokenize-text-empty",
            "row 1",
            bad,
            "items[1]",
            c,
            type="tokenize_texts",
            arrays=(text("items", "ab"), lengths("item_lengths", 2, 0)),
        ),
        decode(
            "tokenize-without-tokenizer",
            "this model has none",
            bad,
            "type",
            m,
            model="classifier",
            type="tokenize_texts",
            arrays=words,
        ),
        decode("decode-without-tokenizer", "this model has none", bad, "type", m, model="classifier"),
    ]


def _embeddings() -> list[Invalid]:
    """Requests to embed that are wrong."""
    h, c, m, bad = "header", "content", "model", "bad_request"
    return [
        _embed("embed-dimensions-float", "dimensions is an int", bad, "dimensions", stage=h, dimensions=1.5),
        _embed("embed-normalize-integer", "1 is no bool", bad, "normalize", stage=h, normalize=1),
        _embed("embed-with-query", "an embedding has no query", "malformed", "frames", stage=c, arrays=SHARED),
        _embed("embed-dimensions-negative", "less than none", bad, "dimensions", stage=c, dimensions=-1),
        _embed("embed-dimensions-huge", "no model has so many", bad, "dimensions", stage=c, dimensions=2**63 - 1),
        _embed("embed-row-empty", "row 1", bad, "items[1]", stage=c, arrays=(ids("items", 21), lengths("item_lengths", 1, 0))),
        _embed("embed-dimensions-untrained", "2 and 4 are", bad, "dimensions", stage=m, model="embedding", dimensions=3),
        _embed("embed-dimensions-too-many", "5 of 4", bad, "dimensions", stage=m, model="embedding", dimensions=5),
        _embed("embed-by-causal", "this model scores", bad, "type", stage=m, model="causal"),
        _score("score-by-embedding", "this model embeds", bad, "type", stage=m, model="embedding"),
    ]


def _logprobs(
    name: str,
    about: str,
    code: str,
    field: str,
    *,
    stage: str,
    model: str = "",
    arrays: tuple[Array, ...] = SHARED,
    **changes: Any,
) -> Invalid:
    header = {"type": "logprobs", "id": 1, "frames": _specs(*arrays), **changes}
    return Invalid(name, "client-coordinator", about, code, field, stage, _hex(header, *arrays), model)


def _responses() -> list[Invalid]:
    """Requests for logprobs that are wrong."""
    h, c, m, bad = "header", "content", "model", "bad_request"
    words = (text("query", "ab"), text("items", "c"), lengths("item_lengths", 1))
    unasked = (ids("query"), *SHARED[1:])
    silent = (ids("query", 11), ids("items", 21), lengths("item_lengths", 1, 0))
    one = (ids("query", 11), lengths("query_lengths", 1, 0), ids("items", 21, 22), lengths("item_lengths", 1, 1))
    return [
        _logprobs("logprobs-labels-string", "labels is an array", bad, "labels", stage=h, labels="5"),
        _logprobs("logprobs-without-prompt", "rows have a prompt", "malformed", "frames", stage=c, arrays=SHARED[1:]),
        _logprobs("logprobs-truncation", "what is measured is not cut", bad, "truncation", stage=c, truncation="right"),
        _logprobs("logprobs-text", "joined text may have other tokens", bad, "items", stage=c, arrays=words),
        _logprobs("logprobs-prompt-empty", "of all rows", bad, "query", stage=c, arrays=unasked),
        _logprobs("logprobs-response-empty", "row 1", bad, "items[1]", stage=c, arrays=silent),
        _logprobs("logprobs-own-prompt-empty", "row 1", bad, "query[1]", stage=c, arrays=one),
        _logprobs("logprobs-label-negative", "a token id is at least 0", bad, "labels", stage=c, labels=[5, -1]),
        _logprobs("logprobs-labels-too-many", "at most 64", bad, "labels", stage=c, labels=[5] * 65),
        _logprobs("logprobs-top-many", "at most 20", bad, "top_logprobs", stage=c, top_logprobs=21),
        _logprobs("logprobs-by-classifier", "it predicts no tokens", bad, "type", stage=m, model="classifier"),
    ]


def _content() -> list[Invalid]:
    """The values cannot be served by anything."""
    c, bad = "content", "bad_request"
    way = "client-coordinator"
    not_utf8: list[str | list[Piece]] = ["ff", "6162", "02000000"]
    split = [["query", "utf8", [1]], ["items", "utf8", [2]], ["item_lengths", "uint32", [2]]]
    whole = [["query", "utf8", [1]], ["items", "utf8", [2]], ["item_lengths", "uint32", [1]]]

    def own(shape: tuple[int, ...], *labels: int) -> Array:
        return Array("labels", "int32", shape, labels)

    words = (text("query", "ab"), text("items", "c"), lengths("item_lengths", 1))
    return [
        _score("id-negative", "ids begin at 0", bad, "id", stage=c, id=-1),
        _score("id-too-large", "2^63 is one too many", bad, "id", stage=c, id=2**63),
        _score("id-largest-uint64", "all 64 bits", bad, "id", stage=c, id=2**64 - 1),
        _score("priority-too-high", "1001", bad, "priority", stage=c, priority=1001),
        _score("priority-too-low", "-1001", bad, "priority", stage=c, priority=-1001),
        _score("softmax-of-one", "over one label it is always 1", bad, "softmax", stage=c, labels=[5], softmax=True),
        _score(
            "row-labels-and-labels", "one of the two", bad, "labels", stage=c, arrays=(*SHARED, own((2, 1), 5, 6)), labels=[5]
        ),
        _score("row-labels-of-one", "two rows", "malformed", "labels", stage=c, arrays=(*SHARED, own((1, 2), 5, 6)), labels=[]),
        _score("row-labels-flat", "two sides", "malformed", "labels", stage=c, arrays=(*SHARED, own((2,), 5, 6)), labels=[]),
        _score("row-labels-none", "at least one", bad, "labels", stage=c, arrays=(*SHARED, own((2, 0))), labels=[]),
        _score("row-labels-negative", "no token id", bad, "labels", stage=c, arrays=(*SHARED, own((2, 1), 5, -6)), labels=[]),
        _score("chat-of-ids", "chats are text", bad, "items", stage=c, arrays=SHARED[1:], chat={}),
        _score("chat-item-first", "a chat is one text", bad, "item_first", stage=c, arrays=words[1:], item_first=True, chat={}),
        _score(
            "chat-truncated-right",
            "its end is where the answer begins",
            bad,
            "truncation",
            stage=c,
            arrays=words[1:],
            truncation="right",
            chat={},
        ),
        _score("chat-with-query", "a chat has no query", "malformed", "frames", stage=c, arrays=words, chat={}),
        _score("label-texts-and-ids", "one of the two", bad, "label_texts", stage=c, labels=[5], label_texts=["yes"]),
        _score("temperature-zero", "0.001 is the lowest", bad, "temperature", stage=c, softmax=True, temperature=0.0),
        _score("temperature-alone", "only softmax divides by it", bad, "temperature", stage=c, labels=[5, 6], temperature=0.5),
        _score("timeout-zero", "no time at all", bad, "timeout_ms", stage=c, timeout_ms=0),
        _score("timeout-negative", "less than none", bad, "timeout_ms", stage=c, timeout_ms=-1),
        _score("label-negative", "a token id is not negative", bad, "labels", stage=c, labels=[5, -1]),
        _score("label-over-int31", "2^31 is no int32", bad, "labels", stage=c, labels=[2**31]),
        _score("items-none", "no items", bad, "items", stage=c, arrays=(QUERY, ids("items"), lengths("item_lengths"))),
        _score(
            "row-empty",
            "the query is empty, and so is item 1",
            bad,
            "items[1]",
            stage=c,
            arrays=(ids("query"), ids("items", 21), lengths("item_lengths", 1, 0)),
        ),
        _score(
            "row-empty-pairs",
            "item 0 is empty, and so is its own query",
            bad,
            "items[0]",
            stage=c,
            arrays=(ids("query", 11), lengths("query_lengths", 0, 1), ids("items", 22), lengths("item_lengths", 0, 1)),
        ),
        _score(
            "row-empty-text",
            "text of 0 bytes on both sides",
            bad,
            "items[0]",
            stage=c,
            arrays=(text("query", ""), text("items", "a"), lengths("item_lengths", 0, 1)),
        ),
        _score(
            "query-id-negative",
            "the second id of the query",
            bad,
            "query[1]",
            stage=c,
            arrays=(ids("query", 11, -1, 13), *SHARED[1:]),
        ),
        _score(
            "item-id-negative",
            "the first id of item 1",
            bad,
            "items[1][0]",
            stage=c,
            arrays=(QUERY, ids("items", 21, 22, -(2**31)), ITEM_LENGTHS),
        ),
        Invalid(
            "text-query-not-utf8",
            way,
            "0xff stands nowhere in UTF-8",
            bad,
            "query",
            c,
            [pack(_header(frames=whole)).hex(), *not_utf8],
        ),
        Invalid(
            "text-item-not-utf8",
            way,
            "a surrogate half",
            bad,
            "items[0]",
            c,
            [
                pack(_header(frames=[["query", "utf8", [1]], ["items", "utf8", [3]], ["item_lengths", "uint32", [1]]])).hex(),
                "61",
                "eda080",
                "03000000",
            ],
        ),
        Invalid(
            "text-cut-inside-character",
            way,
            "the two bytes of one character lie in two items",
            bad,
            "items[0]",
            c,
            [pack(_header(frames=split)).hex(), "61", "c3bc", "0100000001000000"],
        ),
    ]


def _model() -> list[Invalid]:
    """The values cannot be served by the model that `models` describes."""
    m, bad = "model", "bad_request"
    long_item = (QUERY, ids("items", *range(14)), lengths("item_lengths", 0, 14))
    words = (text("query", "a"), text("items", "b"), lengths("item_lengths", 1))
    return [
        _score("labels-none", "a causal model scores labels", bad, "labels", stage=m, model="causal", labels=[]),
        _score("labels-for-classifier", "a classifier has its own", bad, "labels", stage=m, model="classifier"),
        _score(
            "logprobs-of-logits", "a head gives logits", bad, "logprobs", stage=m, model="classifier", labels=[], logprobs=True
        ),
        _score(
            "softmax-of-one-output",
            "a head with one output",
            bad,
            "softmax",
            stage=m,
            model="classifier",
            labels=[],
            softmax=True,
        ),
        _score("label-over-vocabulary", "1000 of 1000", bad, "labels", stage=m, model="causal", labels=[5, 1000]),
        _score(
            "separator-missing",
            "a cross-encoder whose separator is 20: row 0 has it in its item, row 1 nowhere",
            bad,
            "items[1]",
            stage=m,
            model="cross-encoder",
            labels=[],
            arrays=(QUERY, ids("items", 20, 22, 23), ITEM_LENGTHS),
        ),
        _score(
            "item-id-over-vocabulary",
            "1000 of 1000",
            bad,
            "items[1][0]",
            stage=m,
            model="causal",
            arrays=(QUERY, ids("items", 21, 22, 1000), ITEM_LENGTHS),
        ),
        _score(
            "query-id-over-vocabulary",
            "the largest int32",
            bad,
            "query[0]",
            stage=m,
            model="causal",
            arrays=(ids("query", 2**31 - 1), *SHARED[1:]),
        ),
        _score(
            "row-over-context",
            "3 + 14 ids in a context of 16",
            bad,
            "items[1]",
            stage=m,
            model="causal",
            arrays=long_item,
        ),
        _score("hidden-of-causal", "this model has no pooled states", bad, "hidden", stage=m, model="causal", hidden=True),
        _score(
            "text-without-tokenizer", "this group takes ids", bad, "query", stage=m, model="classifier", labels=[], arrays=words
        ),
    ]


def _link() -> list[Invalid]:
    """Hello and register: what only the owner of the link can check."""
    bad = "bad_request"
    worker = {"type": "register", "group": "policy", "incarnation": "a1"}

    def hello(name: str, about: str, code: str, field: str, **changes: Any) -> Invalid:
        header = {"type": "hello", "client": bytes(range(16)), "token": TOKEN, **changes}
        return Invalid(name, "client-coordinator", about, code, field, "link", _hex(header))

    return [
        hello("hello-client-short", "15 bytes", bad, "client", client=bytes(15)),
        hello("hello-client-long", "17 bytes", bad, "client", client=bytes(17)),
        hello("hello-token-empty", "0 bytes", bad, "token", token=b""),
        hello("hello-version-unknown", "a version of the future", "protocol_version", "protocol", protocol=2),
        hello("hello-version-0", "a version that never was", "protocol_version", "protocol", protocol=0),
        hello("hello-epoch-negative", "an epoch below 0", bad, "epoch", epoch=-1),
        hello("hello-epoch-large", "an epoch above MAX_ID", bad, "epoch", epoch=2**63),
        Invalid(
            "register-version-unknown",
            "worker-coordinator",
            "a version of the future",
            "protocol_version",
            "protocol",
            "link",
            _hex({**worker, "protocol": 2}),
        ),
    ]


def _worker() -> list[Invalid]:
    way, h, f, bad = "worker-coordinator", "header", "frames", "bad_request"
    scores = floats("scores", (1, 2), 0.75, 0.25)
    short = Array("stored", "uint64", (0, 2), ()), Array("removed", "uint64", (1,), (9,))

    def done(name: str, about: str, field: str, parts: list[Any], *arrays: Array) -> Invalid:
        return Invalid(
            name, way, about, "malformed", field, f, _hex({"type": "done", "batch": [EPOCH, 1], "parts": parts}, *arrays)
        )

    return [
        done("done-frame-missing", "two parts have rows, one frame came", "frames", [{"frames": _specs(scores)}] * 2, scores),
        done("done-frame-unlisted", "a part with an error has no frames", "frames", [{"code": "engine_error"}], scores),
        done(
            "done-shape", "the scores are [1, 2], not [2, 2]", "scores", [{"frames": [["scores", "float32", [2, 2]]]}], scores
        ),
        Invalid(
            "prefix-blocks-short",
            way,
            "a number has 8 bytes",
            "malformed",
            "removed",
            f,
            _hex({"type": "prefix_blocks", "frames": [["stored", "uint64", [0, 2]], ["removed", "uint64", [2]]]}, *short),
        ),
        Invalid(
            "done-task-of-one",
            way,
            "a TaskId has two numbers",
            bad,
            "batch",
            h,
            _hex({"type": "done", "batch": [EPOCH], "parts": []}),
        ),
        Invalid(
            "done-code-integer",
            way,
            "an error in a part has a code of the table",
            bad,
            "parts[0].code",
            h,
            _hex({"type": "done", "batch": [EPOCH, 1], "parts": [{"code": 7}]}),
        ),
        Invalid("stage-unknown", way, "no such stage", bad, "stage", h, _hex({"type": "stage", "stage": "dreaming"})),
        Invalid("ready-bare", way, "ready for what?", bad, "capabilities", h, _hex({"type": "ready"})),
        Invalid(
            "ready-kind-unknown",
            way,
            "neither causal nor classifier",
            bad,
            "capabilities.kind",
            h,
            _hex({"type": "ready", "capabilities": {"kind": "oracle"}}),
        ),
        Invalid("idle-epoch-string", way, "an epoch is an int", bad, "epoch", h, _hex({"type": "idle", "epoch": "now"})),
        Invalid("score-from-worker", way, "workers do not ask", "unsupported", "type", h, _hex({"type": "score", "id": 1})),
    ]


def _from_coordinator() -> list[Invalid]:
    h, f, bad = "header", "frames", "bad_request"
    batch = {"type": "batch", "batch": [EPOCH, 1], "parts": [{"frames": _specs(*SHARED)}]}
    result = {"type": "result", "id": 1, "version": 3, "forwards": [1], "usage": [2, 9], "timings": [1, 2]}
    scores = floats("scores", (2, 1), 0.5, 0.25)
    short = floats("scores", (1, 1), 0.5)
    return [
        Invalid(
            "batch-frame-missing",
            "coordinator-worker",
            "two of three frames",
            "malformed",
            "frames",
            f,
            _hex(batch, *SHARED[:2]),
        ),
        Invalid(
            "batch-part-bare",
            "coordinator-worker",
            "a part without frames",
            bad,
            "parts[0].frames",
            h,
            _hex({"type": "batch", "batch": [EPOCH, 1], "parts": [{}]}),
        ),
        Invalid(
            "accept-epoch-missing",
            "coordinator-worker",
            "accepted by whom?",
            bad,
            "epoch",
            h,
            _hex({"type": "accept"}),
        ),
        Invalid(
            "result-scores-short",
            "coordinator-client",
            "the header says two rows, one came",
            "malformed",
            "scores",
            f,
            _hex({**result, "frames": _specs(scores)}, short),
        ),
        Invalid(
            "result-usage-short",
            "coordinator-client",
            "usage has two numbers",
            bad,
            "usage",
            h,
            _hex({**result, "usage": [2], "frames": []}),
        ),
    ]


def _updates() -> list[Invalid]:
    way, h, f, v, bad = "client-coordinator", "header", "frames", "content", "bad_request"
    offer = {"type": "publish", "id": 9, "version": 4, "address": "127.0.0.1:29500"}

    def publish(name: str, about: str, code: str, field: str, *arrays: Array, stage: str = v, **changes: Any) -> Invalid:
        header = {**offer, "frames": _specs(*arrays), **changes}
        return Invalid(name, way, about, code, field, stage, _hex(header, *arrays))

    def manifest(name: str, about: str, json: str, field: str = "manifest") -> Invalid:
        return publish(name, about, bad, field, text("manifest", json))

    good = text("manifest", '[["w","float32",[2]]]')
    update = {"update": [EPOCH, 12]}
    return [
        manifest("publish-manifest-empty", "an update brings something", "[]"),
        manifest("publish-manifest-no-json", "no JSON", "[[w]]"),
        manifest("publish-manifest-twice", "a name twice", '[["w","float32",[2]],["w","float32",[2]]]', "manifest[w]"),
        manifest("publish-manifest-dtype", "no such dtype", '[["w","float33",[2]]]', "manifest[w]"),
        manifest("publish-manifest-side", "a negative side", '[["w","float32",[-2]]]', "manifest[w]"),
        publish("publish-no-manifest", "staged needs one", "malformed", "frames"),
        publish("publish-two-frames", "and only one", "malformed", "frames", good, good),
        publish("publish-set_version-manifest", "set_version has none", "malformed", "frames", good, transfer="set_version"),
        publish("publish-checkpoint-where", "read what?", bad, "path", transfer="checkpoint"),
        publish("publish-address", "broadcast where?", bad, "address", good, address=""),
        publish("publish-handles-host", "on which host?", bad, "host", good, transfer="ipc"),
        publish("publish-bucket", "buckets are aligned", bad, "bucket_bytes", good, bucket_bytes=100),
        publish("publish-version-negative", "versions begin at 0", bad, "version", good, version=-1),
        publish("publish-lease", "a lease is more than 0", bad, "lease_ms", good, lease_ms=0),
        publish("publish-drain", "an hour at most", bad, "drain_ms", good, drain_ms=3_600_001),
        publish("publish-transfer", "no such transfer", bad, "transfer", good, stage=h, transfer="pigeon"),
        publish(
            "publish-frame-short",
            "three bytes are listed",
            "malformed",
            "manifest",
            good,
            stage=f,
            frames=[["manifest", "utf8", [3]]],
        ),
        Invalid(
            "control-tags",
            way,
            "no such part of an engine's memory",
            bad,
            "tags[1]",
            h,
            _hex({"type": "control", "id": 5, "command": "sleep", "tags": ["weights", "disk"]}),
        ),
        Invalid(
            "control-worker-long",
            way,
            "no worker has such a name",
            bad,
            "worker",
            v,
            _hex({"type": "control", "id": 5, "command": "sleep", "worker": "w" * 5000}),
        ),
        Invalid(
            "control-profile-endless",
            way,
            "a profile ends",
            bad,
            "seconds",
            v,
            _hex({"type": "control", "id": 5, "command": "start_profile", "seconds": math.inf}),
        ),
        Invalid(
            "control-profile-steps",
            way,
            "fewer than none",
            bad,
            "steps",
            v,
            _hex({"type": "control", "id": 5, "command": "start_profile", "steps": -1}),
        ),
        Invalid(
            "control-path-long",
            way,
            "no file system has such a path",
            bad,
            "path",
            v,
            _hex({"type": "control", "id": 5, "command": "save", "path": "/" * 5000}),
        ),
        Invalid("sent-digest-missing", way, "of what?", bad, "digest", h, _hex({"type": "sent", "id": 9, "sent_bytes": 1})),
        Invalid(
            "weights-question-what",
            way,
            "no such question",
            bad,
            "what",
            h,
            _hex({"type": "inspect_weights", "id": 1, "what": "why"}),
        ),
        _score("score-min-version", "versions begin at 0", bad, "min_version", stage=v, min_version=-1),
        _score("score-version", "versions begin at 0", bad, "version", stage=v, version=-1),
        _score("score-version-below-min-version", "which of them?", bad, "min_version", stage=v, min_version=3, version=2),
        Invalid(
            "prepared-update-missing",
            "worker-coordinator",
            "of what?",
            bad,
            "update",
            h,
            _hex({"type": "prepared", "peer": "a"}),
        ),
        Invalid(
            "staged-finding-kind",
            "worker-coordinator",
            "no such finding",
            bad,
            "findings[0].kind",
            h,
            _hex({"type": "staged", **update, "findings": [{"name": "w", "kind": "odd"}]}),
        ),
        Invalid(
            "inspected-frame-missing",
            "worker-coordinator",
            "the tensor did not come",
            "malformed",
            "frames",
            f,
            _hex({"type": "inspected", "task": [EPOCH, 1], "frames": [["tensor", "float32", [2]]]}),
        ),
        Invalid("hand-over-version", "coordinator-worker", "to what?", bad, "version", h, _hex({"type": "load", **update})),
        Invalid(
            "phase-unknown",
            "coordinator-client",
            "no such phase",
            bad,
            "phase",
            h,
            _hex({"type": "phase", "id": 9, "phase": "waning"}),
        ),
    ]


INVALID = [
    *_unreadable(),
    *_fields(),
    *_payload(),
    *_content(),
    *_model(),
    *_embeddings(),
    *_decodes(),
    *_responses(),
    *GENERATIONS,
    *_link(),
    *_worker(),
    *_from_coordinator(),
    *_updates(),
    *ADAPTERS,
]
