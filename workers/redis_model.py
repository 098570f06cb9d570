"""A model in Redis: the connection, and the keys under a new name, which are a whole model or go away.

The keys are those of SGLang's connector: NAME/keys/rank_R/TENSOR, which the engine writes, and NAME/files/FILE.
"""

import contextlib
import importlib
import itertools
import secrets
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

from enginepool.protocol.redis_url import RedisUrl
from enginepool.workers.engine import EngineError
from enginepool.workers.failures import one_line

#: the file that says which weights are saved, in a folder too: the last one
RECORD = "enginepool.json"
#: seconds in which Redis answers, and in which it takes or gives a large value
ANSWER_S, VALUE_S = 10.0, 60.0
#: what a value has besides the bytes of its tensor
_HEADER_BYTES = 1024
#: keys that are looked at, or removed, at a time
_KEYS = 1000


def connected(at: RedisUrl, seconds: float) -> Any:
    """A client, which connects when it is first used. Commands are sent once, and end within `seconds`. Raises EngineError."""
    try:
        redis: Any = importlib.import_module("redis")
        retry: Any = importlib.import_module("redis.retry")
        backoff: Any = importlib.import_module("redis.backoff")
    except ImportError:
        raise EngineError("the package redis is not installed on this host; install enginepool[redis]") from None
    once = retry.Retry(backoff.NoBackoff(), 0)
    host = at.host.strip("[]")
    return redis.Redis(host=host, port=at.port, socket_timeout=seconds, socket_connect_timeout=ANSWER_S, retry=once)


@contextlib.contextmanager
def redis_errors(url: str) -> Generator[None]:
    """What Redis or the connection to it says becomes an EngineError."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # the classes of the redis package are known only where it is installed
        raise EngineError(f"{url}: {one_line(error)}") from None


def refuse_incomplete(at: RedisUrl, *, rows: bool = True) -> None:
    """Raise EngineError unless an engine can start from there. What Redis or the connection to it says is raised as it is.

    rows: it is for rows, which it may pool.
    """
    with connected(at, ANSWER_S) as client:
        if client.exists(f"{at.name}/saving"):
            raise EngineError("the model there is not complete: it is being saved, or its save was killed")
        if not client.exists(f"{at.name}/files/config.json"):
            raise EngineError(f"there is no model: no key {at.name}/files/config.json")
        # Rerankers have such a list, too.
        if rows and b"Pooling" in (client.get(f"{at.name}/files/modules.json") or b""):
            raise EngineError("its modules.json names folders, which SGLang does not read from Redis; load it from a folder")


def refuse_large(at: RedisUrl, tensors: Mapping[str, int]) -> None:
    """Raise ValueError for a tensor of so many bytes that no value can have: Redis would end the connection."""
    client = connected(at, ANSWER_S)
    try:
        limit = int(client.config_get("proto-max-bulk-len")["proto-max-bulk-len"])
    except Exception:  # it does not tell, or another error will
        return
    finally:
        client.close()
    for name, nbytes in tensors.items():
        if nbytes + _HEADER_BYTES > limit:
            raise ValueError(
                f"not saved: {name} has {nbytes} bytes, and this Redis takes {limit}: raise its proto-max-bulk-len"
            )


class NewModel:
    """A name without keys, which is this one's until it is complete.

    Args:
        url: as it was asked for; `at` are its parts.

    Raises EngineError: there are keys already, it is being saved, or Redis does not answer.
    """

    def __init__(self, url: str, at: RedisUrl) -> None:
        self.place, self._name = url, at.name
        self._redis = connected(at, ANSWER_S)
        #: the process that has set this key writes the others; it is gone when they are complete
        self._claim, self._token = f"{at.name}/saving", secrets.token_hex(8).encode()
        self._record = f"{at.name}/files/{RECORD}"
        with redis_errors(url):
            if not self._redis.set(self._claim, self._token, nx=True):
                raise EngineError(f"{url}: is being saved, or its save was killed: use another name, or remove its keys")
            exists = True
            try:
                exists = next(self._keys(), None) is not None
            finally:
                if exists:  # or that is not known
                    self._redis.delete(self._claim)
            if exists:
                raise EngineError(f"{url}: exists already; use a new name")

    def _keys(self) -> Iterator[bytes]:
        for kind in ("keys", "files"):
            yield from self._redis.scan_iter(match=f"{self._name}/{kind}/*", count=_KEYS)

    def complete(self, files: Iterable[tuple[str, bytes]], record: bytes) -> str:
        """Add `files`, and last the content of `RECORD`. Returns how much there is, for the answer. Raises EngineError."""
        left: list[str] = []
        with redis_errors(self.place):
            for file, content in files:
                if "/" not in file and _is_text(content):
                    self._redis.set(f"{self._name}/files/{file}", content)
                else:
                    left.append(file)
            count = len({*self._keys()}) + 1  # Redis may tell a key twice
            with self._redis.pipeline() as last:
                last.watch(self._claim)
                if last.get(self._claim) != self._token:
                    raise EngineError(f"{self.place}: Redis has lost keys meanwhile; save again")
                last.multi()
                last.set(self._record, record)
                last.delete(self._claim)
                last.execute()
        self._token = b""
        return f"{count} keys" + (f"; without {', '.join(sorted(left))}, which SGLang reads from folders alone" if left else "")

    def close(self) -> None:
        """Remove the keys, unless they are complete. Where Redis is gone, they stay, and the name is refused."""
        with contextlib.suppress(Exception):
            claimed = self._redis.get(self._claim) if self._token else b""
            # Without a claim, Redis has lost it, or another process has completed a model of this name since.
            if self._token and (claimed == self._token or (claimed is None and not self._redis.exists(self._record))):
                keys = self._keys()
                while some := list(itertools.islice(keys, _KEYS)):
                    self._redis.delete(*some)
                self._redis.delete(self._claim)
        self._redis.close()


def files_of(at: RedisUrl) -> Iterator[tuple[str, bytes]]:
    """The files of a model in Redis. Raises EngineError."""
    client, prefix = connected(at, ANSWER_S), f"{at.name}/files/"
    with redis_errors(prefix), client:
        for key in list(client.scan_iter(match=f"{prefix}*", count=_KEYS)):
            yield key.decode().removeprefix(prefix), client.get(key)


def _is_text(content: bytes) -> bool:
    """Whether SGLang can read it from Redis."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
