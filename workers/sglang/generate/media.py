"""Images, videos and audio through SGLang: which a model takes, and what is refused before SGLang decodes it. No SGLang here.

SGLang decodes media on threads of this process, and a medium that it cannot decode fails its request alone. What is checked
here it would do without a word: decode an image of any size, run Ghostscript for one format, leave out a medium for which the
prompt has no placeholder, or the end of a clip that the model takes the beginning of.
"""

import asyncio
import importlib
import io
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, TaskMedium
from enginepool.workers.log import say
from enginepool.workers.sglang.generate.audio import LIBRARY, MAX_SAMPLES, count_samples, decode, wav
from enginepool.workers.sglang.generate.video import VideoThread, refuse_others
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.tokenizer import tokenizer_of

#: Pixels of an image: 3 bytes each, once it is decoded.
MAX_PIXELS = 1 << 26
#: Pixels of the images of one prompt.
PROMPT_PIXELS = 4 * MAX_PIXELS
#: Bytes of what is decoded and not yet computed, of all sequences; one prompt may have all of them.
ROOM_BYTES = 3 * PROMPT_PIXELS
#: Bytes that a sample takes, as it is decoded here, by SGLang, and resampled.
SAMPLE_BYTES = ROOM_BYTES // MAX_SAMPLES
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
#: Models that take the beginning of a clip: SGLang leaves the rest out, or its scheduler ends with a longer one.
_WINDOWED = ("Qwen2AudioForConditionalGeneration",)
_TORCHCODEC = "torchcodec.decoders"
#: pixels of each side of the image by which a processor is asked
_PROBE = 224
#: what SGLang says of a medium that it cannot load, and which one it is
_LOADING = re.compile(r"loading (\w+) data at index (\d+)")


def media_features(tm: Any) -> tuple[str, ...]:
    """The kinds of media that the model takes, and that can be decoded here.

    Args:
        tm: SGLang's tokenizer manager.
    """
    if tm.mm_processor is None:
        return ()
    config, tokens = tm.model_config, getattr(tm.mm_processor, "mm_tokens", None)
    takes = {
        "image": config.is_image_understandable_model,
        "video": getattr(tokens, "video_token_id", None) is not None,
        "audio": config.is_audio_understandable_model,
    }
    return tuple(kind for kind, taken in takes.items() if taken and can_decode(kind))


def can_decode(kind: str) -> bool:
    """Whether media of this kind can be decoded here, by SGLang; audio is decoded for it before, and resampled by it."""
    if kind == "image":
        return True
    if kind == "audio":
        return _loads(LIBRARY) and (_loads("torchaudio") or _torchcodec_decodes())
    # SGLang takes the other one only if this one cannot be imported.
    return _torchcodec_decodes() if _loads(_TORCHCODEC) else _loads("decord")


def _torchcodec_decodes() -> bool:
    """It is installed with SGLang. Some releases cannot be imported without the libraries of FFmpeg, and others cannot be
    used."""
    try:
        importlib.import_module(_TORCHCODEC).AudioDecoder(wav(np.zeros((1600, 1), np.float32), 16_000))
    except Exception:
        # It is not installed, or what it raises where FFmpeg's libraries are missing: that depends on its release.
        return False
    return True


