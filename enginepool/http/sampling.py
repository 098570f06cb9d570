"""SGLang's sampling parameters, as it has settled them for a prompt, as options of `Pool.generate`. Pure."""

from typing import Any

from enginepool.protocol.messages import MAX_NEW_TOKENS
from enginepool.protocol.sampling import GRAMMARS

#: What SGLang's `top_k` is for the whole vocabulary.
_WHOLE = 1 << 30
_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "ignore_eos",
    "logit_bias",
    "sampling_seed",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)


def pool_options(params: Any, prompt: int, context: int, reasoning: bool = False) -> dict[str, Any]:
    """The options for a prompt.

    Args:
        params: SGLang's `SamplingParams`, normalized: its `stop_strs` and `stop_regex_strs` are lists.
        prompt: tokens of its prompt.
        context: tokens that engines take, prompt and output together; where the request has no `max_tokens`, a sequence may
            have all that are left.
        reasoning: the model thinks first; a grammar is not for its thoughts.
    """
    options = {name: getattr(params, name) for name in _SAME}
    options["top_k"] = -1 if params.top_k >= _WHOLE else params.top_k
    options["stop"] = list(params.stop_strs or ())
    options["stop_regex"] = list(params.stop_regex_strs or ())
    options["stop_token_ids"] = sorted(params.stop_token_ids or ())
    options["require_reasoning"] = reasoning and any(options[name] is not None for name in GRAMMARS)
    most = params.max_new_tokens
    options["max_new_tokens"] = max(1, min(context - prompt, MAX_NEW_TOKENS)) if most is None else most
    return options
