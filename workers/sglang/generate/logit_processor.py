"""The one logit processor of the pool: masks of tokens, and temperatures that change with the position.

It runs in SGLang's scheduler, after penalties, biases and SGLang's own `min_new_tokens`. The worker names this class to SGLang,
for requests whose parameters are typed; nothing that a client sends is executed. This file is imported once SGLang may be.
"""

import importlib
from typing import Any

import torch

from enginepool.protocol.messages import TemperatureSchedule

#: In place of temperature 0. Logits that differ in the last bit differ by more than a thousand then.
_COLDEST = 1e-10
_NOT = -float("inf")
_sglang: Any = importlib.import_module("sglang.srt.sampling.custom_logit_processor")
_disallow = _sglang.DisallowedTokensLogitsProcessor()


class PoolLogitProcessor(_sglang.CustomLogitProcessor):
    """Rows of one forward; `custom_param_list` has for each what `processor_params` made."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        temperatures: list[float] = []
        for place, params in enumerate(custom_param_list or ()):
            row = logits[place : place + 1]
            if "allowed" in params:
                ids = _on_device(params, "allowed", logits)
                kept = _alive(row[:, ids])
                row.fill_(_NOT)
                row[:, ids] = kept
            elif "disallowed" in params:
                # SGLang's own wants all rows of a call to disallow the same.
                asked = [{"token_ids": params["disallowed"]}]
                _disallow(row, asked)
                row.copy_(_alive(row))
                _disallow(row, asked)
            temperatures.append(_temperature(params))
        if any(temperature != 1.0 for temperature in temperatures):
            divisors = torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
            # From the largest down: no quotient is infinite.
            logits.sub_(logits.max(dim=-1, keepdim=True).values).div_(divisors)
        return logits


def _alive(logits: Any) -> Any:
    """`logits` [1, n], or zeros where `min_new_tokens` forbids all of them: the mask has the last word."""
    return torch.where(logits.max() == _NOT, torch.zeros_like(logits), logits)


def _on_device(params: dict[str, Any], name: str, logits: Any) -> Any:
    """A list of ids as a tensor, made once for a request."""
    kept = f"{name}_tensor"
    if kept not in params:
        params[kept] = torch.tensor(params[name], dtype=torch.int64, device=logits.device)
    return params[kept]


def _temperature(params: dict[str, Any]) -> float:
    """The temperature of the next token of a sequence."""
    schedule: list[Any] | None = params.get("schedule")
    if schedule is None:
        return 1.0
    req = params["__req__"]
    if not req.decode_batch_idx:
        # A prefill. While decodes overlap, SGLang notes a token only after the next forward was launched.
        params["before"] = len(req.output_ids)
    position = params["at"] + params["before"] + req.decode_batch_idx
    return max(TemperatureSchedule(*schedule).at(position), _COLDEST)
