"""Images of prompts through a real coordinator and its sim workers, whose tokens depend on them: a fault changes no token."""

import asyncio
import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool import Pool, errors
from enginepool.config import Limits
from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import TaskMedium
from enginepool.workers.sim.generation import media_ids
from enginepool.workers.sim.tokens import expected_output
from tests.process.commands import call, records
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.process.test_generate import GENERATES, SAMPLING, STREAMS, VOCAB, all_ready, generating, prompt, run, workers_of


def with_media(ids: list[int], *images: bytes) -> list[int]:
    """What the sim engine makes of a prompt with these images."""
    before = np.frombuffer(media_ids([TaskMedium("image", "bytes", image) for image in images]), "<i4").tolist()
    return [*before, *ids]


def wanted(i: int, *images: bytes, sampling: dict[str, Any] = SAMPLING) -> list[int]:
    """What follows the prompt `i` with these images."""
    return expected_output(with_media(prompt(i), *images), Sampling(**sampling), vocab=VOCAB, end_every=0)[0]


def test_a_worker_that_is_lost_in_the_middle_changes_no_token_of_prompts_with_images(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path)
    images = [i.to_bytes(4, "little") * 20_000 for i in range(STREAMS)]

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(PATIENCE_S)
            call = asyncio.create_task(
                pool.generate([prompt(i) for i in range(STREAMS)], images=[[b"x", one] for one in images], **SAMPLING)
            )
            # A stream has tokens, so the sequences that were sent before have some, too.
            streams = [pool.stream(prompt(i), images=images[i], **SAMPLING, priority=10) for i in range(4)]
            for i, stream in enumerate(streams):
                first = await stream.next_chunk()
                assert first is not None and first.token_ids.tolist() == wanted(i, images[i])[:1]
            os.kill(workers_of(daemon)[0], signal.SIGKILL)
            for i, stream in enumerate(streams):
                [[one]] = await stream.result()
                assert one.token_ids.tolist() == wanted(i, images[i])
            found = await call
            assert [one.token_ids.tolist() for [one] in found] == [wanted(i, b"x", images[i]) for i in range(STREAMS)]
            # The sim engine has a digest of 8 tokens ahead of each prompt.
            assert found.usage.prompt_tokens == sum(8 + len(prompt(i)) for i in range(STREAMS))

    run(scene)


def test_samples_with_a_large_image_that_go_on_at_once_end_no_worker(processes: Processes, tmp_path: Path) -> None:
    mb, image = 1_000_000, bytes(1_500_000)
    limits = Limits(max_message_bytes=2 * mb, window_bytes=4 * mb, buffer_bytes=8 * mb, answers_bytes=mb)
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, options=GENERATES, generates=True, limits=limits)).listening()

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await all_ready(pool, daemon)
            stream, begun = pool.stream(prompt(0), images=image, n=8, **SAMPLING), set[int]()
            while len(begun) < 8:
                chunk = await stream.next_chunk()
                assert chunk is not None
                begun.add(chunk.sequence)
            [first, second] = (await pool.status()).groups[0].workers
            lost, other = (first, second) if first.batches else (second, first)
            os.kill(lost.pid, signal.SIGKILL)
            [samples] = await stream.result()
            assert [one.token_ids.tolist() for one in samples] == [wanted(0, image)] * 8
            left = [one for one in (await pool.status()).groups[0].workers if one.name == other.name]
            assert [one.pid for one in left] == [other.pid], daemon.lines

    run(scene)


def test_a_worker_reads_paths_under_its_media_root_and_refuses_others(processes: Processes, tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "a.png").write_bytes(b"an image")
    (tmp_path / "secret").write_bytes(b"a secret")
    config = sim_pool(tmp_path, workers=1, options=GENERATES, generates=True)
    group = msgspec.structs.replace(config.groups["g"], media_root=str(root))
    daemon = ForkedDaemon(processes, msgspec.structs.replace(config, groups={"g": group})).listening()

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            found = await pool.generate([prompt(1), prompt(2)], images=[Path("a.png"), root / "a.png"], **SAMPLING)
            assert [one.token_ids.tolist() for [one] in found] == [wanted(1, b"an image"), wanted(2, b"an image")]
            with pytest.raises(errors.EngineFailed, match="image 0: no file of its path under media_root of the group"):
                await pool.generate(prompt(1), images=tmp_path / "secret", **SAMPLING)
            with pytest.raises(errors.BadRequest, match="a URL, and the workers of this group fetch none") as refused:
                await pool.generate(prompt(1), images="https://a.com/b.png", **SAMPLING)
            assert refused.value.field == "images" and str(refused.value).startswith("images: a URL")
            both = [b"an image", [b"an image", "https://a.com/b.png"]]
            with pytest.raises(errors.BadRequest, match=r"^images\[1\]\[1\]: a URL"):
                await pool.generate([prompt(1), prompt(2)], images=both, **SAMPLING)
            with pytest.raises(errors.BadRequest, match=r"^images\[1\]: a URL"):
                await pool.stream(prompt(1), images=[b"an image", "https://a.com/b.png"], **SAMPLING).result()

    run(scene)
    # The command takes URLs, also those with the bytes in them.
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    url = "data:image/png;base64," + base64.b64encode(b"an image").decode()
    lines: list[dict[str, Any]] = [
        {"prompt": prompt(1), "images": url}, {"prompt": prompt(2), "images": [url, url]}, {"prompt": prompt(3)},
        {"prompt": prompt(4), "images": [url, "a.png"]}, {"prompt": prompt(5), "images": "https://a.b/c.png"}, {"prompt": []},
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert call("generate", source, target, "--connect", daemon.address, "--temperature", "0", "--max-new-tokens", "3")[0] == 1
    found = [records(target)[line]["samples"][0]["token_ids"] for line in (1, 2, 3)]
    assert found == [wanted(1, b"an image")[:3], wanted(2, b"an image", b"an image")[:3], wanted(3)[:3]]
    failed = [records(target)[line]["error"]["message"] for line in (4, 5, 6)]
    assert failed[0] == "line 4: images[1]: 'a.png'; a URL (https:, http: or data:)"
    assert failed[1].startswith("line 5: images: a URL, and the workers of this group fetch none")
    assert failed[2] == "line 6: prompt: empty"
