"""How long the coordinator has been silent, and what follows from that. Pure, a part of `machine`."""

#: a registered worker that hears nothing for this long sends `register` again
SILENCE_S = 5.0
#: a silence that is as long is a line in the worker's log, and so is its end
NOTED_SILENCE_S = 10.0
#: an unanswered `register` is repeated after this
ASK_AGAIN_S = 1.0
#: No event for this long, though ticks are due, means that this process stood still: not the coordinator's silence.
STALL_S = 2.0


class CoordinatorSilence:
    """When the coordinator was heard last, and when this worker last sent `register`. All times are of the worker's clock.

    Args:
        orphan_s: seconds of silence after which the worker ends; `accept` replaces it.
        external: `orphan_s` does not count.
    """

    def __init__(self, now: float, orphan_s: float, *, external: bool) -> None:
        self.heard_at = now
        self.asked_at = -ASK_AGAIN_S
        self.orphan_s = orphan_s
        self.external = external
        #: the log has a line on the present silence
        self._noted = False

    def pass_time(self, before: float, now: float) -> None:
        """Time has passed since the event before. A time in which this process stood still does not count."""
        gap = now - before
        if gap > STALL_S:
            # A sum of differences is rounded, and may lie after the clock.
            self.heard_at = min(self.heard_at + gap, now)
            self.asked_at = min(self.asked_at + gap, now)

    def end(self, now: float) -> str:
        """The coordinator is heard; a line for the log, or ""."""
        silent, self.heard_at = now - self.heard_at, now
        noted, self._noted = self._noted, False
        return f"the coordinator speaks again, after {silent:.0f} s" if noted else ""

    def orphaned(self, now: float) -> bool:
        """Whether the worker ends."""
        return now - self.heard_at >= self.orphan_s and not self.external

    def check(self, now: float) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.heard_at <= now and self.asked_at <= now

    def line(self, now: float) -> str:
        """What the log says of a long silence, once, or ""."""
        silent = now - self.heard_at
        if silent < NOTED_SILENCE_S or self._noted:
            return ""
        self._noted = True
        then = "keeps its model and waits" if self.external else f"ends after {self.orphan_s:g} s of silence"
        return f"no word from a coordinator for {silent:.0f} s: this worker {then}"

    def may_ask(self, now: float) -> bool:
        """Whether the last `register` has waited so long for an answer that another one may be sent."""
        return now - self.asked_at >= ASK_AGAIN_S

    def must_ask(self, now: float, *, registered: bool) -> bool:
        """Whether it is time for another `register`."""
        if registered:
            return now - max(self.heard_at, self.asked_at) >= SILENCE_S
        return self.may_ask(now)
