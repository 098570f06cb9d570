"""The endpoints of OpenAI's API, for clients in this process: a request in JSON, and its answer as JSON or as a stream."""

import asyncio
import importlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from enginepool.client.readiness import named_group
from enginepool.errors import BadRequest, DeadlineExceeded, EnginepoolError
from enginepool.http.build import Serving, build
from enginepool.http.failures import body_of, error_body, status_of
from enginepool.http.options import read_options
from enginepool.http.refusals import refuse_template
from enginepool.protocol.messages import GroupStatus, StatusReport

if TYPE_CHECKING:
    from enginepool.http.manager import PoolCall

log = logging.getLogger("enginepool")

_JSON = "application/json"


@dataclass(slots=True)
class Reply:
    """An answer. `body`: all of it, or its pieces as they come; `close` takes back what still runs for it."""

    status: int
    body: bytes | AsyncIterator[bytes]
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": _JSON})
    close: Callable[[], None] = lambda: None


class Endpoints:
    """OpenAI's API for one group of a pool. SGLang's part is made when the first request asks for it.

    Args:
        pool: an async `Pool`.
        group: its group; "" for the only one.
        model: a folder or a name of the model hub, for tokenizer, template and configuration; None for the group's own.
        settings: SGLang's (`build.SETTINGS`).
    """

    def __init__(self, pool: Any, group: str, model: str | None, settings: Mapping[str, Any]) -> None:
        self._pool = pool
        self._group = group
        self._model = model
        self._settings = dict(settings)
        self._making: asyncio.Task[Serving] | None = None
        #: how long sequences of the group may be is known
        self._bounded = False

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes, within: float | None) -> Reply:
        """Answer a request. What is wrong with it is an answer, too.

        Args:
            within: seconds for the whole answer; None: no limit, or that of the header `x-enginepool-timeout`.
        """
        try:
            options = read_options(headers, within)
            loop = asyncio.get_running_loop()
            until = None if options["timeout"] is None else loop.time() + options["timeout"]
            serving = await self._serving(options["timeout"])
            if until is not None:
                options["timeout"] = max(until - loop.time(), 0.001)
            if path.startswith("/v1/models") and method == "GET":
                return await self._models(serving, path.removeprefix("/v1/models").removeprefix("/"), options["timeout"])
            if (method, path) == ("POST", "/v1/chat/completions"):
                return await _ask(serving.chat, serving.protocol.ChatCompletionRequest, headers, body, options | self._named)
            if (method, path) == ("POST", "/v1/completions"):
                return await _ask(serving.completion, serving.protocol.CompletionRequest, headers, body, options | self._named)
        except EnginepoolError as error:
            return _failed(error)
        text = f"{method} {path}: not served by this client; it has chat.completions, completions and models"
        return Reply(404, msgspec.json.encode(error_body(text, "not_found", 404)))

    @property
    def _named(self) -> dict[str, Any]:
        return {"group": self._group}

    async def _serving(self, within: float | None) -> Serving:
        """SGLang's part, once it is made and the group has a worker."""
        if self._making is None or (self._making.done() and (self._making.cancelled() or self._making.exception())):
            self._making = asyncio.create_task(self._make())
        loop = asyncio.get_running_loop()
        until = None if within is None else loop.time() + within
        try:
            # One request that ends takes nothing from the others that wait for the same.
            serving = await asyncio.wait_for(asyncio.shield(self._making), within)
        except TimeoutError:
            raise DeadlineExceeded(f"timeout: {within:g} s were over before the group was ready", field="timeout") from None
        if not self._bounded:  # it waited for weights
            left = None if until is None else max(until - loop.time(), 0.001)
            self._bound(serving, named_group(await self._pool.status(left), self._group))
        return serving

    async def _make(self) -> Serving:
        report: StatusReport = await self._pool.status(None)
        group = named_group(report, self._group)
        serving = await asyncio.to_thread(build, self._model or group.model, self._settings)
        report = await self._pool.ready(group=group.name)
        serving.manager.pool, serving.manager.group = self._pool, self._group
        self._bound(serving, named_group(report, group.name))
        return serving

    def _bound(self, serving: Serving, group: GroupStatus) -> None:
        """Have requests without a limit of their own ask for no more tokens than the engines take."""
        if (limits := group.limits) is not None:
            self._bounded = True
            serving.manager.context_len = min(serving.manager.context_len, limits.sequence_context or limits.context)

    async def _models(self, serving: Serving, name: str, within: float | None) -> Reply:
        """The model, and each adapter of the group by the name that `model` of a request takes."""
        served = serving.manager.served_model_name
        card = {"id": served, "object": "model", "created": 0, "owned_by": "enginepool"}
        group = named_group(await self._pool.status(within), self._group)
        # Those that were loaded later are in the limits, too, once the group has some.
        adapters = [*(group.limits.adapters if group.limits else ()), *(one.name for one in group.adapters)]
        cards = [card, *(card | {"id": f"{served}:{adapter}", "parent": served} for adapter in dict.fromkeys(adapters))]
        if not name:
            return Reply(200, msgspec.json.encode({"object": "list", "data": cards}))
        for one in cards:
            if one["id"] == name:
                return Reply(200, msgspec.json.encode(one))
        names = ", ".join(repr(one["id"]) for one in cards)
        text = f"model: {name!r:.100} is not served here, but {names:.300}"
        return Reply(404, msgspec.json.encode(error_body(text, "model_not_found", 404, "model")))


