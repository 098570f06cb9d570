"""The client library: `Pool`, `BlockingPool` and what they return. The pure machine underneath is `session.py`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginepool.client.blocking import BlockingPool
    from enginepool.client.blocking_publisher import BlockingWeightPublisher
    from enginepool.client.pool import Pool
    from enginepool.client.publisher import WeightPublisher
    from enginepool.client.results import ScoreResult

__all__ = ["BlockingPool", "BlockingWeightPublisher", "Pool", "ScoreResult", "WeightPublisher"]

_WHERE = {
    "BlockingPool": "blocking",
    "BlockingWeightPublisher": "blocking_publisher",
    "Pool": "pool",
    "ScoreResult": "results",
    "WeightPublisher": "publisher",
}


def __getattr__(name: str) -> Any:
    """Loaded when asked for: whoever needs the pure machine alone loads no sockets."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
