"""Whether this worker's engine can load the weights that an update offers, and what it will load."""

import asyncio
from collections.abc import Sequence

from enginepool.host import host_identity
from enginepool.protocol.manifest import decode_manifest, difference
from enginepool.protocol.messages.weights import Prepare, Prepared
from enginepool.workers.engine import Engine, EngineError, OnlyAtStart
from enginepool.workers.engine_weights import EngineWeights, NewWeights
from enginepool.workers.events import Frame
from enginepool.workers.weights.checkpoint import checkpoint_digest, checkpoint_tensors, checkpoint_under


class UpdateRefusal(Exception):
    """This worker cannot take part in an update. `answer` says so."""

    def __init__(self, answer: Prepared) -> None:
        super().__init__(answer.message)
        self.answer = answer


async def offered_weights(
    engine: EngineWeights, prepare: Prepare, frames: tuple[Frame, ...], roots: Sequence[str]
) -> NewWeights:
    """What the engine will load, as far as it is known now.

    Raises:
        UpdateRefusal: the worker cannot take part, or takes part by a restart.
        OnlyAtStart, WireError, CheckpointError, EngineError: the engine takes no such update, or there are no such weights.
    """
    if prepare.transfer == "set_version":
        return NewWeights()
    if prepare.transfer == "checkpoint":
        path = await asyncio.to_thread(checkpoint_under, prepare.path, roots)
        if _only_at_start(engine):
            digest = await asyncio.to_thread(checkpoint_digest, path)
            raise UpdateRefusal(Prepared(prepare.update, restart=True, digest=digest))
        weights = NewWeights(tuple(await asyncio.to_thread(checkpoint_tensors, path)), checkpoint=prepare.path)
    else:
        bucket_bytes = prepare.bucket_bytes if prepare.transfer == "direct" else 0
        weights = NewWeights(tuple(decode_manifest(frames[0] if frames else b"")), bucket_bytes=bucket_bytes)
    model = engine.model_tensors()
    hints = prepare.transfer != "checkpoint"  # the publisher of a checkpoint has no such arguments
    if misfit := difference(weights.tensors, model.tensors, model.optional, partial=prepare.partial, hints=hints):
        name, why = misfit
        raise UpdateRefusal(Prepared(prepare.update, code="weights_refused", message=why, field=name))
    if prepare.transfer == "ipc" and (why := _out_of_reach(engine, prepare)):
        message = f"no transfer by handles: {why}"
        raise UpdateRefusal(Prepared(prepare.update, code="unsupported", message=message))
    return weights


def check_generations(engine: Engine, prepare: Prepare) -> None:
    """Raise UpdateRefusal: the engine cannot keep generations as the update wants it."""
    try:
        if prepare.generations != "abort":
            engine.check_pause(prepare.generations)
    except EngineError as error:
        raise UpdateRefusal(Prepared(prepare.update, code="unsupported", message=f"in_flight: {error}")) from None


def _only_at_start(engine: EngineWeights) -> bool:
    try:
        engine.model_tensors()
    except OnlyAtStart:
        return True
    return False


def _out_of_reach(engine: EngineWeights, prepare: Prepare) -> str:
    """Why the engine cannot open the publisher's memory, or ""."""
    if prepare.host != host_identity():
        return "the publisher is on another host than this worker, or in another container"
    gpus = engine.model_tensors().gpus
    if prepare.gpu and prepare.gpu not in gpus:
        return f"the engine sees {' and '.join(gpus) or 'no GPU'}, and the publisher's memory is on {prepare.gpu}"
    return ""
