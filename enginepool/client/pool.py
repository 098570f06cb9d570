"""`Pool`: the async client. One method for each thing that a pool can be asked; the work is `Connection`'s."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex, Unpack

from enginepool.client.absent import no_attribute, not_made_so, not_open
from enginepool.client.arguments import (
    Ids,
    ScoreOptions,
    check_address,
    check_flag,
    check_group,
    check_name,
    check_options,
    check_path,
    check_priority,
    check_timeout,
    check_version,
)
from enginepool.client.connection import Connection
from enginepool.client.metadata_update import publish_message, publish_unsent
from enginepool.client.notices import Notices
from enginepool.client.payload import Payload, check_labels, check_softmax, encode_pairs, encode_shared
from enginepool.client.readiness import wait_until_ready
from enginepool.client.results import Floats, ScoreResult, WeightReader, read_result
from enginepool.client.session.events import Answer, AskStatus, AskWeights, Report, SubmitRequest, WeightsAnswer
from enginepool.client.worker_restarts import restart_workers
from enginepool.net.keys import key_for
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import RestartWorker, RowRequest, Score, StatusReport
from enginepool.protocol.updates import InFlight, InspectWeights, UpdateRecord, WeightsReport

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


class Opening(Awaitable["Pool"]):
    """A pool that is about to open. `await` it, and close the pool yourself; or `async with` it, which closes it."""

    def __init__(self, call: str, open_: Callable[[], Coroutine[Any, Any, "Pool"]]) -> None:
        #: what returned this, as callers write it
        self._call = call
        self._open = open_
        self._pool: Pool | None = None

    if not TYPE_CHECKING:  # a type checker says it by itself

        def __getattr__(self, name: str) -> Any:
            raise not_open(self._call, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{self._call}(...) cannot be copied or pickled: call it once for each pool")

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
    exactly one answer or error. A coordinator that is stopped on purpose is no error either: calls wait for the next one, until
    their timeout; without a timeout, as long as it takes. All errors are `enginepool.errors.EnginepoolError`. A coordinator
    that shuts down or falls silent, and the return of one, are warnings in the log `enginepool`. So is, once, a group without a
    worker for which a call without a timeout waits.
    """

    def __init__(self, connection: Connection | None = None) -> None:
        """Not for callers: use `connect` or `start`."""
        if not isinstance(connection, Connection):
            raise not_made_so("Pool", connection)
        self.address = connection.address
        self._connection = connection
        self._coordinator: EmbeddedCoordinator | None = None
        self._notices = Notices(self.address, self.status)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("Pool", name)

    @property
    def connection(self) -> Connection:
        """What a `WeightPublisher` speaks through; not for other callers."""
        return self._connection

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
    ) -> Opening:
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
            ConnectError: nobody answered within `connect_timeout` seconds, perhaps because nobody knows the host's name; the
                message says so, and names the address.
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
    ) -> Opening:
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
        from enginepool.client.embedded import EmbeddedCoordinator, embedded_config

        start_timeout = check_timeout(start_timeout, "start_timeout") or 60.0
        whole = embedded_config(config, {"model": model, "workers": workers, "engine": engine, "device": device, **settings})

        async def open_() -> Pool:
            coordinator = EmbeddedCoordinator(whole)
            pool = cls(Connection(coordinator.address, key_for(coordinator.address, coordinator.keys)))
            pool._coordinator = coordinator
            coordinator.start(pool._connection.abort)
            await pool._open(start_timeout)
            coordinator.settle()
            return pool

        return Opening("Pool.start", open_)

    async def close(self) -> None:
        """Take back what is not answered, say goodbye, end what `start` started. Never hangs; twice is once."""
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
        except BaseException:  # also when cancelled: whoever awaited this has no pool to close; it is raised again
            await self.close()
            raise

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def score(
        self,
        query: str | Ids,
        items: Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score each item after one query. Query and items are all text, or all token ids.

        A CausalLM gives the probability of each label token after query + item; a classifier or reward model the outputs of its
        head. Items of one call run as one forward pass if they fit one batch of a worker, else as few whole batches.

        A cross-encoder (BERT or XLM-RoBERTa with a head) scores as `CrossEncoder` of sentence-transformers does. Texts are
        joined as its tokenizer joins a pair, and truncated to what the model takes; an empty query is no text of a pair. A
        single output goes through sigmoid, unless the model's configuration names another function. Token ids are not changed:
        every row needs the separator between query and item.

        Args:
            query: a text, or token ids (a sequence of ints, or a one-dimensional integer array).
            items: texts, or token ids of each item (also a two-dimensional array: a row each).
            label_token_ids: the tokens to score; CausalLM only, at most 4096. Default: None.
            apply_softmax: CausalLM: normalize over the labels alone. Classifiers: softmax over the outputs. Default: False.
            item_first: rows are item + query. Default: False.
            return_pooled_hidden_states: classifiers only. Default: False.
            group: may be left out where the pool has one group.
            priority: −1000 to 1000; larger runs first. Default: 0.
            timeout: seconds to the answer, after which the call ends with DeadlineExceeded and what waits is not run. Default:
                None, which is no limit.
            retry_busy: True, the default: wait and try again when the pool is full; else Busy is raised.
            min_version: the oldest weights that may answer; the request waits in the pool until they are there. Default: 0.
            logprobs: natural logarithms instead of probabilities, computed as such: in float32 a probability below 1e-45 is 0,
                and its logarithm -inf. Classifiers: only with `apply_softmax`, or where the head's outputs are probabilities.
                Default: False.
            raw: a cross-encoder takes rows as they are: token ids without a separator, texts joined without one. Default:
                False.

        Returns:
            scores float32 [items, labels], and what it took; see `ScoreResult`.

        Raises:
            BadRequest: an argument cannot be served; `field` names it, `limit` the limit.
            EnginepoolError: everything else that can happen; see `enginepool.errors`.

        Cancelling the task that awaits it takes the request back.
        """
        check_options("score", options, ScoreOptions)
        return await self._score(encode_shared(query, items), _SCORE_NAMES, **options)

    async def score_pairs(
        self,
        prompts: Sequence[str] | Sequence[Ids],
        responses: Sequence[str] | Sequence[Ids],
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult:
        """Score each response after its own prompt, as one request: row i is prompts[i] + responses[i].

        Everything else is as in `score`.
        """
        check_options("score_pairs", options, ScoreOptions)
        return await self._score(encode_pairs(prompts, responses), _PAIR_NAMES, **options)

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
        timeout = check_timeout(timeout)
        now = self._connection.now()
        deadline = None if timeout is None else now + timeout
        return (await self._connection.ask(lambda id_: AskStatus(now, id_, deadline), Report)).report

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
            now = self._connection.now()

            def ask(id_: int) -> AskStatus:
                return AskStatus(now, id_, None, RestartWorker(id_, group, worker, incarnation))

            return (await self._connection.ask(ask, Report)).report

        async def ask() -> StatusReport:
            return await self.status(None)

        return await restart_workers(ask, restart, check_group(group), worker, report or log.info)

    async def weights(self, group: str = "", *, timeout: float | None = 10.0) -> WeightsReport:  # noqa: ASYNC109
        """The committed version of a group, the version that each worker holds, and the history of updates, newest last.

        Raises:
            UnknownGroup: there is no such group.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group)), timeout)).report

    async def weights_digest(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:  # noqa: ASYNC109
        """The digest of every worker's weights as they are in its engine now; equal ones are the same weights.

        An engine that computes or rounds what it loads is not comparable: `code` is `unsupported`, and `message` says why.

        Raises what `weights` does. A worker that cannot say has `code` and `message`.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group), "digest"), timeout)).report

    async def validate_weights(self, group: str = "", *, timeout: float | None = 120.0) -> WeightsReport:  # noqa: ASYNC109
        """Look for NaN, infinity and tensors of nothing but zeros in every engine: the `findings` of each worker.

        Raises what `weights` does. A worker that cannot say has `code` and `message`.
        """
        return (await self._ask_weights(InspectWeights(0, check_group(group), "validate"), timeout)).report

    async def weight(self, name: str, group: str = "", *, timeout: float | None = 60.0) -> Floats:  # noqa: ASYNC109
        """One weight as an engine holds it, by its name in the checkpoint: float32, in the shape that the engine has.

        It comes in chunks of 4 MiB at most, so that a large one does not delay requests.

        Raises what `weights` does; EngineFailed: the engine has no weight of that name, or no worker is ready.
        """
        seconds, reader = check_timeout(timeout), WeightReader()
        group, name = check_group(group), check_name(name)
        end = None if seconds is None else self._connection.now() + seconds
        while reader.weight is None:
            left = None if end is None else max(end - self._connection.now(), 0.001)
            question = InspectWeights(0, group, "tensor", name, offset=reader.offset)
            answer = await self._ask_weights(question, left)
            reader.take(answer.report, answer.frames)
        return reader.weight

    async def set_version(
        self,
        version: int,
        group: str = "",
        *,
        new_run: bool = False,
        timeout: float | None = 60.0,  # noqa: ASYNC109 (the error says what is known)
    ) -> UpdateRecord:
        """Call the weights that a group has `version`, which is above the committed one. Returns what the history keeps of it.

        Args:
            new_run: versions begin again, so that any will do: for an operator who starts another training in the same pool.
            timeout: seconds, after which it is given up.

        Raises:
            VersionBackwards: `version` is not above the committed one, which `limit` names.
            Publishing: an update of the group is under way; `limit` names its publisher.
            UpdateAborted: the message says why.
        """
        publish = publish_message(version, group=group, transfer="set_version", in_flight="drain", drain=10.0, new_run=new_run)
        return await publish_unsent(self._connection, publish, check_timeout(timeout))

    async def publish_checkpoint(
        self,
        path: str | PathLike[str],
        version: int,
        group: str = "",
        *,
        in_flight: InFlight = "drain",
        drain: float = 10.0,
        new_run: bool = False,
        timeout: float | None = 600.0,  # noqa: ASYNC109 (as in `set_version`)
    ) -> UpdateRecord:
        """Let every worker of a group load the checkpoint directory `path`, which each must be able to see, as `version`.

        It is not searched for NaN and infinity before; `validate_weights` does that afterwards. Engines that take weights only
        at their start are restarted on it, as the group's `restart_updates` says: `timeout` has to be long enough for that.

        Args:
            path: a relative one is of this program's folder if there is such a directory, else of each worker's.
            in_flight: batches in flight finish before (`drain`), or run again on the new weights (`abort`).
            drain: seconds that `drain` waits for at most; then as `abort`.
            new_run, timeout: as in `set_version`.

        Raises what `set_version` does, and WeightsRefused: the checkpoint does not fit the model.
        """
        publish = publish_message(
            version, group=group, transfer="checkpoint", in_flight=in_flight, drain=drain, new_run=new_run
        )
        publish.path = check_path(path)
        return await publish_unsent(self._connection, publish, check_timeout(timeout))

    async def _ask_weights(self, question: InspectWeights, seconds: float | None) -> WeightsAnswer:
        seconds = check_timeout(seconds)
        now = self._connection.now()

        def ask(id_: int) -> AskWeights:
            question.id = id_
            return AskWeights(now, question, None if seconds is None else now + seconds)

        return await self._connection.ask(ask, WeightsAnswer)

    async def _score(
        self,
        payload: Payload,
        names: Mapping[str, str],
        *,
        label_token_ids: Ids | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        return_pooled_hidden_states: bool = False,
        group: str = "",
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 (the coordinator keeps this time too)
        retry_busy: bool = True,
        min_version: int = 0,
        logprobs: bool = False,
        raw: bool = False,
    ) -> ScoreResult:
        specs, frames = payload
        score = Score(
            id=0,
            frames=specs,
            group=check_group(group),
            labels=check_labels(label_token_ids),
            softmax=check_flag("apply_softmax", apply_softmax),
            item_first=check_flag("item_first", item_first),
            hidden=check_flag("return_pooled_hidden_states", return_pooled_hidden_states),
            priority=check_priority(priority),
            min_version=check_version(min_version, "min_version"),
            logprobs=check_flag("logprobs", logprobs),
            raw=check_flag("raw", raw),
        )
        check_softmax(score.softmax, score.labels)
        answer = await self._submit(score, frames, names, timeout, retry_busy)
        return read_result(answer.result, answer.frames)

    async def _submit(
        self,
        request: RowRequest,
        frames: Sequence[Buffer],
        names: Mapping[str, str],
        timeout: float | None,  # noqa: ASYNC109 (the coordinator keeps this time too)
        retry_busy: bool,
    ) -> Answer:
        """The answer to `request`, whose fields are called as `names` says in an error."""
        seconds, retry = check_timeout(timeout), check_flag("retry_busy", retry_busy)
        now = self._connection.now()
        deadline = None if seconds is None else now + seconds

        def submit(id_: int) -> SubmitRequest:
            request.id = id_
            return SubmitRequest(now, request, frames, deadline, retry)

        if deadline is None:
            self._notices.begin()
        try:
            return await self._connection.ask(submit, Answer, names)
        finally:
            if deadline is None:
                self._notices.end()
