"""The first batches of an engine, without SGLang: none that was cut goes unseen."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import PartScores
from enginepool.workers.sglang.requests import Parts
from enginepool.workers.sglang.scoring import EngineScoring
from enginepool.workers.sglang.settings import SettingsError
from enginepool.workers.sglang.warmup import warm_up


class Scoring:
    """An engine that takes one row at a time into a forward, as SGLang does where it splits prefills over GPUs."""

    cached = None

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    async def compute(self, parts: Parts, priority: int, hidden: bool) -> tuple[list[PartScores], int, int]:
        rows = sum(len(rows) for _, rows in parts)
        return [PartScores(np.zeros((rows, 1), np.float32))], rows, 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_batch_that_was_cut_ends_the_start(device: str) -> None:
    """On a GPU the largest batch comes after the smallest, and has one row where a context fills the budget."""
    can = Capabilities("causal", 100, 64, 64, 8, 64, 16, device=device)
    with pytest.raises(SettingsError, match="took 2 forwards for one batch"):
        asyncio.run(warm_up(cast("EngineScoring", Scoring(can))))


def test_an_engine_whose_batches_are_whole_starts() -> None:
    scoring: Any = Scoring(Capabilities("causal", 100, 64, 64, 1, 64, 16, device="cpu"))
    assert asyncio.run(warm_up(scoring)) == scoring.capabilities
