"""A pool of SGLang engines behind one message queue.

async with Pool.connect("tcp://10.0.0.1:5755", keys="client.key") as pool:
    result = await pool.score("Is this a question? ", ["Who?", "No."], label_token_ids=[9454, 2753])
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool import errors
    from enginepool.client.blocking import BlockingPool
    from enginepool.client.blocking_session import BlockingSession
    from enginepool.client.embed import EmbedResult
    from enginepool.client.generation_session import Session
    from enginepool.client.generations import Generation, Generations, TokenChunk
    from enginepool.client.logprobs import LogprobsResult
    from enginepool.client.pool import Pool
    from enginepool.client.rerank import RerankResult
    from enginepool.client.rollout import Rollout
    from enginepool.client.rollout_group import RolloutGroup
    from enginepool.client.score import ScoreResult
    from enginepool.client.token_stream import TokenStream
    from enginepool.errors import EnginepoolError
    from enginepool.trainer.blocking_publisher import BlockingWeightPublisher
    from enginepool.trainer.publisher import WeightPublisher

__version__ = "0.1.0"

__all__ = [
    "BlockingPool",
    "BlockingSession",
    "BlockingWeightPublisher",
    "EmbedResult",
    "EnginepoolError",
    "Generation",
    "Generations",
    "LogprobsResult",
    "Pool",
    "RerankResult",
    "Rollout",
    "RolloutGroup",
    "ScoreResult",
    "Session",
    "TokenChunk",
    "TokenStream",
    "WeightPublisher",
    "__version__",
    "errors",
]

#: Where each public name is defined.
_MODULES = {
    "BlockingPool": "client.blocking",
    "BlockingSession": "client.blocking_session",
    "BlockingWeightPublisher": "trainer.blocking_publisher",
    "TokenChunk": "client.generations",
    "EmbedResult": "client.embed",
    "EnginepoolError": "errors",
    "Generation": "client.generations",
    "Generations": "client.generations",
    "LogprobsResult": "client.logprobs",
    "Pool": "client.pool",
    "RerankResult": "client.rerank",
    "Rollout": "client.rollout",
    "RolloutGroup": "client.rollout_group",
    "ScoreResult": "client.score",
    "Session": "client.generation_session",
    "TokenStream": "client.token_stream",
    "WeightPublisher": "trainer.publisher",
}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use: a worker process imports this package without the client."""
    from importlib import import_module

    if name == "errors":
        return import_module("enginepool.errors")
    if name in _MODULES:
        return getattr(import_module(f"enginepool.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
