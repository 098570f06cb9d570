"""`Connection`: a session on one asyncio loop. It owns the socket, the timer, and what waits for answers."""

import asyncio
import logging
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from enginepool import __version__
from enginepool.client.dns import follow_name
from enginepool.client.link import ClientLink
from enginepool.client.session.events import (
    AbandonRequest,
    Abort,
    Answer,
    Ask,
    Close,
    CommittedWeightsLost,
    Complaint,
    Ended,
    Fail,
    Heard,
    MessageReceived,
    OpenLink,
    Question,
    SendMessage,
    SessionEffect,
    SessionEvent,
    SessionTick,
    Start,
    StreamPart,
    SubmitRequest,
    TokensTaken,
    UpdateBegin,
    UpdateStep,
    Welcomed,
)
from enginepool.client.session.machine import ClientSession
from enginepool.errors import ConnectError, EnginepoolError, error_from
from enginepool.net.keys import Key, no_answer_hint
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import (
    AdapterReport,
    ControlReport,
    ErrorReply,
    Generate,
    Generated,
    Result,
    RowRequest,
    StatusReport,
    ToClient,
)
from enginepool.protocol.messages.weight_reports import WeightsReport
from enginepool.protocol.messages.weights import Publish

log = logging.getLogger("enginepool")

T = TypeVar("T", Result, Generated, StatusReport, WeightsReport, ControlReport, AdapterReport)
A = TypeVar("A", Result, Generated)
#: Called with what becomes of a request, a question or an update; last with Answer or Fail.
Hear = Callable[[Heard], None]

_NO_POOL = "; is a pool running there? `enginepool serve` starts one"
#: How long a Goodbye may take to leave, in seconds.
_LINGER_S = 0.1
#: After a stall of this process everything that arrived meanwhile counts before any deadline does.
_ALL = 1 << 16


