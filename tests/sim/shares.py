"""Fairness, read off a coordinator's state from outside.

A request of a client that uses less than its share waits for at most the batches in flight and one batch of each competing
client of its priority. Here batches are counted, not time: from the moment a request waits until its first rows are sent, each
other client opens at most one batch that could have been its.

A client certainly uses less than its share when the request is its only one, and it was never served, or others of its priority
were served many times as much since. Where waiting counts, batches of another lane are left out: which lane is next depends on
how long requests of other priorities wait in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client, Request, RunningBatch
from enginepool.coordinator.core.request_state import QUEUED
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.batch_limits import row_share

#: a client is in no debt once others were served so many times as much as it was served last
FORGIVEN = 40
#: of one group, one priority
Level = tuple[str, int]


@dataclass
class Wait:
    """A request of a light client that waits."""

    request: Request
    #: batches that others opened meanwhile
    opened: dict[Client, int] = field(default_factory=dict[Client, int])


class Shares:
    """Looks at the groups of one machine after each event."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._waits: dict[str, list[Wait]] = {}
        #: the weight of all rows that were sent to workers, in tokens
        self._sent: dict[Level, float] = {}
        #: by client: that weight when it was served last, and the part that was its
        self._served: dict[tuple[Level, Client], tuple[float, float]] = {}

    def after(self, group: Group, batches: Sequence[RunningBatch]) -> None:
        """These batches of rows and these tasks that generate were sent, in this order."""
        before = self._waits.get(group.name)
        waits = [wait for wait in before if _waits(wait.request)] if before else []
        for batch in batches:
            opener = batch.slices[0][0]
            if opener.generation is not None:
                # What it generates is charged later, and is no more than what its cost has for it.
                prompt = memoryview(opener.work.frames[1]).cast("I")[batch.slices[0][1] // _samples(opener)]
                waits = self._serve((group.name, opener.priority), opener.client, prompt, waits, most=batch.cost)
                continue
            for wait in waits:
                request = wait.request
                if batch.trial or request.client is opener.client or request.priority != opener.priority:
                    continue
                if request.generation is not None:
                    continue  # it waits for a slot, and rows have room of their own
                if group.config.ageing_s is not None and _lane(request) != _lane(opener):
                    continue
                count = wait.opened[opener.client] = wait.opened.get(opener.client, 0) + 1
                assert count <= 1, f"{opener.client} opened {count} batches before {request}: {batch}"
            for request, start, end in batch.slices:
                level = group.name, request.priority
                rows, can = end - start, batch.worker.capabilities
                weight = max(1.0, batch.cost * rows / batch.rows)
                if can is not None and "embed" in can.operations:
                    # Most rows are short there, and the queue counts each as its share of a full batch. Where most are long,
                    # the looser count finds more: a client counts as light although short rows brought it into debt.
                    weight = max(weight, rows * row_share(can))
                waits = self._serve(level, request.client, weight, waits)
        self._waits[group.name] = waits + self._new(group) if group.live else waits

    def _serve(
        self, level: Level, client: Client, weight: float, waits: list[Wait], *, most: float | None = None
    ) -> list[Wait]:
        """A client is served. A light one that was served in another signature since is not one any more: the other waits.
        `most`: what it is charged at most in the end."""
        self._sent[level] = self._sent.get(level, 0.0) + weight
        self._served[level, client] = self._sent[level], weight if most is None else most
        return [wait for wait in waits if (wait.request.client, wait.request.priority) != (client, level[1])]

    def _new(self, group: Group) -> list[Wait]:
        newest = self._newest.get(group.name, 0)
        found: list[Wait] = []
        for request in reversed(group.live):
            if request.seq <= newest:
                break
            self._newest[group.name] = max(self._newest.get(group.name, 0), request.seq)
            if _waits(request) and self._light(request):
                found.append(Wait(request))
        return found

    def _light(self, request: Request) -> bool:
        level = request.group.name, request.priority
        mine = [one for one in request.client.live.values() if one.group is request.group and one.priority == request.priority]
        at, weight = self._served.get((level, request.client), (0.0, 0.0))
        return len(mine) == 1 and self._sent.get(level, 0.0) - at >= FORGIVEN * weight


def _samples(request: Request) -> int:
    work = request.work
    return work.n if isinstance(work, GenerateWork) else 1


def _waits(request: Request) -> bool:
    """Whether none of its rows was ever sent, and nothing but its turn keeps them."""
    whole = not request.next and not request.back
    return request.state == QUEUED and whole and request.lane is request.group.queue and request.client.link is not None


def _lane(request: Request) -> tuple[int, bool]:
    """Of the requests that can share a batch."""
    return request.work.signature, request.packs
