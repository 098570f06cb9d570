"""Which workers computed an answer: their names in it, the first ones within a bound, and where they generated. Pure."""

from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.protocol.basis import NAMES_BYTES

#: what a name takes in a header besides its bytes, at most
_NAME_BYTES = 2


def with_worker(names: list[str], name: str) -> list[str]:
    """`names` with that of a further worker, unless it is there already, or has no room."""
    if name in names or sum(len(one.encode()) + _NAME_BYTES for one in (*names, name)) > NAMES_BYTES:
        return names
    return [*names, name]


def note_sequence(batch: RunningBatch, place: int) -> None:
    """A sequence of a request to generate leaves its worker, which is named if it generated a token of it."""
    request = batch.slices[0][0]
    assert request.generation is not None
    sequence, name = request.generation.sequences[place], batch.worker.name
    if len(sequence.tokens) > batch.at and batch.adapter and (sequence.adapters or ((0, 0),))[-1][0] != batch.adapter_version:
        sequence.adapters = (*sequence.adapters, (batch.adapter_version, batch.at))
    if len(sequence.tokens) > batch.at and (not sequence.workers or sequence.workers[-1][0] != name):
        sequence.workers = (*sequence.workers, (name, batch.at))
        request.workers = with_worker(request.workers, name)


def places(request: Request) -> list[list[tuple[int, int]]]:
    """Which of the workers that an answer names generated which tokens of each sequence; none: its first one generated all. A
    worker whose name has no room is -1."""
    assert request.generation is not None
    numbers = {name: number for number, name in enumerate(request.workers)}
    found = [[(numbers.get(name, -1), at) for name, at in one.workers] for one in request.generation.sequences]
    return found if any(one and one != [(0, 0)] for one in found) else []
