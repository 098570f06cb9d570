"""`pool.generate` and `pool.stream` on real engines: tokens are those of a direct computation, also when a worker dies and when
weights change."""

import asyncio
import importlib
import json
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool import Generation, Generations, Pool, TokenChunk, WeightPublisher
from enginepool.client.token_stream import ChunkIterator
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.errors import BadRequest, Interrupted, VersionPassed
from enginepool.protocol.messages.weights import RunningGenerations
from tests.engine.forked import ForkedDaemon
from tests.engine.language_models import LanguageModel
from tests.engine.reference import Models, Reference
from tests.process.daemons import Daemon
from tests.process.processes import Processes
from tests.process.waiting import check_running

safetensors: Any = importlib.import_module("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

START_S = 300.0
VOCAB = 512
#: the first id that the tokenizer of the model does not use
THINK_END = 454
#: tokens of a stream that still runs when new weights arrive
LONG = 3500
#: tokens of the new weights that are looked at
ENOUGH = 40
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def thinking(model: Path, target: Path) -> Path:
    """A copy of a model with a token that ends its thoughts."""
    shutil.copytree(model, target)
    tokenizer = json.loads((target / "tokenizer.json").read_text("utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": THINK_END, "content": "</think>", **flags})
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return target


@pytest.fixture(scope="module")
def daemon(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        options = {"max_running_requests": 8, "constrained_json_disable_any_whitespace": True, "reasoning_parser": "qwen3"}
        options["max_total_tokens"] = 6 * LONG  # for all long sequences of a test at once, whichever worker they are at
        model = str(thinking(models.causal, folder / "model"))
        group = GroupConfig(model=model, workers=2, device="cpu", operations=["generate"], options=options)
        config = PoolConfig(
            groups={"policy": group},
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0),
        )
        daemon = ForkedDaemon(processes, config).listening()
        patch.undo()
        yield daemon


def assert_greedy(reference: Reference, prompt: Sequence[int], found: Generation) -> None:
    below, logprobs = reference.following(prompt, found.token_ids.tolist())
    assert below.max() < 1e-4
    if found.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-4, atol=1e-5)


def test_sequences_are_right_also_when_a_worker_dies(daemon: Daemon, reference: Reference) -> None:
    chance = random.Random(5)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 30))] for _ in range(24)]

    async def scenario() -> tuple[list[Generations], list[int]]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            calls = [
                asyncio.ensure_future(pool.generate(prompts[i : i + 3], n=2, max_new_tokens=60, logprobs=True, **GREEDY))
                for i in range(0, 24, 3)
            ]
            stream = pool.stream(prompts[0], max_new_tokens=200, **GREEDY)
            streamed: list[int] = []
            async for chunk in stream:
                if not streamed:
                    victim = next(w for w in (await pool.status()).groups[0].workers if w.stage == "ready")
                    psutil.Process(victim.pid).send_signal(signal.SIGKILL)
                streamed += chunk.token_ids.tolist()
            return [*(await asyncio.gather(*calls)), await stream.result()], streamed

    *results, last = (found := asyncio.run(scenario()))[0]
    groups = [samples for result in results for samples in result]
    assert len(groups) == len(prompts)
    for prompt, samples in zip(prompts, groups, strict=True):
        for sample in samples:
            assert (len(sample.token_ids), sample.finish_reason) == (60, "length")
            assert_greedy(reference, prompt, sample)
    assert last[0][0].token_ids.tolist() == found[1]
    assert len(found[1]) == 200
    assert_greedy(reference, prompts[0], last[0][0])


def test_the_turns_of_a_session_are_right_and_find_their_history_in_the_prefix_cache(
    daemon: Daemon, reference: Reference
) -> None:
    chance = random.Random(6)
    asked = [[chance.randrange(VOCAB) for _ in range(count)] for count in (70, 20, 20)]

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool, pool.session() as session, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            for turn, ids in enumerate(asked):
                before = [*session.history.tolist(), *ids]
                if turn == 1:
                    result = await session.stream(ids, max_new_tokens=40, **GREEDY).result()
                else:
                    result = await session.generate(ids, max_new_tokens=40, **GREEDY)
                [[found]] = result
                assert session.history.tolist() == [*before, *found.token_ids.tolist()]
                assert_greedy(reference, before, found)
                # Of the history all but its last token, which no forward has computed yet.
                assert result.usage.cached_tokens == (len(before) - len(ids) - 1 if turn else 0)
            branch = session.branch()
            session.replace(session.turns[1], asked[2])
            before = session.history.tolist()
            [[found]] = await session.generate(max_new_tokens=40, **GREEDY)
            assert_greedy(reference, before, found)
            before = [*branch.history.tolist(), 9]
            result = await branch.generate([9], max_new_tokens=40, **GREEDY)
            assert_greedy(reference, before, result[0][0])
            assert result.usage.cached_tokens == len(before) - 2

    asyncio.run(scenario())


