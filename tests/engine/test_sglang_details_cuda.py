"""Hidden states and routed experts on a GPU, where forwards overlap and run as CUDA graphs: those of a direct computation."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import GenerationTask
from tests.engine.families import FAMILIES, VOCAB, make, torch
from tests.engine.hosted import HostedEngine
from tests.engine.test_sglang_details import TOP, Direct, run, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
#: Kernels on a GPU take bfloat16, of 8 bits: router logits are off by so much, hidden states by this share of their length.
BFLOAT16, TYPICAL = 0.25, 0.1
#: Where two experts are as good, the arithmetic decides, and what follows in the layers above differs: so many tokens may.
FLIPPED = 0.02
#: Sequences at once: forwards of them follow each other without a pause.
SEQUENCES, NEW = 96, 40


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HostedEngine, Direct]]:
    folder = tmp_path_factory.mktemp("moe")
    torch.set_num_threads(1)
    family = FAMILIES["Qwen3-MoE"]
    # Kernels of SGLang that rotate queries and keys on a GPU know no smaller heads.
    model = make(replace(family, settings={**family.settings, "head_dim": 64}), folder, seed=3)
    options = {
        "context_length": 200, "enable_return_hidden_states": True, "enable_return_routed_experts": True,
        "attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.2,
    }  # fmt: skip
    engine = HostedEngine(str(folder), device="auto", dtype="bfloat16", operations=("generate",), options=options)
    yield engine.wait_until_started(), Direct(model)
    engine.end()


def nearest(states: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Of which of these states the expected one of its own token is the nearest; most of them are about as expected."""
    apart = np.linalg.norm(states[:, None] - expected, axis=-1)
    assert np.median(apart.diagonal() / np.linalg.norm(expected, axis=-1)) < TYPICAL
    return apart.argmin(axis=1) == np.arange(len(states))


def test_they_belong_to_their_tokens_while_forwards_overlap(both: tuple[HostedEngine, Direct]) -> None:
    engine, direct = both
    can = engine.capabilities
    assert can is not None and (can.device, can.hidden, can.experts) == ("cuda", 64, (2, TOP))
    chance = random.Random(9)
    prompts = [[chance.randrange(5, VOCAB) for _ in range(chance.randrange(1, 90))] for _ in range(SEQUENCES)]
    for _ in range(2):  # the second time behind cached prompts
        own: list[npt.NDArray[np.bool_]] = []
        good: list[npt.NDArray[np.bool_]] = []
        tasks = [
            GenerationTask(
                np.array(prompt, np.int32), Sampling(temperature=1.0, max_new_tokens=NEW, ignore_eos=True), 2,
                hidden_states=True, routed_experts=True,
            )
            for prompt in prompts
        ]  # fmt: skip
        for prompt, sequences in zip(prompts, run(engine, *tasks), strict=True):
            for emitted in sequences:
                tokens, experts = tokens_of(emitted), emitted[-1].routed_experts
                states = np.concatenate([new.hidden_states for new in emitted if new.hidden_states is not None])
                own.append(nearest(states, direct.hidden_states(prompt, tokens)))
                logits = direct.router_logits([*prompt, *tokens])
                assert experts is not None and experts.shape == (*logits.shape[:2], TOP)
                assert (np.diff(np.sort(experts, axis=-1)) > 0).all(), "each expert once"
                last = np.sort(logits, axis=-1)[..., -TOP]
                chosen = np.take_along_axis(logits, experts.astype(np.int64), axis=-1).min(axis=-1)
                good.append((chosen >= last - BFLOAT16).all(axis=-1))
        assert np.concatenate(own).mean() > 1 - FLIPPED
        assert np.concatenate(good).mean() > 1 - FLIPPED
