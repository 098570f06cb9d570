"""What the updates of one publisher share on one trainer rank: memory, endpoint, and time limits."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.trainer.buffers import Buffers
from enginepool.trainer.heartbeats import Heartbeats
from enginepool.trainer.ipc_export import IpcExporter
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd, store_of

if TYPE_CHECKING:
    from enginepool.client.connection import Connection


class CurrentUpdate(Protocol):
    """The update that is under way: as the next one and the publisher see it, and what its thread reports to it.

    The thread of rank 0 reports `planned`, `progress`, `all_sent`, in this order; at most one `failed`; always `left`.
    """

    version: int | None

    def blocks(self) -> str:
        """Why the next update cannot begin."""
        ...

    async def abort(self, reason: str = "") -> None:
        """Abort it, unless it is too late. Returns when it has ended."""

    def planned(self, plan: SendPlan, endpoint: Rank0Endpoint | None) -> None:
        """The source can be read, and workers can join at `endpoint`; None: with `ipc`."""

    def progress(self, sent_bytes: int) -> None:
        """So many bytes are sent."""

    def all_sent(self, digest: str, sent_bytes: int, regions: list[MemoryRegion]) -> None:
        """All bytes are sent, or lie in `regions`."""

    def failed(self, error: Exception) -> None:
        """A trainer rank prevents the update."""

    def left(self) -> None:
        """The thread has ended."""

    def follower_sent(self) -> None:
        """On a rank above 0: the source is no longer read."""

    def follower_ended(self, end: RoundEnd, own: Exception | None) -> None:
        """On a rank above 0: rank 0 has said how the update ended. `own`: what failed on this rank."""


@dataclass(kw_only=True, eq=False)
class PublisherContext:
    """One for each publisher, on its event loop. Times are in seconds.

    Attributes:
        connection: to the coordinator, on rank 0; None on the other trainer ranks.
        next_version: on rank 0, the version after the committed one.
        trainer_group: the process group of the trainer's ranks, or None.
        timeout: for all waits without a limit of their own.
        collective_timeout: for the process group to form, and for each bucket.
        rank_timeout: in which all trainer ranks begin an update, and after which a silent rank is lost.
        committed: called when an update is committed.
        endpoint: rank 0 of the process group with the workers, if there is one.
        current: the update that is under way.
    """

    connection: "Connection | None"
    next_version: Callable[[], Awaitable[int]]
    trainer_group: Any
    buffers: Buffers
    exporter: IpcExporter
    host: str
    bucket_bytes: int
    timeout: float
    collective_timeout: float
    rank_timeout: float
    committed: Callable[[], None]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    endpoint: Rank0Endpoint | None = None
    current: CurrentUpdate | None = None
    _store: Any = None

    @property
    def finish_s(self) -> float:
        """Seconds for `finish`. A rank above 0 leaves it to rank 0, which has so many until all ranks have begun, all is sent,
        and the update has ended."""
        return self.timeout if self.connection is not None else self.rank_timeout + 2 * self.timeout

    def heartbeats(self, version: int | None, lost: Callable[[Exception], None]) -> Heartbeats | None:
        """Heartbeats of the next update; None with one trainer rank. Raises BadRequest: the trainer's group has no store."""
        group = self.trainer_group
        if group is None or group.size() == 1:
            return None
        if self._store is None:
            self._store = store_of(group)
        return Heartbeats(self._store, group.rank(), group.size(), version, self.rank_timeout, lost)

    def open_endpoint(self) -> Rank0Endpoint:
        """An endpoint that can be used: the present one, or a new one. It may wait for the name of `host` to be found."""
        endpoint = self.endpoint
        if endpoint is None or endpoint.lost:
            endpoint = self.endpoint = Rank0Endpoint(self.host, self.buffers.device)
        return endpoint

    async def release(self) -> None:
        """Leave the process group, and free all memory."""
        endpoint, self.endpoint = self.endpoint, None
        if endpoint is not None:
            await asyncio.to_thread(endpoint.abort)
        self.exporter.close()
        self.buffers.close()

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call from another thread on the event loop. A closed loop is ignored: nothing waits there."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *arguments)
