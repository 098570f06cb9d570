"""The sim engine generates: a token is a pure function of those before it, and slots, costs and faults are as asked for."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.protocol.messages import Part, Sampling
from enginepool.workers.engine import (
    EngineDied,
    EngineError,
    GenerationTask,
    NewTokens,
    PauseMode,
    RowBatch,
    RowPart,
    TaskMedium,
)
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sim.engine import SimEngine
from enginepool.workers.sim.tokens import END, expected_output, next_token

VOCAB = 1000
PROMPTS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def engine(**options: Any) -> SimEngine:
    return SimEngine(EngineSettings(model="m", operations=("generate",), options={"vocab": VOCAB, **options}))


class Heard:
    """The tokens of one task, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ends: dict[int, tuple[str, int | str | None]] = {}

        #: what the task had in the cache, each time that it is told
        self.cached: list[int] = []

    def __call__(self, new: NewTokens) -> None:
        if new.cached is not None:
            self.cached.append(new.cached)
        assert new.sequence not in self.ends, "tokens after the end"
        self.tokens.setdefault(new.sequence, []).extend(new.tokens)
        self.logprobs.setdefault(new.sequence, []).extend(new.logprobs)
        if new.reason:
            self.ends[new.sequence] = new.reason, new.matched

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


def task(prompt: Sequence[int], n: int = 1, *, logprobs: bool = False, priority: int = 0, **sampling: Any) -> GenerationTask:
    return GenerationTask(np.array(prompt, np.int32), Sampling(**sampling), n, logprobs, priority)


def generated(one: SimEngine, asked: GenerationTask) -> Heard:
    heard = Heard()

    async def main() -> None:
        async with asyncio.timeout(30):
            await one.generate(asked, heard)

    asyncio.run(main())
    return heard


async def until(heard: Heard, count: int) -> None:
    async with asyncio.timeout(30):
        while heard.count < count:
            await asyncio.sleep(0)


# --- tokens -------------------------------------------------------------------------------------------------------------


@given(PROMPTS, st.integers(0, 40), st.sampled_from([0, 5]))
def test_the_engine_gives_what_the_pure_function_says(prompt: list[int], least: int, version: int) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 50, "min_new_tokens": least, "stop_token_ids": [7, 8, 9]}
    heard = generated(engine(version=version, end_every=20), task(prompt, logprobs=True, **sampling))
    tokens, logprobs, reason = expected_output(prompt, Sampling(**sampling), spans=[(version, 50)], vocab=VOCAB, end_every=20)
    assert heard.tokens[0] == tokens and heard.ends[0][0] == reason
    assert np.array(heard.logprobs[0], np.float32).tolist() == logprobs
    assert len(tokens) > least or reason == "length"
    assert not {END, 7, 8, 9} & {*tokens[:-1]}
    assert heard.ends[0][1] == (tokens[-1] if reason == "stop" else None)


@given(
    PROMPTS,
    st.sampled_from([{"allowed_token_ids": [2, 7, 30, 31]}, {"disallowed_token_ids": [*range(40)]}]),
    st.integers(0, 40),
)
def test_no_token_outside_a_mask_is_chosen_and_the_mask_has_the_last_word(
    prompt: list[int], mask: dict[str, Any], least: int
) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 50, "min_new_tokens": least, "stop_token_ids": [7], **mask}
    allowed = set(mask.get("allowed_token_ids", range(VOCAB))) - set(mask.get("disallowed_token_ids", ()))
    heard = generated(engine(end_every=20), task(prompt, **sampling))
    assert set(heard.tokens[0]) <= allowed
    assert heard.tokens[0] == expected_output(prompt, Sampling(**sampling), vocab=VOCAB, end_every=20)[0]
    assert len(heard.tokens[0]) > least or heard.ends[0][0] == "length"
    one = generated(engine(), task(prompt, allowed_token_ids=[7], stop_token_ids=[7], min_new_tokens=3, max_new_tokens=5))
    assert one.tokens[0] == [7] * 4


