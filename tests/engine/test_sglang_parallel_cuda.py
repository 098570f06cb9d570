"""Options of engines that only generate, on two GPUs: each generates what the model does, and drops what is cancelled."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.workers.engine import OnlyAtStart
from tests.engine.adapters import make_adapter
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_adapters import with_adapter
from tests.engine.test_sglang_cuda import BFLOAT16
from tests.engine.test_sglang_generate import CONTEXT, PROMPTS, run, task
from tests.engine.test_sglang_scores import declared
from tests.engine.test_sglang_weights import safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
#: sequences at once, of a replica
ROWS = 16
#: The draft model is the model itself. Paths of it and of the adapter come later.
OPTIONS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_size": 2},
    "stages": {"pp_size": 2},
    "replicas of attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "n-grams": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
    "a draft model": {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "the model",
        "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
    },
    "a hierarchical cache": {"enable_hierarchical_cache": True, "hicache_ratio": 2.0},
    "adapters": {"lora_paths": "one"},
}  # fmt: skip
#: of these, with weight updates that reach all processes
UPDATED = ("n-grams", "a hierarchical cache", "adapters")


@pytest.fixture(scope="module")
def adapter(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(models.causal, tmp_path_factory.mktemp("adapters") / "one", seed=1, rank=8, alpha=8.0)


@pytest.fixture(scope="module", params=list(OPTIONS))
def engine(request: pytest.FixtureRequest, models: Models, adapter: Path) -> Iterator[HostedEngine]:
    options: dict[str, Any] = {
        "attention_backend": "flashinfer", "sampling_backend": "pytorch", "mem_fraction_static": 0.6,
        "max_total_tokens": 16384, "context_length": CONTEXT, "max_running_requests": ROWS, "disable_custom_all_reduce": True,
    }  # fmt: skip
    options |= OPTIONS[request.param]
    if "speculative_draft_model_path" in options:
        options["speculative_draft_model_path"] = str(models.causal)
    if "lora_paths" in options:
        options["lora_paths"] = {"one": str(adapter)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        patch.setenv("NCCL_CUMEM_ENABLE", "0")
        hosted = HostedEngine(str(models.causal), device="cuda", dtype="bfloat16", operations=("generate",), options=options)
        yield hosted.wait_until_started()
        hosted.end()


def test_it_generates_what_the_model_does(
    engine: HostedEngine, reference: Reference, models: Models, adapter: Path, request: pytest.FixtureRequest
) -> None:
    case: str = request.node.callspec.params["engine"]
    can = declared(engine)
    assert can.context + can.reserved == CONTEXT
    if case == "replicas":
        assert can.inflight_rows == 2 * ROWS
    own: dict[str, Any] = safetensors.load_file(str(models.causal / "model.safetensors"))
    for name in ("", *can.adapters):
        # The second time, with their beginnings in the cache.
        for _ in range(2):
            tasks = [replace(task(prompt, 2, ignore_eos=True, max_new_tokens=24), adapter=name) for prompt in PROMPTS]
            with reference.holding(with_adapter(own, adapter if name else None)):
                for prompt, sequences in zip(PROMPTS, run(engine, *tasks), strict=True):
                    for sequence in sequences:
                        assert len(sequence.tokens) == 24
                        below, _ = reference.following(prompt, sequence.tokens)
                        assert below.max() < 2 * BFLOAT16


def test_logprobs_are_those_of_its_tokens(engine: HostedEngine, reference: Reference) -> None:
    for prompt in PROMPTS:
        [[found]] = run(engine, task(prompt, logprobs=True, ignore_eos=True))
        _, logprobs = reference.following(prompt, found.tokens)
        np.testing.assert_allclose(found.logprobs, logprobs, rtol=0, atol=2 * BFLOAT16)


def test_what_is_cancelled_leaves_the_engine_within_a_step(engine: HostedEngine) -> None:
    for _ in range(2):
        emitted, left = engine.call("stop", task(n=3, ignore_eos=True, max_new_tokens=900), 40)
        assert 40 <= emitted < 3 * 900 and left == 0
    engine.call("do", "flush")


def test_weight_updates_are_refused_by_name_where_they_do_not_reach_all(
    engine: HostedEngine, request: pytest.FixtureRequest
) -> None:
    case: str = request.node.callspec.params["engine"]
    if case in UPDATED:
        assert engine.call("do", "model_tensors").tensors
    else:
        said = r"engine option (dp_size|pp_size|speculative_draft_model_path)=.*: weight updates do not reach "
        with pytest.raises(OnlyAtStart, match=said):
            engine.call("do", "model_tensors")


def test_a_high_priority_takes_a_slot_from_a_low_one_which_goes_on_later(
    engine: HostedEngine, request: pytest.FixtureRequest
) -> None:
    slots = declared(engine).inflight_rows
    low = task(n=slots, ignore_eos=True, max_new_tokens=400)
    high = replace(task(PROMPTS[1], ignore_eos=True, max_new_tokens=10), priority=100)
    assert engine.call("ends", [low], high) == [1, 0]