def test_the_most_probable_tokens_and_the_log_probabilities_of_prompts_are_right(daemon: Daemon, models: Models) -> None:
    prompts = [[5, 6, 7], [*range(40, 80)]]
    direct = LanguageModel(models.causal)

    async def scenario() -> Generations:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            return await pool.generate(prompts, n=2, max_new_tokens=8, top_logprobs=4, prompt_logprobs=True, **GREEDY)

    found = asyncio.run(scenario())
    assert found.prompt_logprobs is not None
    for prompt, samples, of_prompt in zip(prompts, found, found.prompt_logprobs, strict=True):
        table = direct.logprobs([*prompt, *samples[0].token_ids.tolist()])
        assert of_prompt is not None and np.isnan(of_prompt[0])
        expected = [table[at, token] for at, token in enumerate(prompt[1:])]
        np.testing.assert_allclose(of_prompt[1:], expected, rtol=1e-4, atol=1e-4)
        for one in samples:
            assert one.logprobs is not None and one.top_ids is not None and one.top_logprobs is not None
            best = np.sort(table[len(prompt) - 1 : -1], axis=1)[:, ::-1][:, :4]
            np.testing.assert_allclose(one.top_logprobs, best, rtol=1e-4, atol=1e-4)
            assert one.top_ids[:, 0].tolist() == one.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, one.top_logprobs[:, 0], rtol=1e-4, atol=1e-4)


def test_streams_go_on_with_new_weights_and_say_which_tokens_are_theirs(
    daemon: Daemon, models: Models, reference: Reference
) -> None:
    own: dict[str, Any] = safetensors.load_file(str(models.causal / "model.safetensors"))
    torch: Any = importlib.import_module("torch")
    generator = torch.Generator().manual_seed(3)
    new = {name: torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5 for name, tensor in own.items()}
    prompts = [[7, 8, 9, i] for i in range(4)]

    async def one(pool: Pool, prompt: list[int], begun: asyncio.Event) -> dict[int, list[int]]:
        """The tokens by their version, until some are of the last weights."""
        found = dict[int, list[int]]()
        async with aclosing(aiter(pool.stream(prompt, max_new_tokens=LONG, **GREEDY))) as chunks:
            async for chunk in chunks:
                begun.set()
                found.setdefault(chunk.version, []).extend(int(token) for token in chunk.token_ids)
                if len(found.get(2, [])) >= ENOUGH:
                    break
        return found

    async def of_version_0(pool: Pool) -> Generation:
        try:
            return (await pool.generate(prompts[0], max_new_tokens=LONG, version=0, **GREEDY))[0][0]
        except Interrupted as error:
            return error.generations[0][0]

    async def scenario() -> list[dict[int, list[int]]]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(START_S)
            begun = [asyncio.Event() for _ in prompts]
            pinned = asyncio.ensure_future(of_version_0(pool))
            waits = asyncio.ensure_future(pool.generate(prompts[0], max_new_tokens=8, version=1, **GREEDY))
            streams = [asyncio.ensure_future(one(pool, prompt, each)) for prompt, each in zip(prompts, begun, strict=True)]
            async with WeightPublisher(pool, device="cpu", bucket_bytes=1 << 18) as publisher:
                for each in begun:
                    await each.wait()
                await publisher.publish(new, 1, drain=0.1, after_drain="retract")
                assert [version for version, _ in (await waits)[0][0].spans] == [1]
                await publisher.publish(own, 2, in_flight="in_place")
            assert [version for version, _ in (await pinned).spans] == [0]
            with pytest.raises(VersionPassed, match="version is 0, but the committed weight version is 2"):
                await pool.generate(prompts[0], max_new_tokens=8, version=0, **GREEDY)
            return await asyncio.gather(*streams)

    results = asyncio.run(scenario())
    # Generations stay in their engines: retracted for version 1, and in place, over the KV of version 1, for version 2.
    assert any(found.keys() == {0, 1, 2} for found in results)
    for prompt, found in zip(prompts, results, strict=True):
        assert list(found) == [0, 1, 2][: len(found)]
        assert reference.following(prompt, found[0])[0].max() < 1e-4
        spans = [(weights, found[version]) for version, weights in ((1, new), (2, own)) if version in found]
        assert not spans or reference.across([*prompt, *found[0]], spans)[0].max() < 1e-4
        assert len(found) == 3 or sum(map(len, found.values())) == LONG


