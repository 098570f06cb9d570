"""The sim engine: the same question has the same answer for every caller and in every batch; faults come when asked for."""

import asyncio
import math
import os
import zlib
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.protocol.errors import WireError
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages import Part, Tokenize
from enginepool.protocol.messages.weights import Join
from enginepool.transfer.process_group import CollectiveError
from enginepool.workers.engine import BatchOutcome, Engine, EngineDied, EngineError, Outputs, RowBatch, RowPart
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.engine_weights import NewWeights
from enginepool.workers.events import ran_out_of_memory
from enginepool.workers.sim.embeddings import expected_embeddings
from enginepool.workers.sim.engine import BYTE_OFFSET, SimEngine
from enginepool.workers.sim.operation import Weights
from enginepool.workers.sim.scores import expected_scores, score_part
from enginepool.workers.texts import TextIds, TextTask

IDS = st.lists(st.integers(0, 151_935), max_size=8)


def part(
    query: list[int],
    items: list[list[int]],
    labels: tuple[int, ...] = (7,),
    *,
    softmax: bool = False,
    item_first: bool = False,
    logprobs: bool = False,
    temperature: float = 1.0,
) -> RowPart:
    return RowPart(
        np.array(query, np.int32),
        np.array([token for item in items for token in item], np.int32),
        np.array([len(item) for item in items], np.uint32),
        asked=Part([], list(labels), softmax, item_first, logprobs, temperature=temperature),
    )


def engine(**options: Any) -> SimEngine:
    return SimEngine(EngineSettings(model="model", options=options))


T = TypeVar("T")


def work(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


def score(sim: SimEngine, *parts: RowPart, hidden: bool = False) -> BatchOutcome:
    return work(sim.score(RowBatch(parts, hidden=hidden)))


def rows(answer: Outputs | EngineError) -> list[list[float]]:
    assert isinstance(answer, dict)
    [values, *_] = answer.values()
    return values.tolist()


# --- answers ------------------------------------------------------------------------------------------------------------


def in_plain_python(prompt: list[int], column: int, seed: int, version: int) -> float:
    """The formula of sim_scores, one number at a time."""
    crc = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in prompt))
    z = 0x9E3779B97F4A7C15 * seed + 0xD1B54A32D192ED03 * version + 0x8CB92BA72F3D8DD7 * (column + 1)
    z %= 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    k = (z ^ (z >> 31)) | 1
    return (((crc + 1) * k % 2**64 >> 41) + 0.5) / 2**23


@given(IDS, st.lists(IDS, min_size=1, max_size=5), st.lists(st.integers(0, 2**17), min_size=1, max_size=3), st.booleans())
def test_a_causal_score_is_the_documented_function(
    query: list[int], items: list[list[int]], labels: list[int], item_first: bool
) -> None:
    answer = score(engine(seed=3, version=2), part(query, items, tuple(labels), item_first=item_first))
    prompts = [item + query if item_first else query + item for item in items]
    assert rows(answer.parts[0]) == [[in_plain_python(p, label, 3, 2) for label in labels] for p in prompts]
    assert answer.version == 2
    assert answer.forwards == 1


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5), st.booleans())
def test_a_query_for_each_item_scores_as_each_pair_alone(pairs: list[tuple[list[int], list[int]]], item_first: bool) -> None:
    together = expected_scores([q for q, _ in pairs], [i for _, i in pairs], labels=(1, 2), item_first=item_first)
    alone = [expected_scores(q, [i], labels=(1, 2), item_first=item_first)["scores"][0].tolist() for q, i in pairs]
    assert together["scores"].tolist() == alone


def test_softmax_makes_the_labels_of_a_row_sum_to_one() -> None:
    plain = score(engine(), part([1], [[2], [3]], (4, 5, 6)))
    soft = score(engine(), part([1], [[2], [3]], (4, 5, 6), softmax=True))
    for p, s in zip(rows(plain.parts[0]), rows(soft.parts[0]), strict=True):
        assert s == pytest.approx([value / sum(p) for value in p], rel=1e-6)


def test_logprobs_are_the_logarithms_of_what_is_answered_without() -> None:
    for kind, labels, softmax in (("causal", (4, 5, 6), False), ("causal", (4, 5, 6), True), ("classifier", (), True)):
        sim = engine(kind=kind, labels=3)
        plain = rows(score(sim, part([1], [[2], [3]], labels, softmax=softmax)).parts[0])
        logarithms = rows(score(sim, part([1], [[2], [3]], labels, softmax=softmax, logprobs=True)).parts[0])
        np.testing.assert_allclose(logarithms, np.log(plain), rtol=1e-5)


