"""What all calls of a `Pool` for rows share: their common options, and a request that gets one answer."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, TypeVar

from enginepool.client.arguments import (
    bad,
    check_flag,
    check_group,
    check_priority,
    check_timeout,
    check_truncation,
    check_version,
)
from enginepool.client.connection import Connection
from enginepool.client.notices import Notices
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import Embed, Generate, Generated, Logprobs, Result, RowRequest, Score

A = TypeVar("A", Result, Generated)
#: requests for rows that are computed with weights
ModelRequest = Score | Embed | Logprobs

#: What the wire calls the arguments of all calls. A call that a group does not serve is of a wrong type there.
ROW_NAMES = {"timeout_ms": "timeout", "type": "group"}


class RowOptions(TypedDict, total=False):
    """The options of every call for rows. `Pool.score` says what each one does."""

    group: str
    priority: int
    timeout: float | None
    retry_busy: bool
    min_version: int
    version: int | None


class TruncatedOptions(RowOptions, total=False):
    """The options of calls whose rows can be truncated."""

    truncation: Literal["error", "left", "right"] | None


class RowCalls:
    """Base of the calls of each operation."""

    _connection: Connection
    _notices: Notices

    async def _submit(
        self, request: ModelRequest, frames: Sequence[Buffer], names: Mapping[str, str], options: TruncatedOptions
    ) -> tuple[Result, Sequence[Buffer]]:
        """The answer to `request` with these options. An error calls the fields of the request as `names` says."""
        request.truncation = check_truncation(options.get("truncation"))
        return await self._ask(request, frames, Result, names, options)

    async def _ask(
        self,
        request: ModelRequest | Generate,
        frames: Sequence[Buffer],
        answer: type[A],
        names: Mapping[str, str],
        options: RowOptions,
    ) -> tuple[A, Sequence[Buffer]]:
        return await self._waited(request, frames, answer, names, *set_options(request, options))

    async def _waited(
        self,
        request: RowRequest | Generate,
        frames: Sequence[Buffer],
        answer: type[A],
        names: Mapping[str, str],
        seconds: float | None,
        retry_busy: bool,
    ) -> tuple[A, Sequence[Buffer]]:
        if seconds is not None:
            return await self._connection.submit(request, frames, answer, seconds, retry_busy, names)
        self._notices.begin()
        try:
            return await self._connection.submit(request, frames, answer, None, retry_busy, names)
        finally:
            self._notices.end()


def set_options(request: ModelRequest | Generate, options: RowOptions) -> tuple[float | None, bool]:
    """Give a request the options that it carries. Returns the others: the seconds to its answer, and `retry_busy`."""
    request.group = check_group(options.get("group", ""))
    request.priority = check_priority(options.get("priority", 0))
    request.min_version = check_version(options.get("min_version", 0), "min_version")
    exact = options.get("version")
    request.version = None if exact is None else check_version(exact)
    if request.version is not None and request.min_version > request.version:
        text = f"min_version: {request.min_version} with version = {request.version}; at most version"
        raise bad("min_version", text, str(request.version))
    return check_timeout(options.get("timeout")), check_flag("retry_busy", options.get("retry_busy", True))


def flag(options: Mapping[str, object], name: str, default: bool = False) -> bool:
    """The option of this name, which is True or False."""
    return check_flag(name, options.get(name, default))
