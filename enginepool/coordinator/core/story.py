"""The story of an internal error: what the machine had in hand when it failed, as lines for the log. Pure.

The lines name entities and their counts. They hold no payloads and no secrets.
"""

from collections.abc import Iterator
from types import TracebackType

import msgspec

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.core.worker import Worker

#: fields of events that say which one it was
_NAMES = ("link", "id", "ids", "group", "index", "incarnation", "batch", "task", "number", "stage", "epoch", "update", "code")
#: groups, requests and batches of each that are told
MOST = 8
#: calls of the traceback, the innermost ones
CALLS = 12


def story(error: BaseException, core: Context) -> Iterator[str]:
    """Lines about `error`, which left the machine in the middle of its work."""
    text = " ".join(str(error).split())
    yield f"internal error: {type(error).__name__}: {text[:300]}"
    yield f"raised in: {' > '.join(_calls(error.__traceback__))}"
    event = core.event
    if event is not None:
        yield f"event: {_event(event)}"
        yield from _entities(core, event)
        return
    yield "event: none in hand; work was dispatched, or an effect performed"
    for group in core.woken[:MOST]:
        yield _group(core, group)
        for request in list(group.live)[:MOST]:
            yield _request(request)


def _calls(traceback: TracebackType | None) -> list[str]:
    found: list[str] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        found.append(f"{code.co_filename.rpartition('/')[2]}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return found[-CALLS:]


def _event(event: ev.Event) -> str:
    told = [f"{name}={_short(getattr(event, name))}" for name in event.__struct_fields__ if name in _NAMES]
    message = getattr(event, "message", None)
    if isinstance(message, msgspec.Struct):
        told.append(f"message={type(message).__name__}")
    return " ".join([type(event).__name__, *told])


def _short(value: object) -> str:
    if isinstance(value, bytes):
        return value[:16].hex()
    if isinstance(value, list):
        return f"({len(value)})"  # pyright: ignore[reportUnknownArgumentType] (its length is all that is told)
    return repr(value)[:100]


def _entities(core: Context, event: ev.Event) -> Iterator[str]:
    """The client, the worker, the requests and the groups that the event is about."""
    link = getattr(event, "link", b"")
    groups: dict[Group, None] = {}
    client: Client | None = core.links.get(link)
    if client is not None:
        yield f"client: {client!r}"
        request = client.live.get(getattr(event, "id", -1))
        if request is not None:
            groups[request.group] = None
            yield _request(request)
    worker: Worker | None = core.worker_links.get(link)
    if worker is not None:
        groups[worker.group] = None
        yield f"worker: {worker!r} pid={worker.pid} version={worker.version} stage={worker.stage}"
        for batch in list(worker.batches.values())[:MOST]:
            yield f"batch: {batch!r}"
            for request, _, _ in batch.slices[:MOST]:
                yield _request(request)
    for group in groups:
        yield _group(core, group)


def _request(request: Request) -> str:
    return (
        f"request: {request!r} priority={request.priority} flying={request.flying} suspect={request.suspect} "
        f"attempts={request.attempts}"
    )


def _group(core: Context, group: Group) -> str:
    update = core.update_of(group)
    state = f"{update.phase} of version {update.offer.version}" if update is not None else "none"
    workers = ", ".join(repr(worker) for worker in list(group.workers.values())[:MOST])
    return (
        f"group: {group.name} waiting={group.waiting} running={group.running} version={group.version} update={state} "
        f"workers={workers or 'none'}"
    )
