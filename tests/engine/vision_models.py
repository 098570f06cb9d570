"""A tiny random checkpoint that takes images, and what `transformers` generates with it."""

import ctypes
import importlib
import io
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from enginepool.cli import tiny_model_files as tiny
from enginepool.workers import cpu_bridge

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


class VisionReference:
    """`transformers` in float32."""

    def __init__(self, folder: Path, placeholder: Sequence[int]) -> None:
        cpu_bridge.install()
        library: Any = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        self._model = library.Qwen2VLForConditionalGeneration.from_pretrained(folder).float().eval()
        self._images = library.Qwen2VLImageProcessorPil.from_pretrained(folder)
        self._image = placeholder[1]

    @contextmanager
    def holding(self, weights: Mapping[str, Any]) -> Generator[None]:
        """Compute with other weights, by the names of the checkpoint, for as long as the block runs."""
        own = self._model
        if weights:
            library: Any = importlib.import_module("transformers")
            made = library.Qwen2VLForConditionalGeneration
            self._model = made.from_pretrained(None, config=own.config, state_dict=dict(weights)).float().eval()
        try:
            yield
        finally:
            self._model = own

    def expanded(self, prompt: Sequence[int], images: Sequence[bytes]) -> tuple[list[int], dict[str, Any]]:
        """A prompt with as many tokens for each image as it takes, and what the model is given besides."""
        library: Any = importlib.import_module("PIL.Image")
        if not images:
            return list(prompt), {}
        opened = [library.open(io.BytesIO(image)).convert("RGB") for image in images]
        given = dict(self._images(images=opened, return_tensors="pt"))
        counts = iter((given["image_grid_thw"].prod(dim=1) // 4).tolist())
        ids: list[int] = []
        for token in prompt:
            ids += [token] * next(counts) if token == self._image else [token]
        return ids, given

    def greedy(self, prompt: Sequence[int], images: Sequence[bytes], count: int) -> list[int]:
        """The likeliest tokens after a prompt, each after those before it."""
        ids, given = self.expanded(prompt, images)
        first = len(ids)
        with self._torch.no_grad():
            for _ in range(count):
                row = self._torch.tensor([ids])
                types = {"mm_token_type_ids": (row == self._image).int()} if images else {}
                ids.append(int(self._model(input_ids=row, **given, **types).logits[0, -1].argmax()))
        return ids[first:]