def test_a_group_sleeps_in_the_middle_of_streams_and_has_other_weights_when_they_go_on(
    daemon: Daemon, models: Models, reference: Reference
) -> None:
    """The colocated cycle: sleep, wake the weights, update, wake the rest."""
    own: dict[str, Any] = safetensors.load_file(str(models.causal / "model.safetensors"))
    torch: Any = importlib.import_module("torch")
    new = {name: torch.flip(tensor, (0,)).contiguous() for name, tensor in own.items()}
    prompts = [[17, 8, 9, i] for i in range(4)]
    found: list[dict[int, list[int]]] = [{} for _ in prompts]

    async def read(stream: ChunkIterator[TokenChunk], tokens: dict[int, list[int]]) -> None:
        chunk = await anext(stream)
        tokens.setdefault(chunk.version, []).extend(int(token) for token in chunk.token_ids)

    async def scenario() -> int:
        async with Pool.connect(daemon.address) as pool, AsyncExitStack() as stack, asyncio.timeout(2 * START_S):
            stack.push_async_callback(pool.resume)  # the tests that follow use the same group
            stack.push_async_callback(pool.wake)
            while any(worker.stage != "ready" for worker in (await pool.status()).groups[0].workers):
                await asyncio.sleep(0.1)
            last = (await pool.weights()).version
            async with WeightPublisher(pool, device="cpu", bucket_bytes=1 << 18) as publisher:
                await publisher.publish(own, last + 1)
                streams = [aiter(pool.stream(prompt, max_new_tokens=LONG, **GREEDY)) for prompt in prompts]
                for stream, tokens in zip(streams, found, strict=True):
                    await stack.enter_async_context(aclosing(stream))
                    await read(stream, tokens)
                assert [row.code for row in (await pool.pause()).workers] == ["", ""]
                assert (await pool.status()).groups[0].running == 0
                gone = asyncio.create_task(pool.generate([5, 6], max_new_tokens=LONG, **GREEDY))
                while (await pool.status()).groups[0].queued < 5:
                    check_running([gone])
                    await asyncio.sleep(0.01)
                modes: list[tuple[RunningGenerations, int]] = [("in_place", 5), ("retract", 4)]
                for mode, inside in modes:
                    await pool.resume()
                    while (await pool.status()).groups[0].running < inside:  # a chunk may be of before the pause
                        await asyncio.sleep(0.01)
                    for stream, tokens in zip(streams, found, strict=True):
                        await read(stream, tokens)
                    assert [row.code for row in (await pool.pause(mode=mode)).workers] == ["", ""]
                    assert (await pool.status()).groups[0].running == inside
                    if mode == "in_place":
                        gone.cancel()  # new weights wait until it has left the paused engine
                        await publisher.publish(own, last + 2, in_flight="in_place")
                        assert (await pool.status()).groups[0].running == 4
                report = await pool.sleep()  # those that were retracted go back to the queue
                assert [row.code for row in report.workers] == ["", ""], report
                status = (await pool.status()).groups[0]
                assert (status.running, [worker.stage for worker in status.workers]) == (0, ["asleep"] * 2)
                await pool.wake(tags=["weights"])
                await publisher.publish(new, last + 3)
                await pool.wake()
                await pool.resume()
                for stream, tokens in zip(streams, found, strict=True):
                    while len(tokens.get(last + 3, [])) < ENOUGH:
                        await read(stream, tokens)
                return last + 3

    newest = asyncio.run(scenario())
    for prompt, tokens in zip(prompts, found, strict=True):
        before = [token for version, some in tokens.items() if version != newest for token in some]
        assert reference.following(prompt, before)[0].max() < 1e-4
        with reference.holding(new):
            assert reference.following([*prompt, *before], tokens[newest])[0].max() < 1e-4


