"""Backoff after an engine ran out of memory: each worker of its group gets half as much at a time from then on.

The budgets of a worker bound what its engine runs as one forward. A worker declares budgets that are expected to fit. When an
engine runs out of memory, the coordinator halves the budgets of all workers of the group. It fills running workers less. It
tells starting workers, because their first batches are as large as any later one. Three cases:

1. The engine died of a batch that the present budgets allow: the budgets are halved.
2. It died of a larger batch, sent before the loss of another worker halved the budgets: nothing changes.
3. The budgets were already halved as often as may help: the loss counts like any other.

In cases 1 and 2 no request becomes a suspect, and the loss does not count against the slot. Such losses are few.
"""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.capabilities import MOST_HALVINGS, halved


def halve(worker: Worker) -> bool:
    """`worker` ended because its engine ran out of memory. Returns whether smaller batches may help; if so, its group gets
    smaller batches from now on."""
    group, can = worker.group, worker.capabilities
    if can is None:
        present = worker.halvings >= group.halvings
    elif not worker.batches:
        return False
    else:
        present = worker.cost <= can.inflight_tokens and worker.rows <= can.inflight_rows
    if not present:
        return True
    if group.halvings == MOST_HALVINGS:
        return False
    shrink(group, group.halvings + 1)
    return True


def shrink(group: Group, halvings: int) -> None:
    """Halve the budgets of all workers of `group` so many times."""
    group.halvings = halvings
    for worker in group.workers.values():
        if worker.declared is not None:
            worker.capabilities = halved(worker.declared, halvings - worker.declared.halvings)
    group.plain, group.packed = (can and halved(can, halvings - can.halvings) for can in (group.plain, group.packed))