@given(PROMPTS, st.integers(1, 30))
def test_a_sequence_goes_on_after_its_tokens_as_if_it_had_never_been_interrupted(prompt: list[int], cut: int) -> None:
    sampling = Sampling(max_new_tokens=40, min_new_tokens=35)
    whole, _, _ = expected_output(prompt, sampling, vocab=VOCAB)
    rest = Sampling(max_new_tokens=40 - cut, min_new_tokens=35 - cut)
    again, _, _ = expected_output([*prompt, *whole[:cut]], rest, vocab=VOCAB)
    assert whole[:cut] + again == whole
    assert next_token([*prompt, *whole[:cut]], vocab=VOCAB, end_every=0) == whole[cut]


def test_tokens_depend_on_each_token_before_and_on_the_weights() -> None:
    found = {
        next_token([1, 2, 3]), next_token([2, 2, 3]), next_token([3, 2, 1]), next_token([1, 2, 3, 0]),
        next_token([1, 2, 3], 1), next_token([1, 2, 3], seed=1), next_token([1, 2, 3], digest="ab" * 16),
    }  # fmt: skip
    assert len(found) == 7


def test_spans_say_which_weights_computed_which_tokens() -> None:
    sampling = Sampling(max_new_tokens=20, ignore_eos=True)
    old, _, _ = expected_output([1], sampling, vocab=VOCAB)
    mixed, _, _ = expected_output([1], sampling, spans=[(0, 5), (3, 15)], vocab=VOCAB)
    assert mixed[:5] == old[:5] and mixed[5:] != old[5:]
    assert mixed[5] == next_token([1, *mixed[:5]], 3, VOCAB, end_every=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_differ_unless_the_temperature_is_0(temperature: float) -> None:
    heard = generated(engine(), task([1, 2], 4, temperature=temperature, max_new_tokens=12, ignore_eos=True))
    outputs = {tuple(tokens) for tokens in heard.tokens.values()}
    assert len(heard.tokens) == 4 and len(outputs) == (4 if temperature else 1)
    for i, tokens in heard.tokens.items():
        sampling = Sampling(temperature=temperature, max_new_tokens=12, ignore_eos=True)
        assert tokens == expected_output([1, 2], sampling, sample=i, vocab=VOCAB)[0]


def test_one_in_so_many_tokens_ends_a_sequence_and_none_where_it_is_ignored() -> None:
    lengths = [len(expected_output([i], Sampling(max_new_tokens=10_000), vocab=VOCAB)[0]) for i in range(300)]
    assert 85 < sum(lengths) / len(lengths) < 115
    for every, ignores in ((0, False), (1, True)):
        sampling = Sampling(max_new_tokens=300, ignore_eos=ignores)
        tokens, _, reason = expected_output([1], sampling, vocab=VOCAB, end_every=every)
        assert (len(tokens), reason) == (300, "length")


@pytest.mark.parametrize("vocab", [1, 2, 3])
def test_the_smallest_vocabularies_have_tokens_too(vocab: int) -> None:
    tokens, _, _ = expected_output([0], Sampling(max_new_tokens=9, min_new_tokens=9, stop_token_ids=[0, 1]), vocab=vocab)
    assert len(tokens) == 9 and all(0 <= token < vocab for token in tokens)


# --- slots, costs and faults --------------------------------------------------------------------------------------------


def test_so_many_sequences_run_at_once_and_the_others_wait_by_priority() -> None:
    order: list[int] = []

    async def main() -> None:
        one = engine(inflight_rows=2)
        asked = [task([i], max_new_tokens=3, ignore_eos=True, priority=i) for i in range(3)]
        await asyncio.gather(*(one.generate(asked[i], lambda _, i=i: order.append(i)) for i in range(3)))

    asyncio.run(main())
    assert order == [2, 1, 2, 1, 2, 1, 0, 0, 0]


def test_a_cancelled_task_frees_its_slots_within_one_step_also_while_it_waits() -> None:
    heard = [Heard() for _ in range(3)]

    async def main() -> None:
        one = engine(inflight_rows=1)
        running, waiting, last = (
            asyncio.create_task(one.generate(task([i], max_new_tokens=100_000, ignore_eos=True), heard[i])) for i in range(3)
        )
        await until(heard[0], 3)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert heard[0].count <= 6, "it waited for a slot before it left"
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        count = heard[0].count
        await until(heard[2], 3)
        assert heard[0].count == count
        last.cancel()
        with pytest.raises(asyncio.CancelledError):
            await last
        await one.flush()

    asyncio.run(main())
    assert not heard[1].tokens


def test_a_prompt_and_what_was_generated_after_it_are_found_in_the_cache_until_it_is_flushed() -> None:
    one, heard = engine(token_s=1e-6), [Heard() for _ in range(4)]

    async def main() -> None:
        prompt = list(range(40))
        await one.generate(task(prompt, n=2, max_new_tokens=40, ignore_eos=True), heard[0])
        await one.generate(task([*prompt, *heard[0].tokens[1], 5], max_new_tokens=1), heard[1])
        await one.generate(task([*prompt[:20], 5], max_new_tokens=1), heard[2])
        await one.flush()
        await one.generate(task(prompt, max_new_tokens=1), heard[3])

    asyncio.run(main())
    assert [each.cached for each in heard] == [[0], [80], [16], [0]]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_engine_emits_nothing_and_goes_on_where_it_was(mode: PauseMode) -> None:
    async def main() -> None:
        one, heard = engine(inflight_rows=2), [Heard() for _ in range(3)]
        work = [asyncio.create_task(one.generate(task([i], max_new_tokens=50, ignore_eos=True), heard[i])) for i in range(3)]
        await until(heard[1], 10)
        await one.pause(mode)
        counts = [each.count for each in heard]
        work.append(asyncio.create_task(one.generate(task([3], max_new_tokens=1), late := Heard())))
        for _ in range(20):
            await asyncio.sleep(0)
        assert [each.count for each in heard] == counts and not late.count
        await one.resume()
        await asyncio.gather(*work)
        for i, each in enumerate(heard):
            assert each.tokens[0] == expected_output([i], Sampling(max_new_tokens=50, ignore_eos=True), vocab=VOCAB)[0]
            assert each.cached == [0]

    asyncio.run(main())


def test_a_load_lets_an_engine_compute_only_where_nothing_else_pauses_it() -> None:
    asked: list[tuple[str, bool]] = []

    class Asked:
        def check_pause(self, mode: str) -> None: ...

        async def pause(self, mode: str, *, confirmed: bool = True) -> None:
            asked.append((mode, confirmed))

        async def resume(self) -> None:
            asked.append(("resume", True))

    async def main() -> None:
        subject: Any = Asked()
        pauses = EnginePauses(subject)
        await pauses.pause("weights", "in_place", confirmed=False)
        await pauses.pause("command", "in_place")  # it may compute by now
        await pauses.resume("weights")
        await pauses.pause("weights", "in_place", confirmed=False)
        await pauses.pause("weights", "retract", confirmed=False)
        await pauses.resume("weights")
        await pauses.resume("command")
        await pauses.pause("command", "in_place")
        await pauses.resume("command")

    asyncio.run(main())
    one, other = [("in_place", False), ("in_place", True), ("retract", True)], [("in_place", True)]
    assert asked == [*one, ("resume", True), *other, ("resume", True)]


def test_an_engine_is_paused_until_all_who_wanted_that_let_it_go_on() -> None:
    async def main() -> None:
        one, heard = engine(), Heard()
        pauses = EnginePauses(one)
        await pauses.pause("weights", "in_place")
        await pauses.pause("command", "retract")
        work = asyncio.create_task(one.generate(task([1], max_new_tokens=5, ignore_eos=True), heard))
        await pauses.resume("weights")
        await pauses.resume("weights")
        for _ in range(20):
            await asyncio.sleep(0)
        assert not heard.count
        await pauses.resume("command")
        await work
        assert heard.count == 5

    asyncio.run(main())


def test_an_engine_that_scores_is_not_paused() -> None:
    one = SimEngine(EngineSettings(model="m"))
    with pytest.raises(EngineError, match=r"^pause in_place: this engine runs score"):
        one.check_pause("in_place")


def test_it_is_not_flushed_while_a_task_is_inside() -> None:
    async def main() -> None:
        one = engine()
        work = asyncio.create_task(one.generate(task([1], max_new_tokens=100_000, ignore_eos=True), Heard()))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="flushed"):
            await one.flush()
        work.cancel()

    asyncio.run(main())


