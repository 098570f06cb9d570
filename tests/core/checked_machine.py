"""A machine that checks its invariants after each turn."""

from collections.abc import Iterable

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect
from enginepool.coordinator.core.machine import Machine
from tests.core.invariants import check_client, check_request, check_worker


class CheckedMachine(Machine):
    """Checks the clients, workers and requests that a turn was about; `check_machine` looks at all of them."""

    def handle(self, *events: ev.Event) -> list[Effect]:
        effects = super().handle(*events)
        for link in self._links(events) | self._links(effects):
            if (worker := self.core.worker_links.get(link)) is not None:
                check_worker(worker)
                for batch in worker.batches.values():
                    for request, _, _ in batch.slices:
                        check_request(request)
            if (client := self.core.links.get(link)) is not None:
                check_client(client)
                for event in events:
                    if (request := client.live.get(getattr(event, "id", -1))) is not None:
                        check_request(request)
        return effects

    def _links(self, found: Iterable[ev.Event | Effect]) -> set[bytes]:
        return {link for one in found if isinstance(link := getattr(one, "link", None), bytes)}
