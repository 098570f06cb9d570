"""What the Python API raises: one exception for each code of the wire protocol, and a few that never travel.

All derive from `EnginepoolError`, so that one `except` catches all errors of the pool and no others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import ErrorReply


class EnginepoolError(Exception):
    """Something that the pool, or this library on its behalf, refused or could not do.

    Attributes:
        code: the wire code (a key of `enginepool.protocol.errors.CODES`), or a local one (`closed`, `config`, `connect`,
            `interrupted`, `session_busy`, `session_closed`, `session_expired`).
        fault: `caller`, `pool` or `none`: a full queue, a deadline, an update that was aborted.
        retry: sending the same request again is safe and may help.
        field: the argument at fault (`items[3]`), or "".
        limit: the limit that was passed, as text, or "".
        evidence: what is known about the failure, one line each (`Poisoned` says how the workers died).
        retry_after_s: seconds to wait before another attempt (`Busy`), or None.
    """

    code: str = ""
    fault: Literal["caller", "pool", "none"] = "pool"
    retry: bool = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        limit: str = "",
        evidence: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.limit = limit
        self.evidence = tuple(evidence)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """The message; then field and limit where the message does not name them; then the evidence, a line each."""
        message = str(self.args[0])
        said = [f"{what}: {value}" for what, value in (("field", self.field), ("limit", self.limit)) if value not in message]
        head = f"{message} ({', '.join(said)})" if said else message
        return "\n  ".join((head, *self.evidence))


class _WireCode(EnginepoolError):
    """Takes fault and retry from the protocol's own table, so that the two cannot differ."""

    def __init_subclass__(cls, code: str = "") -> None:
        super().__init_subclass__()
        if code:
            cls.code = code
            cls.fault = CODES[code].fault
            cls.retry = CODES[code].retry


class Malformed(_WireCode, code="malformed"):
    """A frame is missing, truncated, or not what its header says."""


class BadRequest(_WireCode, ValueError, code="bad_request"):
    """An argument has a value that cannot be served; `field` and `limit` say which."""


class TooLarge(_WireCode, ValueError, code="too_large"):
    """The request is over the size limit of the coordinator."""


class Unsupported(_WireCode, code="unsupported"):
    """The coordinator does not know this message or this feature."""


class ProtocolVersion(_WireCode, code="protocol_version"):
    """Client and coordinator share no protocol version."""


class HelloRequired(_WireCode, code="hello_required"):
    """The coordinator does not know this link. The client sends `hello` and its requests again; callers never see it."""


class Unauthorized(_WireCode, code="unauthorized"):
    """The client's token is not the one of its identity, or its key is not authorized any more."""


class Forbidden(_WireCode, code="forbidden"):
    """The role of this client's key may not do that; `limit` names the role that may."""


class Superseded(_WireCode, code="superseded"):
    """Another process speaks under this client's identity, for example a fork of it."""


class UnknownGroup(_WireCode, LookupError, code="unknown_group"):
    """No group of that name; `limit` lists the names."""


class IdReused(_WireCode, code="id_reused"):
    """The request id was used before for another content."""


class Busy(_WireCode, code="busy"):
    """A bound of the pool is reached; `retry_after_s` says when to try again."""


class DeadlineExceeded(_WireCode, TimeoutError, code="deadline_exceeded"):
    """`timeout` ran out before the answer."""


class RequestCancelled(_WireCode, code="cancelled"):
    """The request was taken back."""


class Poisoned(_WireCode, code="poisoned"):
    """Workers died each time the request ran alone; `evidence` says how."""


class EngineFailed(_WireCode, code="engine_error"):
    """The engine refused or failed on this request; the worker lives on."""


class PoolDown(_WireCode, code="pool_down"):
    """No worker of the group is left and none will be restarted; or an embedded coordinator ended and stays down."""


class NeedsWeights(_WireCode, code="needs_weights"):
    """No process or file holds the committed weights of the group; publish them again."""


class Publishing(_WireCode, code="publishing"):
    """Another publisher's update of this group is under way; `limit` names it."""