class Connection:
    """A client of the coordinator at `address`, on the running loop, until `close`.

    Raises:
        ConnectError: this process has too few file descriptors.
    """

    def __init__(self, address: str, key: Key | None = None) -> None:
        self.address = address
        self._key = key
        self._loop = asyncio.get_running_loop()
        # Not the global generator: a trainer's seed must not make all its clients back off in step.
        jitter = random.Random(os.urandom(16)).random
        agent = f"enginepool-python/{__version__}"
        client = os.urandom(16)
        #: how errors and the status name this client
        self.client_id = client.hex()[:8]
        self._session = ClientSession(client, os.urandom(16), jitter, agent=agent)
        try:
            self._link = ClientLink(address, self._received, self._complain, key)
        except OSError as error:
            raise ConnectError(f"{address}: cannot connect: {error.strerror}") from None
        self._hears: dict[int, Hear] = {}
        #: called when the committed weights of a group exist nowhere any more
        self.wanted: list[Callable[[CommittedWeightsLost], None]] = []
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf
        self._opened: asyncio.Future[ErrorReply | None] = self._loop.create_future()
        #: why the name of the host cannot be resolved, or ""
        self._unnamed = ""
        self._lookup: asyncio.Task[None] | None = None
        #: the log says that the coordinator is silent
        self._lost = False

    def describe(self) -> str:
        """The session's state, epoch and counts, in a few words."""
        return self._session.describe()

    @property
    def is_elsewhere(self) -> bool:
        """This process is a fork, and the connection is its parent's."""
        return self._link.is_elsewhere

    def now(self) -> float:
        """Seconds on the clock of all events. Raises RuntimeError on another loop than the connection's own."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this Pool belongs to another event loop; open one on each loop, or use BlockingPool")
        return self._loop.time()

    def within(self, seconds: float | None) -> Callable[[], float | None]:
        """For a call that asks several times: what is left of so many seconds from now, always above 0; None: no limit."""
        end = None if seconds is None else self.now() + seconds
        return lambda: None if end is None else max(end - self.now(), 0.001)

    async def open(self, within: float | None) -> None:
        """Find the coordinator, within so many seconds.

        Raises:
            EnginepoolError: no coordinator answered, or it refused this client; the caller closes the connection.
        """
        now = self._loop.time()
        self._lookup = self._loop.create_task(follow_name(self.address, self._named))
        self.handle(Start(now, None if within is None else now + within))
        try:
            failure = await self._opened
        finally:
            self._lookup.cancel()
        if failure is None:
            return
        if failure.code == "connect" and within is not None:
            unnamed = f": {self._unnamed}" if self._unnamed else ""
            failure = ErrorReply("connect", f"{failure.message} within {within:g} s{unnamed}")
        raise self.error(failure)

    async def submit(
        self,
        request: RowRequest | Generate,
        frames: Sequence[Buffer],
        answer: type[A],
        within: float | None,
        retry_busy: bool,
        names: Mapping[str, str],
    ) -> tuple[A, Sequence[Buffer]]:
        """The result of `request`, which gets a fresh id. Cancelling takes the request back.

        Args:
            answer: the kind of its result.
            within: seconds to the answer.
            retry_busy: send it again after `busy`.
            names: what an error calls the fields of the request.

        Raises:
            EnginepoolError: it failed.
        """
        now = self.now()
        deadline = None if within is None else now + within
        request.id = self._fresh_id()
        return await self._answer(SubmitRequest(now, request, frames, deadline, retry_busy), request.id, answer, names)

    def open_stream(
        self, request: Generate, frames: Sequence[Buffer], within: float | None, retry_busy: bool, hear: Hear
    ) -> int:
        """Send `request`, which gets a fresh id; `hear` is called with its parts, and last with its answer. Returns the id."""
        now = self.now()
        request.id = self._fresh_id()
        self._hears[request.id] = hear
        self.handle(SubmitRequest(now, request, frames, None if within is None else now + within, retry_busy))
        return request.id

    def abandon(self, id_: int) -> None:
        """Take a request back, unless it has its answer. Nothing more is heard of it."""
        if self._hears.pop(id_, None) is not None:
            self.handle(AbandonRequest(self._loop.time(), id_))

    def tokens_taken(self, id_: int, taken: int) -> None:
        """The caller has taken so many tokens of a stream, in all."""
        self.handle(TokensTaken(self._loop.time(), id_, taken))

    async def ask(
        self, question: Question, answer: type[T], within: float | None = None, frames: Sequence[Buffer] = ()
    ) -> tuple[T, Sequence[Buffer]]:
        """The report that answers `question`, which gets a fresh id and has these `frames`, and the frames of the report.
        Cancelling takes the question back.

        Raises:
            EnginepoolError: it failed, or there was no answer within so many seconds.
        """
        now = self.now()
        question.id = self._fresh_id()
        return await self._answer(Ask(now, question, None if within is None else now + within, frames), question.id, answer)

    async def _answer(
        self, event: SessionEvent, id_: int, answer: type[T], names: Mapping[str, str] | None = None
    ) -> tuple[T, Sequence[Buffer]]:
        future: asyncio.Future[Heard] = self._loop.create_future()

        def hear(effect: Heard) -> None:
            if not future.done():
                future.set_result(effect)

        self._hears[id_] = hear
        self.handle(event)
        try:
            said = await future
        except asyncio.CancelledError:
            self.abandon(id_)
            raise
        if isinstance(said, Fail):
            raise self.error(said.failure, names)
        if not isinstance(said, Answer) or not isinstance(said.message, answer):
            raise AssertionError(f"{said} is no answer to this question")
        return said.message, said.frames

    def open_update(self, publish: Publish, frames: Sequence[Buffer], deadline: float | None, hear: Hear) -> int:
        """Begin an update: `publish` gets a fresh id. Returns the id, for the events that follow."""
        publish.id = self._fresh_id()
        self._hears[publish.id] = hear
        self.handle(UpdateBegin(self._loop.time(), publish, frames, deadline))
        return publish.id

    def _fresh_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def abort(self, failure: ErrorReply) -> None:
        """End everything that waits, and what will be asked, with `failure`."""
        self.handle(Abort(self._loop.time(), failure))

    def close(self) -> None:
        """Take back what is not answered and say goodbye. Idempotent."""
        self.handle(Close(self._loop.time()))

    def error(self, failure: ErrorReply, names: Mapping[str, str] | None = None) -> EnginepoolError:
        """The exception for a failure; fields are called as `names` says."""
        if failure.code == "connect":
            return ConnectError(f"{self.address}: {failure.message}{_NO_POOL}{no_answer_hint(self.address, self._key)}")
        return error_from(failure, names)

    def _named(self, why: str) -> None:
        self._unnamed = why

    # --- the session's side --------------------------------------------------------------------------------------------

    def handle(self, event: SessionEvent) -> None:
        """Tell the session of an event, and perform what it answers."""
        for effect in self._session.handle(event):
            self._perform(effect)
        wake_at = self._session.wake_at
        if wake_at < self._wake_at:
            self._set_timer(wake_at)

    def _perform(self, effect: SessionEffect) -> None:
        if isinstance(effect, SendMessage):
            self._link.send(effect.message, effect.frames)
        elif isinstance(effect, Answer | Fail):
            hear = self._hears.pop(effect.id, None)
            if hear is not None:
                hear(effect)
        elif isinstance(effect, StreamPart):
            hear = self._hears.get(effect.id)
            if hear is not None:
                hear(effect)
        elif isinstance(effect, UpdateStep):
            self._hears[effect.message.id](effect)
        elif isinstance(effect, CommittedWeightsLost):
            for call in self.wanted:
                call(effect)
        elif isinstance(effect, OpenLink):
            self._open_link()
        elif isinstance(effect, Welcomed):
            log.debug("%s: connected, epoch %d, groups %s", self.address, effect.epoch, ", ".join(effect.groups))
            if self._lost:
                self._lost = False
                self._complain("connected again")
            if not self._opened.done():
                self._opened.set_result(None)
        elif isinstance(effect, Complaint) and effect.failure.code == "shutting_down":
            self._complain("the coordinator is shutting down; calls that it does not answer wait for the next coordinator")
        elif isinstance(effect, Complaint):
            self._complain(f"refused a message of this client: {effect.failure.code}: {effect.failure.message}")
        elif isinstance(effect, Ended):
            self._end(effect.failure)

    def _open_link(self) -> None:
        if self._opened.done() and not self._lost:
            self._lost = True
            self._complain("the coordinator is silent; what it has not answered is sent again once it is back")
        try:
            self._link.open()
        except OSError as error:
            why = f"cannot connect: {error.strerror or error}"
            if self._opened.done():
                # The address is valid, and files may be free again when the session opens the next link.
                self._complain(why)
                return
            failure = ErrorReply("connect", why)
            if self._lookup is not None:
                # The address is invalid, so its name does not matter.
                self._lookup.cancel()
            self._loop.call_soon(self.abort, failure)

    def _end(self, failure: ErrorReply) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.close(_LINGER_S)
        if not self._opened.done():
            self._opened.set_result(failure)
        elif failure.code != "closed":
            log.error("%s: %s: %s", self.address, failure.code, failure.message)

    def _received(self, message: ToClient, frames: Sequence[Buffer]) -> None:
        self.handle(MessageReceived(self._loop.time(), message, frames))

    def _complain(self, line: str) -> None:
        log.warning("%s: %s", self.address, line)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wake_at = at
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._wake_at = math.inf
        self._link.drain(_ALL)
        self.handle(SessionTick(self._loop.time()))
