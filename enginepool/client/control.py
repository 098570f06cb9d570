"""The calls of a `Pool` that give the workers of a group a command."""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import cast, get_args

from enginepool.client.arguments import bad, check_choice, check_group, check_int, check_path, check_timeout, check_worker
from enginepool.client.connection import Connection
from enginepool.errors import error_from
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.control import (
    MAX_PROFILE_S,
    MAX_PROFILE_STEPS,
    CommandName,
    Control,
    ControlReport,
    MemoryTag,
    WorkerOutcome,
)
from enginepool.protocol.messages.weights import RunningGenerations

#: the parts of an engine's memory that can be released
MEMORY_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")


class ControlCalls:
    """Base of `Pool`."""

    _connection: Connection

    async def flush(self, group: str = "", *, timeout: float | None = 120.0) -> ControlReport:  # noqa: ASYNC109
        """Have every worker of a group forget the prefixes that its engine keeps; needs the role `publisher`.

        An engine does it between two batches. One that generates does it only while it is idle. The report has a row for each
        worker: its name, and why it failed.

        Raises:
            UnknownGroup: there is no such group.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return await self._command(Control(0, "flush", check_group(group)), timeout)

    async def sleep(
        self, group: str = "", *, tags: Sequence[MemoryTag] = MEMORY_TAGS, worker: str = "",
        timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> ControlReport:  # fmt: skip
        """Have the engines of a group, or of one worker, release parts of their memory; needs the role `publisher`.

        While a group sleeps its requests wait in the queue, and their timeouts count. Requests of a worker that sleeps alone
        run on other workers. What runs now goes back to the queue: generations go on after their last token. Parts that sleep
        already are left as they are. A worker that ends while it sleeps is started again when it is woken.

        Args:
            tags: `weights`, `kv_cache`, `cuda_graph`, as SGLang names them; by default all.
            worker: a name of the status report; "" for all.

        Raises:
            UnknownGroup: there is no such group.
            BadRequest: an unknown tag, or the group has no such worker.
            Publishing: the group takes new weights.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return await self._command(_memory("sleep", group, tags, worker), timeout)

    async def wake(
        self, group: str = "", *, tags: Sequence[MemoryTag] = MEMORY_TAGS, worker: str = "",
        timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> ControlReport:  # fmt: skip
        """Have engines take back parts of their memory that `sleep` released. A worker of which nothing sleeps gets work.

        After `sleep` of all parts the last `wake` names no tags: one that wakes `kv_cache` alone leaves `cuda_graph` asleep.

        An engine that kept no copy of its weights has none then. An update gives it new ones, while its `kv_cache` sleeps or
        later. Without an update it is restored to the committed weights before it gets work.

        Args and errors: as in `sleep`.
        """
        return await self._command(_memory("wake", group, tags, worker), timeout)

    async def pause(
        self, group: str = "", mode: RunningGenerations = "abort", *, timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> ControlReport:  # fmt: skip
        """Have a group start no work until `resume`; needs the role `publisher`.

        Its requests wait in the queue, and all timeouts count. When the report arrives nothing runs in the engines that it
        lists without a code: batches have finished, and generations stand still. New weights can be published meanwhile. A
        group stays paused when this program ends, and when the coordinator is restarted.

        Args:
            mode: what happens to generations. `abort`: they go back to the queue; one with `partial=True` ends as interrupted,
                with what it has, and all others go on after their last token, on any worker. `in_place`: they stay in their
                engines, and go on over the keys and values that they have. `retract`: they stay, and their keys and values are
                freed and computed again. With `in_place` and `retract` it is all or nothing: if a row of the report has a
                code, the group goes on, or stays paused as it was before. Generations of a worker that ends meanwhile go back
                to the queue, and so do all when the coordinator is restarted.

        Raises:
            UnknownGroup: there is no such group.
            BadRequest: an unknown mode.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        check_choice("mode", mode, get_args(RunningGenerations))
        return await self._command(Control(0, "pause", check_group(group), mode=mode), timeout)

    async def resume(self, group: str = "", *, timeout: float | None = 120.0) -> ControlReport:  # noqa: ASYNC109
        """Have a group that was paused start work again; needs the role `publisher`. No error where it is not paused.

        Raises: as `pause`.
        """
        return await self._command(Control(0, "resume", check_group(group)), timeout)

    async def abort(
        self, group: str = "", *, client: str = "", request: int | None = None, timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> int:  # fmt: skip
        """End all requests of a group, of all clients; needs the role `admin`. To end a call of its own, a program cancels it.

        Generations that have tokens end as interrupted, with all of them. Every other call ends with RequestCancelled. Requests
        that come later are served. Returns how many requests were ended.

        Args:
            client: end those of this client alone: of all groups, if none is named. The first 8 or more hex digits of its id,
                or what `status` shows, which lists busy clients, each with its oldest request; a program reads its own in
                `client_id`.
            request: end that one of the client alone, by the id that the client gave it.

        Raises:
            UnknownGroup: there is no such group.
            BadRequest: not the id of one client, or a request without its client.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        check_group(group)
        if not isinstance(client, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise bad("client", f"client: expected the hex digits of its id, got {client!r}")
        if request is not None and (not client or type(request) is not int or not 0 <= request <= MAX_ID):
            raise bad("request", f"request: expected the id of a request of `client`, got {request!r}")
        return (await self._command(Control(0, "abort", group, client=client, request=request), timeout)).aborted

    async def start_profile(
        self, group: str = "", *, seconds: float = 10.0, steps: int = 0, worker: str = "",
        timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> ControlReport:  # fmt: skip
        """Have the engines of a group, or of one worker, record what they compute; needs the role `admin`.

        SGLang's profiler traces its schedulers, on CPU and GPU. `stop_profile` ends it. Without that the worker does, so that a
        caller that is gone leaves none running. Each worker writes into a folder of its own under `profile_root` of the group,
        on its host: the message of each row of the report is that folder. An engine is slower meanwhile, and stands still
        while it writes its traces.

        Args:
            seconds: the profile ends after so many; 300 at most.
            steps: and after so many forwards, which keeps traces small; 0: it does not matter how many.
            worker: a name of the status report; "" for all.

        Raises:
            UnknownGroup: there is no such group.
            BadRequest: the group has no such worker, or an argument is out of bounds.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        limit = check_timeout(seconds, "seconds")
        if limit is None or limit > MAX_PROFILE_S:
            raise bad("seconds", f"seconds: {limit}; more than 0, at most {MAX_PROFILE_S}", str(MAX_PROFILE_S))
        forwards = check_int("steps", steps, 0, MAX_PROFILE_STEPS)
        asked = Control(0, "start_profile", check_group(group), check_worker(worker), seconds=limit, steps=forwards)
        return await self._command(asked, timeout)

    async def stop_profile(
        self, group: str = "", *, worker: str = "", timeout: float | None = 120.0,  # noqa: ASYNC109
    ) -> ControlReport:  # fmt: skip
        """End what `start_profile` began, also where it has ended by itself since; needs the role `admin`.

        The traces are whole in the folders that the report names. A worker that has none to end says so: it failed.

        Raises: as `start_profile`.
        """
        return await self._command(Control(0, "stop_profile", check_group(group), check_worker(worker)), timeout)

    async def save_weights(
        self, path: str | PathLike[str], group: str = "", *, worker: str = "",
        timeout: float | None = 1800.0,  # noqa: ASYNC109
    ) -> WorkerOutcome:  # fmt: skip
        """Have a worker write the weights of its engine into a new folder, or Redis, while it serves; needs the role `admin`.

        Any ready worker with the committed weights does, or the one that is named: all have the same. The folder appears under
        its name once it is whole: the weights as SGLang's `load_format="sharded_state"` reads them, the files of the model
        besides weights, and `enginepool.json`, which says the version. `GroupConfig(model=path, options={"load_format":
        "sharded_state", ...})`, with the same `tp_size`, starts engines on it. `redis://HOST:PORT/NAME` is the same with keys
        in place of files, as SGLang's `load_format="remote"` reads them, and `enginepool.json` is the last key.

        Args:
            path: absolute, on the worker's host, or such a URL, under `save_roots` of the group; nothing is there yet.

        Returns the name of the worker, and in its `message` the version and how much was written.

        Raises:
            BadRequest: the path is not under `save_roots`, or the group has no such worker.
            EngineFailed: the engine cannot, the path exists or cannot be written, Redis does not answer, or other weights were
                loaded meanwhile; the message says which.
            Publishing: the group takes new weights.
            PoolDown: no worker is ready.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds. The worker goes on.
        """
        place = check_path(path, "a new folder on the worker's host, or a URL of Redis")
        asked = Control(0, "save", check_group(group), check_worker(worker), path=place)
        rows = (await self._command(asked, timeout)).workers
        row = rows[0] if rows else WorkerOutcome(worker, "pool_down", "retired")
        if row.code:
            raise error_from(ErrorReply(row.code, f"{row.name}: {row.message}", 0))
        return row

    async def _command(self, question: Control, timeout: float | None) -> ControlReport:  # noqa: ASYNC109
        return (await self._connection.ask(question, ControlReport, check_timeout(timeout)))[0]


def _memory(command: CommandName, group: str, tags: Sequence[MemoryTag], worker: str) -> Control:
    listed = isinstance(cast("object", tags), Iterable) and not isinstance(tags, str)
    chosen: list[MemoryTag] = [tag for tag in MEMORY_TAGS if listed and tag in tags]
    unknown = [tag for tag in tags if tag not in MEMORY_TAGS] if listed else [tags]
    if unknown or not chosen:
        known = ", ".join(MEMORY_TAGS)
        got = repr(unknown[0]) if unknown else "none"
        raise bad("tags", f"tags: expected a list of one or more of {known}, got {got}", known)
    return Control(0, command, check_group(group), check_worker(worker), chosen)
