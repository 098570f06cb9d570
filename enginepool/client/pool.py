"""`Pool`: the async client. It owns the loop's side of things: a session, its socket, its timer, one future for each call."""

import asyncio
import logging
import math
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from enginepool import __version__
from enginepool.client.events import (
    Abandon,
    Abort,
    Answer,
    AskStatus,
    Close,
    Complaint,
    Effect,
    Ended,
    Event,
    Fail,
    OpenLink,
    Received,
    Report,
    Send,
    Start,
    Submit,
    Tick,
    Welcomed,
)
from enginepool.client.link import Link
from enginepool.client.payload import (
    Ids,
    Payload,
    ScoreResult,
    check_flag,
    check_group,
    check_labels,
    check_priority,
    check_timeout,
    encode_pairs,
    encode_shared,
    read_result,
)
from enginepool.client.readiness import wait_until_ready
from enginepool.client.session import ClientSession
from enginepool.errors import ConnectError, EnginepoolError, error_from
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Failure, Score, StatusReport, ToClient

if TYPE_CHECKING:
    from enginepool.client.embedded import EmbeddedCoordinator
    from enginepool.config import PoolConfig

log = logging.getLogger("enginepool")

#: What the wire calls the arguments of `score` and `score_pairs`.
_SCORE_NAMES = {
    "labels": "label_token_ids",
    "softmax": "apply_softmax",
    "hidden": "return_pooled_hidden_states",
    "timeout_ms": "timeout",
}
_PAIR_NAMES = {**_SCORE_NAMES, "query": "prompts", "items": "responses"}
#: How long a Goodbye may take to leave, in seconds.
_LINGER_S = 0.1
#: After a stall of this process everything that arrived meanwhile counts before any deadline does.
_ALL = 1 << 16


class Opening(Awaitable["Pool"]):
    """A pool that is about to open. `await` it, and close the pool yourself; or `async with` it, which closes it."""

    def __init__(self, open_: Callable[[], Coroutine[Any, Any, "Pool"]]) -> None:
        self._open = open_
        self._pool: Pool | None = None

    def __await__(self) -> Generator[Any, Any, "Pool"]:
        return self._open().__await__()

    async def __aenter__(self) -> "Pool":
        self._pool = await self._open()
        return self._pool

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            await self._pool.close()


