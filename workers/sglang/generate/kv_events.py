"""KV events of SGLang: which blocks of prompts are in its radix cache, told to the pool's prefix affinity. No SGLang here.

With `kv_events_config = '{"publisher": "zmq"}'` SGLang's scheduler publishes what it stores and evicts. The worker sets the
endpoint, in a folder of its own, and pages of as many tokens as a block of the affinity has. A configuration with an endpoint
is for another reader: the worker hands it on as it is, and does not read it.
"""

import os
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from msgspec.structs import replace

from enginepool.host import LONGEST_PATH
from enginepool.protocol.prefix_blocks import BLOCK, MOST_BLOCKS, first_parent, next_block
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.log import say
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.sglang.host.settings import SettingsError, refuse_values

OPTION = "kv_events_config"
_RADIX = "only the radix cache has KV events"
#: as in `refuse_values`
_WITH_EVENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "page_size": ((BLOCK,), f"with {OPTION} a page is a block of the pool's prefix affinity, of {BLOCK} tokens"),
    "disable_radix_cache": ((False, None), _RADIX),
    "enable_lora": ((False, None), f"KV events do not say of which adapter a block is; unset {OPTION}"),
    "dp_size": ((1, None), f"each replica has KV events of its own; unset {OPTION}"),
    "lora_paths": ((None, [], {}), f"KV events do not say of which adapter a block is; unset {OPTION}"),
}
#: In these tiers of SGLang's cache a block is held. What lies in its storage may be gone without an event.
_TIERS = {None: 1, "GPU": 1, "CPU_PINNED": 2}


def with_endpoint(settings: EngineSettings, folder: Path) -> tuple[EngineSettings, str]:
    """`settings` with an endpoint for KV events in `folder`, and the endpoint; "": there is nothing to read. Raises
    SettingsError."""
    text = settings.options.get(OPTION)
    if not text or not settings.generates:
        return settings, ""
    try:
        config = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, TypeError):
        raise SettingsError(f"engine option {OPTION}={text!r} is refused: expected a JSON object as text") from None
    if config.get("publisher") != "zmq" or "endpoint" in config:
        return settings, ""
    path = folder / "kv"
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise SettingsError(f"engine option {OPTION}: the path {path} of its socket is longer than {LONGEST_PATH}; set TMPDIR")
    endpoint = f"ipc://{path}"
    events = msgspec.json.encode(config | {"endpoint": endpoint}).decode()
    options = {"page_size": BLOCK} | settings.options | {OPTION: events}
    refuse_values(options, _WITH_EVENTS)
    return replace(settings, options=options), endpoint


class EventBatch(msgspec.Struct, array_like=True):
    """One message of SGLang."""

    at: float
    events: list[Any]


class StoredEvent(msgspec.Struct, tag="BlockStored", gc=False):
    """`token_ids`: with speculative decoding by EAGLE, pairs of a token and the next one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class RemovedEvent(msgspec.Struct, tag="BlockRemoved", gc=False):
    """Blocks that were evicted from a tier."""

    block_hashes: list[int]
    medium: str | None = None


class ClearedEvent(msgspec.Struct, tag="AllBlocksCleared"):
    """The cache is empty."""


KvEvent = StoredEvent | RemovedEvent | ClearedEvent
_batch = msgspec.msgpack.Decoder(EventBatch)
_NAMES = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in (StoredEvent, RemovedEvent, ClearedEvent)}


def read_events(payload: bytes) -> list[KvEvent]:
    """The events of one message. Newer versions of SGLang send maps, older ones arrays with the same fields in this order.

    Raises:
        msgspec.MsgspecError: they are something else.
    """
    return msgspec.convert([_named(event) for event in _batch.decode(payload).events], list[KvEvent])


def _named(event: Any) -> Any:
    """An event with the names of its fields."""
    if not isinstance(event, list):
        return event
    tag, *values = cast("list[Any]", event) or [None]
    return {"type": tag} | dict(zip(_NAMES.get(str(tag), ()), values, strict=False))


class KvBlocks:
    """The blocks that SGLang has, by its own hashes."""

    def __init__(self, report: PrefixReport) -> None:
        self._report = report
        self._next = 0
        #: hash -> its block, how many blocks that is from the beginning, and the tiers that have it
        self._held: dict[int, tuple[int, int, int]] = {}

    def take(self, number: int, payload: bytes) -> None:
        """Message `number` of SGLang. Where some before it are lost, nothing is known. Raises msgspec.MsgspecError."""
        if number != self._next:
            self._clear()
        self._next = number + 1
        for event in read_events(payload):
            if isinstance(event, StoredEvent):
                self._stored(event)
            elif isinstance(event, RemovedEvent):
                self._removed(event)
            else:
                self._clear()

    def _clear(self) -> None:
        self._held.clear()
        self._report.clear()

    def _stored(self, event: StoredEvent) -> None:
        tier = _TIERS.get(event.medium, 0)
        if not tier or event.block_size != BLOCK or len(event.token_ids) != BLOCK * len(event.block_hashes):
            return
        tokens = np.array(event.token_ids).reshape(len(event.token_ids), -1)[:, 0].astype("<i4").tobytes()
        parent, depth = first_parent(), 0
        if event.parent_block_hash is not None:
            parent, depth, _ = self._held.get(event.parent_block_hash, (0, MOST_BLOCKS, 0))
        for place, name in enumerate(event.block_hashes):
            if depth == MOST_BLOCKS:
                return  # its beginning is not known, or no prompt is looked at so far
            block = next_block(parent, tokens[4 * BLOCK * place : 4 * BLOCK * (place + 1)])
            _, _, tiers = self._held.get(name, (0, 0, 0))
            self._held[name] = block, depth + 1, tiers | tier
            self._report.store(parent, block)
            parent, depth = block, depth + 1

    def _removed(self, event: RemovedEvent) -> None:
        tier = _TIERS.get(event.medium, 0)
        for name in event.block_hashes:
            if (held := self._held.get(name)) is None:
                continue
            block, depth, tiers = held
            if tiers & ~tier:
                self._held[name] = block, depth, tiers & ~tier
            else:
                del self._held[name]
                self._report.remove(block)


async def read_kv_events(endpoint: str, report: PrefixReport) -> None:
    """Read what SGLang publishes at `endpoint`, until this is cancelled."""
    blocks = KvBlocks(report)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        while True:
            _, number, payload = await socket.recv_multipart()
            try:
                blocks.take(int.from_bytes(number, "big"), payload)
            except (msgspec.MsgspecError, ValueError) as error:
                say(f"the KV events of this SGLang cannot be read, so prefix affinity is approximate: {error}")
                report.clear()
                return
