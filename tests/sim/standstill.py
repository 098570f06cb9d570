"""Workers that generate nothing: none keeps a task for longer than it may, while no other task of it gets tokens either."""

from typing import Any

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.machine import STALL_S, Machine
from enginepool.coordinator.core.worker import Worker

#: deadlines are looked at so seldom, and a turn may be late
LATE_S = 1.0


class StandstillWatch:
    """Looks at the tasks that generate, of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        #: when a worker last generated something for a task that it has, or may have stood still
        self._moved: dict[Worker, float] = {}
        self._latest = 0.0
        on = machine._on  # pyright: ignore[reportPrivateUsage] (events are seen one at a time, as the machine takes them)
        real = on[ev.TokensGenerated]

        def generated(e: Any) -> None:
            worker = machine.core.worker_links.get(e.link)
            if worker is not None and any((e.epoch, step.task) in worker.batches for step in e.steps):
                self._moved[worker] = e.now
            real(e)

        on[ev.TokensGenerated] = generated

    def after(self) -> None:
        """Events were handled."""
        core = self.machine.core
        stalled, self._latest = core.now - self._latest > STALL_S, core.now
        for group in core.groups.values():
            may_stand = stalled or group.holds.keeps or core.update_of(group) is not None
            for worker in group.workers.values():
                tasks = [batch for batch in worker.batches.values() if batch.slices[0][0].generation is not None]
                if may_stand or not tasks:
                    self._moved[worker] = core.now
                    continue
                since = max(self._moved.get(worker, 0.0), min(task.began for task in tasks))
                allowed = max(core.config.timing.forward_s, *(2 * (task.deadline - task.late) for task in tasks))
                told = f"{worker} has generated nothing for {core.now - since:.1f} s"
                assert core.now - since <= allowed + LATE_S, told