class Pool:
    """A pool of engines, as one object on one asyncio loop. Made by `connect` or `start`, ended by `close`.

    It reconnects by itself, also to a coordinator that was restarted, and sends again what was not answered; every call gets
    exactly one answer or error. All errors are `enginepool.errors.EnginepoolError`.
    """

    def __init__(self, address: str) -> None:
        """Not for callers: use `connect` or `start`."""
        self.address = address
        self._loop = asyncio.get_running_loop()
        # Not the global generator: a trainer's seed must not make all its clients back off in step.
        jitter = random.Random(os.urandom(16)).random
        agent = f"enginepool-python/{__version__}"
        self._session = ClientSession(os.urandom(16), os.urandom(16), jitter, agent=agent)
        self._link = Link(address, self._received, self._complain)
        self._futures: dict[int, asyncio.Future[Answer | Report | Fail]] = {}
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = math.inf
        self._opened: asyncio.Future[Failure | None] = self._loop.create_future()
        self._coordinator: EmbeddedCoordinator | None = None

    def __repr__(self) -> str:
        return f"<Pool {self.address} {self._session.describe()}>"

    # --- opening and closing -------------------------------------------------------------------------------------------

    @classmethod
    def connect(cls, address: str, *, connect_timeout: float | None = 10.0) -> Opening:
        """Connect to a coordinator that runs elsewhere: `tcp://HOST:PORT` or `ipc://PATH`.

            pool = await Pool.connect(address)            # close it yourself
            async with Pool.connect(address) as pool:     # closed at the end

        Raises:
            ConnectError: nobody answered within `connect_timeout` seconds, or the address is none; the message names it.
        """
        connect_timeout = check_timeout(connect_timeout, "connect_timeout")

        async def open_() -> Pool:
            pool = cls(address)
            await pool._open(connect_timeout)
            return pool

        return Opening(open_)

    @classmethod
    def start(
        cls,
        model: str | None = None,
        *,
        workers: int = 1,
        engine: str = "sglang",
        device: str = "auto",
        config: "PoolConfig | None" = None,
        start_timeout: float = 60.0,
        **settings: Any,
    ) -> Opening:
        """Start a pool inside this program: a coordinator as a child process, and its workers. They end with this process.

        Returns as soon as the coordinator answers; workers go on loading. `await pool.ready()` waits for them. A coordinator
        that dies is started again, and what was not answered is sent again.

        Args:
            model: a checkpoint directory or a name that SGLang can load.
            workers: engines to start; on CUDA one GPU each.
            engine: `sglang`, or `sim` for a dry run without weights.
            device: `auto`, `cuda` or `cpu`.
            config: a whole configuration instead of the arguments before. Unless its `listen` is a fixed address of its own,
                the pool listens on a private ipc socket; unless it has a `state_dir` of its own, on a private directory.
            start_timeout: seconds for the coordinator to answer.
            settings: further keys of `enginepool.config.GroupConfig` (`dtype`, `gpus`, `ageing_s`, `options`, ...).

        Raises:
            ConfigError: a setting cannot work; the message names its key.
            PoolDown: the coordinator ended at once; the message has its exit code and last lines.
        """
        from enginepool.client.embedded import EmbeddedCoordinator, embedded_config

        start_timeout = check_timeout(start_timeout, "start_timeout") or 60.0
        whole = embedded_config(config, {"model": model, "workers": workers, "engine": engine, "device": device, **settings})

        async def open_() -> Pool:
            coordinator = EmbeddedCoordinator(whole)
            pool = cls(coordinator.address)
            pool._coordinator = coordinator
            coordinator.start(pool._coordinator_lost)
            await pool._open(start_timeout)
            coordinator.settle()
            return pool

        return Opening(open_)

    async def close(self) -> None:
        """Take back what is not answered, say goodbye, end what `start` started. Never hangs; twice is once."""
        try:
            self._handle(Close(self._loop.time()))
        finally:
            if self._coordinator is not None:
                await self._coordinator.stop()

    async def __aenter__(self) -> "Pool":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _open(self, within: float | None) -> None:
        now = self._loop.time()
        try:
            self._handle(Start(now, None if within is None else now + within))
            failure = await self._opened
        except BaseException:
            await self.close()
            raise
        if failure is None:
            return
        await self.close()
        if failure.code == "connect" and within is not None:
            raise self._error(Failure("connect", f"{failure.message} within {within:g} s"))
        raise self._error(failure)

    def _coordinator_lost(self, failure: Failure) -> None:
        self._handle(Abort(self._loop.time(), failure))

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def score(
        self,
        query: str | Ids,
        items: Sequence[str] | Sequence[Ids],
        *,
        label_token_ids: Ids | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        return_pooled_hidden_states: bool = False,
        group: str = "",
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the coordinator keeps this time too)
        retry_busy: bool = True,
    ) -> ScoreResult:
        """Score each item after one query. Query and items are all text, or all token ids.

        A CausalLM gives the probability of each label token after query + item; a classifier or reward model the outputs of its
        head. Items of one call run as one forward pass if they fit one batch of a worker, else as few whole batches.

        Args:
            query: a text, or token ids (a sequence of ints, or a one-dimensional integer array).
            items: texts, or token ids of each item (also a two-dimensional array: a row each).
            label_token_ids: the tokens to score; CausalLM only, at most 4096.
            apply_softmax: CausalLM: normalise over the labels alone. Classifiers: softmax over the outputs.
            item_first: rows are item + query.
            return_pooled_hidden_states: classifiers only.
            group: may be left out where the pool has one group.
            priority: −1000 to 1000; larger runs first.
            timeout: seconds to the answer, after which the call ends with DeadlineExceeded and what waits is not run.
            retry_busy: wait and try again when the pool is full; else Busy is raised.

        Returns:
            scores float32 [items, labels], and what it took; see `ScoreResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit.
            EnginepoolError: everything else that can happen; see `enginepool.errors`.

        Cancelling the task that awaits it takes the request back.
        """
        return await self._score(
            encode_shared(query, items), _SCORE_NAMES, label_token_ids, apply_softmax, item_first,
            return_pooled_hidden_states, group, priority, check_timeout(timeout), retry_busy,
        )  # fmt: skip

    async def score_pairs(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        responses: Sequence[str] | Sequence[Ids],
        *,
        label_token_ids: Ids | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        return_pooled_hidden_states: bool = False,
        group: str = "",
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the coordinator keeps this time too)
        retry_busy: bool = True,
    ) -> ScoreResult:
        """Score each response after its own prompt, as one request: row i is prompts[i] + responses[i].

        Everything else is as in `score`.
        """
        return await self._score(
            encode_pairs(prompts, responses), _PAIR_NAMES, label_token_ids, apply_softmax, item_first,
            return_pooled_hidden_states, group, priority, check_timeout(timeout), retry_busy,
        )  # fmt: skip

    async def ready(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 (the error says what the workers were doing)
        *,
        group: str = "",
        report: Callable[[str], None] | None = None,
    ) -> StatusReport:
        """Wait until every group, or the one named, has a ready worker.

        `report` is called with a line for each change of what a worker is doing (loading, compiling, ...); without it the lines
        go to the log `enginepool` at level INFO.

        Raises:
            DeadlineExceeded: `timeout` seconds were not enough; the message says what the workers were doing.
            PoolDown: a group is down and stays down; the message says why.
            UnknownGroup: there is no such group.
        """
        return await wait_until_ready(self.status, check_timeout(timeout), check_group(group), report or log.info)

    async def status(self, timeout: float | None = 10.0) -> StatusReport:  # noqa: ASYNC109 (as in `score`)
        """What the pool is doing: groups, workers, queues. Raises DeadlineExceeded after `timeout` seconds."""
        timeout = check_timeout(timeout)
        now = self._now()
        answer = await self._ask(lambda id_: AskStatus(now, id_, None if timeout is None else now + timeout))
        if isinstance(answer, Report):
            return answer.report
        raise self._error(_failure_of(answer))

    async def _score(
        self,
        payload: Payload,
        names: Mapping[str, str],
        labels: Ids | None,
        softmax: bool,
        item_first: bool,
        hidden: bool,
        group: str,
        priority: int,
        seconds: float | None,
        retry_busy: bool,
    ) -> ScoreResult:
        now = self._now()
        specs, frames = payload
        score = Score(
            id=0,
            frames=specs,
            group=check_group(group),
            labels=check_labels(labels),
            softmax=check_flag("apply_softmax", softmax),
            item_first=check_flag("item_first", item_first),
            hidden=check_flag("return_pooled_hidden_states", hidden),
            priority=check_priority(priority),
        )
        deadline = None if seconds is None else now + seconds

        def submit(id_: int) -> Submit:
            score.id = id_
            return Submit(now, score, frames, deadline, retry_busy)

        answer = await self._ask(submit)
        if isinstance(answer, Answer):
            return read_result(answer.result, answer.frames)
        raise self._error(_failure_of(answer), names)

    async def _ask(self, event: Callable[[int], Event]) -> Answer | Report | Fail:
        self._last_id += 1
        id_ = self._last_id
        future: asyncio.Future[Answer | Report | Fail] = self._loop.create_future()
        self._futures[id_] = future
        self._handle(event(id_))
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(id_, None) is not None:
                self._handle(Abandon(self._loop.time(), id_))
            raise

    def _now(self) -> float:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("this Pool belongs to another event loop; open one on each loop, or use BlockingPool")
        return self._loop.time()

    def _error(self, failure: Failure, names: Mapping[str, str] | None = None) -> EnginepoolError:
        if failure.code == "connect":
            return ConnectError(f"{self.address}: {failure.message}")
        return error_from(failure, names)

    # --- the session's side --------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for effect in self._session.handle(event):
            self._perform(effect)
        wake_at = self._session.wake_at
        if wake_at < self._wake_at:
            self._set_timer(wake_at)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self._link.send(effect.message, effect.frames)
        elif isinstance(effect, Answer | Report | Fail):
            future = self._futures.pop(effect.id, None)
            if future is not None and not future.done():
                future.set_result(effect)
        elif isinstance(effect, OpenLink):
            try:
                self._link.open()
            except OSError as error:
                failure = Failure("connect", f"cannot connect: {error.strerror or error}")
                self._loop.call_soon(self._coordinator_lost, failure)
        elif isinstance(effect, Welcomed):
            log.debug("%s: connected, epoch %d, groups %s", self.address, effect.epoch, ", ".join(effect.groups))
            if not self._opened.done():
                self._opened.set_result(None)
        elif isinstance(effect, Complaint):
            self._complain(f"refused a message of this client: {effect.failure.code}: {effect.failure.message}")
        elif isinstance(effect, Ended):
            self._end(effect.failure)

    def _end(self, failure: Failure) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.close(_LINGER_S)
        if not self._opened.done():
            self._opened.set_result(failure)
        elif failure.code != "closed":
            log.error("%s: %s: %s", self.address, failure.code, failure.message)

    def _received(self, message: ToClient, frames: Sequence[Buffer]) -> None:
        self._handle(Received(self._loop.time(), message, frames))

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
        self._handle(Tick(self._loop.time()))


def _failure_of(answer: Answer | Report | Fail) -> Failure:
    if isinstance(answer, Fail):
        return answer.failure
    raise AssertionError(f"{type(answer).__name__} is no answer to this question")
