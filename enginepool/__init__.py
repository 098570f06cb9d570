"""A pool of SGLang engines behind one message queue.

async with Pool.connect("tcp://10.0.0.1:5755", keys="client.key") as pool:
    result = await pool.score("Is this a question? ", ["Who?", "No."], label_token_ids=[9454, 2753])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool import errors
    from enginepool.client import BlockingPool, BlockingWeightPublisher, Pool, ScoreResult, WeightPublisher
    from enginepool.errors import EnginepoolError

__version__ = "0.1.0"

__all__ = [
    "BlockingPool",
    "BlockingWeightPublisher",
    "EnginepoolError",
    "Pool",
    "ScoreResult",
    "WeightPublisher",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: a worker process imports this package too, and wants nothing of the client."""
    from importlib import import_module

    if name == "errors":
        return import_module("enginepool.errors")
    if name == "EnginepoolError":
        return import_module("enginepool.errors").EnginepoolError
    if name in __all__:
        return getattr(import_module("enginepool.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
