"""Audio of prompts through a pool on a real engine: tokens are those of a direct computation, and a bad clip harms its caller
alone."""

import asyncio
import importlib
import io
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from enginepool import Pool, WeightPublisher
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.errors import BadRequest, EngineFailed
from enginepool.protocol.messages import MAX_MEDIUM_BYTES
from enginepool.trainer.publisher import UpdateOptions
from enginepool.workers.sglang.generate.audio import MAX_SAMPLES, RATES
from enginepool.workers.sglang.generate.media import can_decode
from tests.engine.audio_models import CONTEXT, SPECIAL, WINDOW_S, AudioReference, clip, make_audio_model
from tests.engine.forked import ForkedDaemon
from tests.engine.test_pool_generate import GREEDY, START_S
from tests.process.daemons import Daemon
from tests.process.processes import Processes

safetensors: Any = importlib.import_module("safetensors.torch")
torch: Any = importlib.import_module("torch")

pytestmark = [pytest.mark.engine, pytest.mark.every_version, pytest.mark.timeout(600)]

COUNT = 12
FULL, SHORT = clip(WINDOW_S), clip(0.7, 3000)
#: a prompt, and its clips
Prompt = tuple[list[int], list[bytes]]


class Listener:
    """A pool whose model takes audio, and the direct computation."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.model, self.root = folder / "model", folder / "media"
        self.model.mkdir()
        self.root.mkdir()
        #: the tokens of a clip in a prompt
        self.audio = make_audio_model(self.model)
        self.reference = AudioReference(self.model, self.audio)
        options = {"context_length": CONTEXT, "max_total_tokens": 4 * CONTEXT}
        group = GroupConfig(
            model=str(self.model), workers=1, device="cpu", operations=["generate"], options=options, media_root=str(self.root)
        )
        config = PoolConfig(
            groups={"policy": group},
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0),
        )
        self.daemon: Daemon = ForkedDaemon(processes, config).listening()

    def run(self, scene: Callable[[Pool], Awaitable[None]]) -> None:
        async def scenario() -> None:
            async with Pool.connect(self.daemon.address) as pool, asyncio.timeout(2 * START_S):
                await pool.ready(START_S)
                await scene(pool)

        asyncio.run(scenario())

    def asked(self, *parts: Sequence[int] | bytes) -> Prompt:
        """Token ids and clips, in their order."""
        ids = [token for part in parts for token in (self.audio if isinstance(part, bytes) else part)]
        return ids, [part for part in parts if isinstance(part, bytes)]

    def wanted(self, asked: Prompt, weights: Mapping[str, Any] | None = None) -> list[int]:
        """What the model generates, with its own weights or with these."""
        with self.reference.holding(weights or {}):
            return self.reference.greedy(*asked, COUNT)


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    if "CI" not in os.environ and not can_decode("audio"):
        pytest.skip("needs the packages soundfile and torchaudio: make setup")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield Listener(tmp_path_factory.mktemp("audio"), processes)


async def tokens(pool: Pool, *asked: Prompt, **options: Any) -> list[list[int]]:
    """Of each sequence, all prompts in one request."""
    prompts, audio = [ids for ids, _ in asked], [clips or None for _, clips in asked]
    found = await pool.generate(prompts, audio=audio, max_new_tokens=COUNT, **GREEDY, **options)
    return [one.token_ids.tolist() for samples in found for one in samples]


def test_tokens_after_audio_equal_those_of_transformers(listener: Listener) -> None:
    asked = [
        listener.asked([5, 17, 300], FULL, [40, 41]),
        listener.asked(SHORT, [7], FULL, [8, 9]),
        listener.asked([5, 17, 300, 40]),
        listener.asked([5, 17, 300], clip(1.2, form="FLAC", channels=2), [40]),
        listener.asked([5, 17, 300], clip(1.2, form="OGG"), [40], clip(0.9, 100, form="MP3")),
        listener.asked([5, 17, 300], clip(1.0, rate=44_100), [40]),
    ]
    wanted = [listener.wanted(one) for one in asked]

    async def scene(pool: Pool) -> None:
        limits = (await pool.status()).groups[0].limits
        assert limits is not None
        assert {"audio", "media_path"} <= {*limits.features} and not {"image", "video", "image_ids"} & {*limits.features}
        assert await tokens(pool, *asked, n=2) == [one for one in wanted for _ in range(2)]
        found = await pool.generate(asked[1][0], audio=asked[1][1], max_new_tokens=1, **GREEDY)
        assert found.usage.prompt_tokens == len(listener.reference.expanded(*asked[1])[0])

    assert len({*map(tuple, wanted)}) == len(wanted)
    listener.run(scene)


def test_audio_is_read_from_a_path_under_the_media_root(listener: Listener) -> None:
    ids, clips = asked = listener.asked([5, 17, 300], SHORT, [40, 41])
    (listener.root / "a.wav").write_bytes(clips[0])

    async def scene(pool: Pool) -> None:
        [[one]] = await pool.generate(ids, audio=Path("a.wav"), max_new_tokens=COUNT, **GREEDY)
        assert one.token_ids.tolist() == listener.wanted(asked)
        with pytest.raises(EngineFailed, match="audio 0: no file of its path under media_root of the group"):
            await pool.generate(ids, audio=listener.model / "config.json", max_new_tokens=COUNT, **GREEDY)

    listener.run(scene)


def silence(samples: int, form: str = "FLAC", **options: Any) -> bytes:
    """A file of a few kilobytes."""
    library: Any = importlib.import_module("soundfile")
    file, piece = io.BytesIO(), 1 << 20
    with library.SoundFile(file, "w", 16_000, 1, format=form, **options) as target:
        for begin in range(0, samples, piece):
            target.write(torch.zeros(min(piece, samples - begin)).numpy())
    return file.getvalue()


def relabeled(flac: bytes, samples: int) -> bytes:
    """A FLAC file that says that it has so many samples."""
    at = 8 + 13
    fields = int.from_bytes(flac[at : at + 5], "big")
    return flac[:at] + (fields >> 36 << 36 | samples).to_bytes(5, "big") + flac[at + 5 :]


def test_a_bad_clip_is_one_error_to_its_caller_and_others_go_on(listener: Listener) -> None:
    asked = listener.asked
    bomb, loud = silence(MAX_SAMPLES + 1), silence(1000, "WAV", subtype="FLOAT")
    assert len(bomb) < 200_000
    rates = ", ".join(map(str, RATES))
    unread = "it cannot be read as WAV, FLAC, OGG or MP3"
    cases = [
        (asked(b"no audio", [8]), f"audio 0: {unread}"),
        (asked(FULL, b"RIFF....WAVE", [8]), f"audio 1: {unread}"),
        (asked(clip(1, form="AIFF"), [8]), "audio 0: AIFF; WAV, FLAC, OGG or MP3"),
        (asked(clip(1, form="FLAC")[:9000], [8]), "audio 0: it cannot be decoded"),
        (asked(clip(1, rate=44_101), [8]), f"audio 0: 44101 Hz; one of {rates}"),
        (asked(loud[:-4] + b"\0\0\xc0\x7f", [8]), "audio 0: it has samples that are NaN, or larger than 65536"),
        (asked(bomb, [8]), f"audio 0: {MAX_SAMPLES + 1} samples with those before it, of all channels; at most {MAX_SAMPLES}"),
        (asked(relabeled(bomb, 0), [8]), f"samples with those before it, of all channels; at most {MAX_SAMPLES}"),
        (asked(FULL, clip(WINDOW_S + 0.5), [8]), f"audio 1: 2.50 s; this model takes {WINDOW_S} s of a clip"),
        (asked(clip(0), [8]), "audio: 1 given, and the prompt has placeholders for 0"),
        (([7, 8], [FULL]), "the engine refused the task: AssertionError: feature_attention_mask not found"),
        (([*listener.audio, 8], [FULL, SHORT]), "audio: 2 given, and the prompt has placeholders for 1"),
        (([*listener.audio, *listener.audio], [FULL]), "the engine refused the task: "),
        (asked(*[FULL] * 20), "1040 tokens with media, and max_new_tokens = 12; at most 1018 together"),
    ]
    good = asked([5, 17, 300], FULL, [40, 41])
    long = relabeled(bomb, 16_000)  # no decoder is given what follows the samples that it says it has

    async def refused(pool: Pool, prompt: Prompt, said: str) -> None:
        with pytest.raises(EngineFailed) as error:
            await tokens(pool, prompt)
        assert said in str(error.value)

    async def scene(pool: Pool) -> None:
        before = (await pool.status()).groups[0].workers[0].pid
        async with asyncio.TaskGroup() as all_at_once:
            for prompt, said in cases:
                all_at_once.create_task(refused(pool, prompt, said))
        with pytest.raises(BadRequest, match=f"{MAX_MEDIUM_BYTES + 1} bytes; 1 to {MAX_MEDIUM_BYTES}"):
            await tokens(pool, asked(bytes(MAX_MEDIUM_BYTES + 1), [8]))
        with pytest.raises(BadRequest, match="the workers of this group take no image"):
            await pool.generate([7, 8], images=b"an image", max_new_tokens=1)
        assert await tokens(pool, good, asked(long, [8])) == [
            listener.wanted(good), listener.wanted(asked(silence(16_000), [8])),
        ]  # fmt: skip
        assert (await pool.status()).groups[0].workers[0].pid == before

    listener.run(scene)


def test_the_placeholder_in_a_text_becomes_its_tokens(listener: Listener) -> None:
    async def scene(pool: Pool) -> None:
        [ids] = await pool.tokenize([f"Hear {SPECIAL[0]}{SPECIAL[2]}{SPECIAL[1]}?"])
        at = list(ids).index(listener.audio[0])
        assert list(ids)[at : at + 3] == listener.audio

    listener.run(scene)


def test_after_new_weights_a_clip_is_what_the_new_ones_make_of_it(listener: Listener) -> None:
    """SGLang keeps what the encoder made of a clip, by the clip alone."""
    own: dict[str, Any] = safetensors.load_file(str(listener.model / "model.safetensors"))
    generator = torch.Generator().manual_seed(3)
    new = {name: torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5 for name, tensor in own.items()}
    seen, also = listener.asked([5, 17, 300], FULL, [40, 41, 42]), listener.asked([11, 12], SHORT)

    async def scene(pool: Pool) -> None:
        asked = [seen, also]
        modes: list[UpdateOptions] = [{"drain": START_S}, {"in_flight": "in_place"}, {"drain": 0.0, "after_drain": "retract"}]
        async with WeightPublisher(pool, device="cpu", bucket_bytes=1 << 18) as publisher:
            for mode in modes:
                assert await tokens(pool, *asked) == [listener.wanted(one) for one in asked]
                stream = pool.stream(also[0], audio=also[1], max_new_tokens=CONTEXT // 2, **GREEDY)
                assert await stream.next_chunk() is not None
                await publisher.publish(new, **mode)
                found = await tokens(pool, *asked)
                assert found == [listener.wanted(one, new) for one in asked] != [listener.wanted(one) for one in asked]
                await stream.result()
                await publisher.publish(own)
            assert await tokens(pool, seen) == [listener.wanted(seen)]

    listener.run(scene)
