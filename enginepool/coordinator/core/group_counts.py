"""What the status reports of a group count, and how fast its workers were recently. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class GroupCounts:
    """Since the coordinator started. `split_batches` took more than one forward; the rows of `packed_batches` were packed;
    `lost_batches` had a worker that was lost. `prompt_tokens` are those of prompts that engines continued, `cached_tokens`
    those of them that were in a prefix cache."""

    answered: int = 0
    failed: int = 0
    poisoned: int = 0
    batches: int = 0
    forwards: int = 0
    split_batches: int = 0
    packed_batches: int = 0
    lost_batches: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


#: a batch counts no more seconds than so many times what was expected, or so many
BELIEVED, LITTLE_S = 4.0, 0.025


class RecentSpeed:
    """Time and tokens of recent batches; decayed apart, so that many small batches do not foretell large ones. One that took
    far longer than expected does not foretell others either: its engine stood still. Where engines are slower from then on,
    the next batches say so, too."""

    __slots__ = ("_seconds", "_tokens", "token_s")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        #: seconds for each token of a batch; 0 before the first batch
        self.token_s = 0.0

    def add(self, seconds: float, tokens: float, said: float = 0.0) -> None:
        """A batch of so many tokens took so long; 0: it is not known how long. `said`: as its worker expects, if that is known;
        before the first batch nothing else says it."""
        if seconds <= 0.0:
            return
        if expected := self.token_s * tokens or said:
            seconds = min(seconds, max(BELIEVED * expected, LITTLE_S))
        self._seconds = seconds = 0.9 * self._seconds + seconds
        self._tokens = tokens = 0.9 * self._tokens + tokens
        self.token_s = seconds / tokens if tokens else 0.0
