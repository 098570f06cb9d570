"""Updates that broadcast nothing, so that any client can make them: a checkpoint that workers read, or a new version number."""

import asyncio
from typing import TYPE_CHECKING

from enginepool.client.arguments import check_choice, check_flag, check_group, check_timeout, check_version
from enginepool.client.session.events import Answer, Fail, Heard, UpdateAbort, UpdateCommit
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.protocol.messages.weights import (
    MAX_MS,
    InFlight,
    Publish,
    Published,
    RunningGenerations,
    Transfer,
)

if TYPE_CHECKING:
    from enginepool.client.connection import Connection

#: What the wire calls the arguments.
NAMES = {"manifest": "source", "drain_ms": "drain"}
IN_FLIGHT: tuple[InFlight, ...] = ("drain", "abort", "in_place", "retract")


def publish_message(
    version: int,
    *,
    group: str,
    transfer: Transfer,
    in_flight: InFlight,
    drain: float,
    new_run: bool,
    after_drain: RunningGenerations = "abort",
) -> Publish:
    """The message of an update, from the arguments of a caller. Raises BadRequest."""
    seconds = check_timeout(drain, "drain", MAX_MS // 1000, zero=True)
    return Publish(
        0,
        check_version(version),
        group=check_group(group),
        transfer=transfer,
        in_flight=check_choice("in_flight", in_flight, IN_FLIGHT),
        drain_ms=int((seconds or 0.0) * 1000),
        new_run=check_flag("new_run", new_run),
        after_drain=check_choice("after_drain", after_drain, IN_FLIGHT[1:]),
    )


async def publish_unsent(connection: "Connection", publish: Publish, seconds: float | None) -> UpdateRecord:
    """Open it, allow its commit, and wait for its end. Cancelling gives it up, unless it is too late."""
    now = connection.now()
    deadline = None if seconds is None else now + seconds
    end: asyncio.Future[Answer | Fail] = asyncio.get_running_loop().create_future()

    def hear(effect: Heard) -> None:
        if isinstance(effect, Answer | Fail) and not end.done():
            end.set_result(effect)

    id_ = connection.open_update(publish, (), deadline, hear)
    connection.handle(UpdateCommit(now, id_, deadline))
    try:
        said = await end
    except asyncio.CancelledError:
        connection.handle(UpdateAbort(connection.now(), id_, "the caller gave up"))
        raise
    if isinstance(said, Fail):
        raise connection.error(said.failure, NAMES)
    assert isinstance(said.message, Published)
    return said.message.record
