"""Videos of prompts: SGLang decodes them on a thread of their own, one prompt after another, within bounds. No SGLang here.

SGLang decodes the frames that a model takes in the event loop. That is the worker's, and all its sequences would wait. It
decodes frames of any size: those of a video of a few kilobytes may be gigabytes. And FFmpeg takes a playlist for a video,
and opens the files and URLs that it names.
"""

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from enginepool.workers.engine import EngineError

#: Frames that are decoded for one prompt, and their pixels: 3 bytes each.
MAX_FRAMES, MAX_FRAME_PIXELS = 1024, 1 << 29
#: How files of the containers begin that name no others: MP4 and MOV, WebM and Matroska, AVI.
_HEADS = re.compile(rb"\0...ftyp|\x1aE\xdf\xa3|RIFF....AVI ", re.DOTALL)
#: those of the prompt at hand so far; None on threads that do not know of it, where each call has the bounds
_decoded: ContextVar[list[int] | None] = ContextVar("decoded", default=None)


def refuse_others(videos: Sequence[bytes]) -> None:
    """Raise EngineError for what is not in one of the containers."""
    for i, data in enumerate(videos):
        if _HEADS.match(data) is None:
            raise EngineError(f"video {i}: it cannot be read as MP4, MOV, WebM, Matroska or AVI")


def bound_frames(decoder: Any) -> None:
    """Have SGLang's decoder refuse more frames, or larger ones, than the prompt at hand may have. `decoder` is SGLang's class.
    Idempotent."""
    for name in ("get_frames_at", "get_frames_as_tensor"):
        if not hasattr(get := getattr(decoder, name), "__wrapped__"):
            setattr(decoder, name, _bounded(get))


def _bounded(get: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get)
    def bounded(self: Any, indices: Sequence[int]) -> Any:
        height, width = getattr(self, "frame_shape", None) or self[0].shape[-3:-1]
        before = _decoded.get()
        frames, pixels = before or (0, 0)
        frames, pixels = frames + len(indices), pixels + len(indices) * height * width
        if frames > MAX_FRAMES or pixels > MAX_FRAME_PIXELS:
            found = f"{frames} frames with {pixels} pixels of one prompt"
            raise ValueError(f"video: {found}; at most {MAX_FRAMES} with {MAX_FRAME_PIXELS}")
        if before is not None:
            before[:] = frames, pixels
        return get(self, indices)

    return bounded


class VideoThread:
    """Runs what SGLang does with a prompt that has videos."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "video")

    async def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """What the coroutine that `work` makes returns or raises, in an event loop of its own."""

        async def whole() -> Any:
            _decoded.set([0, 0])
            return await work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: asyncio.run(whole()))
