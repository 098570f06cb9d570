"""SGLang's sampling parameters for a task, and what is refused before it gets there. Pure: no SGLang here.

SGLang checks most values where it takes a request. What is checked here it hands on, and its scheduler would die of it, with
the sequences of all other callers.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from enginepool.protocol.messages import Capabilities, Sampling
from enginepool.protocol.sampling import GRAMMARS, LEAST_REPETITION_PENALTY, MOST_BIAS, MOST_TEMPERATURE
from enginepool.workers.engine import EngineError, GenerationTask, RequestRefused

_SEEDS = 1 << 63
#: characters of SGLang's reasons
_MOST_SAID = 300
#: of its reasons about grammars: which parameter, and where the parser's source says it
_GRAMMAR, _PLACE = re.compile(r"^Failed to compile (\w+) grammar: "), re.compile(r"\[[\d:]+\] \S+:\d+: ")
#: parameters that the logit processor of this package takes; SGLang does not know them
PROCESSED = ("allowed_token_ids", "disallowed_token_ids", "temperature_schedule")
#: parameters that are not among SGLang's sampling parameters
_APART = (*PROCESSED, "require_reasoning")


def why_aborted(reason: Mapping[str, Any]) -> EngineError:
    """Why SGLang gave a sequence up. Status 400: it refused what the request asks, such as a grammar."""
    said = " ".join(str(reason.get("message")).split())
    if reason.get("status_code") == 400:
        said = _GRAMMAR.sub(lambda found: f"{'json_schema' if found[1] == 'json' else found[1]}: ", _PLACE.sub("", said))
        return RequestRefused(said[:_MOST_SAID].rstrip(": "))
    return EngineError(f"the engine aborted the sequence: {said[:_MOST_SAID]}")


def unreadable(error: re.error, patterns: Sequence[str]) -> RequestRefused:
    """The error for one of a sequence's stop patterns, which SGLang could not read. It reads them without compiling them, which
    can take a second for 256 bytes."""
    at = patterns.index(error.pattern) if isinstance(error.pattern, str) and error.pattern in patterns else 0
    return RequestRefused(f"stop_regex[{at}]: {error}; a pattern of Python's re")


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
    if prompt.size + s.max_new_tokens > can.longest_sequence:
        raise EngineError(
            f"prompt: {prompt.size} tokens, and max_new_tokens = {s.max_new_tokens};"
            f" this engine takes {can.longest_sequence} together"
        )
    if not 1 <= task.n <= can.most_sequences:
        raise EngineError(f"n: {task.n}; this engine runs 1 to {can.most_sequences} sequences at once")
    if not 0 <= task.top_logprobs <= can.vocab or (task.top_logprobs and not task.logprobs):
        raise EngineError(f"top_logprobs: {task.top_logprobs}; 0 to {can.vocab}, and only with logprobs")
    if not 0 <= task.prompt_logprobs <= prompt.size:
        raise EngineError(f"prompt_logprobs: {task.prompt_logprobs}; the prompt has {prompt.size} tokens")
    if task.adapter and task.adapter not in can.adapters:
        raise EngineError(f"adapter: {task.adapter!r}; this engine has {', '.join(can.adapters) or 'no adapters'}")
    if task.hidden_states and not can.hidden:
        raise EngineError("hidden_states: this engine returns none; it needs the option enable_return_hidden_states")
    if task.hidden_states and s.stop:
        raise EngineError(f"hidden_states: given with stop = {s.stop}; SGLang gives several tokens at once then")
    if task.routed_experts and not can.experts[0]:
        raise EngineError("routed_experts: this engine returns none; it needs the option enable_return_routed_experts")
    wrong = next((token for token in s.stop_token_ids if not 0 <= token < can.vocab), None)
    if wrong is not None:
        raise EngineError(f"stop_token_ids: {wrong} is outside 0..{can.vocab - 1}")
    for token, bias in s.logit_bias.items():
        if not (token.isascii() and token.isdigit() and int(token) < can.vocab and abs(bias) <= MOST_BIAS):
            raise EngineError(f"logit_bias: {token!r}: {bias:g}; token ids are 0..{can.vocab - 1}, biases up to ±{MOST_BIAS:g}")
    schedule = s.temperature_schedule
    for temperature in (s.temperature,) if schedule is None else (schedule.initial, schedule.final):
        if not 0 <= temperature <= MOST_TEMPERATURE:
            field = "temperature" if schedule is None else "temperature_schedule"
            raise EngineError(f"{field}: {temperature:g} is outside 0..{MOST_TEMPERATURE:g}")
    if s.repetition_penalty < LEAST_REPETITION_PENALTY:
        raise EngineError(f"repetition_penalty: {s.repetition_penalty:g}; at least {LEAST_REPETITION_PENALTY}")
    if s.sampling_seed is not None and not -_SEEDS <= s.sampling_seed < _SEEDS:
        raise EngineError(f"sampling_seed: {s.sampling_seed} has more than 64 bits")
    if deterministic and s.min_p > 0:
        raise EngineError(f"min_p: {s.min_p:g}; an engine with enable_deterministic_inference takes 0")
    for name in ("allowed_token_ids", "disallowed_token_ids"):
        ids: list[int] = getattr(s, name) or []
        if ids and not 0 <= min(ids) <= max(ids) < can.vocab:
            raise EngineError(f"{name}: a token id is outside 0..{can.vocab - 1}")
    if len(set(s.disallowed_token_ids or ())) >= can.vocab:
        raise EngineError(f"disallowed_token_ids: all {can.vocab} tokens of the vocabulary; at least one is left")
    _refuse_unsupported(s, can)


def _refuse_unsupported(s: Sampling, can: Capabilities) -> None:
    grammar = next((name for name in GRAMMARS if getattr(s, name)), "")
    if grammar and "grammar" not in can.features:
        raise EngineError(f"{grammar}: this engine runs no grammar backend")
    if grammar and s.min_new_tokens:
        raise EngineError(f"min_new_tokens: given with {grammar}, whose text may end before; no token would be allowed then")
    if s.require_reasoning and "reasoning_parser" not in can.features:
        raise EngineError("require_reasoning: this engine was started without a reasoning_parser")
    processed = next((name for name in PROCESSED if getattr(s, name) is not None), "")
    if processed and "logit_processors" not in can.features:
        raise EngineError(f"{processed}: this engine runs no logit processors")
    if grammar and s.masked:
        raise EngineError(f"{processed}: given with {grammar}; no token may be left that both allow")


def sampling_kwargs(task: GenerationTask, vocab: int, sequence: int, deterministic: bool) -> dict[str, Any]:
    """SGLang's sampling parameters for a sequence of a task. With one seed all sequences would be the same: each has its own,
    one more than the sequence before. Where SGLang draws by seeds (`deterministic`), it gives all requests without one the same
    seed: each sequence gets a random one here."""
    s = task.sampling
    given: Mapping[str, Any] = {name: value for name, value in msgspec.to_builtins(s).items() if name not in _APART}
    changed: dict[str, Any] = {"max_new_tokens": s.max_new_tokens}
    if s.top_k >= vocab:
        changed["top_k"] = -1  # SGLang keeps it in 32 bits
    if s.sampling_seed is not None:
        changed["sampling_seed"] = (s.sampling_seed + sequence + _SEEDS) % (2 * _SEEDS) - _SEEDS
    elif deterministic:
        changed["sampling_seed"] = secrets.randbelow(_SEEDS)
    if params := processor_params(task):
        changed["custom_params"] = params
    return {**given, **changed}


def processor_params(task: GenerationTask) -> dict[str, list[int] | list[float] | int]:
    """What the logit processor of this package is told of a sequence; nothing: it is not needed."""
    s = task.sampling
    params: dict[str, list[int] | list[float] | int] = {}
    if s.allowed_token_ids:
        params["allowed"] = sorted(set(s.allowed_token_ids))
    if s.disallowed_token_ids:
        params["disallowed"] = sorted(set(s.disallowed_token_ids))
    if s.temperature_schedule is not None:
        params |= {"schedule": list(msgspec.structs.astuple(s.temperature_schedule)), "at": task.at}
    return params
