"""`Pool`: the async client. One method for each thing that a pool can be asked; the work is `Connection`'s."""

import logging
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from enginepool.client.absent import no_attribute, not_copied, not_made_so
from enginepool.client.adapters import AdapterCalls
from enginepool.client.arguments import (
    check_address,
    check_group,
    check_timeout,
)
from enginepool.client.connection import Connection
from enginepool.client.control import ControlCalls
from enginepool.client.generation_session import SessionCalls
from enginepool.client.logprobs import LogprobsCalls
from enginepool.client.notices import Notices
from enginepool.client.openai_calls import OpenAICalls
from enginepool.client.opening import Opening
from enginepool.client.readiness import wait_until_ready
from enginepool.client.rerank import RerankCalls
from enginepool.client.rollout_calls import RolloutCalls
from enginepool.client.tokenizer import TokenizerCalls
from enginepool.client.weight_calls import WeightCalls
from enginepool.client.worker_restarts import restart_workers
from enginepool.net.keys import key_for
from enginepool.protocol.messages import RestartWorker, Status, StatusReport

if TYPE_CHECKING:
    from enginepool.client.embedded import EmbeddedCoordinator
    from enginepool.config import PoolConfig

log = logging.getLogger("enginepool")


class Pool(
    RolloutCalls, RerankCalls, SessionCalls, LogprobsCalls, TokenizerCalls, WeightCalls, ControlCalls, AdapterCalls, OpenAICalls
):
    """A pool of engines, as one object on one asyncio loop. Made by `connect` or `start`, ended by `close`.

    It reconnects by itself, also to a coordinator that was restarted, and sends again what was not answered; every call gets
    exactly one answer or error. A coordinator that is stopped on purpose is no error either: calls wait for the next one, until
    their timeout; without a timeout, as long as it takes. All errors are `enginepool.errors.EnginepoolError`. A coordinator
    that shuts down or falls silent, and the return of one, are warnings in the log `enginepool`. So is, once, a group without a
    worker, or one that is paused or sleeps, for which a call without a timeout waits.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        """Not for callers: use `connect` or `start`."""
        if not isinstance(connection, Connection):
            raise not_made_so("Pool", connection)
        self.address = connection.address
        self._connection = connection
        self._coordinator: EmbeddedCoordinator | None = None
        self._notices = Notices(self.address, self.status)
        self._openai_endpoints = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("Pool", name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise not_copied("Pool", self.address)

    @property
    def connection(self) -> Connection:
        """The connection, for a `WeightPublisher` alone."""
        return self._connection

    @property
    def client_id(self) -> str:
        """The first 8 hex digits of the id of this client: `status` and errors name it so, and `abort` ends its requests."""
        return self._connection.client_id

    def __repr__(self) -> str:
        return f"<Pool {self.address} {self._connection.describe()}>"

    # --- opening and closing -------------------------------------------------------------------------------------------

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        keys: str | PathLike[str] | None = None,
        connect_timeout: float | None = 10.0,
    ) -> "Opening[Pool]":
        """Connect to a coordinator that runs elsewhere: `tcp://HOST:PORT` or `ipc://PATH`. Without an address, to the one in
        the environment variable ENGINEPOOL_ADDRESS, else where a pool of this user listens by default.

            pool = await Pool.connect(address)            # close it yourself
            async with Pool.connect(address) as pool:     # closed at the end

        Args:
            keys: the file that `enginepool keys` made for this client; else the one that ENGINEPOOL_KEYS names. Over TCP they
                prove who this client is, and encrypt what is said; an ipc socket needs none.
            connect_timeout: seconds for the coordinator to answer.

        Raises:
            ConfigError: `keys` cannot be read, or can be read by others.
            BadRequest: an argument is none; `field` names it.
            ConnectError: no coordinator answered within `connect_timeout` seconds, perhaps because the host's name is unknown;
                or this process has too few file descriptors. The message says so, and names the address.
        """
        address, connect_timeout = check_address(address), check_timeout(connect_timeout, "connect_timeout")
        key = key_for(address, keys)

        async def open_() -> Pool:
            pool = cls(Connection(address, key))
            await pool._open(connect_timeout)
            return pool

        return Opening("Pool.connect", open_)

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
    ) -> "Opening[Pool]":
        """Start a pool inside this program: a coordinator as a child process, and its workers. They end with this process.

        Returns as soon as the coordinator answers; workers go on loading. `await pool.ready()` waits for them. A coordinator
        that dies, or that SIGUSR1 ends alone, is started again, and what was not answered is sent again. When SIGTERM ends the
        coordinator with its workers, the pool is over: calls end with `PoolDown`.

        Args:
            model: a checkpoint directory or a name that SGLang can load.
            workers: engines to start; on CUDA each gets GPUs that no other has, one or `tp_size` of them.
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
        from enginepool.client.embedded import EmbeddedCoordinator, check_engine_options, embedded_config

        start_timeout = check_timeout(start_timeout, "start_timeout") or 60.0
        whole = embedded_config(config, {"model": model, "workers": workers, "engine": engine, "device": device, **settings})

        async def open_() -> Pool:
            await check_engine_options(whole)
            coordinator = EmbeddedCoordinator(whole)
            pool = cls(Connection(coordinator.address, key_for(coordinator.address, coordinator.keys)))
            pool._coordinator = coordinator
            coordinator.start(pool._connection.abort)
            await pool._open(start_timeout)
            coordinator.settle()
            return pool

        return Opening("Pool.start", open_)

    async def close(self) -> None:
        """Take back what is not answered, say goodbye, end what `start` started. Never hangs. Idempotent. In a fork it does
        nothing: socket, event loop and coordinator are its parent's."""
        if self._connection.is_elsewhere:
            return
        self._notices.close()
        try:
            self._connection.close()
        finally:
            if self._coordinator is not None:
                await self._coordinator.stop()

    async def __aenter__(self) -> "Pool":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _open(self, within: float | None) -> None:
        try:
            await self._connection.open(within)
        except BaseException:  # also when cancelled: the caller has no pool to close; it is raised again
            await self.close()
            raise

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def ready(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 (the error says what the workers were doing)
        *,
        group: str = "",
        report: Callable[[str], None] | None = None,
    ) -> StatusReport:
        """Wait until every group, or the one named, has a ready worker: with the committed weights in its engine.

        A group whose committed weights exist nowhere any more is not waited for, since a publisher may be who asks: the report
        says so in its `needs_weights`.

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
        return (await self._connection.ask(Status(), StatusReport, check_timeout(timeout)))[0]

    async def restart(self, group: str = "", worker: str = "", *, report: Callable[[str], None] | None = None) -> list[str]:
        """Restart worker `worker` of `group`, by its name in the status, or all workers that the pool started for the group,
        one after the other; needs the role `admin`. A ready worker finishes its work first; a retired one is started again.

        Returns the names of the restarted workers when the last one is ready. `report` is called with a line for each step;
        without it the lines go to the log `enginepool` at level INFO.

        Raises:
            UnknownGroup: there is no such group.
            BadRequest, Unsupported: there is no such worker, or the pool did not start it.
            PoolDown: a worker did not become ready again; those after it were not restarted.
        """

        async def restart(group: str, worker: str, incarnation: str) -> StatusReport:
            return (await self._connection.ask(RestartWorker(0, group, worker, incarnation), StatusReport))[0]

        async def ask() -> StatusReport:
            return await self.status(None)

        return await restart_workers(ask, restart, check_group(group), worker, report or log.info)


def drain_s(pool: Pool) -> float:
    """Seconds that `close` gives begun work to finish: of a pool that was started here."""
    coordinator = pool._coordinator  # pyright: ignore[reportPrivateUsage]
    return 0.0 if coordinator is None else coordinator.config.timing.drain_s
