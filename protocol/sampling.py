"""The bounds of sampling parameters. A client and the coordinator check them alike."""

import math

from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import MAX_NEW_TOKENS, MAX_PATTERN, MAX_SAMPLING_TEXT, Sampling
from enginepool.protocol.ragged import MAX_TOKENS, bad

#: parameters of which at most one is given
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
MASKS = ("allowed_token_ids", "disallowed_token_ids")
#: parameter -> the feature that a worker needs for it
FEATURES = (
    dict.fromkeys(GRAMMARS, "grammar")
    | dict.fromkeys(("stop", "stop_regex"), "stop_text")
    | dict.fromkeys((*MASKS, "temperature_schedule"), "logit_processors")
    | {"require_reasoning": "reasoning_parser"}
)
#: Float32 stays finite when a logit has each of these at once. NaN in one row ends an engine's scheduler.
MOST_BIAS, MOST_TEMPERATURE, LEAST_REPETITION_PENALTY = 1e20, 1e6, 0.01
#: field of `Sampling`: (least, most, whether the least itself is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, MOST_TEMPERATURE, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 2.0, True),
}


def check_sampling(s: Sampling) -> None:
    """Hold sampling parameters to their bounds, as far as they need no model.

    Raises:
        WireError: `bad_request`; its field is `sampling.` and the name of the parameter.
    """
    for name, (least, most, included) in _RANGES.items():
        value = getattr(s, name)
        if not (least <= value <= most and (included or value > least) and math.isfinite(value)):
            field = f"sampling.{name}"
            above = "from" if included else "above"
            raise bad(field, f"{field}: {value:g}; {above} {least:g} up to {most:.9g}", f"{most:.9g}")
    if not 1 <= s.max_new_tokens <= MAX_NEW_TOKENS:
        field = "sampling.max_new_tokens"
        raise bad(field, f"{field}: {s.max_new_tokens} is outside 1..{MAX_NEW_TOKENS}", str(MAX_NEW_TOKENS))
    if not 0 <= s.min_new_tokens <= s.max_new_tokens:
        field = "sampling.min_new_tokens"
        raise bad(field, f"{field}: {s.min_new_tokens} is outside 0..{s.max_new_tokens}", str(s.max_new_tokens))
    if s.top_k != -1 and not 1 <= s.top_k < MAX_TOKENS:
        text = f"sampling.top_k: {s.top_k}; 1 to {MAX_TOKENS - 1}, or -1 for the whole vocabulary"
        raise bad("sampling.top_k", text, "1" if s.top_k < 1 else str(MAX_TOKENS - 1))
    if s.sampling_seed is not None and not 0 <= s.sampling_seed <= MAX_ID:
        text = f"sampling.sampling_seed: {s.sampling_seed} is outside 0..{MAX_ID}"
        raise bad("sampling.sampling_seed", text, str(MAX_ID))
    for name in ("stop_token_ids", *MASKS):
        for at, token in enumerate(getattr(s, name) or ()):
            if not 0 <= token < MAX_TOKENS:
                field = f"sampling.{name}[{at}]"
                raise bad(field, f"{field}: {token}; a token id is 0 to {MAX_TOKENS - 1}", str(MAX_TOKENS - 1))
    for token, bias in s.logit_bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) < MAX_TOKENS):
            raise bad("sampling.logit_bias", f"sampling.logit_bias: {token!r}; a token id", str(MAX_TOKENS - 1))
        if not abs(bias) <= MOST_BIAS:
            text = f"sampling.logit_bias: {token!r}: {bias}; from -{MOST_BIAS:g} up to {MOST_BIAS:g}"
            raise bad("sampling.logit_bias", text, f"{MOST_BIAS:g}")
    for field, texts in (("sampling.stop", s.stop), ("sampling.stop_regex", s.stop_regex)):
        if "" in texts:
            raise bad(field, f"{field}: an empty string, at which every sequence would stop", "")
    sizes = {name: len(getattr(s, name) or "") for name in GRAMMARS}
    sizes |= {"stop": sum(map(len, s.stop)), "stop_regex": sum(map(len, s.stop_regex))}
    if (size := sum(sizes.values())) > MAX_SAMPLING_TEXT:
        field = f"sampling.{max(sizes, key=lambda name: sizes[name])}"
        text = f"{field}: {size} characters with the other stop strings, patterns and grammars"
        raise bad(field, f"{text}; at most {MAX_SAMPLING_TEXT} together", str(MAX_SAMPLING_TEXT))
    for at, pattern in enumerate(s.stop_regex):
        if (size := len(pattern.encode("utf-8", "surrogatepass"))) > MAX_PATTERN:
            field = f"sampling.stop_regex[{at}]"
            raise bad(field, f"{field}: {size} bytes of UTF-8; at most {MAX_PATTERN}", str(MAX_PATTERN))
    given = [name for name in GRAMMARS if getattr(s, name) is not None]
    _check_grammar(s, given)
    _check_processors(s, given)


