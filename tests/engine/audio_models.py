"""A tiny random checkpoint that takes audio, and what `transformers` generates with it."""

import importlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginepool.cli import tiny_model_files as tiny
from enginepool.workers import cpu_bridge
from tests.engine.media_reference import MediaReference

SPECIAL = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
CONTEXT, VOCAB = 1024, 512
#: samples of a second, and of what the encoder hears at once: this many seconds
RATE, WINDOW_S = 16_000, 2


def make_audio_model(folder: Path) -> list[int]:
    """Write a checkpoint of Qwen2-Audio; the token ids that stand for a clip in a prompt."""
    cpu_bridge.install()
    torch, transformers, tokenizers = map(importlib.import_module, ("torch", "transformers", "tokenizers"))
    library: Any = transformers
    core = tiny._tokenizer(tokenizers)  # pyright: ignore[reportPrivateUsage]
    core.add_special_tokens(list(SPECIAL))
    start, end, audio = map(core.token_to_id, SPECIAL)
    text: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": core.token_to_id(tiny.EOS), "pad_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    encoder: dict[str, Any] = {
        "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "d_model": 32,
        "max_source_positions": 50 * WINDOW_S, "initializer_range": 0.3,
    }  # fmt: skip
    config = library.Qwen2AudioConfig(audio_config=encoder, text_config=text, audio_token_index=audio)
    torch.manual_seed(0)  # type: ignore[attr-defined]
    library.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    _rename_as_published(folder / "model.safetensors")
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=tiny.EOS, pad_token=tiny.EOS, model_max_length=CONTEXT
    )
    sounds = library.WhisperFeatureExtractor(feature_size=16, sampling_rate=RATE, chunk_length=WINDOW_S)
    library.Qwen2AudioProcessor(feature_extractor=sounds, tokenizer=tokenizer).save_pretrained(folder)
    return [start, audio, end]


def _rename_as_published(file: Path) -> None:
    """transformers writes other names than those that it reads, and that published checkpoints have."""
    library: Any = importlib.import_module("safetensors.torch")
    tensors = library.load_file(str(file))
    names = {name: name.replace("language_model.model.model.", "language_model.model.") for name in tensors}
    library.save_file({names[name]: tensor for name, tensor in tensors.items()}, str(file), metadata={"format": "pt"})


def clip(seconds: float, hertz: float = 440.0, form: str = "WAV", rate: int = RATE, channels: int = 1) -> bytes:
    """A file with a tone that is louder and louder, in noise."""
    library: Any = importlib.import_module("soundfile")
    times = np.arange(round(seconds * rate))[:, None] / rate
    noise = np.random.default_rng(0).uniform(-0.05, 0.05, (len(times), channels))
    file = io.BytesIO()
    library.write(file, 0.4 * times / max(seconds, 1) * np.sin(2 * np.pi * hertz * times) + noise, rate, format=form)
    return file.getvalue()


def _heard(samples: Any, rate: int) -> Any:
    """One channel, at the rate of the model."""
    library, torch = importlib.import_module("torchaudio"), importlib.import_module("torch")
    return library.functional.resample(torch.from_numpy(samples.mean(axis=1)), rate, RATE).numpy()


class AudioReference(MediaReference):
    """A Qwen2-Audio."""

    def __init__(self, folder: Path, placeholder: Sequence[int]) -> None:
        super().__init__("Qwen2AudioForConditionalGeneration", folder)
        self._sounds = self._library.WhisperFeatureExtractor.from_pretrained(folder)
        self._audio = placeholder[1]

    def _ready(self, model: Any) -> Any:
        """The model, whose encoder attends to the silence after a clip, as SGLang's does. For a clip that is as long as the
        encoder hears there is none, and this changes nothing."""
        tower = super()._ready(model).model.audio_tower
        forward = tower.forward

        def attending(features: Any, attention_mask: Any = None, **others: Any) -> Any:
            return forward(features, **others)

        tower.forward = attending
        return model

    def expanded(self, prompt: Sequence[int], clips: Sequence[bytes]) -> tuple[list[int], dict[str, Any]]:
        """A prompt with as many tokens for each clip as it takes, and what the model is given besides."""
        library: Any = importlib.import_module("soundfile")
        if not clips:
            return list(prompt), {}
        samples = [_heard(*library.read(io.BytesIO(one), dtype="float32", always_2d=True)) for one in clips]
        found = self._sounds(samples, sampling_rate=RATE, padding="max_length", return_attention_mask=True, return_tensors="pt")
        frames = found["attention_mask"].sum(-1).tolist()
        counts = iter([((count - 1) // 2 - 1) // 2 + 1 for count in frames])
        ids: list[int] = []
        for token in prompt:
            ids += [token] * next(counts) if token == self._audio else [token]
        return ids, {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}

    def greedy(self, prompt: Sequence[int], clips: Sequence[bytes], count: int) -> list[int]:
        """The likeliest tokens after a prompt, each after those before it."""
        ids, given = self.expanded(prompt, clips)
        with self._torch.no_grad():
            row = self._torch.tensor([ids])
            given |= {"attention_mask": self._torch.ones_like(row), "pad_token_id": 0}
            found = self._model.generate(input_ids=row, **given, do_sample=False, min_new_tokens=count, max_new_tokens=count)
        return found[0, len(ids) :].tolist()
