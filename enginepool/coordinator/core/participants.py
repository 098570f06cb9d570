"""Which workers computed an answer: their names in it, the first ones within a bound. Pure."""

from enginepool.coordinator.core.request import RunningBatch
from enginepool.protocol.basis import NAMES_BYTES

#: what a name takes in a header besides its bytes, at most
_NAME_BYTES = 2


def with_worker(names: list[str], name: str) -> list[str]:
    """`names` with that of a further worker, unless it is there already, or has no room."""
    if name in names or sum(len(one.encode()) + _NAME_BYTES for one in (*names, name)) > NAMES_BYTES:
        return names
    return [*names, name]


def note_task(batch: RunningBatch) -> None:
    """A task to generate, or a sequence of it, has ended at its worker, which is named if it generated a token."""
    request, start, stop = batch.slices[0]
    state = request.generation
    assert state is not None
    if any(len(state.sequences[place].tokens) > batch.at for place in range(start, stop)):
        request.workers = with_worker(request.workers, batch.worker.name)
