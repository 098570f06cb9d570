"""The whole pool on the real engine: the scores are those of `transformers`, for every caller and every cut."""

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import pytest

from enginepool import Pool, ScoreResult
from enginepool.config import GroupConfig, PoolConfig, RestartConfig, Timing
from enginepool.errors import BadRequest, PoolDown
from enginepool.protocol.messages import GroupStatus
from tests.engine.forked import ForkedDaemon
from tests.engine.reference import Models, Reference
from tests.process.daemons import Daemon
from tests.process.processes import Processes
from tests.process.waiting import check_running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: So small that requests of up to 20 rows are cut, and merged with others', in every way.
BUDGETS: dict[str, Any] = {"max_batch_tokens": 160, "max_batch_rows": 6}
CLIENTS, REQUESTS = 4, 240
START_S = 300.0


@pytest.fixture(scope="module")
def daemon(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        config = PoolConfig(
            groups={
                "policy": GroupConfig(model=str(models.causal), workers=2, device="cpu", dtype="float32", **BUDGETS),
                "reward": GroupConfig(model=str(models.reward), workers=1, device="cpu", dtype="float32", **BUDGETS),
            },
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0, forward_s=15.0),
        )
        daemon = ForkedDaemon(processes, config).listening()
        patch.undo()
        yield daemon


class Case(msgspec.Struct):
    """A random request: what to ask, and what must come back."""

    group: str
    queries: list[list[int]]
    items: list[list[int]]
    labels: tuple[int, ...]
    softmax: bool
    item_first: bool
    hidden: bool
    shared: bool
    priority: int

    @classmethod
    def draw(cls, rng: random.Random, vocab: int) -> "Case":
        rows = rng.choice([1, 1, 2, 3, 5, 8, 13, 20])

        def ids(n: int) -> list[int]:
            return [rng.randrange(vocab) for _ in range(n)]

        shared = rng.random() < 0.6
        group = rng.choice(["policy", "policy", "reward"])
        query = ids(rng.randrange(0, 30))
        labels = tuple(ids(rng.choice([1, 2, 7]))) if group == "policy" else ()
        return cls(
            group=group,
            queries=[query] * rows if shared else [ids(rng.randrange(0, 30)) for _ in range(rows)],
            items=[ids(rng.randrange(1, 40)) for _ in range(rows)],
            labels=labels,
            softmax=len(labels) > 1 and rng.random() < 0.5,
            item_first=rng.random() < 0.3,
            hidden=group == "reward" and rng.random() < 0.5,
            shared=shared,
            priority=rng.randrange(-1000, 1001),
        )

    def prompts(self) -> list[list[int]]:
        return [i + q if self.item_first else q + i for q, i in zip(self.queries, self.items, strict=True)]

    async def ask(self, pool: Pool) -> ScoreResult:
        options: dict[str, Any] = {
            "group": self.group,
            "label_token_ids": self.labels or None,
            "apply_softmax": self.softmax,
            "item_first": self.item_first,
            "return_pooled_hidden_states": self.hidden,
            "priority": self.priority,
        }
        if self.shared:
            return await pool.score(self.queries[0], self.items, **options)
        return await pool.score_pairs(self.queries, self.items, **options)

    def want(self, reference: Reference) -> npt.NDArray[np.float64]:
        if self.group == "policy":
            return np.stack([reference.label_scores(row, self.labels, self.softmax) for row in self.prompts()])
        return np.stack([reference.rewards(row, self.softmax) for row in self.prompts()])


def check(case: Case, result: ScoreResult, reference: Reference) -> None:
    np.testing.assert_allclose(result.scores, case.want(reference), rtol=1e-4, atol=1e-5)
    if case.hidden:
        assert result.hidden is not None
        want = np.stack([reference.hidden(row) for row in case.prompts()])
        np.testing.assert_allclose(result.hidden, want, rtol=1e-4, atol=1e-5)
    else:
        assert result.hidden is None
    assert set(result.forwards) == {1}, "a batch was cut"
    assert result.usage.tokens == sum(map(len, case.prompts()))