def test_a_step_costs_its_forward_its_sequences_and_its_tokens() -> None:
    async def main() -> float:
        one = engine(forward_s=0.01, row_s=0.002, token_s=0.001)
        began = asyncio.get_running_loop().time()
        await one.generate(task([1] * 10, n=2, max_new_tokens=3, ignore_eos=True), Heard())
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) >= 3 * (0.01 + 2 * 0.002 + 2 * 0.001) + 10 * 0.001


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ({"kind": "crash", "at_step": 3}, EngineDied, "crash asked for"),
        ({"kind": "crash", "at_batch": 1}, EngineDied, "crash asked for"),
        ({"kind": "error", "at_batch": 1}, EngineError, "error asked for"),
        ({"kind": "error", "on_token": 2}, EngineError, "error asked for"),
        ({"kind": "error", "at_step": 3}, EngineError, "error asked for"),
        ({"kind": "out_of_memory", "rows": 1, "at_batch": 1}, EngineDied, "OutOfMemoryError: 2 rows"),
    ],
)
def test_a_fault_happens_when_it_is_asked_for(fault: dict[str, Any], kind: type[Exception], says: str) -> None:
    async def main() -> None:
        one = engine(faults=[fault])
        with pytest.raises(kind, match=says):
            await one.generate(task([1, 2], n=2, max_new_tokens=9, ignore_eos=True), heard)
        if kind is EngineDied:
            assert says in await one.died()
            with pytest.raises(EngineDied):
                await one.generate(task([5]), Heard())
        else:
            await one.generate(task([5]), Heard())

    heard = Heard()
    asyncio.run(main())
    assert heard.count == (4 if "at_step" in fault else 0)


