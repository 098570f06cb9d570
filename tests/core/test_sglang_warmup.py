"""The first batches of an engine, without SGLang: none that was cut goes unseen."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import Outputs, RowPart
from enginepool.workers.sglang.host.settings import SettingsError
from enginepool.workers.sglang.operations.base import RowOperation
from enginepool.workers.sglang.operations.score import LabelScores
from enginepool.workers.sglang.score import warmup
from enginepool.workers.sglang.score.scoring import EngineScoring
from enginepool.workers.sglang.score.warmup import warm_up


class Scoring:
    """An engine that takes one row at a time into a forward, as SGLang does where it splits prefills over GPUs."""

    config = None

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.operations = {"score": LabelScores()}

    async def compute(self, operation: RowOperation, parts: list[RowPart]) -> tuple[list[Outputs], int, int]:
        rows = sum(part.item_lengths.size for part in parts)
        return [{"scores": np.zeros((rows, 1), np.float32)}], rows, 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_that_was_cut_ends_the_start(device: str) -> None:
    """On a GPU the largest batch comes after the smallest, and has one row where a context fills the budget."""
    can = Capabilities("causal", 100, 64, 64, 8, 64, 16, device=device)
    with pytest.raises(SettingsError, match="took 2 forwards for one batch"):
        asyncio.run(warm_up(cast("EngineScoring", Scoring(can))))


def test_an_engine_whose_batches_are_whole_starts() -> None:
    scoring: Any = Scoring(Capabilities("causal", 100, 64, 64, 1, 64, 16, device="cpu"))
    found = asyncio.run(warm_up(scoring))
    assert msgspec.structs.replace(found, pace=0, forward_ms=25) == scoring.capabilities


class Timed:
    """A CPU whose forwards cost what `seconds` says of their tokens, on a clock of its own."""

    config = None

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.capabilities = Capabilities("causal", 1000, 4000, 4096, 128, 8192, 256, device="cpu")
        self.operations = {"score": LabelScores()}
        self.seconds = seconds
        self.now = 0.0

    async def compute(self, operation: RowOperation, parts: list[RowPart]) -> tuple[list[Outputs], int, int]:
        lengths = [length for part in parts for length in part.lengths]
        self.now += self.seconds(sum(lengths))
        return [{"scores": np.zeros((len(lengths), 1), np.float32)}], 1, 0

    def perf_counter(self) -> float:
        """In the place of `time.perf_counter`."""
        return self.now


@pytest.mark.parametrize(
    ("small_s", "token_s", "wanted_ms"),
    [(0.0001, 1e-6, 25), (0.005, 2e-5, 41), (0.02, 4e-4, 186), (0.5, 0.01, 1000)],
    ids=["as quick as a GPU", "tiny", "small", "slow"],
)
def test_a_cpu_of_any_pace_is_measured_in_a_few_seconds(
    small_s: float, token_s: float, wanted_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring: Any = Timed(lambda tokens: small_s + tokens * token_s)
    monkeypatch.setattr(warmup, "time", scoring)
    found = asyncio.run(warm_up(scoring))
    assert found.forward_ms == wanted_ms
    true = min((wanted_ms / 1000 - small_s) / token_s, found.batch_tokens)
    assert 0.6 * true <= found.pace <= 1.3 * true
    assert scoring.now <= 15, "seconds for the whole warm-up"


class Card:
    """A GPU on a clock of its own. Its packed forwards take as long as their launch, however little they hold."""

    config = None

    def __init__(self, **can: Any) -> None:
        self.capabilities = Capabilities("causal", 1000, 4000, 16384, 1024, 32768, 2048, device="cuda", **can)
        self.operations = {"score": LabelScores()}
        self.now = 0.0

    async def compute(
        self, operation: RowOperation, parts: list[RowPart], *, packed: bool = False
    ) -> tuple[list[Outputs], int, int]:
        lengths = [length for part in parts for length in part.lengths]
        self.now += max(0.027 if packed else 0.012, 2.5e-6 * sum(lengths))
        return [{"scores": np.zeros((len(lengths), 1), np.float32)}], 1, 0

    def perf_counter(self) -> float:
        """In the place of `time.perf_counter`."""
        return self.now


@pytest.mark.parametrize("packs", [True, False])
def test_a_gpu_declares_what_its_smallest_forwards_take_of_each_kind(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scoring: Any = Card(max_item=3000 if packs else 0)
    monkeypatch.setattr(warmup, "time", scoring)
    found = asyncio.run(warm_up(scoring))
    assert (found.fixed_ms, found.packed_fixed_ms) == (12, 27 if packs else 0)
    assert found.pace == pytest.approx(10_000, rel=0.02)
    assert found.packed_pace == (pytest.approx(10_000, rel=0.02) if packs else 0)
