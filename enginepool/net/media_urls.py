"""Which URLs a worker may fetch media from: those under the prefixes of its group's `media_urls`."""

import re
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

_PORTS = {"http": 80, "https": 443}
#: What programs read differently: another host or folder may be meant than is seen here. `%2e`, `%2f`, `%5c` stand for `.`, `/`
#: and `\`.
_UNCLEAR = re.compile(r"[\s\\]|%2e|%2f|%5c|/\.{1,2}(?:[/?#]|$)", re.IGNORECASE)


def refuse_prefix(prefix: str) -> str:
    """Why no prefix of `media_urls` can be this, or ""."""
    parts = _split(prefix)
    if parts is None or parts.query or parts.fragment:
        return "must be a URL with a host, such as https://images.example.com/public/, without user, query or fragment"
    return ""


def is_allowed(url: str, prefixes: Iterable[str]) -> bool:
    """Whether `url` lies under one of these prefixes: the same scheme, host and port, and a folder or a file of its path."""
    parts = _split(url)
    if parts is None:
        return False
    for prefix in prefixes:
        top = _split(prefix)
        if top is None or _place(top) != _place(parts):
            continue
        folder = top.path.rstrip("/")
        if parts.path == top.path or parts.path.startswith(f"{folder}/"):
            return True
    return False


def _place(parts: SplitResult) -> tuple[str, str | None, int]:
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


def _split(url: str) -> SplitResult | None:
    """The parts of an `http` or `https` URL with a host and without a user; None for anything else."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    clear = url.isprintable() and not _UNCLEAR.search(url)
    whole = parts.scheme in _PORTS and parts.hostname and "@" not in parts.netloc and port != 0
    return parts if clear and whole else None
