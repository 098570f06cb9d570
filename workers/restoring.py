"""A worker's way back to committed weights without their publisher: from its engine, its stager, a snapshot or a checkpoint."""

import asyncio
import time

from enginepool.protocol.layout import layout
from enginepool.protocol.updates import Restore, Restored
from enginepool.workers.checkpoint import CheckpointError, checkpoint_tensors
from enginepool.workers.engine import Engine, EngineDied, EngineError, NewWeights, Space
from enginepool.workers.events import Event, WeightsAnswered, WeightsTaken
from enginepool.workers.stager.link import StagerGone, StagerLink
from enginepool.workers.stager.messages import AskHeld, Held
from enginepool.workers.stager.snapshot import SnapshotError, digest_of_file, read_footer


async def restore(engine: Engine, stager: StagerLink, message: Restore) -> Event:
    """What the machine hears of it. Raises EngineDied."""
    reasons: list[str] = []
    if engine.digest == message.digest:
        await engine.take(NewWeights(), message.version, message.digest)
        return WeightsTaken(time.monotonic(), message.version, message.digest)
    if not message.digest:
        raise EngineDied("the committed weights are those of the checkpoint; the engine starts with them again")
    if (held := await _held(stager, message, reasons)) is not None:
        weights = NewWeights(tuple(held.manifest), tuple(held.spaces))
    elif (saved := await asyncio.to_thread(_saved, message, reasons)) is not None:
        weights = saved
    elif message.path:
        try:
            weights = NewWeights(tuple(await asyncio.to_thread(checkpoint_tensors, message.path)), checkpoint=message.path)
        except CheckpointError as error:
            reasons.append(str(error))
            weights = None
    else:
        weights = None
    try:
        if weights is not None:
            await engine.take(weights, message.version, "" if weights.checkpoint else message.digest)
            if engine.digest == message.digest:
                return WeightsTaken(time.monotonic(), message.version, message.digest)
            reasons.append(f"{message.path} holds other weights now: digest {engine.digest}, not {message.digest}")
            # What is loaded is a checkpoint of no version.
            await engine.take(NewWeights(), 0, engine.digest)
    except EngineError as error:
        reasons.append(str(error))
    return WeightsAnswered(time.monotonic(), Restored(message.version, "needs_weights", "; ".join(reasons)))


async def _held(stager: StagerLink, message: Restore, reasons: list[str]) -> Held | None:
    try:
        held = await stager.ask(AskHeld(message.digest), Held)
    except StagerGone as error:
        reasons.append(str(error))
        return None
    if held.digest == message.digest:
        return held
    reasons.append(f"the stager holds version {held.version}" if held.digest else "the stager holds nothing")
    return None


def _saved(message: Restore, reasons: list[str]) -> NewWeights | None:
    """The snapshot that `message` names, if it is what was committed."""
    if not message.snapshot:
        return None
    try:
        footer = read_footer(message.snapshot)
        nbytes = layout(footer.manifest).nbytes
        found = digest_of_file(message.snapshot, nbytes)
    except SnapshotError as error:
        reasons.append(str(error))
        return None
    if found != message.digest:
        reasons.append(f"{message.snapshot}: its digest is {found}, that of the committed weights is {message.digest}")
        return None
    return NewWeights(tuple(footer.manifest), (Space("file", nbytes, path=message.snapshot),))