def test_every_score_reward_and_hidden_state_equals_the_direct_computation(daemon: Daemon, reference: Reference) -> None:
    """Hundreds of random requests from several clients at random priorities; each batch took exactly one forward."""
    rng = random.Random(7)
    vocab = len(reference.tokenizer)
    cases = [Case.draw(rng, vocab) for _ in range(REQUESTS)]

    async def scenario() -> list[ScoreResult]:
        pools = [await Pool.connect(daemon.address) for _ in range(CLIENTS)]
        try:
            await pools[0].ready(timeout=START_S)
            async with asyncio.timeout(START_S):
                results = await asyncio.gather(*(case.ask(pools[i % CLIENTS]) for i, case in enumerate(cases)))
            report = await pools[0].status()
        finally:
            for pool in pools:
                await pool.close()
        for group in report.groups:
            assert group.split_batches == 0
            assert group.forwards == group.batches > 0
            assert not group.lost_batches
        assert sum(len(r.forwards) > 1 for r in results) > 20, "too few requests were cut to show anything"
        batches = sum(group.batches for group in report.groups)
        parts = sum(len(r.forwards) for r in results)
        assert parts > batches, "no batch held rows of two requests"
        return results

    for case, result in zip(cases, asyncio.run(scenario()), strict=True):
        check(case, result, reference)


def test_text_is_scored_as_its_tokens(daemon: Daemon, reference: Reference) -> None:
    query, items = "Is this a color? ", ["red", "grün", "the number 7", "日本語"]
    labels = (5, 9)

    async def scenario() -> ScoreResult:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(timeout=START_S)
            return await pool.score(query, items, group="policy", label_token_ids=labels)

    result = asyncio.run(scenario())
    rows = [reference.tokenizer(query + item)["input_ids"] for item in items]
    want = np.stack([reference.label_scores(row, labels, False) for row in rows])
    np.testing.assert_allclose(result.scores, want, rtol=1e-4, atol=1e-5)


def test_chats_labels_that_are_texts_and_truncated_rows_equal_the_direct_computation(
    daemon: Daemon, reference: Reference
) -> None:
    tokenizer, softened = reference.tokenizer, {"apply_softmax": True, "temperature": 0.5}
    texts = [text for text in ("yes", "no", " the", "a", "b") if len(tokenizer(text)["input_ids"]) == 1][:3]
    labels = [tokenizer(text)["input_ids"][0] for text in texts]

    async def scenario() -> tuple[int, list[ScoreResult]]:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(timeout=START_S)
            [limits] = [group.limits for group in (await pool.status()).groups if group.name == "policy"]
            assert limits is not None
            chats = [[{"role": "user", "content": content}] for content in ("Is it polite?", "a b " * limits.context)]
            options: dict[str, Any] = {"group": "policy", **softened}
            return limits.context, [
                await pool.score(messages=chats, labels=texts, truncation="left", **options),
                await pool.score([5, 6], [[7] * limits.context, [8]], labels=texts, truncation="right", **options),
                await pool.score([5, 6], [[7], [8]], label_token_ids=[labels, labels[::-1]], **options),
            ]

    def want(row: list[int], labels: list[int]) -> Any:
        shares = np.exp(reference.logits(row, labels) / 0.5)
        return shares / shares.sum()

    context, found = asyncio.run(scenario())
    chats = [[{"role": "user", "content": content}] for content in ("Is it polite?", "a b " * context)]
    rendered = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    expected = [
        [want(row[-context:], labels) for row in rendered],
        [want(row, labels) for row in ([5, 6, *[7] * (context - 2)], [5, 6, 8])],
        [want([5, 6, 7], labels), want([5, 6, 8], labels[::-1])],
    ]
    for result, scores in zip(found, expected, strict=True):
        np.testing.assert_allclose(result.scores, scores, rtol=1e-4, atol=1e-5)
        assert set(result.forwards) == {1}
    assert [result.truncated for result in found] == [1, 1, 0]


