"""Images of prompts on the real engine: tokens are those of a direct computation, and a bad image harms its caller alone."""

import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from enginepool.workers.engine import GenerationTask, TaskMedium
from enginepool.workers.sglang.generate.media import MAX_PIXELS, PROMPT_PIXELS
from tests.engine.forked import run_code
from tests.engine.hosted import HostedEngine
from tests.engine.test_sglang_generate import ENDLESS, one, refusal, run, task
from tests.engine.test_sglang_scores import declared
from tests.engine.test_sglang_weights import Given, Subject
from tests.engine.vision_models import CONTEXT, SPECIAL, VisionReference, film, make_vision_model, picture

pytestmark = [pytest.mark.engine, pytest.mark.every_version, pytest.mark.timeout(600)]
WIDE, TALL = picture(130, 90), picture(60, 200, seed=1, form="JPEG")
#: the frames of each video, of a size that SGLang does not change
FRAMES = {film(frames): frames for frames in ([picture(336, 308, seed=seed) for seed in seeds] for seeds in ((5, 6), (7, 8)))}
FILM, OTHER = FRAMES
COUNT = 12


#: for what runs through SGLang's decoder
pinned_frames = pytest.mark.skipif(
    "ENGINEPOOL_TEST_OLDEST" in os.environ, reason="needs a CUDA GPU: SGLang 0.5.17 pins the memory of frames"
)


class Vision:
    """An engine of a model that takes images, and the direct computation."""

    def __init__(self, folder: Path) -> None:
        #: the tokens of an image in a prompt
        self.folder, self.image = folder, make_vision_model(folder)
        self.reference = VisionReference(folder, self.image)
        self.engine = HostedEngine(str(folder), operations=("generate",), options={"context_length": CONTEXT})

    def asked(self, *parts: Sequence[int] | bytes, count: int = COUNT, n: int = 1) -> GenerationTask:
        """A task: token ids, images and videos, in their order."""
        start, image, end = self.image
        media = tuple(TaskMedium(kind_of(part), "bytes", part) for part in parts if isinstance(part, bytes))
        ids: list[int] = []
        for part in parts:
            ids += [start, image + (kind_of(part) == "video"), end] if isinstance(part, bytes) else part
        return replace(task(ids, n, max_new_tokens=count, ignore_eos=True), media=media)

    def wanted(self, asked: GenerationTask, weights: Mapping[str, Any] | None = None) -> list[int]:
        """What the model generates, with its own weights or with these."""
        images = [medium.data for medium in asked.media if medium.kind == "image"]
        videos = [FRAMES[medium.data] for medium in asked.media if medium.kind == "video"]
        with self.reference.holding(weights or {}):
            return self.reference.greedy(asked.prompt.tolist(), images, asked.sampling.max_new_tokens, videos)


def kind_of(medium: bytes) -> Literal["image", "video"]:
    return "video" if medium in FRAMES else "image"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vision]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Vision(tmp_path_factory.mktemp("vision"))
        made.engine.wait_until_started()
        yield made
        made.engine.end()


def test_the_engine_says_that_it_takes_images_and_videos_and_keeps_token_ids_around_images(vision: Vision) -> None:
    features = {*declared(vision.engine).features}
    assert features & {"image", "image_ids", "video", "audio"} == {"image", "image_ids", "video"}


def test_tokens_after_images_equal_those_of_transformers(vision: Vision) -> None:
    asked = [
        vision.asked([5, 17, 300], WIDE, [40, 41, 42]),
        vision.asked(WIDE, [7], TALL, [8, 9]),
        vision.asked([11, 12], TALL, n=2),
        vision.asked([5, 17, 300, 40]),
    ]
    found = run(vision.engine, *asked)
    for one_asked, sequences in zip(asked, found, strict=True):
        assert [sequence.tokens for sequence in sequences] == [vision.wanted(one_asked)] * one_asked.n


@pinned_frames
def test_tokens_after_videos_equal_those_of_transformers(vision: Vision) -> None:
    asked = [
        vision.asked([5, 17, 300], FILM, [40, 41, 42], n=2),
        vision.asked(WIDE, [7], OTHER, [8, 9], TALL),
        vision.asked([11], OTHER, [12], FILM),
    ]
    found = run(vision.engine, *asked)
    for one_asked, sequences in zip(asked, found, strict=True):
        assert [sequence.tokens for sequence in sequences] == [vision.wanted(one_asked)] * one_asked.n


def test_the_engine_says_how_many_tokens_a_prompt_has_with_its_images(vision: Vision) -> None:
    asked = vision.asked([5, 17, 300], WIDE, [40], TALL)
    whole, _ = vision.reference.expanded(asked.prompt.tolist(), [WIDE, TALL])
    [emitted] = vision.engine.call("generate", (asked,))
    assert [new.prompt for new in emitted if new.cached is not None] == [len(whole)]
    [emitted] = vision.engine.call("generate", (asked,))
    assert [new.cached for new in emitted if new.cached is not None] == [len(whole) - 1]


