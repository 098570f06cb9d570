"""How a worker ends once it is to drain: it finishes the work that it has begun, for a limited time. Pure."""


class Draining:
    """Whether the worker drains, why, and until when. `drain_s`: how long begun work may take to finish."""

    def __init__(self, drain_s: float) -> None:
        self.drain_s = drain_s
        self.until: float | None = None
        self.reason = ""

    def begin(self, now: float, reason: str) -> bool:
        """Drain from now on. False: it drains already."""
        if self.until is not None:
            return False
        self.until, self.reason = now + self.drain_s, reason
        return True

    def over(self, now: float, owed: int) -> str:
        """Why the worker ends now, while so many pieces of its work are unfinished; "": it does not."""
        if self.until is None or (owed and now < self.until):
            return ""
        return f"drained: {self.reason}" + (f"; {owed} unfinished after {self.drain_s:g} s" if owed else "")
