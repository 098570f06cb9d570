"""A machine that checks its invariants after each turn."""

from collections.abc import Iterable

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect
from enginepool.coordinator.core.machine import Machine


class CheckedMachine(Machine):
    """Runs `check()` on the clients, workers and requests that a turn was about; `Machine.check` looks at all of them."""

    def handle(self, *events: ev.Event) -> list[Effect]:
        effects = super().handle(*events)
        for link in self._links(events) | self._links(effects):
            if (worker := self.core.worker_links.get(link)) is not None:
                worker.check()
                for batch in worker.batches.values():
                    for request, _, _ in batch.slices:
                        request.check()
            if (client := self.core.links.get(link)) is not None:
                client.check()
                for event in events:
                    if (request := client.live.get(getattr(event, "id", -1))) is not None:
                        request.check()
        return effects

    def _links(self, found: Iterable[ev.Event | Effect]) -> set[bytes]:
        return {link for one in found if isinstance(link := getattr(one, "link", None), bytes)}
