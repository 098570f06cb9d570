"""Options of a pool's calls that OpenAI's API has no field for: they are read from headers. Pure."""

from collections.abc import Mapping
from typing import Any

from enginepool.client.arguments import bad, check_timeout, check_version

TIMEOUT, MIN_VERSION, VERSION = "x-enginepool-timeout", "x-enginepool-min-version", "x-enginepool-version"
RETRY_BUSY = "x-enginepool-retry-busy"


def read_options(headers: Mapping[str, str], timeout: float | None = None) -> dict[str, Any]:
    """The options `timeout`, `min_version`, `version` and `retry_busy` of `Pool.generate`.

    Args:
        headers: of the request, by lower-case names.
        timeout: where the header has none.

    Raises:
        BadRequest: a header is not a number; `field` names it.
    """
    return {
        "timeout": check_timeout(_number(headers, TIMEOUT, float, timeout), TIMEOUT),
        "min_version": check_version(_number(headers, MIN_VERSION, int, 0), MIN_VERSION),
        "version": None if VERSION not in headers else check_version(_number(headers, VERSION, int, 0), VERSION),
        "retry_busy": _flag(headers, RETRY_BUSY),
    }


def _number(headers: Mapping[str, str], name: str, kind: type, default: Any) -> Any:
    text = headers.get(name)
    if text is None:
        return default
    try:
        return kind(text)
    except ValueError:
        raise bad(name, f"{name}: {text!r:.40} is no {'whole ' * (kind is int)}number") from None


def _flag(headers: Mapping[str, str], name: str) -> bool:
    text = headers.get(name, "true")
    if text not in ("true", "false"):
        raise bad(name, f"{name}: {text!r:.40}; true or false", "true, false")
    return text == "true"
