"""The first batches of an engine: they compile its kernels, prove that a batch is one forward, and measure what it can do."""

import asyncio
import contextlib
import math
import time

import msgspec
import numpy as np

from enginepool.protocol.capabilities import FORWARD_S, MOST_FORWARD_MS
from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, RowPart
from enginepool.workers.forward_time import MOST_FORWARD_S, forward_ms
from enginepool.workers.forward_time import pace as pace_of
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.operations.base import RowOperation
from enginepool.workers.sglang.score.scoring import EngineScoring

_WARM_ROWS = 2
_WORDS = 1 << 15
_WARM_LENGTH = 8
_PACE_LENGTH = 512
_PACE_RUNS = 3
_FIXED_RUNS = 5
#: The rows by which a CPU is measured, and how many times as many of them each forward has as the one before.
_CPU_LENGTH = 64
_CPU_GROWTH = 4


async def warm_up(scoring: EngineScoring) -> Capabilities:
    """Run real batches: kernels are compiled, one forward each is checked, the head's shape and the pace are seen.

    What `scoring` was told of the engine, completed. Raises SettingsError when a batch inside its budget was cut.
    """
    capabilities = scoring.capabilities
    length = min(_WARM_LENGTH, capabilities.context, capabilities.batch_tokens)
    rows = min(_WARM_ROWS, capabilities.batch_rows, max(1, capabilities.batch_tokens // max(length, capabilities.page)))
    forwards = 1
    for operation in scoring.operations.values():
        parts = _made_up(capabilities, operation, rows, length)
        [outputs, *_], forwards, _ = await scoring.compute(operation, parts)
        if capabilities.packs and operation.packs:
            await scoring.compute(operation, _sequences(capabilities, operation, rows, length), packed=True)
        capabilities = operation.measured(capabilities, outputs, scoring.config)
        if operation.has_hidden:
            with contextlib.suppress(EngineError):  # some heads give no hidden states; then `hidden` stays 0
                [outputs, *_], _, _ = await scoring.compute(operation, parts, hidden=True)
                capabilities = msgspec.structs.replace(capabilities, hidden=outputs["hidden"].shape[1])
        if forwards == 1:
            forwards = await _largest_forwards(scoring, operation)
    if forwards != 1:
        raise SettingsError(f"the engine took {forwards} forwards for one batch inside its budget")
    if capabilities.device == "cpu":
        pace, wanted_ms = await _cpu_pace(scoring)
        return msgspec.structs.replace(capabilities, pace=pace, forward_ms=wanted_ms)
    pace, fixed_ms = await _pace(scoring), await _fixed_ms(scoring)
    capabilities = msgspec.structs.replace(capabilities, pace=pace, fixed_ms=fixed_ms)
    if not capabilities.packs:
        return capabilities
    pace, fixed_ms = await _pace(scoring, packed=True), await _fixed_ms(scoring, packed=True)
    return msgspec.structs.replace(capabilities, packed_pace=pace, packed_fixed_ms=fixed_ms)


async def _largest_forwards(scoring: EngineScoring, operation: RowOperation) -> int:
    """Into how many forwards the engine cuts the largest batches of an operation: 1, or the first other number."""
    can = scoring.capabilities
    batches: list[list[RowPart]] = []
    packed: list[list[RowPart]] = []
    if can.device != "cpu":
        # The most that may ever run as one forward: kernels are chosen by shape, and memory is taken now or never. Next to
        # sequences each batch is a forward of its own.
        most_rows, most_tokens = (can.batch_rows, can.batch_tokens) if can.mixed else (can.inflight_rows, can.inflight_tokens)
        rows = min(most_rows, most_tokens // can.context)
        batches.append(_made_up(can, operation, max(1, rows), can.context))
        if can.packs and operation.packs:
            packed.append(_sequences(can, operation, max(1, rows), can.context))
    if can.packs and operation.packs:
        # The same for the rows: at the end of each the whole vocabulary is computed.
        packed.append(_short_rows(can, operation))
    if can.cached_query:
        batches.append([_long_query(can, operation)])
    for parts, joined in [*((parts, False) for parts in batches), *((parts, True) for parts in packed)]:
        _, forwards, _ = await scoring.compute(operation, parts, packed=joined)
        if forwards != 1:
            return forwards
    if can.cached_query and (scoring.cached.missed or not scoring.cached.computed):
        raise SettingsError("the engine finds no query again that it has computed; unset cached_query_tokens")
    return 1


async def _pace(scoring: EngineScoring, *, packed: bool = False) -> int:
    """Tokens of a forward that takes FORWARD_S where others follow it, from the quickest of some pairs of full batches."""
    capabilities = scoring.capabilities
    operation = next(one for one in scoring.operations.values() if one.packs or not packed)
    made = _sequences if packed else _made_up
    length = min(_PACE_LENGTH, capabilities.context)
    rows = max(1, min(capabilities.batch_rows, capabilities.batch_tokens // length))
    quickest = math.inf
    for run in range(_PACE_RUNS):
        # Rows that were never seen: what an engine keeps, it does not compute again.
        seen = 1 + 2 * run
        parts = [made(capabilities, operation, rows, length, seed) for seed in (seen, seen + 1)]
        began = time.perf_counter()
        await asyncio.gather(*(scoring.compute(operation, each, packed=packed) for each in parts))
        quickest = min(quickest, time.perf_counter() - began)
    return max(1, min(capabilities.batch_tokens, int(2 * rows * length * FORWARD_S / quickest)))


async def _fixed_ms(scoring: EngineScoring, *, packed: bool = False) -> int:
    """Milliseconds of a forward of a few tokens, the quickest of some; at least 1."""
    capabilities = scoring.capabilities
    operation = next(one for one in scoring.operations.values() if one.packs or not packed)
    made = _sequences if packed else _made_up
    length = min(_WARM_LENGTH, capabilities.context, capabilities.batch_tokens)
    quickest = math.inf
    for seed in range(1, 1 + _FIXED_RUNS):
        began = time.perf_counter()
        await scoring.compute(operation, made(capabilities, operation, 1, length, seed), packed=packed)
        quickest = min(quickest, time.perf_counter() - began)
    return max(1, min(round(1000 * quickest), MOST_FORWARD_MS))


async def _cpu_pace(scoring: EngineScoring) -> tuple[int, int]:
    """(tokens of a forward that takes as long as one is meant to take here, that time in milliseconds).

    CPUs differ by a factor of a thousand: forwards grow from a few tokens until one takes long enough to tell.
    """
    capabilities, operation = scoring.capabilities, next(iter(scoring.operations.values()))
    seed = 0

    async def seconds(rows: int, length: int) -> float:
        """The quickest forward of so many rows, which were never seen."""
        nonlocal seed
        quickest = math.inf
        for _ in range(_PACE_RUNS):
            seed += 1
            parts = _made_up(capabilities, operation, rows, length, seed)
            began = time.perf_counter()
            await scoring.compute(operation, parts)
            quickest = min(quickest, time.perf_counter() - began)
            if quickest >= MOST_FORWARD_S:
                break
        return quickest

    most = capabilities.batch_tokens
    wanted_ms = forward_ms(await seconds(1, min(_WARM_LENGTH, capabilities.context, most)))
    length = min(_CPU_LENGTH, capabilities.context, most)
    most_rows = max(1, min(capabilities.batch_rows, most // length))
    rows = 1
    while (took := await seconds(rows, length)) < wanted_ms / 1000 and rows < most_rows:
        rows = min(most_rows, rows * _CPU_GROWTH)
    return pace_of(rows * length, took, wanted_ms, most), wanted_ms


def _made_up(capabilities: Capabilities, operation: RowOperation, rows: int, length: int, seed: int = 0) -> list[RowPart]:
    """`rows` different rows of `length` tokens in all."""
    # Low ids are words everywhere; among the high ones are places for images that there are none of.
    words = min(capabilities.vocab, _WORDS)
    ids = np.random.default_rng(seed).integers(0, words, rows * length, dtype=np.int32)
    return [RowPart(np.empty(0, np.int32), ids, np.full(rows, length, np.uint32), asked=operation.trial())]


def _sequences(capabilities: Capabilities, operation: RowOperation, rows: int, length: int, seed: int = 0) -> list[RowPart]:
    """As many rows of one part each, which take `length` tokens in a sequence of their own. Short ones share sequences."""
    # Queries that differ, so that rows are placed whole; a context that holds no row at all has been refused by now.
    ids = (np.arange(max(rows, length), dtype=np.int32) + seed) % capabilities.vocab
    item = max(1, length - 3)
    return [RowPart(ids[i : i + 1], ids[:item], np.full(1, item, np.uint32), asked=operation.trial()) for i in range(rows)]


def _long_query(capabilities: Capabilities, operation: RowOperation) -> RowPart:
    """Two rows of the shortest query that is computed ahead of them."""
    ids = np.arange(capabilities.cached_query, dtype=np.int32)[::-1] % capabilities.vocab
    return RowPart(ids, np.array([0, 1], np.int32), np.ones(2, np.uint32), asked=operation.trial())


def _short_rows(capabilities: Capabilities, operation: RowOperation) -> list[RowPart]:
    """As many packed rows of one token behind a query as may be in flight."""
    rows = max(1, min(capabilities.inflight_rows, capabilities.inflight_tokens // (4 + capabilities.page)))
    query, items = np.zeros(1, np.int32), np.zeros(rows, np.int32)
    return [RowPart(query, items, np.ones(rows, np.uint32), asked=operation.trial())]
