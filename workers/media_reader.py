"""Media that a request names by URL or by path: their bytes, where the group allows it.

What a client names may be a service inside the network, or a file of this host. So only URLs under a prefix of `media_urls` are
fetched, without redirects, and only files under `media_root` are opened, once symbolic links are resolved.
"""

import asyncio
import http.client
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from enginepool.net.media_urls import is_allowed
from enginepool.protocol.messages import MAX_MEDIUM_BYTES
from enginepool.workers.engine import EngineError, TaskMedium
from enginepool.workers.room import SharedRoom

#: Seconds for one URL, and for each wait for its bytes.
FETCH_S, SILENCE_S = 20.0, 10.0
#: How many are read at once.
THREADS = 8
#: Bytes that were read for one prompt, and for all sequences that run.
PROMPT_BYTES, HELD_BYTES = 256 << 20, 1 << 30
_PIECE = 1 << 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Where a server points to was not allowed by anyone."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """None: the answer is an error."""


class MediaReader:
    """Reads media on threads of its own.

    Args:
        root: the folder under which paths lie; "": none is read.
        urls: prefixes of the URLs that are fetched.
    """

    def __init__(self, root: str, urls: Sequence[str]) -> None:
        self._root = os.path.realpath(os.path.expanduser(root)) if root else ""
        self._urls = tuple(urls)
        self._room = SharedRoom(HELD_BYTES)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media")

    @property
    def features(self) -> tuple[str, ...]:
        """What it can read, as `Capabilities.features` calls it."""
        return tuple(name for name, allowed in (("media_url", self._urls), ("media_path", self._root)) if allowed)

    @asynccontextmanager
    async def reading(self, media: Sequence[TaskMedium]) -> AsyncGenerator[tuple[TaskMedium, ...]]:
        """The same media with their bytes, for which there is room meanwhile. Raises EngineError: one cannot be read."""
        named = [place for place, one in enumerate(media) if one.source != "bytes"]
        # All at once: two prompts that wait for more, and give nothing back meanwhile, would wait for each other.
        held = await self._room.take(min(len(named) * MAX_MEDIUM_BYTES, PROMPT_BYTES))
        try:
            read = await self._read_all(media, named)
            total = sum(map(len, read))
            if total > PROMPT_BYTES:
                raise EngineError(f"media: {total} bytes of URLs and paths of one prompt; at most {PROMPT_BYTES}")
            held.shrink(total)
            found = list(media)
            for place, data in zip(named, read, strict=True):
                found[place] = TaskMedium(media[place].kind, "bytes", data)
            yield tuple(found)
        finally:
            held.give_back()

    async def _read_all(self, media: Sequence[TaskMedium], named: Sequence[int]) -> list[bytes]:
        most = FETCH_S * (1 + len(named))
        try:
            async with asyncio.timeout(most):
                return await asyncio.gather(*(self._read(place, media[place]) for place in named))
        except TimeoutError:
            raise EngineError(f"media: URLs and paths of one prompt were not read within {most:g} s") from None

    async def _read(self, place: int, medium: TaskMedium) -> bytes:
        name, read = str(medium.data, "utf-8"), self._fetch if medium.source == "url" else self._open
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read, name)
        except EngineError as error:
            raise EngineError(f"{medium.kind} {place}: {error}") from None

    def _fetch(self, url: str) -> bytes:
        if not is_allowed(url, self._urls):
            raise EngineError("its URL is not under media_urls of the group")
        end = time.monotonic() + FETCH_S
        try:
            with urllib.request.build_opener(_NoRedirects).open(url, timeout=SILENCE_S) as answer:
                return _pieces(answer.read1, end)
        except urllib.error.HTTPError as error:
            error.close()
            why = ", and redirects are not followed" if 300 <= error.code < 400 else ""
            raise EngineError(f"the server of its URL answered {error.code}{why}") from None
        except urllib.error.URLError as error:
            raise EngineError(f"its URL cannot be fetched: {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise EngineError(f"its URL cannot be fetched: {type(error).__name__}") from None

    def _open(self, path: str) -> bytes:
        """A file. What is elsewhere is not told from what does not exist."""
        missing = EngineError("no file of its path under media_root of the group")
        try:
            real = os.path.realpath(os.path.join(self._root, path))
            if not self._is_under_root(real):
                raise missing
            file = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise missing from None
        try:
            # Of what was opened: a folder may have become a link since it was looked at.
            if not self._is_under_root(os.readlink(f"/proc/self/fd/{file}")) or not stat.S_ISREG(os.fstat(file).st_mode):
                raise missing
            return _pieces(partial(os.read, file), time.monotonic() + FETCH_S)
        except OSError as error:
            raise EngineError(f"its file cannot be read: {error.strerror}") from None
        finally:
            os.close(file)

    def _is_under_root(self, path: str) -> bool:
        return bool(self._root) and path.startswith(self._root.rstrip("/") + "/")


def _pieces(read: Callable[[int], bytes], end: float) -> bytes:
    """All that there is, until this time. Raises EngineError, OSError."""
    data = bytearray()
    while piece := read(_PIECE):
        data += piece
        if len(data) > MAX_MEDIUM_BYTES:
            raise EngineError(f"more than {MAX_MEDIUM_BYTES} bytes")
        if time.monotonic() > end:
            raise EngineError(f"not read within {FETCH_S:g} s")
    if not data:
        raise EngineError("no bytes")
    return bytes(data)
