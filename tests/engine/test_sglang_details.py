"""Hidden states of generated tokens, and routed experts, on the real engine: those of a direct computation."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.engine import EngineError, GenerationTask, NewTokens
from tests.engine.families import FAMILIES, make, torch
from tests.engine.hosted import HostedEngine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
#: the last one is long enough to be found in the prefix cache
PROMPTS = ([5, 17, 30], [8], [*range(40, 90)])
NEW = 6
#: experts of a token
TOP = 2


class Direct:
    """`transformers` on the same checkpoint."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def hidden_states(self, prompt: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """From which each of these tokens after a prompt is chosen: after the final norm."""
        with torch.no_grad():
            found = self._model(torch.tensor([[*prompt, *tokens]]), output_hidden_states=True)
        return found.hidden_states[-1][0].numpy()[len(prompt) - 1 : -1]

    def router_logits(self, whole: Sequence[int]) -> npt.NDArray[np.float32]:
        """[tokens - 1, layers, experts]: of each token but the last one."""
        with torch.no_grad():
            found = self._model(torch.tensor([whole]), output_router_logits=True)
        return torch.stack(found.router_logits, dim=1).numpy()[:-1]

    def routed_experts(self, whole: Sequence[int]) -> npt.NDArray[np.int64]:
        """[tokens - 1, layers, k]: to which experts each token but the last one is routed, in ascending order."""
        return np.sort(np.argsort(self.router_logits(whole), axis=-1)[..., -TOP:], axis=-1)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HostedEngine, Direct]]:
    folder = tmp_path_factory.mktemp("moe")
    torch.set_num_threads(1)
    model = make(FAMILIES["Qwen3-MoE"], folder, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        options = {
            "context_length": 200, "enable_return_hidden_states": True, "enable_return_routed_experts": True,
            # Forwards overlap, as on a GPU.
            "disable_overlap_schedule": False,
        }  # fmt: skip
        engine = HostedEngine(str(folder), operations=("generate",), options=options)
        yield engine.wait_until_started(), Direct(model)
        engine.end()


def task(prompt: Sequence[int], n: int = 1, *, hidden: bool = True, **fields: Any) -> GenerationTask:
    sampling = Sampling(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
    return GenerationTask(np.array(prompt, np.int32), sampling, n, hidden_states=hidden, **fields)


def run(engine: HostedEngine, *tasks: GenerationTask) -> list[list[list[NewTokens]]]:
    """What each sequence of each task emitted."""
    found: list[list[list[NewTokens]]] = []
    for asked, emitted in zip(tasks, engine.call("generate", tasks), strict=True):
        assert not isinstance(emitted, Exception), emitted
        found.append([[new for new in emitted if new.sequence == i] for i in range(asked.n)])
    return found


def tokens_of(emitted: list[NewTokens]) -> list[int]:
    return [token for new in emitted for token in new.tokens]


@pytest.mark.every_version
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 3}, {"prompt_logprobs": 1}], ids=str)
def test_hidden_states_are_those_from_which_the_tokens_are_chosen_also_behind_cached_prompts(
    both: tuple[HostedEngine, Direct], fields: dict[str, Any]
) -> None:
    engine, direct = both
    assert engine.capabilities is not None and engine.capabilities.hidden == 64
    tasks = [task(prompt, 2, **fields) for prompt in (*PROMPTS, PROMPTS[-1])] + [task(PROMPTS[0], hidden=False)]
    *found, plain = run(engine, *tasks)
    assert run(engine, task(PROMPTS[-1]))[0][0][0].cached, "the next ones find it, too"
    for prompt, sequences in zip((*PROMPTS, PROMPTS[-1]), found, strict=True):
        for emitted in sequences:
            states = np.concatenate([new.hidden_states for new in emitted if new.hidden_states is not None])
            expected = direct.hidden_states(prompt, tokens_of(emitted))
            assert states.dtype == np.float32 and states.shape == expected.shape == (NEW, 64)
            np.testing.assert_allclose(states, expected, rtol=1e-4, atol=1e-4)
    assert all(new.hidden_states is None for new in plain[0])


@pytest.mark.every_version
def test_routed_experts_are_those_of_prompt_and_output_also_behind_cached_prompts(both: tuple[HostedEngine, Direct]) -> None:
    engine, direct = both
    assert engine.capabilities is not None and engine.capabilities.experts == (2, TOP)
    for again in (False, True):
        tasks = [task(prompt, 2, hidden=False, routed_experts=True) for prompt in PROMPTS] + [task(PROMPTS[1])]
        *found, plain = run(engine, *tasks)
        for prompt, sequences in zip(PROMPTS, found, strict=True):
            for emitted in sequences:
                *before, last = (new.routed_experts for new in emitted)
                assert last is not None and last.dtype == np.int16 and before == [None] * (NEW - 1)
                expected = direct.routed_experts([*prompt, *tokens_of(emitted)])
                np.testing.assert_array_equal(np.sort(last, axis=-1), expected)
        assert all(new.routed_experts is None for new in plain[0])
        assert not again or found[-1][0][0].cached, "the prompt was found in the cache"


@pytest.mark.every_version
def test_a_sequence_that_goes_on_has_those_of_all_its_tokens(both: tuple[HostedEngine, Direct]) -> None:
    engine, direct = both
    [[begun]] = run(engine, task(PROMPTS[0], hidden=False))
    whole = [*PROMPTS[0], *tokens_of(begun)]
    [[rest]] = run(engine, task(whole, routed_experts=True))
    experts = rest[-1].routed_experts
    assert experts is not None
    np.testing.assert_array_equal(np.sort(experts, axis=-1), direct.routed_experts([*whole, *tokens_of(rest)]))


@pytest.mark.every_version
def test_what_it_cannot_give_is_refused(both: tuple[HostedEngine, Direct]) -> None:
    engine, _ = both
    asked = GenerationTask(np.array([5], np.int32), Sampling(stop=["w7"]), hidden_states=True)
    [error] = engine.call("generate", (asked,))
    assert isinstance(error, EngineError) and "hidden_states: given with stop" in str(error)