def test_an_error_of_one_task_leaves_the_others_alone() -> None:
    async def main() -> Heard:
        one = engine(faults=[{"kind": "error", "on_token": 666}])
        heard = Heard()
        good = asyncio.create_task(one.generate(task([1], max_new_tokens=9, ignore_eos=True), heard))
        with pytest.raises(EngineError):
            await one.generate(task([666], n=3), Heard())
        await good
        return heard

    assert asyncio.run(main()).count == 9


def test_a_task_in_an_engine_that_hangs_does_not_leave() -> None:
    async def main() -> None:
        one = engine(faults=[{"kind": "hang", "at_step": 2}])
        heard = Heard()
        work = asyncio.create_task(one.generate(task([1], max_new_tokens=9, ignore_eos=True), heard))
        await until(heard, 1)
        work.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not work.done() and heard.count == 1

    asyncio.run(main())


# --- what it says -------------------------------------------------------------------------------------------------------


def report(stage: str, detail: str) -> None:
    """What the engine says while it starts matters to no test here."""


def test_its_capabilities_are_those_of_a_continuous_batch() -> None:
    can = asyncio.run(engine(inflight_rows=64, inflight_tokens=5000, forward_s=0.01).start(report))
    assert can.operations == ("generate",) and can.pace == 0
    assert can.features == ("logit_processors", "load_adapters", "image", "video", "audio", "image_ids")
    assert engine(multimodal=False)._capabilities.features == ("logit_processors", "load_adapters")  # pyright: ignore[reportPrivateUsage]
    assert (can.batch_rows, can.inflight_rows, can.batch_tokens, can.inflight_tokens) == (64, 64, 5000, 5000)


