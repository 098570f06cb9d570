"""What must hold of the weights of a worker, and of the update that it takes part in. Pure, for tests of `machine`."""

from enginepool.protocol.messages.weights import LoadWeights, WeightsLoaded
from enginepool.workers.ledger import TaskLedger
from enginepool.workers.weights.machine import WorkerUpdates


def check_updates(updates: WorkerUpdates, work: TaskLedger, commanded: bool) -> None:
    """Raise AssertionError when an invariant does not hold. `commanded`: a command runs, for which weights wait."""
    update, waiting, loading = updates.update, updates.waiting, updates.loading
    leaving = bool(work.leaving or work.stopped or commanded)
    keeps = update is None or update.prepare.generations != "abort"  # a closed one may have kept them
    assert work.leaving or updates.busy or not work.held, "work is held back and nothing is leaving"
    assert loading is None or work.only_generates, "weights are loaded during work"
    assert loading is None or keeps or not (leaving or work.generates), "weights are loaded during work"
    assert waiting is None or leaving or loading is not None, "weights wait for nothing"
    assert update is None or not update.closed
    assert update is None or LoadWeights in update.requested or WeightsLoaded not in update.answers
    assert not isinstance(waiting, LoadWeights) or (update is not None and LoadWeights in update.requested)