def test_a_classifier_answers_logits_and_softmax_is_that_of_logits() -> None:
    sim = engine(kind="classifier", labels=3)
    plain = rows(score(sim, part([1], [[2]], ())).parts[0])
    soft = rows(score(sim, part([1], [[2]], (), softmax=True)).parts[0])
    assert plain == [[in_plain_python([1, 2], column, 0, 0) for column in range(3)]]
    e = [math.exp(value) for value in plain[0]]
    assert soft[0] == pytest.approx([value / sum(e) for value in e], rel=1e-6)


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_softmax_divides_logits_by_the_temperature(kind: str) -> None:
    sim, labels = engine(kind=kind, labels=3), (4, 5, 6) if kind == "causal" else ()
    logits = np.array(rows(score(sim, part([1], [[2]], labels, logprobs=kind == "causal")).parts[0]))
    found = rows(score(sim, part([1], [[2]], labels, softmax=True, temperature=0.25)).parts[0])
    expected = np.exp(logits / 0.25)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-5)


def test_hidden_states_come_when_asked_for_and_are_refused_when_there_are_none() -> None:
    sim = engine(kind="classifier", hidden=4)
    (answer,) = score(sim, part([1], [[2], [3]], ()), hidden=True).parts
    assert isinstance(answer, dict)
    want = [[in_plain_python([1, t], 2**32 + j, 0, 0) for j in range(4)] for t in (2, 3)]
    assert answer["hidden"].tolist() == want
    assert "hidden" not in score(sim, part([1], [[2]], ())).parts[0]  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(EngineError, match="hidden"):
        score(engine(), part([1], [[2]]), hidden=True)


def test_scores_depend_on_prompt_label_seed_and_version_and_on_nothing_else() -> None:
    def one(sim: SimEngine, p: RowPart) -> float:
        return rows(score(sim, p).parts[0])[0][0]

    base = one(engine(), part([1], [[2]]))
    assert one(engine(), part([], [[1, 2]])) == base
    assert rows(score(engine(), part([9], [[9]]), part([1], [[2]])).parts[1])[0][0] == base
    others = [
        one(engine(), part([1], [[3]])),
        one(engine(), part([1], [[2]], (8,))),
        one(engine(seed=1), part([1], [[2]])),
        one(engine(version=1), part([1], [[2]])),
    ]
    assert len({base, *others}) == 5


def embedded(sim: SimEngine, *parts: RowPart) -> tuple[Any, ...]:
    return work(sim.score(RowBatch(parts, operation="embed"))).parts


