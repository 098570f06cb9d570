"""Headers stay under the limit of frame 0, for all labels, rows and errors of a batch."""

from typing import Any, get_args
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool.coordinator.scheduling.batch_limits import header_bytes
from enginepool.coordinator.shell.incoming import Incoming
from enginepool.coordinator.shell.peers import SAME_USER
from enginepool.coordinator.shell.process_memory import CollectorPauses
from enginepool.coordinator.shell.router import ROUND_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import decode_header, encode_header
from enginepool.protocol.messages import (
    MAX_HEADER_BYTES,
    MAX_LABELS,
    MAX_VALUES,
    Batch,
    Capabilities,
    Done,
    Dtype,
    Ended,
    FrameSpec,
    FromClient,
    FromWorker,
    Generate,
    GenerationProgress,
    PartDone,
    Ping,
    Sampling,
    Step,
)
from enginepool.protocol.messages.adapters import AdapterChanged
from enginepool.protocol.messages.control import CommandName, MemoryTag
from tests.core.machines import Pool, results, work

LARGE = Capabilities("causal", 100_000, 4096, 100_000, 20_000, 200_000, 40_000)
LARGE_PACKED = msgspec.structs.replace(LARGE, max_item=100)
TOP = 2**31 - 1


@pytest.mark.parametrize("can", [LARGE, LARGE_PACKED], ids=["plain", "packed"])
def test_a_batch_of_many_labels_has_a_header_that_workers_read(can: Capabilities) -> None:
    pool = Pool()
    clients = [pool.client() for _ in range(4)]
    labels = tuple(range(70_000, 70_820))
    for i in range(256):
        pool.submit(clients[i % 4], i, work(1, 3, labels=labels, query=2))
    pool.worker(can=can)
    pool.finish_all()
    batches = [s.message for s in pool.sent if isinstance(s.message, Batch)]
    assert max(len(encode_header(batch)) for batch in batches) <= MAX_HEADER_BYTES
    assert len(batches) == 2, "as few batches as the headers allow"
    assert len(results(pool.sent)) == 256


@settings(deadline=None)
@given(
    labels=st.integers(0, MAX_LABELS), rows=st.integers(1, 3), query=st.integers(0, 70_000), paired=st.booleans(),
    softmax=st.booleans(), item_first=st.booleans(),
)  # fmt: skip
def test_what_a_part_adds_to_a_header_is_never_underestimated(
    labels: int, rows: int, query: int, paired: bool, softmax: bool, item_first: bool
) -> None:
    content = work(rows, 3, labels=(TOP,) * labels, query=query)
    specs = list(content.part.frames)
    if paired:
        specs.insert(1, FrameSpec("query_lengths", "uint32", (TOP,)))
    part = msgspec.structs.replace(content.part, frames=specs, softmax=softmax, item_first=item_first)
    assert len(msgspec.msgpack.encode(part)) <= header_bytes(content)
    done = PartDone([FrameSpec("scores", "float32", (TOP, TOP)), FrameSpec("hidden", "float32", (TOP, TOP))])
    assert len(msgspec.msgpack.encode(done)) <= header_bytes(content), "and what its answer adds to that of the answer"


def test_a_header_with_an_unknown_key_that_is_no_text_is_malformed() -> None:
    header = b"\x83\xa4type\xa4ping\xa3\xff\xfe\xfd\x01\xa1x" + bytes([0xDC, 0, 64]) + bytes([0x90] * 64)
    with pytest.raises(WireError) as caught:
        decode_header(msgspec.msgpack.Decoder(Ping), header)
    assert caught.value.code == "malformed"


def test_a_header_of_which_the_depth_takes_long_to_find_takes_a_round_of_the_sockets_for_itself() -> None:
    """Any peer may send it, also before its hello; others wait for the end of each round."""
    router: Any = Mock(unread=0, unread_of=Mock(return_value=0), peer=Mock(return_value=SAME_USER))
    incoming = Incoming(Pool().machine, router, router, 1 << 20, CollectorPauses())

    def counted(values: int) -> int:
        header: dict[str, Any] = {"type": "status", "id": 1, "later": [[]] * values}
        return incoming.from_client(b"link", [msgspec.msgpack.encode(header)], Mock())

    assert counted(MAX_VALUES - 1) >= ROUND_BYTES
    assert counted(MAX_VALUES) >= ROUND_BYTES, "it has too many values"
    assert counted(400) < ROUND_BYTES / 64, "many that are shorter share a round"
    assert counted(20) == 0
    assert len(incoming.events) == 3 and router.send.call_count == 1


