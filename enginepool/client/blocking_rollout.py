"""`BlockingRollout`: `Rollout` for code that does not await, on the loop of its `BlockingPool`."""

from enginepool.client.facade import BlockingIterator, StreamingFacade
from enginepool.client.rollout import Rollout
from enginepool.client.rollout_group import RolloutGroup


class BlockingRollout(BlockingIterator[RolloutGroup, list[RolloutGroup]]):
    """What `BlockingPool.rollout` returns: `for group in rollout`, or `rollout.take(32)` for a training step. Other groups go
    on between two calls."""

    def __init__(self, rollout: Rollout, pool: StreamingFacade) -> None:
        """Not for callers: use `BlockingPool.rollout`."""
        super().__init__(rollout, pool)
        self._rollout, self._pool = rollout, pool

    def take(self, count: int) -> list[RolloutGroup]:
        """As of `Rollout`."""
        return self._pool.call(self._rollout.take(count))
