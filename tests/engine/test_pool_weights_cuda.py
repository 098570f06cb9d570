"""New weights for pools on two GPUs: an engine over both answers as one on each does; a worker killed meanwhile comes back."""

import asyncio
import importlib
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from enginepool import Pool, WeightPublisher, errors
from enginepool.cli.tiny_model_files import make_tiny_model
from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.protocol.messages import WorkerStatus
from enginepool.protocol.messages.weight_reports import UpdateRecord
from tests.engine.reference import Models, Reference
from tests.engine.test_pool_weights import CLIENTS, LABELS, Load, kept_room
from tests.engine.test_sglang_cuda import BFLOAT16
from tests.process.daemons import PATIENCE_S, Daemon
from tests.process.processes import Processes
from tests.process.weights import Gate

torch: Any = importlib.import_module("torch")
safetensors: Any = importlib.import_module("safetensors.torch")

GPUS: int = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA GPUs: torch finds {GPUS}"),
]
Transfer = Literal["staged", "direct"]
TRANSFERS: tuple[Transfer, ...] = ("staged", "direct")
#: groups, and their workers: a GPU for each of the first; one worker over both of the second, which has the same model
PAIR, SPLIT = "pair", "split"
WORKERS = {PAIR: 2, SPLIT: 1}
#: A worker may take this long to start: on a new host its kernels are compiled, and it shares the GPUs with others that start.
START_S = 400.0
#: the model has some thirty of these
BUCKET = 1 << 14
#: Logarithms of scores are this far apart, somewhere, for any two of the models here; kernels err by `Stand.atol`.
CLEARLY = 1.0
BUDGETS = {"max_batch_tokens": 1024, "max_batch_rows": 32}
#: restarts, by group, for which a test has failed already
FAILED_FOR: dict[str, int] = {}
ROWS = [[(7 * row + 3 * at) % 512 for at in range(2 + 3 * row)] for row in range(12)]


class Stand(NamedTuple):
    """What the pool is put on. Everything here can be told on a CPU too, in float32 and with a tolerance of its own.

    Attributes:
        atol: of logarithms of scores.
        split: further options of the engine that is over two GPUs.
    """

    device: str
    dtype: str
    gpus: list[str]
    atol: float
    options: dict[str, Any]
    split: dict[str, Any]

    def weights(self, directory: Path, version: int) -> dict[str, Any]:
        """Those of a version: of a model that is made for it, whose scores differ from those of all others."""
        made = make_tiny_model(directory / f"model-{version}", seed=100 + version)
        own = safetensors.load_file(str(made / "model.safetensors"))
        return {name: tensor.to(getattr(torch, self.dtype)) for name, tensor in own.items()}


class Running(NamedTuple):
    """A pool whose first group has started, which took `start_s`."""

    stand: Stand
    daemon: Daemon
    reference: Reference
    start_s: float


@pytest.fixture(scope="module")
def stand() -> Stand:
    # Three engines share two GPUs, and start at once: none may count on all that is free.
    options = {
        "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2, "max_total_tokens": 32_768,
    }  # fmt: skip
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    # What several ranks do while they start is in the log, should one of them not come up.
    return Stand("cuda", "bfloat16", gpus, BFLOAT16, options, {"disable_custom_all_reduce": True, "log_level": "info"})


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, stand: Stand, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("pool")
    common: dict[str, Any] = {"model": str(models.causal), "device": stand.device, "dtype": stand.dtype, **BUDGETS}
    pair = GroupConfig(workers=WORKERS[PAIR], gpus=stand.gpus, options=stand.options, **common)
    over = {**stand.options, **stand.split, "tp_size": 2}
    split = GroupConfig(workers=WORKERS[SPLIT], gpus=[",".join(stand.gpus)] if stand.gpus else [], options=over, **common)
    config = PoolConfig(
        groups={PAIR: pair, SPLIT: split},
        listen=f"ipc://{folder}/pool.sock",
        state_dir=str(folder / "state"),
        timing=Timing(silence_s=60.0),
    )
    with Processes() as processes, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_DEBUG", "WARN")
        # SGLang refuses two GPUs of which one is fuller, as they are for a moment where others start on them, too.
        patch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
        began = time.monotonic()
        daemon = Daemon(processes, config).listening()
        patch.undo()
        # Asked for here, and not as an argument: it is made while the engines start.
        reference: Reference = request.getfixturevalue("reference")

        async def started() -> float:
            async with Pool.connect(daemon.address) as pool:
                await ready(daemon, pool, PAIR)
                return time.monotonic() - began

        running = Running(stand, daemon, reference, asyncio.run(started()))
        tell("start of the pool, until the group of two workers is ready", running.start_s, "s")
        yield running


