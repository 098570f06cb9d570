"""Tells a caller without a timeout what it waits for: a group without a worker that only external workers can serve, or one
that is paused or sleeps."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from enginepool.errors import EnginepoolError
from enginepool.protocol.messages import GroupStatus, StatusReport

log = logging.getLogger("enginepool")

#: seconds that a call waits before the status is looked at, and between two looks
LOOK_S = 10.0


class Notices:
    """Looks at the status while calls without a timeout wait; one warning for each group, each time that it
    has no worker, is paused, or sleeps."""

    def __init__(self, address: str, ask: Callable[[], Awaitable[StatusReport]]) -> None:
        self._address = address
        self._ask = ask
        #: calls that wait
        self._calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        #: groups that the caller was told about
        self._told: set[str] = set()

    def begin(self) -> None:
        """A call waits without a timeout."""
        self._calls += 1
        if self._timer is None:
            self._set_timer()

    def end(self) -> None:
        """It has its answer."""
        self._calls -= 1

    def close(self) -> None:
        """Stop looking."""
        for one in (self._timer, self._task):
            if one is not None:
                one.cancel()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._due)

    def _due(self) -> None:
        self._timer = None
        if self._calls:
            self._task = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        try:
            self.seen(await self._ask())
        except EnginepoolError as error:
            log.debug("%s: no status: %s", self._address, error)
        if self._calls and self._timer is None:
            self._set_timer()

    def seen(self, report: StatusReport) -> None:
        """Warn of groups in which requests wait for more than their turn."""
        for group in report.groups:
            why = _stopped(group)
            if not why:
                self._told.discard(group.name)
            elif group.queued and group.name not in self._told:
                self._told.add(group.name)
                log.warning("%s: group %r: %s; calls wait for it", self._address, group.name, why)


def _stopped(group: GroupStatus) -> str:
    """Why nothing of a group runs until something changes; or ""."""
    if group.no_worker:
        return group.no_worker
    if group.paused:
        return "it is paused until it is resumed"
    return f"it sleeps ({', '.join(group.asleep)}) until it is woken" if group.asleep else ""
