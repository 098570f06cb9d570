"""Changes to how SGLang pools the embedding of a row. No SGLang here: its module is an argument."""

import importlib
from typing import Any

#: SGLang's names of what `sentence_modules.Pooling` says
_TYPES = {"cls": "CLS", "mean": "MEAN", "last": "LAST"}


def pool_as_the_model_says(module: Any, pooling: str) -> None:
    """Have rows pooled by this rule, unless it is "", and answered as they are pooled. `module` is SGLang's of poolers.

    SGLang normalizes what it pools, for most models.
    """
    initialize, pool = module.Pooler.__init__, module.pool_hidden_states
    chosen = getattr(module.PoolingType, _TYPES[pooling]) if pooling else None

    def without_normalizing(self: Any, pooling_type: Any, normalize: bool) -> None:
        initialize(self, pooling_type if chosen is None else chosen, False)

    def pool_each_alone(pooling_type: Any, hidden_states: Any, forward_batch: Any) -> Any:
        if pooling_type != module.PoolingType.MEAN:
            return pool(pooling_type, hidden_states, forward_batch)
        return means(hidden_states, forward_batch.extend_seq_lens)

    module.Pooler.__init__, module.pool_hidden_states = without_normalizing, pool_each_alone


def means(hidden_states: Any, lengths: Any) -> Any:
    """The mean of the tokens of each row, in the type of `hidden_states` [tokens, or more with padding, size].

    SGLang takes differences of one sum over all rows, in that type: in bfloat16 a short row behind long ones is lost in the
    rounding, and in float16 the sum is infinite.
    """
    torch: Any = importlib.import_module("torch")
    # Unsafe: it does not ask the device whether the lengths are those of all tokens.
    return torch.segment_reduce(hidden_states.float(), "mean", lengths=lengths, unsafe=True).to(hidden_states.dtype)
