"""SGLang's sampling parameters for a task, and what is refused before it gets there. Pure: no SGLang here.

SGLang checks most values where it takes a request. What is checked here it hands on, and its scheduler would die of it, with
the sequences of all other callers.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from enginepool.protocol.messages import Capabilities, Sampling
from enginepool.workers.engine import EngineError, GenerationTask

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
#: Float32 stays finite when a logit has each of these at once. NaN in one row ends the scheduler, so it ends all of them.
MOST_BIAS = 1e20
MOST_TEMPERATURE = 1e6
LEAST_REPETITION_PENALTY = 0.01
_SEEDS = 1 << 63


def refuse_fatal(task: GenerationTask, can: Capabilities, deterministic: bool) -> None:
    """Raise EngineError for a task that this engine would refuse too late, or die of.

    Args:
        deterministic: whether the engine draws by the seeds of requests.
    """
    prompt, s = task.prompt, task.sampling
    if not prompt.size:
        raise EngineError("prompt: it has no tokens")
    if not 0 <= int(prompt.min()) <= int(prompt.max()) < can.vocab:
        raise EngineError(f"prompt: a token id is outside 0..{can.vocab - 1}")
    if prompt.size + s.max_new_tokens > can.context:
        raise EngineError(
            f"prompt: {prompt.size} tokens, and max_new_tokens = {s.max_new_tokens}; this engine takes {can.context} together"
        )
    if not 1 <= task.n <= can.inflight_rows:
        raise EngineError(f"n: {task.n}; this engine runs 1 to {can.inflight_rows} sequences at once")
    wrong = next((token for token in s.stop_token_ids if not 0 <= token < can.vocab), None)
    if wrong is not None:
        raise EngineError(f"stop_token_ids: {wrong} is outside 0..{can.vocab - 1}")
    for token, bias in s.logit_bias.items():
        if not (token.isascii() and token.isdigit() and int(token) < can.vocab and abs(bias) <= MOST_BIAS):
            raise EngineError(f"logit_bias: {token!r}: {bias:g}; token ids are 0..{can.vocab - 1}, biases up to ±{MOST_BIAS:g}")
    if not 0 <= s.temperature <= MOST_TEMPERATURE:
        raise EngineError(f"temperature: {s.temperature:g} is outside 0..{MOST_TEMPERATURE:g}")
    if s.repetition_penalty < LEAST_REPETITION_PENALTY:
        raise EngineError(f"repetition_penalty: {s.repetition_penalty:g}; at least {LEAST_REPETITION_PENALTY}")
    if s.sampling_seed is not None and not -_SEEDS <= s.sampling_seed < _SEEDS:
        raise EngineError(f"sampling_seed: {s.sampling_seed} has more than 64 bits")
    if deterministic and s.min_p > 0:
        raise EngineError(f"min_p: {s.min_p:g}; an engine with enable_deterministic_inference takes 0")
    _refuse_unsupported(s, can)


def _refuse_unsupported(s: Sampling, can: Capabilities) -> None:
    grammar = next((name for name in _GRAMMARS if getattr(s, name)), "")
    if grammar and "grammar" not in can.features:
        raise EngineError(f"{grammar}: this engine runs no grammar backend")
    if grammar and s.min_new_tokens:
        raise EngineError(f"min_new_tokens: given with {grammar}, whose text may end before; no token would be allowed then")


def sampling_kwargs(task: GenerationTask, vocab: int, sequence: int) -> dict[str, Any]:
    """SGLang's sampling parameters for a sequence of a task. With one seed all sequences would be the same: each has its own,
    one more than the sequence before."""
    s = task.sampling
    given: Mapping[str, Any] = msgspec.to_builtins(s)
    changed: dict[str, Any] = {"max_new_tokens": s.max_new_tokens}
    if s.top_k >= vocab:
        changed["top_k"] = -1  # SGLang keeps it in 32 bits
    if s.sampling_seed is not None:
        changed["sampling_seed"] = (s.sampling_seed + sequence + _SEEDS) % (2 * _SEEDS) - _SEEDS
    return {**given, **changed}