def test_what_this_model_cannot_serve_is_refused_with_field_and_limit(daemon: Daemon, reference: Reference) -> None:
    async def refused(pool: Pool, *args: Any, **kwargs: Any) -> BadRequest:
        with pytest.raises(BadRequest) as caught:
            await pool.score(*args, **kwargs)
        return caught.value

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready(timeout=START_S)
            vocab = 10**6
            no_labels = await refused(pool, [1], [[2]], group="policy")
            assert no_labels.field == "label_token_ids"
            label = await refused(pool, [1], [[2]], group="policy", label_token_ids=[vocab])
            assert label.field == "label_token_ids" and label.limit
            token = await refused(pool, [1], [[2], [3, vocab]], group="policy", label_token_ids=[1])
            assert token.field == "items[1][1]" and token.limit == label.limit
            long = await refused(pool, [1], [[2], [1] * 100_000], group="policy", label_token_ids=[1])
            assert long.field == "items[1]" and long.limit
            hidden = await refused(pool, [1], [[2]], group="policy", label_token_ids=[1], return_pooled_hidden_states=True)
            assert hidden.field == "return_pooled_hidden_states"
            result = await pool.score([1], [[2]], group="policy", label_token_ids=[1])
            np.testing.assert_allclose(result.scores[0], reference.label_scores([1, 2], (1,), False), rtol=1e-4)

    asyncio.run(scenario())


def test_a_model_path_that_does_not_exist_is_said_in_the_status_and_to_callers(processes: Processes, tmp_path: Path) -> None:
    config = PoolConfig(
        groups={"g": GroupConfig(model=str(tmp_path / "no-such-model"), workers=1, device="cpu")},
        listen=f"ipc://{tmp_path}/pool.sock",
        state_dir=str(tmp_path / "state"),
    )
    daemon = ForkedDaemon(processes, config).listening()

    async def scenario() -> PoolDown:
        async with Pool.connect(daemon.address) as pool:
            with pytest.raises(PoolDown) as caught:
                await asyncio.wait_for(pool.score([1], [[2]], label_token_ids=[1]), START_S)
            return caught.value

    assert "no-such-model" in str(asyncio.run(scenario()))
    assert daemon.end() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_scheduler_that_dies_or_hangs_costs_its_worker_and_no_request(
    daemon: Daemon, reference: Reference, number: signal.Signals
) -> None:
    """SGLang's own process is hit. The worker that hosts it ends or is killed, and its requests run elsewhere."""
    rng = random.Random(3)
    rows = [[rng.randrange(len(reference.tokenizer)) for _ in range(20)] for _ in range(60)]

    async def scenario() -> list[ScoreResult]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(timeout=START_S)
            before = (await pool.status()).groups[0]
            victim = next(w for w in before.workers if w.stage == "ready")
            (scheduler,) = [p for p in psutil.Process(victim.pid).children(recursive=True) if "scheduler" in p.name()]
            calls = [asyncio.create_task(pool.score([], [row], group="policy", label_token_ids=[1])) for row in rows]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            scheduler.send_signal(number)
            # More work, so that the victim is asked for some.
            more = [asyncio.create_task(pool.score([], [row], group="policy", label_token_ids=[1])) for row in rows]
            results = await asyncio.gather(*calls, *more)
            while not any(
                w.restarts > victim.restarts and w.name == victim.name for w in (await pool.status()).groups[0].workers
            ):
                await asyncio.sleep(0.1)
            return results

    for row, result in zip(rows * 2, asyncio.run(scenario()), strict=True):
        np.testing.assert_allclose(result.scores[0], reference.label_scores(row, (1,), False), rtol=1e-4, atol=1e-5)


