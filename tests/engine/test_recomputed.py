"""What the benchmark of weights in flight computes again is what a model with these weights gives."""

import importlib
from typing import Any

import numpy as np

from bench.in_flight.recompute import Recomputed
from tests.engine.reference import Models, Reference

safetensors: Any = importlib.import_module("safetensors.torch")
PROMPT, TOKENS = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8]


def test_log_probabilities_are_those_of_the_weights_that_a_span_names(models: Models, reference: Reference) -> None:
    first = safetensors.load_file(str(models.causal / "model.safetensors"))
    other = {name: tensor.flip(0) if tensor.dim() > 1 else tensor for name, tensor in first.items()}
    computed = Recomputed(models.causal, {"first": first, "other": other})
    spans = [("first", 3), ("other", 2), ("first", 2)]

    named, others = computed.named_and_other(PROMPT, TOKENS, spans, kept=True)
    weights = {"first": first, "other": other}
    _, expected = reference.across(PROMPT, [(first, TOKENS[:3]), (other, TOKENS[3:5]), (first, TOKENS[5:])])
    np.testing.assert_allclose(named, expected, rtol=1e-4, atol=1e-5)
    _, claimed = reference.across(PROMPT, [(first, TOKENS[:3]), (first, TOKENS[3:4])])
    np.testing.assert_allclose(others[3], claimed[3], rtol=1e-4, atol=1e-5)
    assert np.abs(named - others).min() > 1e-3

    named, others = computed.named_and_other(PROMPT, TOKENS, spans, kept=False)
    done = 0
    for name, count in spans:
        with reference.holding(weights[name]):
            _, expected = reference.following([*PROMPT, *TOKENS[:done]], TOKENS[done : done + count])
        np.testing.assert_allclose(named[done : done + count], expected, rtol=1e-4, atol=1e-5)
        done += count