def tell(what: str, value: float, unit: str) -> None:
    """A figure for the reader of this file's output, who judges the times."""
    print(f"{what}: {value:.4g} {unit}", flush=True)  # noqa: T201


@contextmanager
def last_words(running: Running) -> Generator[None]:
    """Where something goes wrong with workers that had got ready, what they have written is told at once, too."""
    try:
        yield
    except Exception:
        print("\n".join(running.daemon.last_words(group, 30) for group in WORKERS), flush=True)  # noqa: T201
        raise


async def workers_of(pool: Pool, group: str) -> list[WorkerStatus]:
    return next(status.workers for status in (await pool.status()).groups if status.name == group)


async def ready(daemon: Daemon, pool: Pool, group: str, *, version: int | None = None, restarts: int = 0) -> list[WorkerStatus]:
    """Wait until all workers of a group are ready, on this version; one that has to start more often will not.

    What they do meanwhile is told when it changes. Where they do not get ready, what they have written is told at once, and is
    the message of the failure; the next wait has no need to fail for the same restart.
    """
    began, doing = time.monotonic(), ""
    restarts = max(restarts, FAILED_FOR.get(group, 0))
    while True:
        workers = await workers_of(pool, group)
        before, doing = doing, "; ".join(f"{one.name} {one.stage} {one.detail}, restarts {one.restarts}" for one in workers)
        waited = time.monotonic() - began
        if doing != before:
            tell(f"{group}: {doing}; waited", waited, "s")
        lost = any(one.restarts > restarts or one.stage == "retired" for one in workers)
        if not lost and all(one.stage == "ready" and version in (None, one.version) for one in workers):
            return workers
        if lost or waited > START_S:
            story = f"{group} is not ready after {waited:.0f} s: {doing}\n{daemon.last_words(group)}"
            print(story, flush=True)  # noqa: T201
            FAILED_FOR[group] = max(one.restarts for one in workers)
            pytest.fail(story)
        await asyncio.sleep(0.05)


async def digests(pool: Pool, group: str) -> list[str]:
    """Of what each engine of a group holds now."""
    report = await pool.weights_digest(group)
    assert [one.message for one in report.workers] == [""] * WORKERS[group]
    return [one.digest for one in report.workers]


def apart(some: npt.NDArray[Any], others: npt.NDArray[Any]) -> float:
    """The largest difference of the logarithms of scores."""
    return float(np.abs(np.log(some) - np.log(others)).max())


