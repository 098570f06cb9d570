"""Errors of the pool as answers of OpenAI's API. Pure."""

from http import HTTPStatus
from typing import Any

from enginepool.errors import EnginepoolError

_STATUS: dict[str, HTTPStatus] = {
    "malformed": HTTPStatus.BAD_REQUEST,
    "bad_request": HTTPStatus.BAD_REQUEST,
    "too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "unsupported": HTTPStatus.BAD_REQUEST,
    "unauthorized": HTTPStatus.UNAUTHORIZED,
    "forbidden": HTTPStatus.FORBIDDEN,
    "unknown_group": HTTPStatus.NOT_FOUND,
    "version_passed": HTTPStatus.CONFLICT,
    "busy": HTTPStatus.TOO_MANY_REQUESTS,
    "deadline_exceeded": HTTPStatus.GATEWAY_TIMEOUT,
    "closed": HTTPStatus.SERVICE_UNAVAILABLE,
}
#: argument of `Pool.generate` -> OpenAI's name, where it is another
_NAMES = {
    "adapter": "lora_path",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompts": "prompt",
    "sampling_seed": "seed",
}


def status_of(error: EnginepoolError) -> HTTPStatus:
    """The HTTP status for an error of the pool."""
    other = HTTPStatus.SERVICE_UNAVAILABLE if error.retry else HTTPStatus.INTERNAL_SERVER_ERROR
    return _STATUS.get(error.code, other)


def body_of(error: EnginepoolError) -> dict[str, Any]:
    """The JSON of an answer to a failed request, in OpenAI's form. `type` is the pool's code of the error; `param` is the field
    at fault, or None."""
    message, field = str(error), error.field
    own, bracket, rest = field.partition("[")
    name = _NAMES.get(own, own)
    if name != own and message.startswith(own):
        message = name + message[len(own) :]
    return error_body(message, error.code, status_of(error), f"{name}{bracket}{rest}" or None)


def error_body(message: str, kind: str, status: int, field: str | None = None) -> dict[str, Any]:
    """The JSON of an answer that is an error."""
    return {"error": {"message": message, "type": kind, "param": field, "code": int(status)}}
