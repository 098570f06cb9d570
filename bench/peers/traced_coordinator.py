"""A coordinator whose requests are traced: `python -m bench.peers.traced_coordinator`, configured as the daemon is."""

import sys
from typing import Any

from bench.tracing.marks import Marker
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.launchers import local
from enginepool.coordinator.shell import daemon
from enginepool.protocol.messages import Batch, Result


def trace(machine: type[Machine], marker: Marker) -> None:
    """Mark when requests arrive and are answered, and when their batches leave and are back."""
    handle = machine.handle

    def traced(self: Machine, *events: ev.Event) -> list[ef.Effect]:
        for event in events:
            if type(event) is ev.Submit:
                marker.mark("arrived", f"r{event.id}", at=event.now)
            elif type(event) is ev.BatchDone:
                marker.mark("back", f"b{event.batch[1]}", at=event.now)
        effects = handle(self, *events)
        for effect in effects:
            message: Any = effect.message if isinstance(effect, ef.ToWorker | ef.ToClient) else None
            if isinstance(message, Batch) and isinstance(effect, ef.ToWorker):
                batch = self.core.worker_links[effect.link].batches[message.batch]
                for request, _, _ in batch.slices:
                    marker.mark("left", f"r{request.id}", f"b{message.batch[1]}")
            elif isinstance(message, Result):
                marker.mark("answered", f"r{message.id}")
        return effects

    machine.handle = traced


if __name__ == "__main__":
    trace(Machine, Marker())
    local.COMMAND = (sys.executable, "-m", "bench.peers.traced_worker")
    sys.exit(daemon.main())
