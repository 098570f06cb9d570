"""Halving: an engine that ran out of memory was given too much at once, so its group is given half as much from then on.

What an engine runs as one forward is bounded by its worker's budgets. They are declared in the hope that they fit; when memory
runs out, in the first batches of an engine or later, no worker of the group gets more than half of them: those that run are
filled less, and those that start are told so, since their first batches are as large as any that follow. Three cases:

1. The engine died of what present budgets allow: they are halved.
2. It died of more, from before others brought that about: nothing changes.
3. They were halved as often as may help: then it is a loss like any other.

In the first two nobody is suspected, and the loss does not count against its slot: there can be only few of them.
"""

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.halving import MOST_HALVINGS, halved


def halve(worker: Worker) -> bool:
    """`worker` ended because its engine ran out of memory. Whether less at a time may help; if so, it gets less from now on."""
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
    """No worker of `group` is given more than its budgets halved so many times."""
    group.halvings = halvings
    for worker in group.workers.values():
        if worker.declared is not None:
            worker.capabilities = halved(worker.declared, halvings - worker.declared.halvings)
    group.plain, group.packed = (can and halved(can, halvings - can.halvings) for can in (group.plain, group.packed))