def test_a_sequence_goes_on_after_its_tokens_with_its_image(vision: Vision) -> None:
    whole = vision.asked([5, 17, 300], WIDE, [40, 41, 42])
    tokens = vision.wanted(whole)
    rest = vision.asked([5, 17, 300], WIDE, [40, 41, 42, *tokens[:5]], count=COUNT - 5)
    assert one(vision.engine, replace(rest, at=5)).tokens == tokens[5:]


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says that it has so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [struct.pack(">I", 13), header, struct.pack(">I", zlib.crc32(header)), struct.pack(">I", 4), b"IDAT", bytes(8)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_a_bad_medium_is_one_error_to_its_caller_and_others_go_on(vision: Vision, tmp_path: Path) -> None:
    image, no_video = vision.image, "it cannot be read as MP4, MOV, WebM, Matroska or AVI"
    (tmp_path / "secret.avi").write_bytes(FILM)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:2,\nfile://{tmp_path}/secret.avi\n#EXT-X-ENDLIST\n".encode()
    cases = [
        (vision.asked(b"no image", [8]), "image 0: it cannot be read as JPEG, PNG, WEBP, GIF, BMP"),
        (vision.asked(WIDE, b"%!PS-Adobe-3.0 EPSF-3.0\n", [8]), "image 1: it cannot be read as JPEG"),
        (vision.asked(WIDE[:2000], [8]), "truncated"),
        (vision.asked(bomb(100_000, 100_000), [8]), f"image 0: too many pixels; at most {MAX_PIXELS}"),
        (vision.asked(bomb(10_000, 10_000), [8]), f"image 0: 10000 × 10000 pixels; at most {MAX_PIXELS}"),
        (vision.asked(*[bomb(8192, 8192)] * 5), f"images: {5 << 26} pixels of one prompt; at most {PROMPT_PIXELS}"),
        (replace(vision.asked([7, 8]), media=vision.asked(WIDE).media), "1 given, and the prompt has placeholders for 0"),
        (replace(vision.asked([*image, 8]), media=vision.asked(WIDE, TALL).media), "2 given, and the prompt has placeholders"),
        (replace(vision.asked(WIDE, [8]), media=(TaskMedium("audio", "bytes", b"a"),)), "this engine takes no audio"),
        (replace(vision.asked(FILM, [8]), media=(TaskMedium("video", "bytes", b"a"),)), f"video 0: {no_video}"),
        (replace(vision.asked(FILM, [8]), media=(TaskMedium("video", "bytes", playlist),)), f"video 0: {no_video}"),
        (replace(vision.asked(FILM, [8]), media=(TaskMedium("video", "bytes", FILM[:200]),)), "video 0: "),
        (replace(vision.asked([7, 8]), media=vision.asked(FILM).media), "1 given, and the prompt has placeholders for 0"),
        (vision.asked([5], WIDE, count=CONTEXT - 20), "18 tokens with media, and max_new_tokens = 1004; at most 1018 together"),
    ]
    good = vision.asked([5, 17, 300], WIDE, [40, 41, 42])
    for asked, said in cases:
        assert said in refusal(vision.engine, asked)
    assert one(vision.engine, good).tokens == vision.wanted(good)


#: What a worker does before it starts an engine; then a film of four frames.
BOUNDED = """
import sys
from pathlib import Path
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate import video
from enginepool.workers.sglang.host.build import prepare
from sglang.srt.utils.video_decoder import VideoDecoderWrapper

prepare(EngineSettings(model=sys.argv[1], device="cpu", operations=("generate",)))
video.MAX_FRAMES = 3
film = VideoDecoderWrapper(Path(sys.argv[2]).read_bytes())
print(film.get_frames_at([0, 1]).shape)
film.get_frames_at([0, 1, 2, 3])
"""


def test_the_decoder_of_sglang_has_a_bound_of_frames(vision: Vision, tmp_path: Path) -> None:
    (tmp_path / "film.avi").write_bytes(FILM)
    status, said = run_code(BOUNDED, str(vision.folder), str(tmp_path / "film.avi"))
    assert status == 1 and "(2, 308, 336, 3)" in said
    assert f"ValueError: video: 4 frames with {4 * 308 * 336} pixels of one prompt; at most 3 with {1 << 29}" in said


def test_the_placeholder_in_a_text_becomes_its_tokens(vision: Vision) -> None:
    [ids] = vision.engine.call("tokenize", [("", f"See {SPECIAL[0]}{SPECIAL[2]}{SPECIAL[1]}?")])
    at = ids.index(vision.image[0])
    assert ids[at : at + 3] == vision.image


@pytest.mark.parametrize("mode", ["", "in_place", "retract"])
def test_after_new_weights_an_image_is_what_the_new_ones_make_of_it(vision: Vision, tmp_path: Path, mode: str) -> None:
    """SGLang keeps what the encoder made of an image, by the image alone."""
    subject = Subject(vision.engine, vision.folder, tmp_path)
    seen, also = vision.asked([5, 17, 300], WIDE, [40, 41, 42]), vision.asked([11, 12], TALL, count=ENDLESS)
    own, new = Given(tmp_path, subject.own), subject.drawn(3)
    assert one(vision.engine, seen).tokens == vision.wanted(seen)
    if mode:
        emitted, _ = vision.engine.call("pause", (also,), 5, mode, ((new.weights, 1, new.digest, mode),))
        assert sum(len(step.tokens) for step in emitted[0]) >= 10
    else:
        subject.load_weights(new.weights, 1, new.digest)
    for asked in (seen, replace(also, sampling=seen.sampling)):
        assert one(vision.engine, asked).tokens == vision.wanted(asked, new.tensors) != vision.wanted(asked)
    subject.load_weights(own.weights, 2, own.digest)
    assert one(vision.engine, seen).tokens == vision.wanted(seen)
