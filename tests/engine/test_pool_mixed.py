"""One group of real engines scores, gives log-probabilities and generates, while a worker dies: all of it is right."""

import asyncio
import importlib
import random
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool import Generations, LogprobsResult, Pool, ScoreResult, TokenChunk, WeightPublisher
from enginepool.config import GroupConfig, PoolConfig, Timing
from tests.engine.forked import ForkedDaemon
from tests.engine.language_models import LanguageModel
from tests.engine.reference import Models, Reference
from tests.engine.test_pool_generate import GREEDY, START_S, VOCAB, assert_greedy
from tests.process.daemons import Daemon
from tests.process.processes import Processes
from tests.process.test_generate import all_ready

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: tokens of a sequence that still runs when new weights arrive, and of one for which they wait
LONG, SHORT = 3500, 200
#: tokens under the new weights, after which a sequence need not go on
ENOUGH = 40
#: seconds between scores that a client asks for: there are some in each part of a scene
PAUSE_S = 0.02


@pytest.fixture(scope="module")
def daemon(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    group = GroupConfig(
        model=str(models.causal), workers=2, device="cpu", operations=["score", "logprobs", "generate"], max_batch_tokens=256
    )
    config = PoolConfig(
        groups={"policy": group},
        listen=f"ipc://{folder}/pool.sock",
        state_dir=str(folder / "state"),
        timing=Timing(silence_s=60.0),
    )
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield ForkedDaemon(processes, config).listening()


#: the samples of a stream, each as its tokens by the version of the weights that computed them
Sequences = dict[int, dict[int, list[int]]]


def add_chunk(sequences: Sequences, chunk: TokenChunk) -> None:
    if chunk.token_ids.size:
        sequences.setdefault(chunk.sequence, {}).setdefault(chunk.version, []).extend(chunk.token_ids.tolist())


async def enough(answers: Sized, count: int) -> None:
    while len(answers) < count:
        await asyncio.sleep(0.01)


@pytest.mark.every_version
def test_all_operations_at_once_are_right_also_when_a_worker_dies(daemon: Daemon, models: Models, reference: Reference) -> None:
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))] for _ in range(12)]
    labels = [7, 8, 9]
    scored: list[tuple[int, ScoreResult]] = []
    known: list[tuple[int, LogprobsResult]] = []

    async def score(pool: Pool, first: int, over: asyncio.Event) -> None:
        for number in range(first, 400, 2):
            if over.is_set():
                return
            await asyncio.sleep(PAUSE_S)
            at = number % 12
            scored.append((at, await pool.score(prompts[at], [[at], [at, 3]], label_token_ids=labels)))
            known.append((at, await pool.logprobs([prompts[at]] * 2, [[5, 6, 7], [at]])))

    async def scenario() -> tuple[list[Generations], int]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            report = await pool.ready(START_S)
            over = asyncio.Event()
            async with asyncio.TaskGroup() as rows:
                for first in range(2):
                    rows.create_task(score(pool, first, over))
                await enough(scored, 4)
                calls = [pool.generate([prompt], n=2, max_new_tokens=160, logprobs=True, **GREEDY) for prompt in prompts]
                running = asyncio.gather(*calls)
                stream = pool.stream(prompts[0], max_new_tokens=160, **GREEDY)
                chunks = aiter(stream)  # which ends the stream when it is collected
                await anext(chunks)
                psutil.Process(report.groups[0].workers[0].pid).kill()
                found, _ = await running, await stream.result()
                over.set()
            [status] = (await pool.status()).groups
            assert status.failed == 0
            return found, status.split_batches

    found, split = asyncio.run(scenario())
    assert split == 0, "each batch of rows was one forward"
    for prompt, [samples] in zip(prompts, found, strict=True):
        assert [len(sample.token_ids) for sample in samples] == [160, 160]
        for sample in samples:
            assert_greedy(reference, prompt, sample)
    assert len(scored) >= 4
    for at, answer in scored:
        expected = [reference.label_scores([*prompts[at], *item], labels, softmax=False) for item in ([at], [at, 3])]
        np.testing.assert_allclose(answer.scores, expected, rtol=1e-4, atol=1e-5)
    model = LanguageModel(models.causal)
    for at, answer in known[:20]:
        for values, response in zip(answer.logprobs, ([5, 6, 7], [at]), strict=True):
            row = [*prompts[at], *response]
            want = model.logprobs(row)[-len(response) - 1 : -1]
            np.testing.assert_allclose(values, want[range(len(response)), response], rtol=1e-4, atol=1e-5)