class VersionBackwards(_WireCode, ValueError, code="version_backwards"):
    """A weight version must be above the committed one, which `limit` names."""


class VersionPassed(_WireCode, code="version_passed"):
    """Newer weights than the exact `version` of the call are committed, as `limit` says: no weights of that version answer any
    more."""


class WeightsRefused(_WireCode, ValueError, code="weights_refused"):
    """The tensors do not fit the model, or hold NaN or infinity; `field` names the first one. No engine was touched."""


class UpdateAborted(_WireCode, code="update_aborted"):
    """The update was aborted: the old weights serve, or will when restarted workers are ready. The message says why."""


class ShuttingDown(_WireCode, code="shutting_down"):
    """The coordinator is shutting down and takes no new updates. Calls for scores do not end with this: they wait for the next
    coordinator, until their timeout."""


class Interrupted(EnginepoolError):
    """Sequences of a generation ended before their time: their worker was lost, or got new weights, and no other could continue
    them exactly.

    Attributes:
        generations: all sequences of the call, as far as they are (`enginepool.Generations`). `continue_from` goes on after
            them.
    """

    code = "interrupted"
    fault = "none"
    retry = True

    def __init__(self, message: str, *, generations: Any = None, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.generations = generations


class SessionClosed(EnginepoolError):
    """The session was closed by its owner: it has no history."""

    code = "session_closed"
    fault = "caller"


class SessionExpired(SessionClosed):
    """The session had no call for `idle` seconds, and dropped its history. Begin another with the tokens that are to go on."""

    code = "session_expired"


class SessionBusy(EnginepoolError):
    """The session has a call that runs, and takes one at a time; `branch` gives another session for another call."""

    code = "session_busy"
    fault = "caller"
    retry = True


class ConnectError(EnginepoolError, ConnectionError):
    """No coordinator answered at the address that the message names, or this process cannot connect: the message says why."""

    code = "connect"
    fault = "none"
    retry = True


class PoolClosed(EnginepoolError):
    """The pool was closed by its owner; calls that were waiting end with this too."""

    code = "closed"
    fault = "caller"


class ConfigError(EnginepoolError, ValueError):
    """The pool's configuration cannot be used. The message is one line: the key, the value and what is allowed."""

    code = "config"
    fault = "caller"


def _by_code(base: type[EnginepoolError]) -> dict[str, type[EnginepoolError]]:
    found: dict[str, type[EnginepoolError]] = {}
    for cls in base.__subclasses__():
        found |= _by_code(cls)
        if cls.code:
            found[cls.code] = cls
    return found


#: Every code that has an exception, wire codes and local ones.
BY_CODE: dict[str, type[EnginepoolError]] = _by_code(EnginepoolError)


def _first_name(field: str) -> tuple[str, str]:
    """`items[3][7]` is `items` and `[3][7]`."""
    bracket = field.find("[")
    return (field, "") if bracket < 0 else (field[:bracket], field[bracket:])


def error_from(failure: ErrorReply, names: Mapping[str, str] | None = None) -> EnginepoolError:
    """The exception for a Failure message. A code of a newer protocol becomes a plain EnginepoolError that carries it.

    `names` maps the wire's names of fields to the caller's own (`labels` to `label_token_ids`, or `media[0]` to `images`).
    """
    cls = BY_CODE.get(failure.code)
    # A caller without the role may send no message of this type, with any arguments.
    names = {} if names is None or failure.code == "forbidden" else names
    wire, rest = (failure.field, "") if failure.field in names else _first_name(failure.field)
    own = names.get(wire, wire)
    message = failure.message
    if own != wire and message.startswith(wire):
        message = own + message[len(wire) :]
    if names.get("query") == "prompts":
        message = message.replace("tokens with its query;", "tokens with its prompt;")
    error = (cls or EnginepoolError)(
        message,
        field=own + rest,
        limit=failure.limit,
        evidence=failure.evidence,
        retry_after_s=None if failure.retry_after_ms is None else failure.retry_after_ms / 1000,
    )
    if cls is None:
        error.code = failure.code
    return error
