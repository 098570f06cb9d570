"""A row of logits that is not finite has token -1, and is harmless until SGLang ends its sequence; on classes for SGLang's."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.patches.not_finite import accept_no_marked_token, mark_logits_that_are_not_finite

torch: Any = importlib.import_module("torch")
NAN, INF = float("nan"), float("inf")


class Sampler:
    """Masks some rows as a whole, and of all rows some tokens; draws a token for each row. Raises as torch does."""

    def __init__(self, masked: list[int], hidden: list[int]) -> None:
        self.masked, self.hidden = masked, hidden

    def _preprocess_logits(self, logits: Any, sampling_info: Any) -> Any:
        logits[self.masked] = -INF
        logits[:, self.hidden] = -INF
        return logits

    def draw(self, logits: Any) -> Any:
        return torch.multinomial(torch.softmax(self._preprocess_logits(logits, None), -1), 1).squeeze(1)


class Runner:
    """Of a model."""

    def __init__(self, masked: list[int], hidden: list[int], speculative: bool = False) -> None:
        self.sampler: Any = Sampler(masked, hidden)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: not speculative)

    def sample(self, logits_output: Any, forward_batch: Any) -> Any:
        return self.sampler.draw(logits_output.next_token_logits)


class Relay:
    """Of tokens to the next forward."""

    def __init__(self, speculative: bool) -> None:
        self.spec_algo = SimpleNamespace(is_none=lambda: not speculative)

    def stash(self, future_indices: Any, payload: Any) -> None:
        self.kept = payload.bonus_tokens.tolist()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Runner, "sample"), (Sampler, "_preprocess_logits"), (Relay, "stash")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back afterwards
    mark_logits_that_are_not_finite(Runner, Sampler, Relay)


def sampled(rows: list[list[float]], masked: list[int] | None = None, hidden: list[int] | None = None) -> list[int]:
    return Runner(masked or [], hidden or []).sample(SimpleNamespace(next_token_logits=torch.tensor(rows)), None).tolist()


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("wrong", [[NAN, 1.0], [NAN, NAN], [1.0, INF], [INF, -INF], [-INF, -INF], [1e31, 0.0]])
def test_a_row_that_is_not_finite_has_no_token_and_the_others_have_theirs(wrong: list[float]) -> None:
    assert sampled([[-INF, 2.0], wrong, [0.0, -INF]]) == [1, -1, 0]


@pytest.mark.usefixtures("changed")
def test_a_mask_that_leaves_nothing_is_as_bad_and_hides_no_nan() -> None:
    assert sampled([[-INF, 2.0], [1.0, 2.0]], masked=[1]) == [1, -1]
    assert sampled([[NAN, 1.0]], hidden=[0]) == [-1]


@pytest.mark.usefixtures("changed")
def test_logits_that_are_not_sampled_stay_as_they_are() -> None:
    runner = Runner([], [])
    logits = SimpleNamespace(next_token_logits=torch.tensor([[NAN, 1.0]]))
    assert runner.sample(logits, None).tolist() == [-1]
    assert runner.sampler._preprocess_logits(torch.tensor([[NAN, 1.0]]), None).isnan().any()
    speculative = Runner([], [], speculative=True)
    with pytest.raises(RuntimeError, match="nan"):
        speculative.sample(SimpleNamespace(next_token_logits=torch.tensor([[NAN, 1.0]])), None)


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize(("speculative", "kept"), [(False, [3, 0]), (True, [3, -1])])
def test_the_next_forward_is_given_token_ids(speculative: bool, kept: list[int]) -> None:
    relay, payload = Relay(speculative), SimpleNamespace(bonus_tokens=torch.tensor([3, -1]))
    relay.stash(None, payload)
    assert relay.kept == kept


def test_a_grammar_is_not_given_the_token() -> None:
    class Request:
        grammar: Any = "a grammar"

        def _check_vocab_boundary_finish(self, new_accepted_tokens: list[int]) -> bool:
            return min(new_accepted_tokens) < 0

    accept_no_marked_token(Request)
    fine: Any = Request()
    ended: Any = Request()
    assert not fine._check_vocab_boundary_finish([3]) and ended._check_vocab_boundary_finish([-1])
    assert (fine.grammar, ended.grammar) == ("a grammar", None)
