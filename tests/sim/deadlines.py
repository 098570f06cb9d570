"""What must hold when deadlines were checked, also where the coordinator looked at nothing."""

from enginepool.coordinator.core.machine import Machine


def watch_deadlines(machine: Machine) -> None:
    """From now on no worker keeps rows that were not done in time, also while its sequences get tokens."""
    core, real = machine.core, machine.deadlines.check

    def check() -> None:
        real()
        for worker in core.worker_links.values():
            if not worker.batches:
                continue
            update = core.update_of(worker.group)
            stands_still = update is not None and update.loading and worker.incarnation in update.members
            if worker.lost or stands_still:
                continue
            for batch in worker.batches.values():
                if batch.slices[0][0].generation is None:
                    assert core.now <= batch.deadline, f"{worker} still has {batch}, which was due at {batch.deadline:.1f}"
                    break

    machine.deadlines.check = check