def _check_grammar(s: Sampling, given: list[str]) -> None:
    if len(given) > 1:
        raise bad(f"sampling.{given[1]}", f"sampling.{given[1]}: given with {given[0]}; at most one grammar", "1")
    if given and not getattr(s, given[0]):
        raise bad(f"sampling.{given[0]}", f"sampling.{given[0]}: empty; a grammar, or leave it out", "")
    if given and s.min_new_tokens:
        # Where the text may end, and must not, no token is left: an engine would compute NaN.
        text = f"sampling.min_new_tokens: {s.min_new_tokens} with {given[0]}, whose text may end before; 0"
        raise bad("sampling.min_new_tokens", text, "0")
    if given and s.ignore_eos:
        # The end token is the only one that fits behind the last word, and an engine would go on behind it without the grammar.
        raise bad("sampling.ignore_eos", f"sampling.ignore_eos: given with {given[0]}, whose text ends; false", "false")
    if s.require_reasoning and not given:
        field = "sampling.require_reasoning"
        raise bad(field, f"{field}: given without a grammar; only with one of {', '.join(GRAMMARS)}", "")


def _check_processors(s: Sampling, grammars: list[str]) -> None:
    masks = [name for name in MASKS if getattr(s, name) is not None]
    for name in masks:
        field = f"sampling.{name}"
        if not getattr(s, name):
            raise bad(field, f"{field}: no token ids; at least 1, or leave it out", "1")
        if other := [*grammars, *(one for one in masks if one < name)]:
            # Together they may leave no token: an engine would compute NaN.
            raise bad(field, f"{field}: given with {other[0]}; at most one of them", "")
    schedule = s.temperature_schedule
    if schedule is None:
        return
    field = "sampling.temperature_schedule"
    for name in ("initial", "final"):
        value = getattr(schedule, name)
        if not 0 <= value <= MOST_TEMPERATURE:
            most = f"{MOST_TEMPERATURE:.9g}"
            raise bad(field, f"{field}: {name} is {value:g}; from 0 up to {most}", "0" if value < 0 else most)
    if not 1 <= schedule.tokens <= MAX_NEW_TOKENS:
        raise bad(field, f"{field}: tokens is {schedule.tokens}; 1 to {MAX_NEW_TOKENS}", str(MAX_NEW_TOKENS))
    if s.temperature != 1.0:
        raise bad(field, f"{field}: given with temperature = {s.temperature:g}; at most one of them", "")


def is_constrained(s: Sampling) -> bool:
    """Whether the next token depends on more than the tokens before it: on what a grammar or a penalty counts, or on a stop
    string that has begun. Such a sequence is not continued exactly by another engine."""
    penalties = s.frequency_penalty or s.presence_penalty or s.repetition_penalty != 1.0
    return bool(penalties or s.stop or s.stop_regex or any(getattr(s, name) is not None for name in GRAMMARS))
