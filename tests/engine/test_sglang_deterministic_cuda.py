"""A deterministic engine, which SGLang has on a GPU only: the same seed draws the same tokens, also next to other sequences."""

import numpy as np
import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import GenerationTask
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models
from tests.engine.test_sglang_details import run, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
N, NEW = 8, 40


def asked(first: int, seed: int | None) -> GenerationTask:
    sampling = Sampling(temperature=1.0, max_new_tokens=NEW, ignore_eos=True, sampling_seed=seed)
    return GenerationTask(np.arange(first, first + 12, dtype=np.int32), sampling, N)


def test_seeds_draw_the_same_tokens_and_samples_without_one_differ(models: Models) -> None:
    options = {"attention_backend": "triton", "enable_deterministic_inference": True, "mem_fraction_static": 0.2}
    engine = HostedEngine(str(models.causal), device="auto", dtype="bfloat16", operations=("generate",), options=options)
    try:
        engine.wait_until_started()
        can = engine.capabilities
        assert can is not None and "deterministic" in can.features

        def drawn(*tasks: GenerationTask) -> list[list[tuple[int, ...]]]:
            return [[tuple(tokens_of(emitted)) for emitted in sequences] for sequences in run(engine, *tasks)]

        (alone,) = drawn(asked(20, 7))
        assert len(set(alone)) == N, "each sequence has a seed of its own"
        among = drawn(*(asked(first, first) for first in (40, 60)), asked(20, 7), asked(80, None))
        assert among[2] == alone, "other sequences next to it change nothing"
        seedless = [sample for _ in range(2) for sample in drawn(asked(20, None))[0]]
        assert len(set(seedless)) == 2 * N, "samples differ, also from call to call"
    finally:
        engine.end()
