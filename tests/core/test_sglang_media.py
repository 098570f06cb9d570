"""What a worker does with media before SGLang has them: room for images, and errors that an answer has room for."""

import asyncio
from typing import Any

import pytest

from enginepool.workers.room import SharedRoom
from enginepool.workers.sglang.generate.media import can_decode, media_error


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
        assert not room._turn.locked()  # pyright: ignore[reportPrivateUsage]

    asyncio.run(scene())


def test_an_error_of_sglang_is_told_without_the_bytes_that_it_repeats() -> None:
    text = (
        "An exception occurred while loading IMAGE data at index 1: Error while loading data b'\\x89PNG...: image is truncated"
    )
    assert media_error(text) == "image 1: image is truncated"
    assert media_error("no room") == "no room"


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
