"""What goes wrong in a sim engine when its options ask for it: which faults a batch meets, and what each of them does."""

import asyncio
import os
import signal
import time
from collections.abc import Iterable

import msgspec
import numpy as np

from enginepool.workers.engine import BatchOutcome, EngineDied, EngineError, EngineUnusable, Ids, RowBatch, RowPart
from enginepool.workers.sim.options import Fault

_NO_ITEMS = np.zeros(0, np.uint32)


def faults_on_load(faults: Iterable[Fault]) -> list[Fault]:
    """Those of the start."""
    return [fault for fault in faults if fault.kind.endswith("_on_load")]


def faults_of_first_batch(faults: Iterable[Fault]) -> list[Fault]:
    """Those of the batch with which an engine would warm up: as large as any."""
    return [fault for fault in faults if fault.kind == "out_of_memory" and fault.at_batch is None]


def faults_on_take(faults: Iterable[Fault], take: int) -> list[Fault]:
    """Those of the new weights number `take`, from 1."""
    return [fault for fault in faults if fault.kind.endswith("_on_take") and fault.at_take in (None, take)]


def faults_of(faults: Iterable[Fault], batch: RowBatch, number: int) -> list[Fault]:
    """Those of a batch, the engine's `number`th, from 1."""
    return [
        fault
        for fault in faults
        if not fault.kind.endswith(("_on_load", "_on_take"))
        and fault.at_step is None
        and (fault.at_batch is None or fault.at_batch == number)
        and (fault.on_token is None or any(_has(part, fault.on_token) for part in batch.parts))
    ]


def faults_of_task(faults: Iterable[Fault], prompt: Ids, number: int) -> list[Fault]:
    """Those of a generation, the engine's `number`th, from 1."""
    found = faults_of(faults, RowBatch((RowPart(prompt, prompt[:0], _NO_ITEMS),)), number)
    return [msgspec.structs.replace(fault, on_token=None) for fault in found]


def faults_of_step(faults: Iterable[Fault], number: int) -> list[Fault]:
    """Those of a step of generation, from 1."""
    return [fault for fault in faults if fault.at_step == number]


async def suffer(fault: Fault, rows: int = 0) -> None:
    """What a fault does before there is an answer to `rows` rows; nothing, if it spoils the answer instead.

    Raises EngineError, EngineDied.
    """
    asked_for = f"sim engine: {fault.kind} asked for by options.faults"
    match fault.kind:
        case "crash" | "crash_on_load" | "crash_on_take":
            raise EngineDied(asked_for)
        case "refuse_on_load":
            raise EngineUnusable(asked_for)
        case "exit_on_load":
            os._exit(3)
        case "abort" | "abort_on_take":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang" | "hang_on_take":
            await asyncio.Event().wait()
        case "block" | "block_on_load":
            time.sleep(fault.seconds)  # noqa: ASYNC251 - standing still is what this fault is
        case "slow" | "slow_on_take":
            await asyncio.sleep(fault.seconds)
        case "fail_on_take":
            raise EngineError(asked_for)
        case "error" if fault.on_token is None:
            raise EngineError(asked_for)
        case "out_of_memory" if rows > fault.rows:
            raise EngineDied(f"sim engine: OutOfMemoryError: {rows} rows, with memory for {fault.rows} by options.faults")
        case "error" | "wrong_rows" | "lie_forwards" | "out_of_memory":
            pass


def spoil(outcome: BatchOutcome, batch: RowBatch, faults: Iterable[Fault]) -> BatchOutcome:
    """The answer as these faults leave it."""
    parts = list(outcome.parts)
    forwards = outcome.forwards
    for fault in faults:
        first = parts[0]
        if fault.kind == "lie_forwards":
            forwards += 1
        elif fault.kind == "wrong_rows" and not isinstance(first, EngineError):
            parts[0] = {name: values[:-1] for name, values in first.items()}
        elif fault.kind == "error" and fault.on_token is not None:
            for i, part in enumerate(batch.parts):
                if _has(part, fault.on_token):
                    parts[i] = EngineError(f"sim engine: token {fault.on_token} is refused by options.faults")
    return BatchOutcome(tuple(parts), forwards, outcome.version)


def _has(part: RowPart, token: int) -> bool:
    return bool(np.any(part.query == token) or np.any(part.items == token))
