"""What every caller may hear: exactly one final answer a call, the right one, or an error that is justified.

The oracle knows what was asked and what went wrong in the world; it knows nothing of how the coordinator decides.
"""

from enginepool.client.events import Answer, Fail
from enginepool.protocol.messages import Result
from tests.sim.traffic import Call

#: nothing in a simulation justifies these
NEVER = frozenset(
    {"malformed", "too_large", "unsupported", "protocol_version", "hello_required", "unauthorised", "superseded", "id_reused"}
)


class Oracle:
    """All calls of a simulation, and the world's record of what may be told to whom."""

    def __init__(self, max_attempts: int, bounded: bool) -> None:
        self.max_attempts = max_attempts
        #: the pool's bounds are so tight that `busy` is justified
        self.bounded = bounded
        self.calls: dict[int, Call] = {}
        self.open: dict[int, Call] = {}
        self.versions: dict[str, set[int]] = {}
        #: calls that an engine refused, or cut, because it was told to
        self.wronged: set[int] = set()
        self.cut: set[int] = set()
        #: workers that were lost while they ran only this call, by call
        self.trials_lost: dict[int, int] = {}
        self.workers_lost = 0
        self.down: set[str] = set()
        self.draining = False
        #: clients whose owner closed them
        self.closed: set[int] = set()
        self.counts: dict[str, int] = {}

    def add(self, call: Call) -> None:
        self.calls[call.uid] = call
        self.open[call.uid] = call

    def forget(self, call: Call) -> None:
        """The caller is gone: nobody will hear the answer."""
        self.open.pop(call.uid, None)

    def finished(self, now: float, call: Call, effect: Answer | Fail) -> None:
        """The caller hears its final answer."""
        assert not call.outcome, f"{call}: a second final answer: {effect}"
        assert call.submitted >= 0, f"{call}: answered before it was asked"
        call.outcome = "result" if isinstance(effect, Answer) else effect.failure.code
        self.open.pop(call.uid, None)
        self.counts[call.outcome] = self.counts.get(call.outcome, 0) + 1
        if isinstance(effect, Answer):
            self._right(call, effect.result, [bytes(frame) for frame in effect.frames])
        else:
            self._justified(now, call, effect)

    def _right(self, call: Call, result: Result, frames: list[bytes]) -> None:
        assert not (call.bad or call.poison or call.choking or call.refused), f"{call}: answered, and should not be"
        group = call.score.group or next(iter(self.versions))
        assert result.version in self.versions[group], f"{call}: version {result.version}"
        assert frames == call.expected(result.version), f"{call}: wrong scores"
        assert [spec.name for spec in result.frames] == ["scores", "hidden"][: len(frames)], f"{call}: {result.frames}"
        assert result.frames[0].shape == (len(call.prompts), len(call.columns)), f"{call}: {result.frames}"
        assert result.usage == (result.usage.__class__)(len(call.prompts), call.tokens), f"{call}: {result.usage}"
        assert result.forwards and (set(result.forwards) == {1} or call.uid in self.cut), f"{call}: {result.forwards}"
        assert result.timings.queued_us >= 0 and result.timings.run_us >= 0, f"{call}: {result.timings}"

    def _justified(self, now: float, call: Call, effect: Fail) -> None:
        failure = effect.failure
        code = failure.code
        told = f"{call}: {code}: {failure.message} {failure.evidence}"
        assert code not in NEVER, told
        if code == "busy":
            assert self.bounded and (not call.retry_busy or call.deadline is not None), told
        elif code == "deadline_exceeded":
            assert call.deadline is not None and now >= call.deadline, told
        elif code == "cancelled":
            assert call.cancelled, told
        elif code == "poisoned":
            assert len(failure.evidence) == self.max_attempts, told
            guilty = call.poison or call.choking
            assert guilty or self.trials_lost.get(call.uid, 0) >= self.max_attempts, f"{told}: innocent"
        elif code == "engine_error":
            assert call.refused or call.uid in self.wronged, told
        elif code == "pool_down":
            assert (call.score.group or next(iter(self.versions))) in self.down, told
        elif code in ("bad_request", "unknown_group"):
            assert call.bad == code, told
        elif code == "shutting_down":
            assert self.draining, told
        elif code == "closed":
            assert call.client in self.closed, told
        else:
            raise AssertionError(told)