def test_it_generates_only_where_its_group_does_and_then_nothing_else() -> None:
    rows = SimEngine(EngineSettings(model="m"))
    with pytest.raises(EngineError, match="generate: this engine runs score"):
        asyncio.run(rows.generate(task([1]), Heard()))
    with pytest.raises(ValueError, match="kind = 'classifier'"):
        engine(kind="classifier")


# --- media --------------------------------------------------------------------------------------------------------------


def test_its_tokens_depend_on_the_bytes_the_kind_and_the_order_of_media() -> None:
    def tokens(*media: tuple[Any, bytes]) -> list[int]:
        asked = replace(task([1, 2, 3], max_new_tokens=8), media=tuple(TaskMedium(kind, "bytes", data) for kind, data in media))
        return generated(engine(end_every=0), asked).tokens[0]

    a, b = ("image", b"a"), ("image", b"b")
    found = [tokens(), tokens(a), tokens(b), tokens(a, b), tokens(b, a), tokens(("image", b"ab")), tokens(("audio", b"a"))]
    assert len({*map(tuple, found)}) == len(found) and tokens(a) == found[1]


def test_a_prompt_with_other_media_is_not_in_its_cache() -> None:
    one, cached = engine(end_every=0), list[int]()
    for data in (b"a", b"a", b"b"):
        asked = replace(task([*range(100)], max_new_tokens=2), media=(TaskMedium("image", "bytes", data),))
        cached += generated(one, asked).cached
    assert cached[0] == cached[2] == 0 < cached[1] <= 100


def mixed(**options: Any) -> SimEngine:
    operations = ("score", "generate")
    return SimEngine(EngineSettings(model="m", operations=operations, options={"vocab": VOCAB, **options}))


def rows(count: int = 1) -> RowBatch:
    part = RowPart(
        np.zeros(0, np.int32), np.arange(count, dtype=np.int32), np.ones(count, np.uint32), asked=Part([], labels=[1])
    )
    return RowBatch((part,))


def test_an_engine_that_generates_and_scores_has_budgets_for_each_and_a_pace() -> None:
    one = mixed(sequences=3, sequence_tokens=500, batch_tokens=100, batch_rows=4, context=1000, forward_s=0.01)
    can = asyncio.run(one.start(lambda _stage, _detail: None))
    assert can.operations == ("score", "generate") and can.mixed and can.pace > 0
    assert (can.batch_tokens, can.batch_rows, can.inflight_tokens, can.inflight_rows, can.context) == (100, 4, 200, 8, 200)
    assert (can.sequences, can.sequence_tokens, can.sequence_context) == (3, 500, 500)


def test_sequences_have_a_step_between_two_batches_of_rows() -> None:
    async def main() -> list[int]:
        one, heard, counts = mixed(forward_s=0.001, end_every=0), Heard(), list[int]()
        sequence = asyncio.create_task(one.generate(task([1, 2], max_new_tokens=40), heard))
        while not heard.count:
            await asyncio.sleep(0)

        async def score() -> None:
            await one.score(rows())
            counts.append(heard.count)

        await asyncio.gather(*(score() for _ in range(8)))
        await sequence
        return counts

    counts = asyncio.run(main())
    assert [after - before for before, after in pairwise(counts)] == [1] * 7


def test_scores_next_to_sequences_are_those_of_an_engine_without() -> None:
    async def main() -> None:
        one, heard = mixed(), Heard()
        alone = SimEngine(EngineSettings(model="m", options={"vocab": VOCAB}))
        sequence = asyncio.create_task(one.generate(task([1, 2], max_new_tokens=40), heard))
        found, expected = await one.score(rows(3)), await alone.score(rows(3))
        assert found.forwards == 1
        [mine], [other] = found.parts, expected.parts
        assert isinstance(mine, dict) and isinstance(other, dict) and (mine["scores"] == other["scores"]).all()
        await sequence

    asyncio.run(main())