async def _ask(serving: Any, kind: Any, headers: Mapping[str, str], body: bytes, options: dict[str, Any]) -> Reply:
    """The answer of one of SGLang's serving classes to the JSON of a request."""
    requests: Any = importlib.import_module("starlette.requests")
    manager: Any = importlib.import_module("enginepool.http.manager")
    request = _parsed(kind, body)
    refuse_template(getattr(request, "chat_template_kwargs", None))
    call: PoolCall = manager.PoolCall(options)
    scope: dict[str, Any] = {
        "type": "http", "method": "POST", "path": "/v1", "query_string": b"", "state": {"pool_call": call},
        "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
    }  # fmt: skip
    found = await serving.handle_request(request, requests.Request(scope, _never_disconnected))
    if call.failure is not None:
        return _failed(call.failure)
    if (pieces := getattr(found, "body_iterator", None)) is not None:
        return Reply(200, _encoded(pieces, call), {"content-type": "text/event-stream"}, call.cancel)
    if hasattr(found, "model_dump_json"):
        return Reply(200, found.model_dump_json().encode())
    return Reply(found.status_code, found.body if found.status_code < 400 else _in_openais_form(found.body, kind.model_fields))


def _parsed(kind: Any, body: bytes) -> Any:
    """The request in the JSON of a body. Raises BadRequest with the field at fault."""
    pydantic: Any = importlib.import_module("pydantic")
    try:
        given: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body: not JSON: {error!s:.200}", field="body") from None
    if not isinstance(given, dict):
        raise BadRequest("body: not an object of JSON", field="body")
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        first: dict[str, Any] = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise BadRequest(f"{where}: {first['msg']:.300}", field=where) from None
    except Exception as error:  # SGLang looks at some fields before their types are checked
        raise BadRequest(f"body: a field has another type than it must have: {error!r:.200}", field="body") from None


async def _encoded(pieces: AsyncGenerator[str | bytes], call: "PoolCall") -> AsyncGenerator[bytes]:
    try:
        async for piece in pieces:
            yield piece.encode() if isinstance(piece, str) else piece
    finally:
        call.cancel()
        with suppress(RuntimeError):  # it runs, in a task that is being cancelled
            await pieces.aclose()


async def _never_disconnected() -> dict[str, Any]:
    """A client in this process takes its request back by cancelling it."""
    await asyncio.Event().wait()
    return {}


def _failed(error: EnginepoolError) -> Reply:
    headers = {"content-type": _JSON}
    if error.retry_after_s is not None:
        headers["retry-after"] = f"{error.retry_after_s:g}"
    return Reply(status_of(error), msgspec.json.encode(body_of(error)), headers)


def _in_openais_form(body: bytes, fields: Container[str]) -> bytes:
    """SGLang says an error without the object `error` around it, and where it names a field, in its first word alone."""
    said: dict[str, Any] = msgspec.json.decode(body)
    message = str(said.get("message"))
    word = message.partition(" ")[0]
    return msgspec.json.encode(
        error_body(message, str(said.get("type")), int(said.get("code") or 500), word if word in fields else said.get("param"))
    )
