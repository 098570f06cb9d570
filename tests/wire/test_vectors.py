"""The golden messages of protocol/vectors: what is valid is understood and made, byte for byte; what is not is refused."""

import itertools
import json
import random
import struct
from typing import Any, cast

import msgspec
import pytest

from enginepool.coordinator.core.events import Submit, WorkerBroken
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.requests.fitting import refusal
from enginepool.coordinator.shell.decode import client_event, worker_event
from enginepool.protocol import messages
from enginepool.protocol.errors import CODES, WireError
from enginepool.protocol.frames import check_frames, decode_header, encode_header
from enginepool.protocol.messages import Batch, Capabilities, Done, Embed, FrameSpec, Logprobs, Message, Score
from enginepool.protocol.messages.weight_reports import UpdateRecord
from tests.wire.golden import unpieced
from tests.wire.make_vectors import PATH, document

UNIONS = {
    "client-coordinator": messages.FromClient,
    "coordinator-client": messages.ToClient,
    "worker-coordinator": messages.FromWorker,
    "coordinator-worker": messages.ToWorker,
}
DECODERS: "dict[str, msgspec.msgpack.Decoder[Any]]" = {way: msgspec.msgpack.Decoder(union) for way, union in UNIONS.items()}
MAX_BYTES = 4 << 20
CODES_OF_DTYPES = {"int32": "i", "uint32": "I", "uint64": "Q", "float32": "f", "uint8": "B", "int16": "h"}

FILE: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
VECTORS: list[dict[str, Any]] = FILE["vectors"]
VALID = [vector for vector in VECTORS if "valid" in vector]
INVALID = [vector for vector in VECTORS if "invalid" in vector]

FROM_WORKER = [v for v in INVALID if v["direction"] == "worker-coordinator" and v["invalid"]["stage"] != "link"]

each_valid = pytest.mark.parametrize("vector", VALID, ids=lambda v: v["name"])
each_invalid = pytest.mark.parametrize("vector", INVALID, ids=lambda v: v["name"])


def frames_of(vector: dict[str, Any]) -> list[bytes]:
    return [unpieced(frame) for frame in vector["frames"]]