def _loads(module: str) -> bool:
    """Whether a module can be imported, with the libraries that it needs."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def refuse_untaken(media: Sequence[TaskMedium], can: Capabilities) -> None:
    """Raise EngineError for media that this engine does not take."""
    for one in media:
        if one.kind not in can.features:
            raise EngineError(f"media: this engine takes no {one.kind}")


def longest_clip(tm: Any) -> float:
    """Seconds of audio that the model takes of a clip.

    Args:
        tm: SGLang's tokenizer manager.
    """
    if not {*tm.model_config.hf_config.architectures} & {*_WINDOWED}:
        return math.inf
    return float(tm.mm_processor._processor.feature_extractor.chunk_length)


async def decoded_bytes(media: Sequence[TaskMedium], longest_s: float) -> int:
    """What images and audio take once they are decoded, by what their bytes say at their beginning. Raises EngineError: a
    medium is too large or too long, or none."""
    images, clips, videos = ([one.data for one in media if one.kind == kind] for kind in ("image", "audio", "video"))
    refuse_others(videos)

    def found() -> int:
        pixels = sum(_pixels(i, data) for i, data in enumerate(images))
        if pixels > PROMPT_PIXELS:
            raise EngineError(f"images: {pixels} pixels of one prompt; at most {PROMPT_PIXELS}")
        return 3 * pixels + SAMPLE_BYTES * count_samples(clips, longest_s)

    return await asyncio.to_thread(found) if images or clips else 0


async def plain(media: Sequence[TaskMedium]) -> Sequence[TaskMedium]:
    """The same media with audio as plain samples. Raises EngineError: a clip cannot be decoded."""
    clips = [place for place, one in enumerate(media) if one.kind == "audio"]
    found = list(media)
    for i, place in enumerate(clips):
        found[place] = TaskMedium("audio", "bytes", await asyncio.to_thread(decode, i, media[place].data))
    return found


def _pixels(i: int, data: bytes) -> int:
    library: Any = importlib.import_module("PIL.Image")
    try:
        with library.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except library.DecompressionBombError:
        raise EngineError(f"image {i}: too many pixels; at most {MAX_PIXELS}") from None
    except Exception as error:  # decoders of formats raise what they like
        raise EngineError(f"image {i}: it cannot be read as {', '.join(FORMATS)}") from error
    if width * height > MAX_PIXELS:
        raise EngineError(f"image {i}: {width} × {height} pixels; at most {MAX_PIXELS}")
    return width * height


def check_expanded(processor: Any, context: int) -> None:
    """Have SGLang's processor of a model refuse media for which the prompt has no placeholder, which it would leave out, and
    prompts that are longer with their media than an engine of this context takes."""
    process, videos = processor.process_mm_data_async, VideoThread()

    async def checked(*args: Any, **kwargs: Any) -> Any:
        asked, work = kwargs["request_obj"], partial(process, *args, **kwargs)
        found = await (videos.run(work) if asked.video_data else work())
        items: list[Any] = [] if found is None else found.mm_items
        for kind, given in (("image", asked.image_data), ("video", asked.video_data), ("audio", asked.audio_data)):
            # An item may stand for several, of which each has a place in the prompt.
            places = [item.offsets for item in items if item.modality.name.lower() == kind]
            count = sum(1 if one is None else len(one) for one in places)
            if count < len(given or ()):
                raise ValueError(f"{kind}: {len(given)} given, and the prompt has placeholders for {count}")
        tokens, new = len(getattr(found, "input_ids", None) or ()), asked.sampling_params["max_new_tokens"]
        if tokens + new > context:
            raise ValueError(f"{tokens} tokens with media, and max_new_tokens = {new}; at most {context} together")
        _share_lengths([item for item in items if item.modality.name == "AUDIO"])
        return found

    processor.process_mm_data_async = checked


def _share_lengths(clips: Sequence[Any]) -> None:
    """SGLang's processor of Qwen2-Audio gives the first clip the lengths of all, and its scheduler ends if another has none."""
    lengths = getattr(clips[0], "audio_feature_lens", None) if len(clips) > 1 else None
    if lengths is not None and len(lengths) == len(clips) and not hasattr(clips[1], "audio_feature_lens"):
        for clip, length in zip(clips, lengths.split(1), strict=True):
            clip.audio_feature_lens = length


async def keeps_ids(tm: Any, requests: Any) -> bool:
    """Whether SGLang's processor of the model keeps the token ids around an image as they are given. Some make text of them,
    and ids of that: another engine would not go on after the tokens that a sequence has.

    Args:
        tm: SGLang's tokenizer manager.
        requests: SGLang's module of request classes.
    """
    tokenizer, text = tokenizer_of(tm), getattr(getattr(tm.mm_processor, "mm_tokens", None), "image_token", None)
    if tokenizer is None or not isinstance(text, str):
        return False
    # One id for each character: of the text of them, a tokenizer makes fewer.
    letters = [token for letter in " the other" for token in tokenizer.encode(letter, add_special_tokens=False)]
    library, file = importlib.import_module("PIL.Image"), io.BytesIO()
    library.new("RGB", (_PROBE, _PROBE)).save(file, "PNG")
    image, placeholder = [file.getvalue()], tokenizer.encode(text, add_special_tokens=False)
    ids = [*letters, *placeholder, *letters]
    asked = requests.GenerateReqInput(input_ids=ids, image_data=image, sampling_params={"max_new_tokens": 1}, rid="probe")
    try:
        found = await tm.mm_processor.process_mm_data_async(
            image_data=image, audio_data=None, input_text=ids, request_obj=asked, max_req_input_len=tm.max_req_input_len
        )
    except Exception as error:  # processors raise what they like; then images are refused later, with the reason
        say(f"whether the model keeps token ids around images is not known: {one_line(error)}")
        return False
    kept = None if found is None or found.input_ids is None else list(found.input_ids)
    return kept is not None and kept[: len(letters)] == letters == kept[-len(letters) :]


def media_error(text: str) -> str:
    """What SGLang says of media, as short as an answer has room for: it repeats their bytes."""
    loading = _LOADING.search(text)
    return text if loading is None else f"{loading[1].lower()} {loading[2]}: {text.rpartition(': ')[2]}"