def test_texts_are_tokenized_and_ids_decoded_as_the_tokenizer_of_the_model_does_it(
    daemon: Daemon, reference: Reference
) -> None:
    chance = random.Random(3)
    tokenizer = reference.tokenizer
    # Bytes of texts in every order: parts of characters are replaced.
    rows = [[chance.randrange(THINK_END) for _ in range(chance.randrange(50))] for _ in range(40)]
    rows += [tokenizer.encode("grün, 日本語 👍"), [VOCAB - 1]]
    eos, texts = tokenizer.eos_token_id, ["Once upon a time", "grün, 日本語 👍"]

    async def scenario() -> list[str]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            with pytest.raises(BadRequest, match=r"rows\[1\]\[0\]: token id 512 is outside the vocabulary of 512"):
                await pool.decode([[1], [VOCAB]])
            for special in (True, False):
                found = await pool.tokenize(texts, add_special_tokens=special)
                assert [row.tolist() for row in found] == tokenizer(texts, add_special_tokens=special)["input_ids"]
            with_special = await pool.decode([[eos, eos]], skip_special_tokens=False)
            assert with_special == [2 * tokenizer.decode([eos])] and await pool.decode([[eos]]) == [""]
            every = await pool.decode([[token] * 100 for token in range(THINK_END)], skip_special_tokens=False)
            assert every == tokenizer.batch_decode([[token] * 100 for token in range(THINK_END)])
            return await pool.decode(rows)

    assert asyncio.run(scenario()) == tokenizer.batch_decode(rows, skip_special_tokens=True)


def test_text_grammars_and_refusals(daemon: Daemon, reference: Reference) -> None:
    async def scenario() -> Generations:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(START_S):
            await pool.ready(START_S)
            with pytest.raises(BadRequest, match="score is not an operation of this group"):
                await pool.score([1], [[2]], label_token_ids=[3])
            with pytest.raises(BadRequest, match="min_new_tokens: 3 with regex"):
                await pool.generate([[1]], regex="a+", min_new_tokens=3)
            with pytest.raises(BadRequest, match="allowed_token_ids: token id 512 is outside the vocabulary"):
                await pool.generate([[1]], allowed_token_ids=[512])
            answer = await pool.generate([[1], [2]], n=2, max_new_tokens=20, ignore_eos=True, allowed_token_ids=[7, 9])
            assert {token for group in answer for one in group for token in one.token_ids.tolist()} <= {7, 9}
            grammars: dict[str, Any] = {"regex": "(a", "ebnf": "root ::= (", "json_schema": '{"type": "intege"}'}
            for name, wrong in grammars.items():
                with pytest.raises(BadRequest, match=rf"^{name}: [A-Z]") as refused:
                    await pool.generate([[1]], **{name: wrong})
                assert refused.value.field.endswith(name) and "/" not in str(refused.value)
            # About one token of 20 of the thoughts is their end, and none is that of the sequence.
            bias = {THINK_END: 5.0, reference.tokenizer.eos_token_id: -100.0}
            thought: dict[str, Any] = {"n": 8, "require_reasoning": True, "logit_bias": bias, "max_new_tokens": 200}
            thoughts = (await pool.generate("Choose:", regex="(yes|no)", **thought))[0]
            for ids in (one.token_ids.tolist() for one in thoughts):
                assert reference.tokenizer.decode(ids[ids.index(THINK_END) + 1 :], skip_special_tokens=True) in ("yes", "no")
            assert any(one.token_ids[0] != THINK_END for one in thoughts), "no grammar before"
            with pytest.raises(BadRequest, match="require_reasoning: given without a grammar"):
                await pool.generate([[1]], require_reasoning=True)
            return await pool.generate("Choose:", n=2, regex="(yes|no)", max_new_tokens=20)

    for sample in asyncio.run(scenario())[0]:
        assert sample.finish_reason == "stop"
        assert reference.tokenizer.decode(sample.token_ids, skip_special_tokens=True) in ("yes", "no")
