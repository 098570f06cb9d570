"""`UpdateHandle`: one update on one trainer rank, as its caller sees it.

Who holds what of one update:

| object                              | holds                                                            | runs in        |
|-------------------------------------|------------------------------------------------------------------|----------------|
| `Rank0Update` or `FollowerUpdate`   | what the caller waits for, the phase, the cause of a failure     | the event loop |
| `PublishedUpdate` of the session    | the messages that a coordinator must know, the lease, deadlines  | the event loop |
| `UpdateSender`                      | the source, the buckets, the digest                              | its thread     |
| `Heartbeats`                        | whether the other trainer ranks are alive and in the same update | its thread     |

`PublisherContext` holds what outlives an update: memory and the process group.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from enginepool.client.arguments import check_timeout
from enginepool.client.metadata_update import NAMES
from enginepool.errors import EnginepoolError, Publishing, error_from
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weight_reports import UpdateRecord
from enginepool.protocol.messages.weights import PhaseName, Publish, Published
from enginepool.trainer.heartbeats import RankFailed
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.tensors import SendPlan
from enginepool.transfer.process_group import CollectiveError

log = logging.getLogger("enginepool")

#: Seconds to wait for the thread after the end of its update; it may still be in the caller's own `gather`.
_LEAVE_S = 10.0
#: The same after a trainer rank failed: the threads of the other ranks may be in a collective with it.
_LEAVE_BROKEN_S = 2.0


class UpdateHandle(ABC):
    """An update under way.

    Attributes:
        version: of the weights that it brings; None as long as only rank 0 knows it.
        phase: `open`, `join`, `transfer`, `staged`, `hold`, `load`; finally `committed` or `failed`. On a trainer rank above 0
            `open` until the end.
        members: number of workers that take part.
        done: number of members that have finished the phase.
        sent_bytes: bytes sent so far.
        total_bytes: bytes of all tensors.
    """

    def __init__(
        self, context: PublisherContext, version: int | None, again: Callable[[ErrorReply], float | None] | None = None
    ) -> None:
        """Not for callers: `WeightPublisher.start` makes it. `again`: seconds until the next attempt after a failure, or
        None: there is none."""
        if asyncio.get_running_loop() is not context.loop:
            raise RuntimeError("this WeightPublisher belongs to another event loop")
        current = context.current
        if current is not None:
            raise Publishing(f"this publisher's update to version {current.version} is not over; {current.blocks()}")
        self.version: int | None = version
        self.phase: PhaseName | Literal["committed", "failed"] = "open"
        self.members = self.done = self.sent_bytes = self.total_bytes = 0
        #: all trainer ranks try it again after so many seconds
        self.again_s: float | None = None
        self._again = again
        self._context = context
        #: the version that the caller gave
        self._asked_version = version
        self._heartbeats = context.heartbeats(version, lambda error: context.post(self._ranks_failed, error))
        #: the caller aborted it
        self._aborted = False
        #: what failed on this rank, which is a better reason than the coordinator can give
        self._cause: Exception | None = None
        self._opened: asyncio.Future[None] = context.loop.create_future()
        self._sent: asyncio.Future[None] = context.loop.create_future()
        self._final: asyncio.Future[UpdateRecord] = context.loop.create_future()
        #: the thread has ended
        self._left: asyncio.Future[None] = context.loop.create_future()
        for future in (self._opened, self._sent, self._final):
            future.add_done_callback(_mark_retrieved)
        context.current = self

    def __repr__(self) -> str:
        return f"<UpdateHandle version={self.version} {self.phase} {self.sent_bytes}/{self.total_bytes} bytes>"

    # --- the caller's side ---------------------------------------------------------------------------------------------

    async def sent(self) -> None:
        """Wait until the source is no longer read, so that training may go on. Raises what `finish` raises."""
        await asyncio.shield(self._sent)

    async def finish(self, timeout: float | None = None) -> UpdateRecord:  # noqa: ASYNC109 (the coordinator's answer counts)
        """Commit: wait for the transfer, then the group is held and loads. Every later answer is computed by this version.

        Args:
            timeout: seconds; None: the publisher's own `timeout`.

        Raises:
            UpdateAborted, WeightsRefused: the old weights serve on; the message says why.
            DeadlineExceeded: it took longer than `timeout`; the message says whether it may have been committed.
        """
        seconds = check_timeout(timeout) or self._context.timeout
        self._commit(seconds)
        try:
            return await asyncio.shield(self._final)
        except asyncio.CancelledError:
            await self.abort("the caller gave up")
            raise
        finally:
            await self._wait_left()

    async def abort(self, reason: str = "") -> None:
        """Abort the update, unless it is too late. Returns when it has ended, committed or not.

        On a trainer rank above 0 it waits for rank 0 to say how it ended.
        """
        self._aborted = True
        if not self._final.done():
            self._request_abort(reason or "the publisher gave it up")
            await asyncio.wait([self._final])
        await self._wait_left()

    # --- by rank -------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def begin(self, publish: Publish, plan: Callable[[], SendPlan], next_version: Callable[[], Awaitable[int]]) -> None:
        """For the publisher: start the thread, and on rank 0 wait until all members have agreed to the update."""

    @abstractmethod
    def _commit(self, seconds: float) -> None:
        """The caller waits for the end, at most so long."""

    @abstractmethod
    def _request_abort(self, reason: str) -> None:
        """The caller wants no end but an abort."""

    @abstractmethod
    def _ranks_failed(self, error: Exception) -> None:
        """The heartbeats say that a trainer rank prevents this update."""

    def _stuck(self) -> str:
        """What the thread waits for in the caller's own code, as the end of a sentence; "" if it does not."""
        return ""

    def _exception(self, failure: ErrorReply) -> EnginepoolError:
        return error_from(failure, NAMES)

    # --- the end -------------------------------------------------------------------------------------------------------

    def _settle(self, outcome: Published | ErrorReply) -> None:
        if self._final.done():
            return
        waiting = [future for future in (self._opened, self._sent) if not future.done()]
        if isinstance(outcome, Published):
            self.phase, self.version = "committed", outcome.version
            self._context.committed()
            self._final.set_result(outcome.record)
            for future in waiting:
                future.set_result(None)
        else:
            self.phase = "failed"
            error = self._error(outcome)
            for future in (self._final, *waiting):
                future.set_exception(error)

    def _error(self, failure: ErrorReply) -> Exception:
        cause = self._cause
        if cause is not None and not isinstance(cause, CollectiveError | RankFailed):
            return cause
        if cause is None:
            # The coordinator only knows that no bytes arrive.
            failure = msgspec.structs.replace(failure, message=failure.message + self._stuck())
        error = self._exception(failure)
        error.__cause__ = cause
        return error

    def _failure(self, why: str) -> ErrorReply:
        update = "the update" if self.version is None else f"the update to version {self.version}"
        return ErrorReply("update_aborted", f"{update} was aborted: {why}")

    def blocks(self) -> str:
        """Why the next update cannot begin."""
        return "finish or abort it first" if not self._final.done() else f"its thread is still busy{self._stuck()}"

    def left(self) -> None:
        """The thread has ended: the next update may begin."""
        if not self._left.done():
            self._left.set_result(None)
        if self._context.current is self:
            self._context.current = None

    async def _wait_left(self) -> None:
        """Wait until the thread has ended, or is stuck in the caller's own code.

        The next update has a thread of its own. With several trainer ranks it is refused until this thread has ended: the
        collectives of both updates would meet.
        """
        if not self._left.done():
            broken = self._cause is not None and self._heartbeats is not None
            await asyncio.wait([self._left], timeout=_LEAVE_BROKEN_S if broken else _LEAVE_S)
        if not self._left.done():
            log.warning("the thread of the update to version %s is still busy%s", self.version, self._stuck())
            if self._context.trainer_group is None:
                self.left()


def _mark_retrieved(future: "asyncio.Future[Any]") -> None:
    """Python warns of exceptions that no code retrieves; here the caller need not wait for each future."""
    if not future.cancelled():
        future.exception()
