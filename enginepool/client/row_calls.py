"""What all calls of a `Pool` for rows share: a request is submitted, and one answer comes."""

from collections.abc import Mapping, Sequence

from enginepool.client.arguments import check_flag, check_timeout
from enginepool.client.connection import Connection
from enginepool.client.notices import Notices
from enginepool.client.session.events import Answer, SubmitRequest
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import RowRequest


class RowCalls:
    """Base of the calls of each operation."""

    _connection: Connection
    _notices: Notices

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