@pytest.mark.parametrize("message", ["x" * 100_000, "\N{SNOWMAN}" * 600])
def test_errors_of_very_many_parts_fit_a_header(message: str) -> None:
    failed = PartDone(code="engine_error", message=message)
    header = encode_header(Done((2**62, 1), [failed] * 6000))
    assert len(header) <= MAX_HEADER_BYTES
    parts = msgspec.msgpack.decode(header, type=Done).parts
    assert [part.code for part in parts] == ["engine_error"] * 6000


@pytest.mark.parametrize(
    "sent",
    ["a\nforged line", "\r\x1b[31m", "\N{RIGHT-TO-LEFT OVERRIDE}x", "y" * 1_000_000],
    ids=["line", "escape", "order", "long"],
)
def test_an_error_that_repeats_what_a_peer_sent_is_one_line_that_can_be_printed(sent: str) -> None:
    headers: list[tuple[dict[str, Any], str]] = [
        ({"type": sent}, "type"),
        ({"type": "control", "id": 1, "command": sent}, "command"),
        ({"type": "generate", "id": 1, "frames": [], "sampling": {sent: 1}}, "sampling"),
    ]
    for header, field in headers:
        with pytest.raises(WireError) as caught:
            decode_header(msgspec.msgpack.Decoder(FromClient), msgspec.msgpack.encode(header))
        assert caught.value.message.isprintable() and len(caught.value.message) < 1000, caught.value.message
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("header", "field", "allowed"),
    [
        ({"type": "control", "id": 1, "command": "x"}, "command", get_args(CommandName)),
        ({"type": "control", "id": 1, "command": "sleep", "tags": ["weights", "x"]}, "tags[1]", get_args(MemoryTag)),
        ({"type": "publish", "id": 1, "version": 1, "in_flight": "x"}, "in_flight", ("drain", "abort", "in_place", "retract")),
        ({"type": "decode", "id": 1, "frames": [["items", "x", [1]]]}, "frames[0][1]", get_args(Dtype)),
        ({"type": "generate", "id": 1, "frames": [], "ended": [[0, "x"]]}, "ended[0][1]", get_args(Ended)),
    ],
)
def test_an_error_about_one_of_a_few_values_says_which_are_allowed(
    header: dict[str, Any], field: str, allowed: tuple[str, ...]
) -> None:
    with pytest.raises(WireError) as caught:
        decode_header(msgspec.msgpack.Decoder(FromClient), msgspec.msgpack.encode(header))
    assert (caught.value.code, caught.value.field) == ("bad_request", field)
    assert caught.value.message == f"{field}: Invalid enum value 'x'; one of {caught.value.limit}"
    assert set(caught.value.limit.split(", ")) == set(allowed)


def test_a_text_that_has_half_a_surrogate_pair_can_be_sent() -> None:
    """JSON in a file or in a request may have one, and an error quotes it: its worker has to go on."""
    changed = AdapterChanged((7, 1), code="weights_refused", message="\ud800.lora_A: the model has no such layer, é")
    assert decode_header(msgspec.msgpack.Decoder(FromWorker), encode_header(changed)) == AdapterChanged(
        (7, 1), code="weights_refused", message="\\ud800.lora_A: the model has no such layer, é"
    )
    step = Step(1, 0, 0, 0, "error", "no schema: \udfff")
    assert b"no schema: \\udfff" in encode_header(GenerationProgress(7, 1, [step], []))
    assert b"\\ud801" in encode_header(Generate(1, [], sampling=Sampling(logit_bias={"\ud801": 1.0}))), "also as a key"
    assert len(encode_header(AdapterChanged((7, 1), message="\udfff" * MAX_HEADER_BYTES))) < MAX_HEADER_BYTES


@pytest.mark.timeout(20)
@pytest.mark.parametrize("field", ["type", "truncation"])
def test_a_value_that_looks_like_many_paths_is_refused_at_once(field: str) -> None:
    """A search for the path of the error that begins at each of them would take minutes."""
    value = " - at `$" * ((MAX_HEADER_BYTES - 100) // 8) + "\n"
    fields: dict[str, Any] = {"type": "score", "id": 1, "frames": [], field: value}
    with pytest.raises(WireError) as refused:
        decode_header(msgspec.msgpack.Decoder(FromClient), msgspec.msgpack.encode(fields))
    assert refused.value.field == field
