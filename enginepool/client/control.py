"""The calls of a `Pool` that give the workers of a group a command."""

from collections.abc import Sequence

from enginepool.client.arguments import bad, check_group, check_timeout, check_worker
from enginepool.client.connection import Connection
from enginepool.protocol.messages.control import CommandName, Control, ControlReport, MemoryTag

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

        An engine that kept no copy of its weights has none then. An update gives it new ones, while its `kv_cache` sleeps or
        later. Without an update it is restored to the committed weights before it gets work.

        Args and errors: as in `sleep`.
        """
        return await self._command(_memory("wake", group, tags, worker), timeout)

    async def pause(self, group: str = "", *, timeout: float | None = 120.0) -> ControlReport:  # noqa: ASYNC109
        """Have a group start no work until `resume`; needs the role `publisher`.

        Its requests wait in the queue, and their timeouts count. When the report arrives nothing runs in the engines that it
        lists without a code: batches have finished, and generations are back in the queue. A generation with `partial=True`
        ends as interrupted, with what it has. All others go on after their last token once the group is resumed. New weights
        can be published meanwhile. A group stays paused when this program ends, and when the coordinator is restarted.

        Raises:
            UnknownGroup: there is no such group.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return await self._command(Control(0, "pause", check_group(group)), timeout)

    async def resume(self, group: str = "", *, timeout: float | None = 120.0) -> ControlReport:  # noqa: ASYNC109
        """Have a group that was paused start work again; needs the role `publisher`. No error where it is not paused.

        Raises: as `pause`.
        """
        return await self._command(Control(0, "resume", check_group(group)), timeout)

    async def abort(self, group: str = "", *, timeout: float | None = 120.0) -> int:  # noqa: ASYNC109
        """End all requests of a group, of all clients; needs the role `admin`. To end a call of its own, a program cancels it.

        Generations that have tokens end as interrupted, with all of them. Every other call ends with RequestCancelled. Requests
        that come later are served. Returns how many requests were ended.

        Raises:
            UnknownGroup: there is no such group.
            Forbidden: this client's role is not enough.
            DeadlineExceeded: no answer within `timeout` seconds.
        """
        return (await self._command(Control(0, "abort", check_group(group)), timeout)).aborted

    async def _command(self, question: Control, timeout: float | None) -> ControlReport:  # noqa: ASYNC109
        return (await self._connection.ask(question, ControlReport, check_timeout(timeout)))[0]


def _memory(command: CommandName, group: str, tags: Sequence[MemoryTag], worker: str) -> Control:
    chosen: list[MemoryTag] = [tag for tag in MEMORY_TAGS if tag in tags]
    unknown = [tags] if isinstance(tags, str) else [tag for tag in tags if tag not in MEMORY_TAGS]
    if unknown or not chosen:
        known = ", ".join(MEMORY_TAGS)
        got = repr(unknown[0]) if unknown else "none"
        raise bad("tags", f"tags: expected a list of one or more of {known}, got {got}", known)
    return Control(0, command, check_group(group), check_worker(worker), chosen)
