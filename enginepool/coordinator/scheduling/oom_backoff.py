"""Backoff after an engine ran out of memory: each worker of its group gets half as much at a time from then on.

The budgets of a worker bound what its engine runs as one forward. A worker declares budgets that are expected to fit. When an
engine runs out of memory, the coordinator halves the budgets of all workers of the group. It fills running workers less. It
tells starting workers, because their first batches are as large as any later one. Three cases:

1. The engine died of a batch that the present budgets allow: the budgets are halved.
2. It died of a larger batch, sent before the loss of another worker halved the budgets: nothing changes.
3. The budgets were already halved as often as may help: the loss counts like any other.

In cases 1 and 2 no request becomes a suspect, and the loss does not count against the slot. Such losses are few.

A request whose sequence was all that a worker ran is a suspect from then on: it runs alone, at a worker that has nothing else.
If that one runs out of memory, fewer sequences cannot help: the loss is case 3. After such a loss a group that generates starts
no work for a while: what took the memory may be gone then.
"""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.capabilities import MOST_HALVINGS, halved

#: for how long a group that generates starts nothing after its first, second, and later losses, in seconds
BACKOFF_S = (0.5, 1.0, 2.0)


def back_off(core: Context, worker: Worker) -> None:
    """`worker` ended because its engine ran out of memory: if it generates, its group starts nothing for a while. A request
    that was alone there runs alone from now on."""
    if worker.capabilities is None or "generate" not in worker.capabilities.operations:
        return
    losses = worker.group.halvings
    request = next(iter(worker.batches.values())).slices[0][0] if worker.rows == 1 else None
    if request is not None and request.generation is not None:
        losses = request.attempts + 1 + request.suspect
        request.suspect = True
    worker.group.resume_at = core.now + BACKOFF_S[min(max(losses, 1), len(BACKOFF_S)) - 1]


def resume(core: Context) -> None:
    """Groups whose time is over start work again."""
    for group in core.groups.values():
        if 0.0 < group.resume_at <= core.now:
            group.resume_at = 0.0
            core.wake(group)


def halve(worker: Worker, now: float) -> bool:
    """`worker` ended because its engine ran out of memory. Returns whether smaller batches may help; if so, its group gets
    smaller batches from now on."""
    group, can = worker.group, worker.capabilities
    if can is None:
        present = worker.halvings >= group.halvings
    elif now < group.resume_at:
        present = False  # it began all that it runs, and what it was told to stop since, before the latest loss
    elif not worker.batches or any(batch.trial and batch.slices[0][0].generation for batch in worker.batches.values()):
        return False
    else:
        present = worker.within(can)
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
    if (can := group.capabilities) is not None:
        group.capabilities = halved(can, halvings - can.halvings)
