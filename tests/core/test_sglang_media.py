"""What a worker does with media before SGLang has them: room for images, and errors that an answer has room for."""

import asyncio
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from enginepool.workers.engine import EngineError
from enginepool.workers.room import SharedRoom
from enginepool.workers.sglang.generate.media import can_decode, media_error
from enginepool.workers.sglang.generate.video import MAX_FRAMES, VideoThread, bound_frames, refuse_others


def test_images_wait_for_room_in_their_order_and_one_that_is_larger_than_all_room_runs_alone() -> None:
    async def scene() -> None:
        room, took = SharedRoom(10), list[str]()

        async def take(name: str, pixels: int) -> None:
            await room.take(pixels)
            took.append(name)

        first = await room.take(8)
        waiting = [asyncio.create_task(take(*one)) for one in (("large", 99), ("small", 1))]
        await asyncio.sleep(0)
        assert not took  # the small one would fit
        first.shrink(9)
        first.give_back()
        first.give_back()
        await asyncio.wait(waiting[:1])
        assert took == ["large"] and room.free == 0
        waiting[1].cancel()
        await asyncio.wait(waiting)
        room.add(10)
        assert room.free == 10  # one that was cancelled has none

    asyncio.run(scene())


def test_media_of_a_higher_priority_get_room_first() -> None:
    async def scene() -> None:
        room, took = SharedRoom(10), list[str]()

        async def take(name: str, priority: int) -> None:
            held = await room.take(6, priority)
            took.append(name)
            held.give_back()

        first = await room.take(10)
        waiting = [asyncio.create_task(take(*one)) for one in (("low", 0), ("low", 0), ("high", 1))]
        await asyncio.sleep(0)
        first.give_back()
        await asyncio.wait(waiting)
        assert took == ["high", "low", "low"] and room.free == 10

    asyncio.run(scene())


def test_an_error_of_sglang_is_told_without_the_bytes_that_it_repeats() -> None:
    text = (
        "An exception occurred while loading IMAGE data at index 1: Error while loading data b'\\x89PNG...: image is truncated"
    )
    assert media_error(text) == "image 1: image is truncated"
    assert media_error("no room") == "no room"


class Decoder:
    """As SGLang's decoder of a video."""

    def __init__(self, height: int, width: int) -> None:
        self._frame = np.zeros((height, width, 3), np.uint8)

    def __getitem__(self, index: int) -> Any:
        return self._frame

    def get_frames_at(self, indices: list[int]) -> int:
        return len(indices)

    def get_frames_as_tensor(self, indices: list[int]) -> int:
        return len(indices)


class NewerDecoder(Decoder):
    @property
    def frame_shape(self) -> tuple[int, int]:
        return self._frame.shape[:2]


@pytest.mark.parametrize("kind", [Decoder, NewerDecoder])
def test_frames_of_the_videos_of_one_prompt_have_a_bound_together(kind: type[Decoder]) -> None:
    # Classes of this test's own, which are changed.
    decoder = type("Bounded", (kind,), {name: vars(Decoder)[name] for name in ("get_frames_at", "get_frames_as_tensor")})
    bound_frames(decoder)
    bound_frames(decoder)
    small, large = decoder(2, 2), decoder(1080, 1920)

    async def prompt(*videos: tuple[Any, int]) -> list[int]:
        found = [video.get_frames_at([*range(count)]) for video, count in videos[:1]]
        return found + [video.get_frames_as_tensor([*range(count)]) for video, count in videos[1:]]

    async def scene() -> None:
        thread = VideoThread()
        assert await thread.run(partial(prompt, (small, MAX_FRAMES - 1), (small, 1))) == [MAX_FRAMES - 1, 1]
        with pytest.raises(ValueError, match=f"^video: 1025 frames with 4100 pixels of one prompt; at most {MAX_FRAMES} with"):
            await thread.run(partial(prompt, (small, MAX_FRAMES), (small, 1)))
        assert await thread.run(partial(prompt, (large, 258))) == [258]
        with pytest.raises(
            ValueError, match=f"259 frames with {259 * 1080 * 1920} pixels of one prompt; at most .* with {1 << 29}"
        ):
            await thread.run(partial(prompt, (large, 129), (large, 130)))
        # On a thread of SGLang's own, which serves many prompts, each video has the bounds.
        for _ in range(2):
            assert large.get_frames_at([*range(258)]) == 258
        with pytest.raises(ValueError, match="259 frames"):
            large.get_frames_at([*range(259)])

    asyncio.run(scene())


def test_prompts_with_videos_run_one_after_another_while_the_event_loop_goes_on() -> None:
    async def scene() -> None:
        thread, order, go_on = VideoThread(), list[str](), threading.Event()

        async def first() -> None:
            go_on.wait()  # as SGLang waits for frames
            await asyncio.sleep(0)
            order.append("first")

        async def second() -> None:
            order.append("second")

        running = [asyncio.create_task(thread.run(work)) for work in (first, second)]
        await asyncio.sleep(0)
        order.append("the event loop")
        go_on.set()
        await asyncio.gather(*running)
        assert order == ["the event loop", "first", "second"]

    asyncio.run(scene())


def test_only_containers_that_name_no_other_files_are_taken_for_videos() -> None:
    refuse_others([b"\0\0\0\x18ftypmp42", b"\x1aE\xdf\xa3\x9f", b"RIFF\0\0\0\0AVI LIST"])
    for data in (b"", b"#EXTM3U\nfile:///etc/passwd", b"ffconcat version 1.0", b"#EXTM3U\nAVI ", b"RIFF\0\0\0\0WAVE"):
        with pytest.raises(EngineError, match=r"^video 1: it cannot be read as MP4, MOV, WebM, Matroska or AVI$"):
            refuse_others([b"RIFF\0\0\0\0AVI ", data])


class Torchcodec:
    """torchcodec.decoders, which some releases can be imported without FFmpeg and then not used."""

    def __init__(self, *, ffmpeg: bool) -> None:
        self._ffmpeg = ffmpeg

    def AudioDecoder(self, data: bytes) -> None:
        assert data.startswith(b"RIFF")
        if not self._ffmpeg:
            raise RuntimeError("Could not load libtorchcodec")


TORCHCODEC = "torchcodec.decoders"
NO_FFMPEG, NO_CUDA = RuntimeError("Could not load libtorchcodec"), OSError("libnvrtc.so.13: cannot open shared object file")
WHOLE, BARE = Torchcodec(ffmpeg=True), Torchcodec(ffmpeg=False)


@pytest.mark.parametrize(
    ("installed", "kinds"),
    [
        ({}, ["image"]),
        ({TORCHCODEC: NO_FFMPEG}, ["image"]),
        ({TORCHCODEC: NO_CUDA, "decord": None}, ["image", "video"]),
        ({TORCHCODEC: WHOLE}, ["image", "video"]),
        ({TORCHCODEC: WHOLE, "soundfile": None}, ["image", "video", "audio"]),
        ({TORCHCODEC: BARE, "decord": None, "soundfile": None}, ["image"]),
        ({TORCHCODEC: BARE, "soundfile": None, "torchaudio": None}, ["image", "audio"]),
        ({"soundfile": None}, ["image"]),
        ({"soundfile": None, "torchaudio": None}, ["image", "audio"]),
        ({"soundfile": None, "torchaudio": NO_CUDA}, ["image"]),
    ],
)
def test_a_kind_is_taken_if_its_decoder_can_be_used(
    installed: dict[str, Any], kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        found = installed.get(name, ImportError(name))
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("importlib.import_module", load)
    assert [kind for kind in ("image", "video", "audio") if can_decode(kind)] == kinds
