"""New weights for a pool of real engines: each answer is what `transformers` computes with the weights of its version."""

import asyncio
import importlib
import itertools
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from enginepool import Pool, ScoreResult, WeightPublisher, errors
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.protocol.messages import WorkerStatus
from tests.engine.forked import ForkedDaemon
from tests.engine.reference import Models, Reference
from tests.process.daemons import PATIENCE_S, Daemon
from tests.process.processes import Processes
from tests.process.waiting import check_running

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.torch")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
BUDGETS: dict[str, Any] = {"max_batch_tokens": 160, "max_batch_rows": 6}
WORKERS, UPDATES, CLIENTS = 3, 50, 3
START_S = 500.0
LABELS = (3, 9, 400)
#: less than an update takes, so that each meets requests
PAUSE_S = 0.03


@pytest.fixture(scope="module")
def daemon(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("pool")
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        config = PoolConfig(
            groups={
                "g": GroupConfig(
                    model=str(models.causal),
                    workers=WORKERS,
                    device="cpu",
                    dtype="float32",
                    checkpoint_roots=[str(folder.parent)],
                    **BUDGETS,
                )
            },
            listen=f"ipc://{folder}/pool.sock",
            state_dir=str(folder / "state"),
            timing=Timing(silence_s=60.0, forward_s=30.0),
        )
        daemon = ForkedDaemon(processes, config).listening()
        patch.undo()
        yield daemon


@pytest.fixture(scope="module")
def own(models: Models) -> dict[str, Any]:
    return safetensors.load_file(str(models.causal / "model.safetensors"))


def drawn(own: dict[str, Any], version: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(one.shape, generator=generator) * one.shape[-1] ** -0.5 for name, one in own.items()}


class Answer(NamedTuple):
    """A request of the load: its rows, the version that was published when it was sent, its answer, and when (monotonic)."""

    rows: list[list[int]]
    least: int
    result: ScoreResult
    at: float = 0.0


class Load:
    """Clients that ask again `pause_s` after an answer. `repeating`: after so many requests each of them begins with its first
    one again."""

    def __init__(self, group: str = "", repeating: int | None = None, pause_s: float = 0) -> None:
        self.group, self.repeating, self.pause_s = group, repeating, pause_s
        self.published = 0
        self.answers: list[Answer] = []
        self.asked = 0
        self.stop = False
        self.clients: list[asyncio.Task[None]] = []

    async def client(self, pool: Pool, seed: int) -> None:
        chance = random.Random(seed)
        for count in itertools.count(1):
            if self.stop:
                return
            rows = [[chance.randrange(512) for _ in range(chance.randrange(2, 30))] for _ in range(chance.choice([1, 2, 9]))]
            least = self.published
            self.asked += 1
            result = await pool.score([], rows, label_token_ids=LABELS, group=self.group)
            self.answers.append(Answer(rows, least, result, time.monotonic()))
            await asyncio.sleep(self.pause_s)
            if self.repeating and count % self.repeating == 0:
                chance = random.Random(seed)

    async def more(self, count: int) -> None:
        """Wait for so many more answers: the pool serves."""
        goal = len(self.answers) + count
        async with asyncio.timeout(PATIENCE_S):
            while len(self.answers) < goal:
                check_running(self.clients)
                await asyncio.sleep(0.005)


def check(answers: Iterable[Answer], reference: Reference) -> None:
    """Rows of one length are computed together: nothing is padded."""
    by_length: dict[int, list[tuple[list[int], Any]]] = defaultdict(list)
    for answer in answers:
        for row, scores in zip(answer.rows, answer.result.scores, strict=True):
            by_length[len(row)].append((row, scores))
    for found in by_length.values():
        want = reference.scores_of_labels([row for row, _ in found], LABELS)
        np.testing.assert_allclose([scores for _, scores in found], want, rtol=1e-4, atol=1e-6)


async def all_ready(pool: Pool) -> None:
    await pool.ready(timeout=START_S)
    async with asyncio.timeout(START_S):
        while [one.stage for one in (await pool.status()).groups[0].workers] != ["ready"] * WORKERS:
            await asyncio.sleep(0.1)


async def all_on(pool: Pool, version: int) -> None:
    end = time.monotonic() + START_S
    while True:
        workers = (await pool.weights()).workers
        if [one.version for one in workers if not one.message] == [version] * WORKERS:
            return
        assert time.monotonic() < end, workers
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(("transfer", "updates"), [("staged", UPDATES), ("ipc", UPDATES // 5)])
def test_after_each_of_many_updates_under_load_every_answer_is_of_exactly_its_weights(
    daemon: Daemon, reference: Reference, own: dict[str, Any], transfer: Any, updates: int
) -> None:
    load = Load(pause_s=PAUSE_S)
    published: list[int] = []

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, device="cpu", bucket_bytes=1 << 18) as publisher:
            await all_ready(pool)
            first = (await pool.weights()).version + 1
            clients = load.clients = [asyncio.create_task(load.client(pool, seed)) for seed in range(CLIENTS)]
            for version in range(first, first + updates):
                record = await publisher.publish(drawn(own, version), version, transfer=transfer)
                published.append(version)
                assert (record.outcome, record.members, record.committed) == ("committed", WORKERS, WORKERS)
                load.published = version
                await load.more(CLIENTS + 1)
            load.stop = True
            await asyncio.gather(*clients)
            report = await pool.weights()
            assert {(one.version, one.digest) for one in report.workers} == {(published[-1], report.digest)}

    asyncio.run(scenario())
    versions = {answer.result.version for answer in load.answers}
    assert versions >= set(published)
    assert all(answer.result.version >= answer.least for answer in load.answers)
    for version in sorted(versions):
        with reference.holding(own if version == 0 else drawn(own, version)):
            check((answer for answer in load.answers if answer.result.version == version), reference)


def kept_room(daemon: Daemon, worker: WorkerStatus) -> bool:
    """Whether a worker has asked for memory for staged updates before its engine took the rest."""
    log = Path(daemon.config.state_dir) / "logs" / f"{worker.incarnation}.log"
    return " for weight updates" in (said := log.read_text("utf-8", "replace")) or "weight updates will be received" in said


def test_a_worker_and_its_stager_that_die_come_back_on_the_committed_weights(
    daemon: Daemon, reference: Reference, own: dict[str, Any]
) -> None:
    answers: list[Answer] = []

    async def ask(pool: Pool) -> None:
        for seed in range(12):
            rows = [[random.Random(seed).randrange(512) for _ in range(9)]]
            answers.append(Answer(rows, 0, await pool.score([], rows, label_token_ids=LABELS)))

    async def scenario() -> int:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, device="cpu") as publisher:
            await all_ready(pool)
            version = (await pool.weights()).version + 1
            await publisher.publish(drawn(own, version), version)
            one, other, _ = (await pool.status()).groups[0].workers
            assert not kept_room(daemon, one), "it started before the first staged update"
            os.kill(one.pid, signal.SIGKILL)  # comes back by its stager
            records = Path(daemon.config.state_dir) / "stagers"
            os.kill(other.pid, signal.SIGKILL)  # and this one by the snapshot
            os.kill(int((records / "g.1.json").read_text().split('"pid":')[1].split(",")[0]), signal.SIGKILL)
            await ask(pool)
            while not {one.pid, other.pid}.isdisjoint(w.pid for w in (await pool.status()).groups[0].workers):
                await asyncio.sleep(0.1)
            await all_ready(pool)
            await all_on(pool, version)
            assert [kept_room(daemon, worker) for worker in (await pool.status()).groups[0].workers] == [True, True, False]
            await ask(pool)
            report = await pool.weights_digest()
            assert [one.digest for one in report.workers] == [report.digest] * WORKERS
            return version

    version = asyncio.run(scenario())
    assert {answer.result.version for answer in answers} == {version}
    with reference.holding(drawn(own, version)):
        check(answers, reference)


def test_direct_transfer_checkpoints_and_questions(
    daemon: Daemon, reference: Reference, own: dict[str, Any], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", seed=77)
    rows = [[1, 2, 3], [4, 5]]
    answers: list[Answer] = []

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool, WeightPublisher(pool, device="cpu", bucket_bytes=1 << 16) as publisher:
            await all_ready(pool)
            version = (await pool.weights()).version + 1
            weights = drawn(own, version)
            record = await publisher.publish(weights, version, transfer="direct")
            assert record.outcome == "committed"
            answers.append(Answer(rows, version, await pool.score([], rows, label_token_ids=LABELS)))
            tensor = await pool.weight("model.layers.1.self_attn.v_proj.weight")
            np.testing.assert_array_equal(tensor, weights["model.layers.1.self_attn.v_proj.weight"].numpy())
            report = await pool.weights_digest()
            assert [one.digest for one in report.workers] == [record.digest] * WORKERS
            assert all(not one.findings for one in (await pool.validate_weights()).workers)

            for wrong, story in (
                ({**weights, "nowhere": weights["lm_head.weight"].clone()}, "unknown names: nowhere"),
                ({name: one for name, one in weights.items() if "q_proj" not in name}, "missing names"),
                ({**weights, "lm_head.weight": weights["lm_head.weight"].T}, "lm_head.weight: shape"),
                ({**weights, "model.norm.weight": weights["model.norm.weight"] / 0}, "model.norm.weight"),
            ):
                with pytest.raises(errors.WeightsRefused, match=story):
                    await publisher.publish(wrong, version + 1)
            await pool.publish_checkpoint(str(other), version + 1)
            answers.append(Answer(rows, version + 1, await pool.score([], rows, label_token_ids=LABELS)))

    asyncio.run(scenario())
    for answer, weights in zip(
        answers, (drawn(own, answers[0].least), safetensors.load_file(str(other / "model.safetensors"))), strict=True
    ):
        assert answer.result.version == answer.least
        with reference.holding(weights):
            check([answer], reference)
