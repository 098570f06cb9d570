"""What a publisher and its updates share on one trainer rank: connection, memory, and this rank's side of the process group."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from enginepool.trainer.buffers import Buffers
from enginepool.trainer.heartbeats import Heartbeats
from enginepool.trainer.ipc_export import IpcExporter
from enginepool.trainer.trainer_ranks import store_of
from enginepool.trainer.update_sender import Side

if TYPE_CHECKING:
    from enginepool.client.connection import Connection


class Open(Protocol):
    """An update that is under way, to those who come after it."""

    version: int | None

    def blocks(self) -> str:
        """Why the next one cannot begin."""
        ...

    async def abort(self, reason: str = "") -> None:
        """Give it up, unless it is too late. Returns when it has ended."""


class PublisherContext:
    """One for each publisher.

    Attributes:
        connection: to the coordinator; None on trainer ranks above 0.
        trainer_group: the trainer's ranks, or None.
        timeout: seconds for all waits without one of their own.
        collective_timeout: seconds for the process group to form, and for each bucket.
        rank_timeout: seconds in which all trainer ranks begin an update, and after which a silent one is lost.
        committed: called when an update is committed.
        side: this rank's side of the process group, if there is one.
        lender: this rank's memory for what is lent.
        open: the update that is under way.
    """

    def __init__(
        self,
        connection: "Connection | None",
        trainer_group: Any,
        buffers: Buffers,
        lender: IpcExporter,
        *,
        host: str,
        bucket_bytes: int,
        timeout: float,
        collective_timeout: float,
        rank_timeout: float,
        committed: Callable[[], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.connection = connection
        self.trainer_group = trainer_group
        self.buffers = buffers
        self.lender = lender
        self.host = host
        self.bucket_bytes = bucket_bytes
        self.timeout = timeout
        self.collective_timeout = collective_timeout
        self.rank_timeout = rank_timeout
        self._store: Any = None
        self.committed = committed
        self.side: Side | None = None
        self.open: Open | None = None

    def heartbeats(self, version: int | None, lost: Callable[[Exception], None]) -> Heartbeats | None:
        """Of the next update; None where there is one trainer rank. Raises BadRequest: the trainer's group has no store."""
        group = self.trainer_group
        if group is None or group.size() == 1:
            return None
        if self._store is None:
            self._store = store_of(group)
        return Heartbeats(self._store, group.rank(), group.size(), version, self.rank_timeout, lost)

    async def have_side(self) -> Side:
        """A side that can be used."""
        if self.side is None or self.side.lost:
            self.side = await asyncio.to_thread(Side, self.host, self.buffers.device)
        return self.side

    async def leave(self) -> None:
        """Leave the process group, lend nothing, and give memory back."""
        side, self.side = self.side, None
        if side is not None:
            await asyncio.to_thread(side.abort)
        self.lender.close()
        self.buffers.close()

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """From another thread to the loop. On one that is closed nobody waits."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *arguments)
