"""URLs of models in Redis, as SGLang's load_format `remote` reads them: redis://HOST:PORT/NAME."""

import re
from collections.abc import Sequence
from typing import NamedTuple

#: what such a URL looks like, for errors
FORM = "redis://HOST:PORT/NAME, where NAME is of letters, digits, '_', '-', '.' and '/', and no part is keys or files"
_URL = re.compile(r"redis://([a-zA-Z0-9._-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})(?:/(.*))?", re.ASCII)
#: SGLang looks for keys with a pattern: nothing here may stand for something else.
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]*", re.IGNORECASE | re.ASCII)
#: what SGLang has below a name: a model there would be read as a part of the one above it
_RESERVED = ("keys", "files")


class RedisUrl(NamedTuple):
    """The server, and the parts of the name: none where the URL names the server alone."""

    host: str
    port: int
    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """With which the keys of the model begin."""
        return "/".join(self.parts)


def is_redis(path: str) -> bool:
    """Whether this is no path of a folder, but meant to be such a URL."""
    return path.lower().startswith("redis://")


def parse_redis(url: str) -> RedisUrl | None:
    """The parts of such a URL; None for anything else, also where it has a user, a query, a fragment or a pattern."""
    found = _URL.fullmatch(url)
    if found is None or not 0 < int(found[2]) < 1 << 16:
        return None
    parts = tuple(found[3].split("/")) if found[3] else ()
    if any(part in _RESERVED or not _PART.fullmatch(part) for part in parts):
        return None
    return RedisUrl(found[1].lower(), int(found[2]), parts)


def redis_root(root: str) -> RedisUrl | None:
    """The same of an entry of `save_roots`, which names a server, or a folder of it: redis://HOST:PORT/FOLDER/."""
    return parse_redis(root.removesuffix("/"))


def below_redis(url: str, roots: Sequence[str]) -> RedisUrl | None:
    """The parts of `url` if it names a model under one of these roots: the same host and port, below its folder."""
    found = parse_redis(url)
    for top in map(redis_root, roots):
        if found is not None and top is not None and found[:2] == top[:2]:
            inside = len(top.parts) < len(found.parts) and found.parts[: len(top.parts)] == top.parts
            if inside:
                return found
    return None
