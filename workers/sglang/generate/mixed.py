"""Engines that generate and run rows: what SGLang is started with, and the bounds of both. Pure: no SGLang here.

`patches/row_forwards.py` has a batch of rows run as one prefill of its own, between two forwards of sequences. So a batch, and
with it a row, is no longer than what SGLang computes in one prefill. Room in the key-value pool and request slots for the rows
in flight are kept from the sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import (
    Budgets,
    Running,
    SettingsError,
    inflight_rows,
    inflight_tokens,
    refuse_splitting,
    refuse_values,
)

#: Rows in flight on a CPU when the config names no `max_batch_rows`: sequences need slots, too.
CPU_ROWS = 64
#: Of the key-value pool, and of the request slots, at most one in so many is kept for rows.
SHARE = 2

_ONLY_ROWS = "rows share no engine with it yet; give them a group of their own"
_RULES: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_lora": ((False, None), _ONLY_ROWS),
    "lora_paths": ((None, [], {}), _ONLY_ROWS),
    "enable_hierarchical_cache": ((False, None), _ONLY_ROWS),
    "enable_lmcache": ((False, None), _ONLY_ROWS),
    "enable_return_hidden_states": ((False, None), _ONLY_ROWS),
    "prefill_decode_interval": ((None, 0), "batches of rows could be held back"),
}


def refuse_mixed(settings: EngineSettings) -> None:
    """Raise SettingsError for settings that an engine which generates and runs rows cannot have."""
    if "embed" in settings.operations:
        raise SettingsError("operations: a model that embeds does not generate; give embed a group of its own")
    if settings.cached_query_tokens:
        raise SettingsError(f"cached_query_tokens is {settings.cached_query_tokens}: {_ONLY_ROWS}")


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options of SGLang with which rows and sequences do not work on one engine."""
    refuse_splitting(options, chunks=True)
    refuse_values(options, _RULES)


def wanted_rows(settings: EngineSettings) -> int:
    """Rows in flight, if the engine has room."""
    rows = inflight_rows(settings)
    return min(rows, CPU_ROWS) if settings.device == "cpu" and settings.max_batch_rows is None else rows


def mixed_defaults(settings: EngineSettings) -> dict[str, Any]:
    """Defaults of SGLang's options besides those of an engine that generates."""
    return {
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        # The pool does it, and knows what goes on exactly.
        "disable_priority_preemption": True,
        "swa_full_tokens_ratio": 1.0,
    }


@dataclass(frozen=True, slots=True)
class RowRoom:
    """Room for rows: tokens and rows of a batch and of all in flight, and `kept`: tokens of the key-value pool."""

    batch_tokens: int
    batch_rows: int
    tokens: int
    rows: int
    kept: int


def row_room(
    settings: EngineSettings, *, kv_tokens: int, page: int, prefill: int, chunk: int | None, max_running: int
) -> RowRoom:
    """What rows get of a started engine.

    Args:
        kv_tokens, page: of the key-value pool.
        prefill, chunk: tokens of one forward, SGLang's `max_prefill_tokens` and `chunked_prefill_size`.
        max_running: request slots.
    """
    flights = settings.forwards_in_flight
    rows = min(wanted_rows(settings), max_running // SHARE, kv_tokens // (4 * SHARE * page)) // flights
    if settings.max_batch_rows is not None:
        rows = min(rows, settings.max_batch_rows)
    spare = (rows + 1) * page
    most = min(prefill - 1, chunk) if chunk and chunk > 0 else prefill - 1
    tokens = min(most, inflight_tokens(settings) // flights, (kv_tokens // SHARE - spare) // flights) // page * page
    return RowRoom(tokens, rows, flights * tokens, flights * rows, flights * tokens + spare)


def room_in(settings: EngineSettings, scheduler: Any) -> RowRoom:
    """The same in the scheduler's own process."""
    return row_room(
        settings,
        kv_tokens=scheduler.max_total_num_tokens,
        page=scheduler.page_size,
        prefill=scheduler.max_prefill_tokens,
        chunk=scheduler.chunked_prefill_size,
        max_running=scheduler.max_running_requests,
    )


@dataclass(frozen=True, slots=True)
class MixedBudgets(Budgets):
    """Budgets of rows, and those of sequences; as in `protocol.messages.Capabilities`."""

    sequences: int = 0
    sequence_tokens: int = 0
    sequence_context: int = 0


def mixed_budgets(settings: EngineSettings, running: Running, sequences: Budgets) -> MixedBudgets:
    """What may be sent to the started engine. `sequences`: what it could generate without any rows. Raises SettingsError."""
    resolved = running.settings
    refuse_options(resolved)
    room = row_room(
        settings,
        kv_tokens=running.kv_tokens,
        page=sequences.page,
        prefill=resolved["max_prefill_tokens"],
        chunk=resolved.get("chunked_prefill_size"),
        max_running=running.max_running,
    )
    slots, tokens = running.max_running - room.rows, running.kv_tokens - room.kept
    context = min(sequences.context, tokens - 2 * sequences.page)
    if min(room.batch_rows, room.batch_tokens, slots) < 1 or context < 2:
        raise SettingsError(
            f"the engine has no room for rows and sequences: max_running_requests={running.max_running},"
            f" max_prefill_tokens={resolved['max_prefill_tokens']}, key-value pool {running.kv_tokens} tokens,"
            f" page {sequences.page}"
        )
    return MixedBudgets(
        context=min(running.longest, room.batch_tokens),
        page=sequences.page,
        batch_tokens=room.batch_tokens,
        batch_rows=room.batch_rows,
        inflight_tokens=room.tokens,
        inflight_rows=room.rows,
        sequences=slots,
        sequence_tokens=tokens,
        sequence_context=context,
    )
