"""A machine that checks its invariants after each turn."""

from collections.abc import Iterable

from enginepool.config import PoolConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import Effect
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.request import Request
from tests.core.invariants import check_client, check_request, check_worker


class CheckedMachine(Machine):
    """Checks the clients, workers and requests that its turns were about; `check_machine` looks at all of them."""

    def __init__(self, config: PoolConfig, check_every: int = 1) -> None:
        """`check_every`: it checks on every so many turns what all of them were about."""
        super().__init__(config)
        self._check_every = check_every
        self._turns = 0
        self._links: set[bytes] = set()
        #: requests that events named, by link and id
        self._named: set[tuple[bytes, int]] = set()

    def handle(self, *events: ev.Event) -> list[Effect]:
        effects = super().handle(*events)
        self._note(events)
        self._note(effects)
        self._turns += 1
        if self._turns % self._check_every == 0:
            self._check_noted()
        return effects

    def _note(self, found: Iterable[ev.Event | Effect]) -> None:
        for one in found:
            link: bytes | None = getattr(one, "link", None)
            if link is not None:
                self._links.add(link)
                if (id_ := getattr(one, "id", None)) is not None:
                    self._named.add((link, id_))

    def _check_noted(self) -> None:
        core = self.core
        requests: set[Request] = set()
        for link in self._links:
            if (worker := core.worker_links.get(link)) is not None:
                check_worker(worker)
                requests.update(request for batch in worker.batches.values() for request, _, _ in batch.slices)
            if (client := core.links.get(link)) is not None:
                check_client(client)
        for link, id_ in self._named:
            if (client := core.links.get(link)) is not None and (request := client.live.get(id_)) is not None:
                requests.add(request)
        for request in requests:
            check_request(request)
        self._links.clear()
        self._named.clear()