def test_coordinators_that_are_stopped_and_started_again_cost_no_call_and_load_no_model_again(
    daemon: Daemon, reference: Reference
) -> None:
    """`python -m bench.upgrade` does it ten times with 200 calls/s, on simulated engines."""
    query, item, labels = "Is this a color? ", "red", (5, 9)
    ids = reference.tokenizer(query + item)["input_ids"]

    async def workers(pool: Pool) -> dict[str, tuple[int, int]]:
        while True:
            found = [worker for group in (await pool.status()).groups for worker in group.workers]
            if all(worker.stage == "ready" for worker in found):
                return {worker.name: (worker.pid, worker.restarts) for worker in found}
            await asyncio.sleep(0.05)

    results: list[ScoreResult] = []
    calls: list[asyncio.Task[None]] = []

    async def ask(pool: Pool, stop: asyncio.Event) -> None:
        while not stop.is_set():
            results.extend(
                await asyncio.gather(
                    pool.score([], [ids], group="policy", label_token_ids=labels),
                    pool.score(query, [item], group="policy", label_token_ids=labels),
                )
            )

    async def more(answers: int) -> None:
        answers += len(results)
        while len(results) < answers:
            check_running(calls)
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        stop, coordinator = asyncio.Event(), daemon
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(timeout=START_S)
            before = {name: pid for name, (pid, _) in (await workers(pool)).items()}
            calls.extend(asyncio.create_task(ask(pool, stop)) for _ in range(4))
            for sign in (signal.SIGUSR1, signal.SIGKILL, signal.SIGUSR1):
                await more(8)
                coordinator.process.send_signal(sign)
                await asyncio.to_thread(coordinator.process.wait, START_S)
                coordinator = await asyncio.to_thread(coordinator.successor)
            after = await workers(pool)
            assert after == {name: (pid, 0) for name, pid in before.items()}, "the same processes"
            await more(8)
            stop.set()
            await asyncio.gather(*calls)

    asyncio.run(scenario())
    want = reference.label_scores(ids, labels, False)
    for result in results:
        np.testing.assert_allclose(result.scores[0], want, rtol=1e-4, atol=1e-5)


def test_a_scheduler_without_memory_for_a_batch_costs_its_worker_and_no_request(
    processes: Processes, models: Models, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own process is kept from growing. Its group is given half as much at a time, and no request is suspected."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")  # no batch fits into what malloc keeps of the batches before
    config = PoolConfig(
        groups={"policy": GroupConfig(model=str(models.causal), workers=1, device="cpu", dtype="float32")},
        listen=f"ipc://{tmp_path}/pool.sock",
        state_dir=str(tmp_path / "state"),
        timing=Timing(silence_s=60.0, forward_s=15.0),
        restart=RestartConfig(max_restarts=0),
    )
    daemon = ForkedDaemon(processes, config).listening()
    rng = random.Random(4)
    rows = [[rng.randrange(len(reference.tokenizer)) for _ in range(60)] for _ in range(60)]

    async def scenario() -> tuple[ScoreResult, GroupStatus]:
        async with Pool.connect(daemon.address) as pool, asyncio.timeout(2 * START_S):
            await pool.ready(timeout=START_S)
            [worker] = (await pool.status()).groups[0].workers
            (scheduler,) = [p for p in psutil.Process(worker.pid).children(recursive=True) if "scheduler" in p.name()]
            # Memory that it may write to: what malloc has only reserved for threads is not among it.
            size = scheduler.memory_info().data
            scheduler.rlimit(psutil.RLIMIT_DATA, (size, size))
            result = await pool.score([], rows, label_token_ids=[1])
            return result, (await pool.status()).groups[0]

    result, group = asyncio.run(scenario())
    want = [reference.label_scores(row, (1,), False) for row in rows]
    np.testing.assert_allclose(result.scores, want, rtol=1e-4, atol=1e-5)
    assert set(result.forwards) == {1}
    assert (group.halvings, group.poisoned, group.workers[0].restarts) == (1, 0, 1)
    assert daemon.end() == 0
