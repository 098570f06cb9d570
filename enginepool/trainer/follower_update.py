"""An update on a trainer rank above 0: it takes part in gathering tensors, and rank 0 says how the update ended."""

from collections.abc import Awaitable, Callable

from enginepool.protocol.messages.weights import Publish
from enginepool.trainer.buffers import stand_behind
from enginepool.trainer.tensors import SendPlan
from enginepool.trainer.trainer_ranks import RoundEnd
from enginepool.trainer.update_handle import UpdateHandle
from enginepool.trainer.update_sender import follow_rank0
from enginepool.transfer import threads


class FollowerUpdate(UpdateHandle):
    """An update under way, on a rank that has no pool."""

    async def begin(self, publish: Publish, plan: Callable[[], SendPlan], next_version: Callable[[], Awaitable[int]]) -> None:
        """See `UpdateHandle`."""
        context, heartbeats = self._context, self._heartbeats

        def run() -> None:
            end, own = follow_rank0(plan, self._asked_version, context.trainer_group, heartbeats, context.buffers.device)
            context.post(self._follower_ended, end, own)

        if heartbeats is not None:
            heartbeats.start()
        # A gather reads what this rank's stream computes.
        stand_behind(context.buffers.device)
        threads.start(run, "weights")
        self._opened.set_result(None)

    def _follower_ended(self, end: RoundEnd, own: Exception | None) -> None:
        self._cause = self._cause or own
        self.again_s = end.again_s if own is None and not self._final.done() else None
        self._settle(end.outcome)
        self.left()

    def _commit(self, seconds: float) -> None:
        """Rank 0 commits."""

    def _request_abort(self, reason: str) -> None:
        """Rank 0 decides."""

    def _ranks_failed(self, error: Exception) -> None:
        if not self._final.done():
            self._cause = error
            self._settle(self._failure(str(error)))
