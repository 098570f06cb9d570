"""The calls of a `Pool` that give all workers of a group a command."""

from enginepool.client.arguments import check_group, check_timeout
from enginepool.client.connection import Connection
from enginepool.protocol.messages.control import Control, ControlReport


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
        question = Control(0, "flush", check_group(group))
        return (await self._connection.ask(question, ControlReport, check_timeout(timeout)))[0]
