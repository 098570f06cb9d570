"""KV events of SGLang become blocks of the pool, and a worker reports each of them once, or all to a new coordinator."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.protocol.messages import MAX_REPORTED_BLOCKS
from enginepool.protocol.prefix_blocks import BLOCK, MOST_BLOCKS, REMEMBERED, blocks_of
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sglang.generate.kv_events import KvBlocks, read_events, with_endpoint
from enginepool.workers.sglang.host.settings import SettingsError

#: What SGLang's own classes encode, by version: tokens 0 to 127 stored as two blocks, 11 and -12; -12 evicted; all evicted.
_HEAD, _END = "93cb3ff8000000000000", "00"
_IDS = bytes(range(2 * BLOCK)).hex()
_MAP_REMOVED = "ac626c6f636b5f68617368657391f4a66d656469756da347505500"
RECORDED = {
    "0.5.17": (
        f"{_HEAD}9297ab426c6f636b53746f726564910bc0dc0040{_IDS[:128]}40c0a3475055"
        f"97ab426c6f636b53746f72656491f40bdc0040{_IDS[128:]}40c0a3475055{_END}",
        f"{_HEAD}9193ac426c6f636b52656d6f76656491f4a3475055{_END}",
        f"{_HEAD}9191b0416c6c426c6f636b73436c6561726564{_END}",
    ),
    "0.5.23": (
        f"{_HEAD}9187a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920bf4b1706172656e745f626c6f636b5f68617368c0"
        f"a9746f6b656e5f696473dc0080{_IDS}aa626c6f636b5f73697a6540a76c6f72615f6964c0a66d656469756da3475055{_END}",
        f"{_HEAD}9183a474797065ac426c6f636b52656d6f766564{_MAP_REMOVED}",
        f"{_HEAD}9181a474797065b0416c6c426c6f636b73436c6561726564{_END}",
    ),
}
TOKENS = np.arange(2 * BLOCK, dtype=np.int32)


def told(report: PrefixReport) -> tuple[bool, list[int], list[int]] | None:
    """(cleared, removed, stored) of the next message."""
    if (message := report.take()) is None:
        return None
    stored, removed = (np.frombuffer(frame, "<u8").tolist() for frame in message[1])
    return message[0].cleared, removed, stored[1::2]


@pytest.mark.parametrize("version", RECORDED)
def test_events_of_each_version_are_the_blocks_that_the_coordinator_computes(version: str) -> None:
    stored, removed, cleared = map(bytes.fromhex, RECORDED[version])
    blocks = blocks_of(TOKENS.tobytes())
    report = PrefixReport()
    events = KvBlocks(report)
    events.take(0, stored)
    assert told(report) == (False, [], blocks)
    events.take(1, removed)
    assert told(report) == (False, blocks[1:], [])
    assert told(report) is None
    events.take(2, stored)
    events.take(3, cleared)
    assert told(report) == (True, [], [])


def event(kind: str, *hashes: int, tokens: Sequence[Any] = (), **fields: Any) -> dict[str, Any]:
    found = {"type": f"Block{kind}", "block_hashes": hashes, **fields}
    return found | ({"parent_block_hash": None, "token_ids": tokens, "block_size": BLOCK} | fields if kind == "Stored" else {})


def batch(*events: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def test_lost_messages_clear_everything_and_blocks_after_an_unknown_one_are_left_out() -> None:
    report = PrefixReport()
    events = KvBlocks(report)
    events.take(0, batch(event("Stored", 1, 2, tokens=TOKENS.tolist())))
    events.take(2, batch(event("Stored", 3, tokens=TOKENS.tolist()[:BLOCK], parent_block_hash=2)))
    assert told(report) == (True, [], [])
    events.take(3, batch(event("Stored", 1, tokens=TOKENS.tolist()[:BLOCK]), event("Removed", 2)))
    assert told(report) == (False, [], blocks_of(TOKENS.tobytes())[:1])


def test_a_block_in_host_memory_is_held_and_pairs_of_tokens_are_read_as_tokens() -> None:
    report = PrefixReport()
    events = KvBlocks(report)
    pairs = [(token, token + 1) for token in TOKENS.tolist()]
    events.take(0, batch(event("Stored", 1, 2, tokens=pairs), event("Stored", 1, tokens=pairs[:BLOCK], medium="CPU_PINNED")))
    blocks = blocks_of(TOKENS.tobytes())
    assert told(report) == (False, [], [blocks[1], blocks[0]])
    events.take(1, batch(event("Removed", 1, 2, medium="GPU"), event("Removed", 7)))
    assert told(report) == (False, blocks[1:], [])
    events.take(2, batch(event("Removed", 1, medium="CPU_PINNED")))
    assert told(report) == (False, blocks[:1], [])
    disk = event("Stored", 5, tokens=pairs[:BLOCK], medium="DISK")
    events.take(3, batch(disk, event("Stored", 6, tokens=[1], block_size=1)))
    assert told(report) is None


def test_blocks_that_no_prompt_is_looked_at_so_far_for_are_not_reported() -> None:
    report = PrefixReport()
    tokens = np.zeros((MOST_BLOCKS + 3) * BLOCK, np.int32)
    KvBlocks(report).take(0, batch(event("Stored", *range(MOST_BLOCKS + 3), tokens=tokens.tolist())))
    assert told(report) == (False, [], blocks_of(tokens.tobytes()))


@pytest.mark.parametrize("wrong", [b"", b"\x93", batch({"type": "BlockMoved"}), batch({}), msgspec.msgpack.encode([1.0, [[]]])])
def test_events_of_another_kind_are_an_error(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_events(wrong)


def test_a_new_coordinator_is_told_all_that_the_engine_has_in_messages_of_a_bounded_size() -> None:
    report = PrefixReport()
    report.again()
    assert told(report) is None, "the engine tells nothing"
    for block in range(1, MAX_REPORTED_BLOCKS + 11):
        report.store(block - 1, block)
    report.remove(5)
    report.remove(99_999)
    for again in (False, True):
        first, second = told(report), told(report)
        assert first is not None and second is not None and told(report) is None
        assert len(first[1]) + len(first[2]) == MAX_REPORTED_BLOCKS
        assert [*first[2], *second[2]] == [i for i in range(1, MAX_REPORTED_BLOCKS + 11) if i != 5]
        assert (first[0], second[0]) == (again, False), "what it may know of the engine is dropped first"
        report.again()


def test_a_worker_reports_the_newest_blocks_where_its_engine_has_more_than_the_coordinator_remembers() -> None:
    report = PrefixReport()
    for block in range(1, REMEMBERED + 11):
        report.store(0, block)
    found: list[int] = []
    while (message := told(report)) is not None:
        found += message[2]
    assert found == [*range(11, REMEMBERED + 11)]


def test_the_worker_sets_endpoint_and_page_size_and_leaves_a_configuration_with_an_endpoint_alone(tmp_path: Path) -> None:
    def settings(text: Any, operation: str = "generate", **options: Any) -> EngineSettings:
        return EngineSettings(model="m", operations=(operation,), options={"kv_events_config": text, **options})

    found, endpoint = with_endpoint(settings('{"publisher": "zmq", "hwm": 5}'), tmp_path)
    assert endpoint == f"ipc://{tmp_path}/kv" and found.options["page_size"] == BLOCK
    assert json.loads(found.options["kv_events_config"]) == {"publisher": "zmq", "hwm": 5, "endpoint": endpoint}
    for left in (
        settings('{"publisher": "zmq", "endpoint": "tcp://*:5557"}', page_size=16), settings('{"publisher": "null"}'),
        settings('{"publisher": "zmq"}', "score"), EngineSettings(model="m", operations=("generate",)),
    ):  # fmt: skip
        assert with_endpoint(left, tmp_path) == (left, "")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"page_size": 16}, "page_size=16 is refused: .* of 64 tokens"), ({"disable_radix_cache": True}, "radix"),
        ({"lora_paths": ["a"]}, "adapter"), ({"dp_size": 2}, "each replica"), ({"enable_lora": True}, "adapter"),
    ]  # fmt: skip
    for options, words in refused:
        with pytest.raises(SettingsError, match=words):
            with_endpoint(settings('{"publisher": "zmq"}', **options), tmp_path)
    for text in ("zmq", "[]", {"publisher": "zmq"}):
        with pytest.raises(SettingsError, match="expected a JSON object"):
            with_endpoint(settings(text), tmp_path)
    with pytest.raises(SettingsError, match="longer than 107"):
        with_endpoint(settings('{"publisher": "zmq"}'), tmp_path / ("x" * 100))
