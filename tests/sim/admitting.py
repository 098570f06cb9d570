"""Who gets into a full queue, counted from scratch at each request: liveness under `busy`.

- A request is refused only if its client has its share, or if all untouched requests of lower priorities together would not
  make room for it. So a request that outranks what waits gets in at once, and one of a client with little gets in as soon as
  others are done with as much.
- A request that is admitted is within the share of its client, and what it displaced was lower, untouched, and told so.
"""

from collections.abc import Iterable

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.request import Client, Request
from enginepool.protocol.messages import ErrorReply


def watch_admission(machine: Machine) -> None:
    """Check every decision about room from now on."""
    core, admission = machine.core, machine.admission
    real = admission._full  # pyright: ignore[reportPrivateUsage]

    def full(client: Client, e: ev.Submit, held: int) -> str:
        live = [request for other in core.clients.values() for request in other.live.values()]
        lower = [request for request in live if request.priority < e.priority]
        limits = core.config.limits
        #: by bound: its limit, what the request needs, what its client has, what all have, what lower ones have, and what
        #: of that no engine was given
        free = [request for request in lower if _untouched(request)]
        own = client.live.values()
        table = {
            "queue_items": (limits.queue_items, e.work.rows, *map(_rows, (own, live, lower, free))),
            "buffer_bytes": (
                limits.buffer_bytes - e.outboxes, held, _bytes(own) + e.unread, *map(_bytes, (live, lower, free)),
            ),
        }  # fmt: skip
        refused = real(client, e, held)
        shed = [request for request in live if request.client.live.get(request.id) is not request]
        within = {name: mine + need <= most - (all_ - low) - need for name, (most, need, mine, all_, low, _) in table.items()}
        fits = {name: all_ + need <= most + loose for name, (most, need, _, all_, _, loose) in table.items()}
        if refused:
            assert not (all(within.values()) and all(fits.values())), f"{e.id} of {client} is refused: {table}"
            assert not shed, f"{shed} were shed in vain"
        else:
            assert all(within.values()), f"{e.id} of {client} is more than its share: {table}"
        if not shed:
            return refused
        told = {(m.link, m.message.id) for m in core.effects if type(m) is ToClient and type(m.message) is ErrorReply}
        for request in shed:
            assert request in free, f"{request} was shed for one of priority {e.priority}"
            assert core.answers.get(request.client, request.id) is None, f"{request} could not be sent again"
            assert request.client.link is None or (request.client.link, request.id) in told, f"{request} was not told"
        return refused

    admission._full = full  # pyright: ignore[reportPrivateUsage]


def _rows(requests: Iterable[Request]) -> int:
    return sum([request.work.rows for request in requests])


def _bytes(requests: Iterable[Request]) -> int:
    return sum([request.held for request in requests])


def _untouched(request: Request) -> bool:
    """No engine has, or had, any of it. Sequences that had ended when it was sent again do not wait."""
    return request.waiting_rows() == request.left and not request.suspect and not request.started
