"""A worker's way back to committed weights without their publisher: from its engine, its stager, a snapshot or a checkpoint."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

from enginepool.protocol.layout import layout
from enginepool.protocol.messages.weights import Restore, Restored
from enginepool.workers.engine import EngineDied, EngineError, OnlyAtStart
from enginepool.workers.engine_weights import EngineWeights, MemoryRegion, NewWeights
from enginepool.workers.stager.link import StagerGone, StagerLink
from enginepool.workers.stager.messages import AskHeld, StagerHolds
from enginepool.workers.stager.snapshot import SnapshotError, check_folder, digest_of_file, read_footer
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_tensors, checkpoint_under


async def restore(engine: EngineWeights, stager: StagerLink, message: Restore, roots: Sequence[str] = ()) -> Restored:
    """The answer: without a code if one of them had the weights and the engine took them. Raises EngineDied."""
    done = Restored(message.version, code="", message="")
    reasons: list[str] = []
    if engine.digest == message.digest:
        await engine.load_weights(NewWeights(), message.version, message.digest)
        return done
    if not message.digest:
        raise EngineDied("the committed weights are those of the checkpoint; the engine starts with them again")
    sources: list[Callable[[], Awaitable[NewWeights]]] = [lambda: _held(stager, message.digest)]
    if message.snapshot:
        sources.append(lambda: asyncio.to_thread(_saved, message.snapshot, message.digest))
    if message.path:
        sources.append(lambda: asyncio.to_thread(_checkpoint, message.path, roots))
    for source in sources:
        try:
            weights = await source()
            await engine.load_weights(weights, message.version, "" if weights.checkpoint else message.digest)
            if engine.digest == message.digest:
                return done
            reasons.append(f"{message.path} no longer holds the committed weights")
            # What is loaded is a checkpoint of no version.
            await engine.load_weights(NewWeights(), 0, engine.digest)
        except OnlyAtStart as error:
            if not message.path:  # started again, it would not have them either
                return Restored(message.version, "needs_weights", f"{error}; publish a checkpoint")
            raise EngineDied(f"other weights are committed than those that it started on: {error}") from None
        except (MissingWeights, StagerGone, SnapshotError, CheckpointError, EngineError) as error:
            # Its name has the digest, and clients read this.
            folder = f"the snapshot in {os.path.dirname(message.snapshot)}"
            reasons.append(str(error).replace(message.snapshot, folder) if message.snapshot else str(error))
    return Restored(message.version, "needs_weights", "; ".join(reasons))


class MissingWeights(Exception):
    """The weights are not there. The message is one line."""


async def _held(stager: StagerLink, digest: str) -> NewWeights:
    """What the stager holds. Raises MissingWeights or StagerGone."""
    held = await stager.ask(AskHeld(digest), StagerHolds)
    if held.digest != digest:
        raise MissingWeights(f"the stager holds version {held.version}" if held.digest else "the stager holds nothing")
    return NewWeights(tuple(held.manifest), tuple(held.regions), held.sharded)


def _saved(path: str, digest: str) -> NewWeights:
    """The snapshot at `path`, if it holds the committed weights. Raises MissingWeights or SnapshotError."""
    check_folder(path)
    footer = read_footer(path)
    nbytes = layout(footer.manifest).nbytes
    if digest_of_file(path, nbytes) != digest:
        raise MissingWeights(f"{path}: its digest is not that of the committed weights")
    return NewWeights(tuple(footer.manifest), (MemoryRegion("file", nbytes, path=path),))


def _checkpoint(path: str, roots: Sequence[str]) -> NewWeights:
    """The checkpoint at `path`; its digest is known when it is loaded. Raises CheckpointError."""
    path = checkpoint_under(path, roots)
    return NewWeights(tuple(checkpoint_tensors(path)), checkpoint=path)
