"""A tiny random checkpoint that takes images, and what `transformers` generates with it."""

import ctypes
import importlib
import io
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginepool.cli import tiny_model_files as tiny
from enginepool.workers import cpu_bridge
from tests.engine.media_reference import MediaReference

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CONTEXT, VOCAB = 1024, 512
#: How messages become a prompt, as in Qwen-VL.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _keep_sentencepiece(library: Any) -> None:
    """Its bindings crash when the interpreter ends and frees their table of types; whether it does depends on the order of
    imports. So that table, which they keep in a module of its own, is never freed."""
    assert library.Qwen2VLForConditionalGeneration  # imports them, with some versions
    for name in [name for name in sys.modules if name.startswith("swig_runtime_data")]:
        for value in vars(sys.modules[name]).values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def make_vision_model(folder: Path) -> list[int]:
    """Write a checkpoint of Qwen2-VL; the token ids that stand for an image in a prompt."""
    cpu_bridge.install()
    torch, transformers, tokenizers = map(importlib.import_module, ("torch", "transformers", "tokenizers"))
    library: Any = transformers
    _keep_sentencepiece(library)
    core = tiny._tokenizer(tokenizers)  # pyright: ignore[reportPrivateUsage]
    core.add_special_tokens(list(SPECIAL))
    start, end, image, video = map(core.token_to_id, SPECIAL)
    text: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": core.token_to_id(tiny.EOS), "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "initializer_range": 0.1,
        "in_chans": 3,  # what published checkpoints have, and SGLang reads
    }  # fmt: skip
    config = library.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=video, vision_start_token_id=start,
        vision_end_token_id=end, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)  # type: ignore[attr-defined]
    library.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=tiny.EOS, pad_token=tiny.EOS, model_max_length=CONTEXT,
        extra_special_tokens={"image_token": SPECIAL[2]}, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    images = library.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28)
    videos = library.Qwen2VLVideoProcessor()
    processor = library.Qwen2VLProcessor(
        image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(folder)
    return [start, image, end]


def picture(width: int, height: int, seed: int = 0, form: str = "PNG") -> bytes:
    """A file with an image of noise."""
    library: Any = importlib.import_module("PIL.Image")
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    library.fromarray(pixels).save(file, form)
    return file.getvalue()


def film(frames: Sequence[bytes], copies: int = 2) -> bytes:
    """An AVI file of images of one size, each so many times, two in a second. They are not compressed."""
    opened = [np.asarray(_opened(frame)) for frame in frames]
    height, width, _ = opened[0].shape
    # From the lowest line up, each a multiple of 4 bytes, blue before red.
    lines = [np.pad(one[::-1, :, ::-1].reshape(height, -1), ((0, 0), (0, -width * 3 % 4))).tobytes() for one in opened]
    data = [line for line in lines for _ in range(copies)]
    count, size = len(data), len(data[0])
    head = _chunk(b"avih", struct.pack("<14I", 500_000, 2 * size, 0, 16, count, 0, 1, size, width, height, 0, 0, 0, 0))
    stream = struct.pack("<4s4s10I4H", b"vids", b"DIB ", 0, 0, 0, 1, 2, 0, count, size, 0, 0, 0, 0, width, height)
    pixels = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, size, 0, 0, 0, 0)
    streams = _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", pixels))
    index = b"".join(struct.pack("<4sIII", b"00db", 16, 4 + i * (size + 8), size) for i in range(count))
    body = _chunk(b"LIST", b"movi" + b"".join(_chunk(b"00db", one) for one in data)) + _chunk(b"idx1", index)
    return _chunk(b"RIFF", b"AVI " + _chunk(b"LIST", b"hdrl" + head + streams) + body)


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data


class VisionReference(MediaReference):
    """A Qwen2-VL."""

    def __init__(self, folder: Path, placeholder: Sequence[int]) -> None:
        super().__init__("Qwen2VLForConditionalGeneration", folder)
        library = self._library
        self._images = library.Qwen2VLImageProcessorPil.from_pretrained(folder)
        # What a video processor makes of frames in pairs, if they need not be resized.
        self._frames = library.Qwen2VLImageProcessorPil(max_pixels=1 << 20)
        self._image, self._video = placeholder[1], placeholder[1] + 1

    def expanded(
        self, prompt: Sequence[int], images: Sequence[bytes], videos: Sequence[Sequence[bytes]] = ()
    ) -> tuple[list[int], dict[str, Any]]:
        """A prompt with as many tokens for each image and video as it takes, and what the model is given besides.

        Args:
            videos: of each video its frames, of which the video has each one twice.
        """
        given: dict[str, Any] = {}
        if images:
            given |= self._images(images=[*map(_opened, images)], return_tensors="pt")
        if videos:
            each = [self._frames(images=[*map(_opened, frames)], return_tensors="pt") for frames in videos]
            grids = [[len(one["image_grid_thw"]), *one["image_grid_thw"][0].tolist()[1:]] for one in each]
            given["pixel_values_videos"] = self._torch.cat([one["pixel_values"] for one in each])
            given["video_grid_thw"] = self._torch.tensor(grids)
        kinds = ((self._image, "image_grid_thw"), (self._video, "video_grid_thw"))
        counts = {token: iter((given[grid].prod(dim=1) // 4).tolist()) for token, grid in kinds if grid in given}
        ids: list[int] = []
        for token in prompt:
            ids += [token] * next(counts[token]) if token in counts else [token]
        return ids, given

    def greedy(
        self, prompt: Sequence[int], images: Sequence[bytes], count: int, videos: Sequence[Sequence[bytes]] = ()
    ) -> list[int]:
        """The likeliest tokens after a prompt, each after those before it."""
        ids, given = self.expanded(prompt, images, videos)
        first = len(ids)
        with self._torch.no_grad():
            for _ in range(count):
                row = self._torch.tensor([ids])
                types = {"mm_token_type_ids": (row == self._image).int() + 2 * (row == self._video).int()} if given else {}
                ids.append(int(self._model(input_ids=row, **given, **types).logits[0, -1].argmax()))
        return ids[first:]


def _opened(image: bytes) -> Any:
    library: Any = importlib.import_module("PIL.Image")
    return library.open(io.BytesIO(image)).convert("RGB")