def test_embeddings_are_cut_before_they_are_normalized_and_alike_however_they_are_batched() -> None:
    sim, items = engine(embedding=6, seed=3), [[1, 2], [3], [4, 5, 6]]
    whole = replace(part([], items, ()), asked=Part([], normalize=False))
    raw, short, rest = embedded(sim, whole, replace(whole, asked=Part([], dimensions=4)), part([], items[1:], ()))
    assert raw["embeddings"].shape == (3, 6) and np.abs(raw["embeddings"]).max() < 0.5
    cut = raw["embeddings"][:, :4].astype(np.float64)
    np.testing.assert_allclose(short["embeddings"], cut / np.linalg.norm(cut, axis=1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(rest["embeddings"], axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(rest["embeddings"], expected_embeddings(items, 6, seed=3)["embeddings"][1:])
    [other] = embedded(engine(embedding=6, seed=3, version=1), whole)
    assert not np.isclose(other["embeddings"], raw["embeddings"]).any(), "of other weights"


def test_an_engine_runs_the_operations_that_it_says() -> None:
    for options, operations in (({}, ("score", "logprobs")), ({"embedding": 4}, ("score", "logprobs", "embed"))):
        assert work(engine(**options).start(lambda _stage, _detail: None)).operations == operations
    only = engine(kind="embedding", embedding=4)
    assert work(only.start(lambda _stage, _detail: None)).operations == ("embed",)
    with pytest.raises(EngineError, match="score: this engine runs embed"):
        work(only.score(RowBatch((part([1], [[2]]),))))
    with pytest.raises(ValueError, match="embedding = 0: must be more than 0 where kind is 'embedding'"):
        engine(kind="embedding")


def tokens(sim: SimEngine, pairs: list[tuple[str, str]], **asked: Any) -> TextIds:
    return work(sim.tokenize(TextTask(pairs, Tokenize((0, 0), [], **asked))))


def test_text_is_its_bytes() -> None:
    sim = engine()
    assert tokens(sim, [("a", "é"), ("", "")]).rows == [[97 + BYTE_OFFSET, 0xC3 + BYTE_OFFSET, 0xA9 + BYTE_OFFSET], []]
    crossing = engine(separator=2)
    a, b = (97 + BYTE_OFFSET, 98 + BYTE_OFFSET)
    assert tokens(crossing, [("a", "b"), ("", "b")]).rows == [[a, 2, b, 2], [b, 2]]
    assert tokens(crossing, [("a", "b")], raw=True).rows == [[a, b]]
    with pytest.raises(EngineError, match="no room"):
        tokens(engine(vocab=100), [("", "a")])


def test_text_that_is_too_long_loses_tokens_of_its_item_on_the_side_that_was_asked_for() -> None:
    sim, crossing = engine(), engine(separator=2)

    def read(found: TextIds) -> list[str]:
        return ["".join("|" if id_ == 2 else chr(id_ - BYTE_OFFSET) for id_ in row) for row in found.rows]

    pairs = [("ab", "cdef"), ("ab", "c")]
    for truncation, row in (("right", "abcd"), ("left", "abef")):
        found = tokens(sim, pairs, truncation=truncation, longest=4)
        assert (read(found), found.truncated) == ([row, "abc"], 1)
    assert read(tokens(sim, [("cdef", "ab")], truncation="left", longest=4, item_first=True)) == ["efab"]
    assert read(tokens(crossing, pairs, truncation="right", longest=6)) == ["ab|cd|", "ab|c|"]
    assert read(tokens(crossing, [("cdef", "ab")], truncation="right", longest=6, item_first=True)) == ["cd|ab|"]
    assert read(tokens(sim, pairs, truncation="error", longest=4)) == ["abcdef", "abc"]
    with pytest.raises(WireError, match=r"items\[1\]: 4 tokens of its query, which is not truncated; at most 3") as wrong:
        tokens(sim, [("", "abcdef"), ("abcd", "e")], truncation="right", longest=4)
    assert (wrong.value.code, wrong.value.field, wrong.value.limit) == ("bad_request", "items[1]", "3")


def test_scores_lie_strictly_between_zero_and_one() -> None:
    p = part([], [[i] for i in range(20_000)])
    scores = score_part(p, Weights())["scores"]
    assert scores.min() > 0
    assert scores.max() < 1
    assert abs(scores.mean() - 0.5) < 0.01


# --- capabilities and options -------------------------------------------------------------------------------------------


def test_capabilities_follow_options_and_caps() -> None:
    reports: list[tuple[str, str]] = []
    options: dict[str, Any] = {"kind": "classifier", "labels": 2, "hidden": 8, "batch_tokens": 100}
    sim = SimEngine(EngineSettings(model="m", options=options, max_batch_tokens=40, max_batch_rows=1000, forwards_in_flight=3))
    held_by_type: Engine = sim
    c = work(held_by_type.start(lambda stage, detail: reports.append((stage, detail))))
    assert (c.kind, c.labels, c.hidden, c.model, c.engine) == ("classifier", 2, 8, "m", "sim")
    assert (c.batch_tokens, c.inflight_tokens, c.batch_rows, c.inflight_rows) == (40, 120, 256, 768)
    assert c.context == 120, "a row over what may be in flight could never be sent"
    assert [stage for stage, _ in reports] == ["loading", "compiling"]


@pytest.mark.parametrize("options", [{"kind": "embedding", "embedding": 8}, {"separator": 5}])
def test_an_engine_that_cannot_pack_does_not_and_is_refused_where_it_has_to(options: dict[str, Any]) -> None:
    sim = SimEngine(EngineSettings(model="m", options=options))
    assert not work(sim.start(lambda _stage, _detail: None)).packs
    with pytest.raises(ValueError, match="packing = 'on': auto or off with kind = "):
        SimEngine(EngineSettings(model="m", options=options, packing="on"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"latency": 3}, "latency"),
        ({"vocab": 0}, "vocab = 0"),
        ({"token_s": -1.0}, "token_s"),
        ({"kind": "other"}, "kind = 'other': must be one of causal, classifier, embedding"),
        ({"faults": [{"kind": "explode"}]}, "faults[0].kind = 'explode': must be one of crash, abort, hang, "),
        ({"faults": [{"kind": "crash", "at": 3}]}, "`at`"),
        (
            {"faults": [{"kind": "crash", "rows": "all"}]},
            "options of engine sim: faults[0].rows = 'all': must be a whole number",
        ),
    ],
)
def test_impossible_options_are_refused_by_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="options of engine sim") as refused:
        SimEngine(EngineSettings(model="m", options=options))
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("sizes", "forwards"),
    [([8], 1), ([4, 4], 1), ([4, 5], 2), ([20], 1), ([20, 1], 2), ([1] * 4, 1), ([1] * 5, 2), ([3, 3, 3, 3, 3], 3)],
)
def test_a_batch_over_the_budget_takes_more_than_one_forward(sizes: list[int], forwards: int) -> None:
    sim = engine(batch_tokens=8, batch_rows=4)
    assert score(sim, part([], [[1] * n for n in sizes])).forwards == forwards


