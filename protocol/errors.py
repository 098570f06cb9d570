"""The closed set of error codes that travel on the wire, and the exception that carries one.

Each code says whose fault it is and whether sending the same request again is safe and may help. PROTOCOL.md
section "Errors" is the specification of this table; a test holds the two together.
"""

from typing import Literal, NamedTuple

from enginepool.protocol.basis import MAX_TEXT

Fault = Literal["caller", "pool", "none"]
#: whether an error with the id of a request is its final answer. `attempt`: of this attempt, and the request may be sent again.
#: `no`: it answers nothing. `second`: of the second request under the id, while the first one goes on.
Final = Literal["yes", "no", "attempt", "second"]
#: whether it is kept for a resend until it is acknowledged. `accepted`: where the request had been accepted before.
Kept = Literal["yes", "no", "accepted"]


class CodeFacts(NamedTuple):
    """What a code means to the peer that receives it."""

    fault: Fault
    retry: bool
    meaning: str
    final: Final = "yes"
    kept: Kept = "no"

    @property
    def id(self) -> str:
        """What becomes of the request's id. `free`: the same request is sent again under it. `spent`: it is acknowledged, and
        another attempt takes a new one. `taken`: by the first request."""
        return {"yes": "spent", "no": "free", "attempt": "free", "second": "taken"}[self.final]


CODES: dict[str, CodeFacts] = {
    "malformed": CodeFacts("caller", False, "a frame is missing, truncated, or not what its header says"),
    "bad_request": CodeFacts(
        "caller", False, "a field has a value that cannot be served; `field` and `limit` say which", kept="accepted"
    ),
    "too_large": CodeFacts(
        "caller",
        False,
        "the message or its answer is over the size limit, or both together are over the window",
        kept="accepted",
    ),
    "unsupported": CodeFacts(
        "caller", False, "the receiver does not know the message type or the requested feature", kept="accepted"
    ),
    "protocol_version": CodeFacts("caller", False, "the peers share no protocol version"),
    "hello_required": CodeFacts(
        "none", True, "the link has no accepted `hello`; send `hello`, then the request again", final="no"
    ),
    "unauthorized": CodeFacts("caller", False, "`token` is not that of this `client`, or the link's key is not authorized"),
    "forbidden": CodeFacts("caller", False, "the role of this link may not send that; `limit` names the role that may"),
    "superseded": CodeFacts("caller", False, "a newer link or incarnation of this peer exists; this one is refused"),
    "unknown_group": CodeFacts("caller", False, "no group of that name; `limit` lists the names"),
    "id_reused": CodeFacts("caller", False, "the request id was used before for another content", final="second"),
    "busy": CodeFacts("none", True, "a bound is reached; try again after `retry_after_ms`", final="attempt"),
    "deadline_exceeded": CodeFacts("none", False, "`timeout_ms` ran out before the answer", kept="yes"),
    "cancelled": CodeFacts("caller", False, "the caller cancelled the request, or an operator aborted it", kept="yes"),
    "poisoned": CodeFacts("caller", False, "workers died each time the request ran alone; `evidence` says how", kept="yes"),
    "engine_error": CodeFacts("pool", False, "the engine refused or failed on this request; the worker lives on", kept="yes"),
    "pool_down": CodeFacts("pool", True, "no worker of the group is left and none will be restarted", kept="accepted"),
    "needs_weights": CodeFacts(
        "pool", True, "no process or file holds the committed weights of the group; publish them again", kept="accepted"
    ),
    "publishing": CodeFacts("caller", True, "another publisher's transaction is open in this group; `limit` names it"),
    "version_backwards": CodeFacts(
        "caller", False, "a weight version is not above the committed one, which `limit` names", kept="accepted"
    ),
    "version_passed": CodeFacts(
        "none", False, "newer weights than the exact `version` of the request are committed, as `limit` says", kept="accepted"
    ),
    "weights_refused": CodeFacts(
        "caller", False, "the tensors do not fit the model, or hold NaN or infinity; `field` names one", kept="accepted"
    ),
    "update_aborted": CodeFacts(
        "none",
        True,
        "the update was aborted; the old weights serve, or will when restarted workers are ready",
        kept="accepted",
    ),
    "shutting_down": CodeFacts("pool", True, "the coordinator is draining and takes no new requests", kept="accepted"),
}


def located(text: str) -> tuple[str, str]:
    """The path of the value in a text of msgspec, "" for the whole, and what is wrong with it. The text may repeat what a peer
    sent, as long as a message."""
    what, mark, path = text.rpartition(" - at `$")
    return (path[:-1].removeprefix("."), what) if mark and path.endswith("`") else ("", text)


def brief(text: str, most: int = MAX_TEXT) -> str:
    """A text for people, cut off after `most` characters: more than that is not read."""
    return text if len(text) <= most else text[:most] + "…"


class WireError(Exception):
    """A message or a field that is refused.

    Args:
        code: a key of `CODES`.
        message: one line: what is wrong, where, and which limit.
        field: the field at fault, as the sender names it (`priority`, `items[3]`, `frames[2]`).
        limit: the limit that was passed, as text.
    """

    def __init__(self, code: str, message: str, *, field: str = "", limit: str = "") -> None:
        if code not in CODES:
            raise ValueError(f"unknown error code {code!r}")
        super().__init__(message)
        self.code = code
        # Messages and fields may repeat what a peer sent; an error is a line, not an echo.
        self.message = brief(message)
        self.field = field[:MAX_TEXT]
        self.limit = limit