def expected(reference: Reference, rows: list[list[int]]) -> npt.NDArray[Any]:
    return np.stack([reference.label_scores(row, LABELS, False) for row in rows])


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_an_engine_over_two_gpus_answers_after_an_update_as_those_on_one_each(
    running: Running, transfer: Transfer, tmp_path: Path
) -> None:
    stand = running.stand
    found: list[dict[str, npt.NDArray[Any]]] = []

    async def ask(pool: Pool, version: int) -> None:
        answers = {group: await pool.score([], ROWS, label_token_ids=LABELS, group=group) for group in WORKERS}
        assert version in (0, *(answer.version for answer in answers.values()))
        found.append({group: answer.scores for group, answer in answers.items()})

    async def scenario() -> dict[str, Any]:
        async with Pool.connect(running.daemon.address) as pool:
            for group in WORKERS:
                await ready(running.daemon, pool, group)
            version = 1 + max([(await pool.weights(group)).version for group in WORKERS])
            weights = stand.weights(tmp_path, version)
            await ask(pool, 0)
            records: list[UpdateRecord] = []
            for group, members in WORKERS.items():
                async with WeightPublisher(pool, group=group, device="cpu", bucket_bytes=BUCKET) as publisher:
                    record = await publisher.publish(weights, version, transfer=transfer)
                assert (record.outcome, record.members, record.committed) == ("committed", members, members)
                assert set(await digests(pool, group)) == {record.digest}
                tell(f"{transfer}, {group}: hand-over", record.phases["load"] / 1000, "ms")
                records.append(record)
            assert records[0].digest == records[1].digest
            await ask(pool, version)
            return weights

    with last_words(running):
        weights = asyncio.run(scenario())
    before, after = found
    with running.reference.holding(weights):
        want = expected(running.reference, ROWS)
    tell(f"{transfer}: scores of tp_size 2 are apart from those of tp_size 1 by", apart(after[PAIR], after[SPLIT]), "(log)")
    for group in WORKERS:
        tell(f"{transfer}, {group}: the update has moved scores by", apart(before[group], after[group]), "(log)")
        tell(f"{transfer}, {group}: scores are apart from a direct computation by", apart(after[group], want), "(log)")
    assert apart(after[PAIR], after[SPLIT]) < stand.atol
    assert all(apart(before[group], after[group]) > CLEARLY for group in WORKERS)
    assert all(apart(after[group], want) < stand.atol for group in WORKERS)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_worker_killed_in_a_transfer_comes_back_on_the_committed_weights_and_no_request_is_lost(
    running: Running, transfer: Transfer, tmp_path: Path
) -> None:
    load = Load(PAIR, repeating=8)
    sent: dict[int, dict[str, Any]] = {}

    async def scenario() -> None:
        async with (
            Pool.connect(running.daemon.address) as pool,
            WeightPublisher(pool, group=PAIR, device="cpu", bucket_bytes=BUCKET) as publisher,
            asyncio.TaskGroup() as clients,
        ):

            async def publish(version: int) -> str:
                record = await publisher.publish(sent[version], version)
                assert (record.outcome, record.members, record.committed) == ("committed", 2, 2)
                return record.digest

            first = await workers_of(pool, PAIR)
            restarts = max(one.restarts for one in first)
            first = await ready(running.daemon, pool, PAIR, restarts=restarts)
            old = (await pool.weights(PAIR)).version + 1
            sent.update({version: running.stand.weights(tmp_path, version) for version in (old, old + 1, old + 2)})
            # No process keeps a copy of what goes straight into engines: they can come back on this.
            digest = await publish(old)
            for seed in range(CLIENTS):
                clients.create_task(load.client(pool, seed))
            await load.more(20)
            gate = Gate(sent[old + 1], after=len(sent[old + 1]) // 2)
            described = [(name, running.stand.dtype, tuple(tensor.shape)) for name, tensor in sent[old + 1].items()]
            try:
                handle = await publisher.start(gate, old + 1, manifest=described, transfer=transfer)
                finish = asyncio.create_task(handle.finish())
                assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
                async with asyncio.timeout(PATIENCE_S):
                    while not handle.sent_bytes:
                        await asyncio.sleep(0.005)
                assert handle.sent_bytes < handle.total_bytes
                victim, other = first
                killed = time.monotonic()
                os.kill(victim.pid, signal.SIGKILL)
                async with asyncio.timeout(PATIENCE_S):
                    while victim.pid in [one.pid for one in await workers_of(pool, PAIR) if one.stage == "ready"]:
                        await asyncio.sleep(0.005)
                if transfer == "staged":
                    await load.more(20)
                    assert [one.pid for one in await workers_of(pool, PAIR) if one.stage == "ready"] == [other.pid]
            finally:
                gate.opened.set()
            with pytest.raises(errors.UpdateAborted):
                await finish
            tell(f"{transfer}, worker killed: the update has ended after", time.monotonic() - killed, "s")
            now = await ready(running.daemon, pool, PAIR, version=old, restarts=restarts + 1)
            back = time.monotonic()
            pids = [one.pid for one in now]
            assert victim.pid not in pids
            # It started after a staged update, for which the one before had kept no memory unless it did, too.
            (successor,) = [one for one in now if one.name == victim.name]
            assert kept_room(running.daemon, successor)
            assert transfer == "direct" or other.pid in pids
            await load.more(20)
            assert await digests(pool, PAIR) == [digest] * 2
            times = [killed, *(answer.at for answer in load.answers if killed < answer.at < back), back]
            tell(f"{transfer}, worker killed: all are ready on the committed weights after", back - killed, "s")
            tell(f"{transfer}, worker killed: the same, beyond the start of the pool", back - killed - running.start_s, "s")
            tell(f"{transfer}, worker killed: answers until then", len(times) - 2, "")
            tell(f"{transfer}, worker killed: longest time without an answer", 1000 * float(np.diff(times).max()), "ms")
            assert await publish(old + 2) != digest
            load.published = old + 2
            await load.more(CLIENTS + 1)
            load.stop = True

    with last_words(running):
        asyncio.run(scenario())
    assert len(load.answers) == load.asked
    assert {answer.result.version for answer in load.answers} == {min(sent), max(sent)}
    assert all(answer.result.version >= answer.least for answer in load.answers)
    for version in (min(sent), max(sent)):
        with running.reference.holding(sent[version]):
            wanted: dict[str, npt.NDArray[Any]] = {}
            for answer in load.answers:
                if answer.result.version == version:
                    asked = str(answer.rows)
                    if asked not in wanted:
                        wanted[asked] = expected(running.reference, answer.rows)
                    assert apart(answer.result.scores, wanted[asked]) < running.stand.atol