def test_the_pace_is_what_the_costs_say_and_without_costs_there_is_none() -> None:
    free, slow = engine(), engine(forward_s=0.02, token_s=0.001, batch_tokens=1000)
    both = [work(one.start(lambda stage, detail: None)) for one in (free, slow)]
    # Eight times a small forward of 21 ms; 960 tokens take 980 ms.
    assert [(c.pace, c.forward_ms) for c in both] == [(0, 25), (164, 168)]


# --- order and cost -----------------------------------------------------------------------------------------------------


def test_one_forward_at_a_time_by_priority_then_arrival() -> None:
    sim = engine(forward_s=1e-4)
    order: list[int] = []

    async def one(n: int, priority: int) -> None:
        await sim.score(RowBatch((part([n], [[n]]),), priority))
        order.append(n)

    async def all_of_them() -> None:
        async with asyncio.TaskGroup() as group:
            for n, priority in enumerate([0, 0, 5, -5, 5]):
                group.create_task(one(n, priority))

    work(all_of_them())
    assert order == [0, 2, 4, 1, 3]


def test_a_cancelled_batch_gives_its_turn_away() -> None:
    sim = engine(forward_s=1e-4)

    async def scenario() -> int:
        tasks = [asyncio.create_task(sim.score(RowBatch((part([n], [[n]]),)))) for n in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(result, BatchOutcome) for result in results)

    assert work(scenario()) == 2


def test_the_cost_is_that_of_forward_rows_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    score(engine(forward_s=1.0, row_s=0.1, token_s=0.01), part([1, 2], [[3], [4, 5]]))
    assert slept == pytest.approx([1.0 + 0.2 + 0.07])
    for seed in (1, 1, 2):
        score(engine(forward_s=1.0, jitter=0.5, seed=seed), part([1], [[2]]))
    first, again, other = slept[1:]
    assert first == again != other
    assert all(0.5 <= seconds <= 1.5 for seconds in slept[1:])


def test_without_costs_nothing_is_awaited() -> None:
    coroutine = engine().score(RowBatch((part([1], [[2]]),)))
    with pytest.raises(StopIteration):
        coroutine.send(None)


# --- faults -------------------------------------------------------------------------------------------------------------


def faulty(kind: str, **when: Any) -> SimEngine:
    return engine(faults=[{"kind": kind, **when}])


def test_a_crash_fails_the_batch_and_everything_after_it_and_wakes_the_watcher() -> None:
    sim = faulty("crash", at_batch=2)

    async def scenario() -> str:
        watcher = asyncio.create_task(sim.died())
        await sim.score(RowBatch((part([1], [[2]]),)))
        for _ in range(2):
            with pytest.raises(EngineDied, match="crash"):
                await sim.score(RowBatch((part([1], [[2]]),)))
        return await watcher

    assert "crash" in work(scenario())


def test_a_hang_never_answers_nor_lets_others_run() -> None:
    sim = faulty("hang", on_token=13)

    async def scenario() -> set[bool]:
        tasks = [asyncio.create_task(sim.score(RowBatch((part([token], [[2]]),)))) for token in (13, 1)]
        for _ in range(100):
            await asyncio.sleep(0)
        done = {task.done() for task in tasks}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    assert work(scenario()) == {False}