def restored(value: Any) -> Any:
    """A header of vectors.json with its bytes as bytes."""
    match value:
        case {"bin": str(digits)}:
            return bytes.fromhex(digits)
        case dict():
            return {key: restored(inner) for key, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [restored(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def specs_of(message: Message) -> list[FrameSpec]:
    """All frames that the message lists, in order."""
    if isinstance(message, Batch | Done):
        return [spec for part in message.parts for spec in part.frames]
    return getattr(message, "frames", [])


def payload_of(array: dict[str, Any]) -> bytes:
    values = array["values"]
    if array["dtype"] == "utf8":
        return values.encode()
    return struct.pack(f"<{len(values)}{CODES_OF_DTYPES[array['dtype']]}", *values)


def receive(vector: dict[str, Any]) -> None:
    """What a receiver does with a message: the coordinator's own door where it answers with an error, else the codec."""
    frames = frames_of(vector)
    if vector["direction"] == "client-coordinator":
        event = client_event(0.0, b"link", frames, MAX_BYTES)
        if model := vector["invalid"].get("model"):
            assert isinstance(event, Submit)
            wrong = refusal(event.work, msgspec.convert(FILE["models"][model], Capabilities))
            if wrong is not None:
                raise wrong
    elif vector["invalid"]["stage"] == "link":
        worker_event(0.0, b"link", frames)
    else:
        check_frames(specs_of(decode_header(DECODERS[vector["direction"]], frames[0])), frames[1:])


def test_the_file_is_what_its_script_makes() -> None:
    assert PATH.read_text(encoding="utf-8") == document()


def test_names_are_unique_and_a_third_of_the_vectors_is_invalid() -> None:
    names = [vector["name"] for vector in VECTORS]
    assert len(set(names)) == len(names) == len(VALID) + len(INVALID)
    assert len(names) >= 60
    assert len(INVALID) * 3 >= len(names)
    assert FILE["specification"] == messages.PROTOCOL_VERSION


@pytest.mark.parametrize("way", UNIONS)
def test_every_message_type_has_a_valid_vector_in_each_direction(way: str) -> None:
    tags = {struct_.__struct_config__.tag for struct_ in UNIONS[way].__args__}
    assert tags == {vector["valid"]["header"]["type"] for vector in VALID if vector["direction"] == way}


def test_every_field_of_every_message_is_set_in_some_valid_vector() -> None:
    sent: dict[str, set[str]] = {}
    for vector in VALID:
        header = vector["valid"]["header"]
        sent.setdefault(header["type"], set()).update(header)
    every = {struct_ for union in UNIONS.values() for struct_ in union.__args__}
    #: seq and final hold their defaults in version 1, protocol is always 1
    constant = {"protocol", "seq", "final", "ping_ms"}
    for struct_ in every:
        config = struct_.__struct_config__
        assert set(struct_.__struct_fields__) - constant <= sent[config.tag], config.tag


@each_valid
def test_a_valid_vector_decodes_to_its_values(vector: dict[str, Any]) -> None:
    frame0, *payload = frames_of(vector)
    way = vector["direction"]
    message = decode_header(DECODERS[way], frame0)
    assert message == msgspec.convert(restored(vector["valid"]["header"]), UNIONS[way])

    specs = specs_of(message)
    check_frames(specs, payload)
    arrays = vector["valid"]["payload"]
    assert [[spec.name, spec.dtype, list(spec.shape)] for spec in specs] == [
        [a["name"], a["dtype"], a["shape"]] for a in arrays
    ]
    assert payload == [payload_of(array) for array in arrays]
    if isinstance(message, Score | Embed | Logprobs):
        work = OPERATIONS[type(message)].open(message, payload)
        assert (work.rows, work.group) == (specs[-1].shape[0], message.group)


@each_valid
def test_each_text_of_a_valid_vector_is_whole_and_each_chat_is_one(vector: dict[str, Any]) -> None:
    arrays: dict[str, Any] = {array["name"]: array for array in vector["valid"]["payload"]}
    for name, lengths in (("items", "item_lengths"), ("query", "query_lengths"), ("texts", "text_lengths")):
        if lengths in arrays and arrays[name]["dtype"] == "utf8":
            ends: list[int] = list(itertools.accumulate(arrays[lengths]["values"], initial=0))
            rows = [payload_of(arrays[name])[begin:end].decode() for begin, end in itertools.pairwise(ends)]
            if vector["valid"]["header"].get("chat") is not None:
                assert all(isinstance(json.loads(row), list) for row in rows)


@each_valid
def test_the_values_of_a_valid_vector_encode_to_its_bytes(vector: dict[str, Any]) -> None:
    frame0 = frames_of(vector)[0]
    header = restored(vector["valid"]["header"])
    message = msgspec.convert(header, UNIONS[vector["direction"]])
    encoded = encode_header(message)
    assert (encoded == frame0) == vector["valid"]["exact"]
    assert msgspec.msgpack.decode(encoded) == header, "no default is sent, and nothing is lost"


def test_an_error_about_a_choice_names_all_that_can_be_chosen() -> None:
    vector = next(vector for vector in INVALID if vector["name"] == "truncation-unknown")
    with pytest.raises(WireError, match=r"; one of error, left, right$") as refused:
        receive(vector)
    assert refused.value.limit == "error, left, right"


@each_invalid
def test_an_invalid_vector_is_refused_with_its_code_and_field(vector: dict[str, Any]) -> None:
    want = vector["invalid"]
    assert want["code"] in CODES
    with pytest.raises(WireError) as refused:
        receive(vector)
    assert (refused.value.code, refused.value.field) == (want["code"], want["field"])
    assert 0 < len(refused.value.message) < 1000


@pytest.mark.parametrize("vector", FROM_WORKER, ids=lambda v: v["name"])
def test_a_worker_that_sends_an_invalid_vector_is_broken(vector: dict[str, Any]) -> None:
    event = worker_event(0.0, b"link", frames_of(vector))
    assert isinstance(event, WorkerBroken)
    assert vector["invalid"]["field"].split(".")[-1] in event.reason


@each_invalid
def test_an_invalid_vector_is_not_refused_before_its_stage(vector: dict[str, Any]) -> None:
    frame0, *payload = frames_of(vector)
    stage = vector["invalid"]["stage"]
    if stage == "header":
        return
    message = decode_header(DECODERS[vector["direction"]], frame0)
    if stage == "frames":
        return
    check_frames(specs_of(message), payload)
    if stage == "model":
        OPERATIONS[type(message)].open(message, payload)


@each_valid
def test_a_vector_cut_anywhere_is_refused_and_nothing_else_escapes(vector: dict[str, Any]) -> None:
    frame0, *payload = frames_of(vector)
    decoder = DECODERS[vector["direction"]]
    for end in range(len(frame0)):
        with pytest.raises(WireError) as refused:
            decode_header(decoder, frame0[:end])
        assert refused.value.code == "malformed"
    specs = specs_of(decode_header(decoder, frame0))
    for i, frame in enumerate(payload):
        if frame:
            with pytest.raises(WireError, match=specs[i].name):
                check_frames(specs, [*payload[:i], frame[:-1], *payload[i + 1 :]])


@pytest.mark.parametrize(
    "message",
    [
        messages.ErrorReply("unknown_group", "\0" * 500_000, 7, limit="ä" * 600_000, evidence=["e" * 700_000, "died"]),
        messages.Inspected((5, 1), code="engine_error", message="no such weight: " + "x" * 2_000_000),
        messages.Exiting("out of memory " * 200_000, failed=True),
        messages.Done((5, 2), [messages.PartDone(code="engine_error", message="m" * 600_000)] * 2),
        messages.WeightsReport(1, "g", history=[UpdateRecord(v, "update_aborted", message="r" * 20_000) for v in range(64)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_an_answer_whose_text_would_not_fit_frame_0_is_sent_with_less_of_it(message: Message) -> None:
    frame = encode_header(message)
    assert len(frame) < messages.MAX_HEADER_BYTES
    sent = msgspec.msgpack.decode(frame, type=type(message))
    assert shortened(msgspec.to_builtins(message)) == shortened(msgspec.to_builtins(sent))
    assert len(frame) < 100_000


def shortened(value: Any) -> Any:
    """With every text of at most 500 characters and a mark."""
    if isinstance(value, str):
        return value if len(value) <= 501 else value[:500] + "…"
    if isinstance(value, dict):
        return {key: shortened(entry) for key, entry in cast("dict[str, Any]", value).items()}
    return [shortened(entry) for entry in cast("list[Any]", value)] if isinstance(value, list | tuple) else value


def test_a_message_over_the_size_limit_is_refused() -> None:
    frames = frames_of(next(vector for vector in VALID if vector["name"] == "score"))
    size = sum(map(len, frames))
    client_event(0.0, b"link", frames, size)
    with pytest.raises(WireError) as refused:
        client_event(0.0, b"link", frames, size - 1)
    assert refused.value.code == "too_large"


@pytest.mark.parametrize("seed", range(8))
def test_nothing_but_a_refusal_comes_of_mutated_vectors(seed: int) -> None:
    """Bytes are changed, cut and put in, frames dropped, doubled and swapped; what escapes would end the coordinator."""
    chance = random.Random(seed)
    sources = [(v["direction"], frames_of(v)) for v in VECTORS if v["name"] != "header-too-large"]
    outcomes = [refusal_of(way, mutated(list(frames), chance)) for way, frames in (chance.choice(sources) for _ in range(2000))]
    refusals = [outcome for outcome in outcomes if outcome is not None]
    assert len(refusals) > 1000
    assert all(error.code in CODES and len(error.message) < 1000 for error in refusals)


def refusal_of(way: str, frames: list[bytes]) -> WireError | None:
    """What the coordinator says of these frames; a worker's nonsense counts as malformed."""
    try:
        if way == "worker-coordinator":
            event = worker_event(0.0, b"link", frames)
            return WireError("malformed", event.reason) if isinstance(event, WorkerBroken) else None
        client_event(0.0, b"link", frames, MAX_BYTES)
    except WireError as error:
        return error
    return None


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(frames)) if chance.random() < 0.5 else 0
        data = bytearray(frames[at])
        place = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if place < len(data):
                data[place] = chance.randrange(256)
            case 1:
                del data[place : place + chance.randint(1, 8)]
            case 2:
                data[place:place] = chance.randbytes(chance.randint(1, 8))
            case 3 if place < len(data):
                data[place] ^= 1 << chance.randrange(8)
            case 4 if len(frames) > 1:
                other = chance.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
                continue
            case _:
                frames.insert(at, bytes(data))
                continue
        frames[at] = bytes(data)
    return frames
