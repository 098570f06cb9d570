"""Scores next to streams in SGLang's own engine, also in 0.5.17: the correction of 0.5.23. Runs in the scheduler's process."""

import importlib
from collections.abc import Callable
from typing import Any


def run_repaired(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Entry of the scheduler's process: `run` is SGLang's own."""
    processor: Any = importlib.import_module("sglang.srt.layers.logprob_processor")
    get = processor.get_token_ids_logprobs

    def repaired(logprobs: Any, token_ids: Any, no_copy_to_cpu: bool = False) -> Any:
        """A sequence that asked for no labels has an empty tensor, as the scheduler expects, where 0.5.17 has a list."""
        values, ids = get(logprobs, token_ids, no_copy_to_cpu)
        if no_copy_to_cpu:
            values = [logprobs.new_empty((0,)) if isinstance(value, list) else value for value in values]
        return values, ids

    processor.get_token_ids_logprobs = repaired
    return run(*args, **kwargs)