@pytest.mark.parametrize(("kind", "sleeper"), [("slow", "asyncio.sleep"), ("block", "time.sleep")])
def test_slow_and_block_take_their_seconds(kind: str, sleeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(sleeper, sleep if kind == "slow" else slept.append)
    assert score(faulty(kind, seconds=7.0), part([1], [[2]])).forwards == 1
    assert slept == [7.0]


def test_new_weights_may_be_slow_to_take_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    sim = faulty("slow_on_take", at_take=2, seconds=7.0)
    for version in (1, 2, 3):
        work(sim.weights.load_weights(NewWeights(), version, ""))
    assert (slept, sim.weights.version) == ([7.0], 3)


def test_a_tensor_of_float16_is_held_as_such_unless_told_otherwise() -> None:
    came = [Tensor("a", "float32", (2,)), Tensor("b", "float32", (2,))]
    own: list[Any] = [["a", "float16", [2]], ["b", "float32", [2]]]
    assert engine(tensors=own).weights.model_tensors().targets(came) == ["float16", ""]
    assert engine(tensors=own, held="bfloat16").weights.model_tensors().targets(came) == ["bfloat16", "bfloat16"]
    assert engine(tensors=own, held="float32").weights.model_tensors().targets(came) == []


def test_a_broadcast_that_breaks_leaves_the_engine_on_its_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        name, on_device = "ring", False

        def begin(self, bucket: Any) -> None:
            raise CollectiveError("rank 0 is gone")

    def join(*told: Any) -> Broken:
        return Broken()

    monkeypatch.setattr("enginepool.workers.sim.weights._join", join)
    sim = engine(tensors=[["norm", "float32", [4]]])

    async def scenario() -> None:
        await sim.weights.join(Join("ring", 2, 1, "127.0.0.1:1"))
        await sim.weights.load_weights(NewWeights((Tensor("norm", "float32", (4,)),), group="ring", bucket_bytes=256), 1, "")

    with pytest.raises(EngineError, match="rank 0 is gone"):
        work(scenario())
    assert (sim.weights.version, sim.weights.digest) == (0, "")


def test_of_the_groups_that_it_joins_it_is_in_the_last_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    class Ring:
        def __init__(self, name: str) -> None:
            self.name = name

        def abort(self) -> None:
            left.append(self.name)

    def join(request: Join) -> Ring:
        return Ring(request.rendezvous)

    monkeypatch.setattr("enginepool.workers.sim.weights._join", join)
    sim = engine(tensors=[["norm", "float32", [4]]])

    async def scenario() -> None:
        for name in ("first", "first", "second", "third"):
            await sim.weights.join(Join(name, 2, 1, "127.0.0.1:1"))

    work(scenario())
    assert left == ["first", "second"]


def test_an_error_refuses_the_batch_or_only_the_part_with_the_token() -> None:
    with pytest.raises(EngineError, match="asked for"):
        score(faulty("error", at_batch=1), part([1], [[2]]))
    good, bad = score(faulty("error", on_token=13), part([1], [[2]]), part([1], [[13]])).parts
    assert isinstance(good, dict)
    assert isinstance(bad, EngineError)
    assert "13" in str(bad)


def test_wrong_rows_takes_a_row_away() -> None:
    assert len(rows(score(faulty("wrong_rows"), part([1], [[2], [3]])).parts[0])) == 1


def test_lie_forwards_reports_one_too_many() -> None:
    sim = faulty("lie_forwards", at_batch=1)
    assert [score(sim, part([1], [[2]])).forwards for _ in range(2)] == [2, 1]


def test_a_token_in_the_query_triggers_too_and_other_batches_are_well() -> None:
    sim = faulty("lie_forwards", on_token=13)
    assert [score(sim, part([token], [[2]])).forwards for token in (13, 12)] == [2, 1]


def test_an_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(EngineDied, match="crash_on_load"):
        work(faulty("crash_on_load").start(lambda stage, detail: None))


def test_an_engine_without_memory_for_what_may_be_in_flight_starts_with_half_of_it() -> None:
    sizes = {"inflight_rows": 8, "batch_rows": 4, "faults": [{"kind": "out_of_memory", "rows": 5}]}
    with pytest.raises(EngineDied, match="OutOfMemoryError: 8 rows") as died:
        work(engine(**sizes).start(lambda stage, detail: None))
    assert ran_out_of_memory(str(died.value))
    can = work(engine(**sizes).start(lambda stage, detail: None, 1))
    assert (can.inflight_rows, can.batch_rows, can.halvings) == (4, 2, 1)


def test_a_batch_without_memory_for_its_rows_kills_the_engine() -> None:
    sim = engine(faults=[{"kind": "out_of_memory", "rows": 2, "at_batch": 2}])
    work(sim.start(lambda stage, detail: None))
    assert score(sim, part([1], [[2]] * 3)).forwards == 1
    with pytest.raises(EngineDied, match="OutOfMemoryError: 3 rows"):
        score(sim, part([1], [[2]] * 3))


@pytest.mark.parametrize("kind", ["abort", "exit_on_load"])
def test_the_hard_faults_end_the_process(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def end(*args: int) -> None:
        ended.append(kind)
        raise SystemExit

    monkeypatch.setattr(os, "kill", end)
    monkeypatch.setattr(os, "_exit", end)
    sim = faulty(kind)

    async def scenario() -> None:
        await sim.start(lambda stage, detail: None)
        await sim.score(RowBatch((part([1], [[2]]),)))

    with pytest.raises(SystemExit):
        work(scenario())
    assert ended == [kind]
