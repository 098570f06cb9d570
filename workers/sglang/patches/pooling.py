"""Changes to how SGLang pools the embedding of a row. No SGLang here: its module is an argument."""

from typing import Any

#: SGLang's names of what `sentence_modules.Pooling` says
_TYPES = {"cls": "CLS", "mean": "MEAN", "last": "LAST"}


def pool_as_the_model_says(module: Any, pooling: str) -> None:
    """Have rows pooled by this rule, unless it is "", and answered as they are pooled. `module` is SGLang's of poolers.

    SGLang normalizes what it pools, for most models.
    """
    initialize = module.Pooler.__init__
    chosen = getattr(module.PoolingType, _TYPES[pooling]) if pooling else None

    def without_normalizing(self: Any, pooling_type: Any, normalize: bool) -> None:
        initialize(self, pooling_type if chosen is None else chosen, False)

    module.Pooler.__init__ = without_normalizing
