"""What a request must not ask for: what is dangerous to take from a caller, and what the pool does not hand on to its engines.
Pure: no SGLang here."""

from collections.abc import Mapping
from typing import Any, cast

from enginepool.errors import BadRequest
from enginepool.protocol.messages import MAX_SEQUENCES, MAX_TOP_LOGPROBS
from enginepool.protocol.sampling import GRAMMARS

_RETURNED = "the pool returns tokens, text and log-probabilities alone"
_DISAGGREGATED = "the coordinator chooses the engine"
_CACHE = "the pool does not hand it on to its engines"
_SESSION = "the pool has no sessions; send the whole conversation, whose beginning is found in the engine's cache"

#: attribute of SGLang's `GenerateReqInput` -> (what OpenAI's API calls it, why it is refused)
_REFUSED: dict[str, tuple[str, str]] = {
    "custom_logit_processor": ("custom_logit_processor", "it is a program, and a program is never taken from a request"),
    "input_embeds": ("input_embeds", "a prompt is text or token ids"),
    "embed_overrides": ("embed_overrides", "a prompt is text or token ids"),
    "positional_embed_overrides": ("positional_embed_overrides", "a prompt is text or token ids"),
    "session_params": ("session_params", _SESSION),
    "session_id": ("session_id", _SESSION),
    "token_ids_logprob": ("token_ids_logprob", "the pool has the logprobs of the most probable tokens; use top_logprobs"),
    "return_hidden_states": ("return_hidden_states", _RETURNED),
    "return_routed_experts": ("return_routed_experts", _RETURNED),
    "return_indexer_topk": ("return_indexer_topk", _RETURNED),
    "return_sampling_mask": ("return_sampling_mask", _RETURNED),
    "bootstrap_host": ("bootstrap_host", _DISAGGREGATED),
    "bootstrap_room": ("bootstrap_room", _DISAGGREGATED),
    "routed_dp_rank": ("routed_dp_rank", _DISAGGREGATED),
    "disagg_prefill_dp_rank": ("disagg_prefill_dp_rank", _DISAGGREGATED),
    "extra_key": ("extra_key", _CACHE),
    "cache_salt": ("cache_salt", _CACHE),
    "watermark": ("watermark", "the pool hands on no watermark"),
    "max_thinking_tokens": ("max_thinking_tokens", "the pool hands on no budget of thinking; use max_tokens"),
}
#: Likewise, of its sampling parameters.
_REFUSED_PARAMETERS = {
    "custom_params": "it is for logit processors, which are never taken from a request",
    "beam_width": "the pool samples; beam search runs in no engine of it",
    "watermark": "the pool hands on no watermark",
}
#: What SGLang writes into `custom_params` itself.
_OWN = "__sglang_"


def refuse_dangerous(request: Any) -> None:
    """Hold SGLang's `GenerateReqInput` to what the pool serves, before anything of it is opened, loaded or counted.

    Raises:
        BadRequest: `field` names the parameter.
    """
    for name, (field, why) in _REFUSED.items():
        value: Any = getattr(request, name, None)
        if _is_given(value, zero=name.endswith(("_rank", "_room"))):
            raise refused(field, why)
    _refuse_logprobs(request)
    if not isinstance(getattr(request, "rid", None), str | None):
        raise BadRequest("rid: not a text; one for the request, or none", field="rid")
    parameters = request.sampling_params
    parameters = cast("list[Any]", parameters if isinstance(parameters, list) else [parameters or {}])
    prompts = _prompts(request)
    for one in parameters:
        _refuse_parameters(one, bool(getattr(request, "require_reasoning", False)), prompts)


def _refuse_logprobs(request: Any) -> None:
    top: Any = getattr(request, "top_logprobs_num", None) or 0
    if not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS:
        text = f"top_logprobs: {top!r:.40} (logprobs of a completion); 0 to {MAX_TOP_LOGPROBS}"
        raise BadRequest(text, field="top_logprobs", limit=str(MAX_TOP_LOGPROBS))
    start: Any = getattr(request, "logprob_start_len", None)
    if not getattr(request, "return_logprob", False) or start in (None, -1):
        return
    if start != 0:
        raise refused("logprob_start_len", "the pool has the logprobs of a whole prompt; give 0, or -1 for none")
    if request.stream:
        raise refused("echo", "a stream has no logprobs of its prompt; leave stream, echo or logprobs out")


def _refuse_parameters(given: Mapping[str, Any], reasoning: bool, prompts: int) -> None:
    for name, why in _REFUSED_PARAMETERS.items():
        value = given.get(name)
        if isinstance(value, dict):
            value = {key: one for key, one in cast("dict[str, Any]", value).items() if not key.startswith(_OWN)}
        if _is_given(value):
            raise refused(name, why)
    n: Any = given.get("n", 1)
    most = max(1, MAX_SEQUENCES // prompts)
    if not isinstance(n, int) or not 1 <= n <= most:
        raise BadRequest(f"n: {n!r:.40} for {prompts} prompts; 1 to {most}", field="n", limit=str(most))
    own = any(key.startswith(_OWN) for key in given.get("custom_params") or ())
    if reasoning and own and any(given.get(name) for name in GRAMMARS):
        why = "a grammar after thoughts whose end this model's template chooses for each request; turn thinking off, as in "
        raise refused("response_format", why + "chat_template_kwargs={'enable_thinking': False}")


def refuse_template(options: Any) -> None:
    """Raise BadRequest for the `chat_template_kwargs` of a request that bring a template of its own: a program of Jinja."""
    if isinstance(options, dict) and "chat_template" in options:
        raise refused("chat_template_kwargs", "chat_template is a program, and a program is never taken from a request")


def refused(field: str, why: str) -> BadRequest:
    """The error for a parameter that is not served."""
    return BadRequest(f"{field}: not served by this pool: {why}", field=field)


def _is_given(value: Any, *, zero: bool = False) -> bool:
    if isinstance(value, list):
        return any(_is_given(one, zero=zero) for one in cast("list[Any]", value))
    if value is None or value is False:
        return False
    return bool(value) or (zero and value == 0)


def _prompts(request: Any) -> int:
    texts, ids = request.text, request.input_ids
    if isinstance(texts, list):
        return max(1, len(cast("list[Any]", texts)))
    return len(ids) if ids and isinstance(ids[0], list) else 1