@pytest.mark.every_version
@pytest.mark.parametrize(("version", "in_flight"), [(1, "abort"), (2, "drain"), (3, "in_place"), (4, "retract")])
def test_new_weights_meet_rows_and_sequences(
    daemon: Daemon, models: Models, reference: Reference, version: int, in_flight: Any
) -> None:
    """Each score is of one version, which it names; each token is of the version of its span."""
    own = safetensors.load_file(models.causal / "model.safetensors")

    def weights(version: int) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(version)
        noise = 0.02 if version else 0.0
        return {name: tensor + noise * torch.randn(tensor.shape, generator=chance) for name, tensor in own.items()}

    known = {version - 1: weights(version - 1), version: weights(version)}
    prompts, labels, scored = [[5, 6, 7], [8]], [7, 8, 9], list[ScoreResult]()
    length = SHORT if in_flight == "drain" else LONG

    async def score(pool: Pool, over: asyncio.Event) -> None:
        while not over.is_set():
            scored.append(await pool.score([5, 6, 7], [[9], [9, 3]], label_token_ids=labels))
            await asyncio.sleep(PAUSE_S)

    async def scenario() -> list[Sequences]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await all_ready(pool, daemon)  # one that comes later gives its sequences back, and has their tokens computed again
            over = asyncio.Event()
            async with WeightPublisher(pool, device="cpu", bucket_bytes=1 << 18) as publisher, asyncio.TaskGroup() as asking:
                update = await publisher.start(known[version], version, in_flight=in_flight)
                await update.sent()  # all of it is there, and what follows meets the hand-over alone
                for _ in range(2):
                    asking.create_task(score(pool, over))
                await enough(scored, 8)
                streams = [pool.stream(prompt, n=2, max_new_tokens=length, **GREEDY) for prompt in prompts]
                chunks = [aiter(stream) for stream in streams]
                found = [Sequences(), Sequences()]
                for each, sequences in zip(chunks, found, strict=True):
                    while len(sequences) < 2:
                        add_chunk(sequences, await anext(each))
                await update.finish()
                await enough(scored, len(scored) + 4)
                for each, sequences in zip(chunks, found, strict=True):
                    async for chunk in each:
                        add_chunk(sequences, chunk)
                        if all(len(spans.get(version, [])) >= ENOUGH for spans in sequences.values()):
                            break  # which ends the stream
                over.set()
            return found

    found = asyncio.run(scenario())
    assert {one.version for one in scored} == {version - 1, version} and scored[-1].version == version
    for named, held in known.items():
        with reference.holding(held):
            expected = [reference.label_scores([5, 6, 7, *item], labels, softmax=False) for item in ([9], [9, 3])]
        for one in scored:
            if one.version == named:
                np.testing.assert_allclose(one.scores, expected, rtol=1e-4, atol=1e-5)
    for prompt, sequences in zip(prompts, found, strict=True):
        for spans_of in sequences.values():
            if in_flight == "drain":
                assert [*map(len, spans_of.values())] == [length], "of the weights before, to its end"
            else:
                assert [*spans_of] == [version - 1, version], "the weights changed while it ran"
            spans = [(known[named], tokens) for named, tokens in spans_of.items()]
            below, _ = (reference.across if in_flight == "in_place" else reference.afresh)(prompt, spans)
            assert below.max() < 1e-4
