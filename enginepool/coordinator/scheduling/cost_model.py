"""Pace: what a forward costs a worker, learned from the batches that it has done.

    seconds of a forward = fixed + tokens * seconds of a token + rows * seconds of a row

A worker says its `pace`, the tokens of a forward of FORWARD_S, as it measured them once: with rows of one length, in full
batches, before there was any load. A worker that needs longer forwards, as on a CPU, says how long they are meant to be: all
times below are then in proportion to that. Short rows cost the engine's host more than their tokens do, long ones cost more
for each token, and hosts slow down. So the three numbers are fitted to the latest batches: least squares in which old batches
count less, drawn toward what the worker said, and within bounds. A batch that took far longer than expected (a pause, an
update in between) is believed only in part, and wholly once such batches follow each other.

The fixed part is there so that the others are right. Where little is asked batches are small, and a forward of one row takes
milliseconds whatever is in it; were that what a row costs, batches would stay small when much is asked.

The time of a batch is that since the one before it was done, or that which it was in the engine, whichever is shorter. Answers
that come together are learned as one batch: either the coordinator read them late or the engine ran them as one forward, and in
both cases only the sum of their times is known. To leave out all but the first would count the time of all for that one.
"""

from enginepool.protocol.pace import FORWARD_S

#: Answers that follow each other more closely came in one turn of the loop, or of one forward.
TOGETHER_S = 0.001
#: What a batch still counts once the next one is learned: about the latest fifty count.
KEPT = 0.98
#: What the worker said counts as so many batches, at first and at last, and so much of that is left with each.
SAID, SAID_AT_LAST, SAID_KEPT = 1.0, 0.02, 0.95
#: The units that fixed part and rows are counted in, and the most that they can be; tokens are counted in what the worker said.
FIXED_S, MOST_FIXED_S = 0.005, FORWARD_S / 2
ROW_S, MOST_ROW_S = 0.0005, 0.005
LEAST_TOKEN, MOST_TOKEN = 0.25, 4.0
#: A batch is believed up to that part of what was expected of it, or of LITTLE_S, more. Each that says more widens that, each
#: that does not narrows it again.
BELIEVED, LITTLE_S = 0.5, FORWARD_S / 4
WIDER, NARROWER, WIDEST = 1.5, 0.5, 16.0


class ForwardCostModel:
    """The pace of one worker.

    Args:
        said: tokens of a forward of `forward_s`, as the worker measured them; more than 0.
        forward_s: seconds that a forward of several requests is meant to take at this worker; more than 0.
    """

    __slots__ = (
        "_at", "_before", "_believed", "_ff", "_fits", "_fixed", "_fr", "_fs", "_ft", "_row", "_rows", "_rr", "_rs", "_run_s",
        "_said", "_scale", "_token", "_tokens", "_tr", "_ts", "_tt", "forward_s", "row", "said", "tokens",
    )  # fmt: skip

    def __init__(self, said: int, forward_s: float = FORWARD_S) -> None:
        self.said = said
        self.forward_s = forward_s
        #: seconds here for each second of the fit
        self._scale = forward_s / FORWARD_S
        #: what a forward of `forward_s` weighs, in tokens; at least 1
        self.tokens = said
        #: tokens that each row weighs beside its own
        self.row = 0.0
        #: of the answers in hand, which came together: when the last of them came, and the last one before them; the longest
        #: time that one of them was in the engine; their tokens and rows; whether all are of the kind that the fit is about
        self._at = self._before = float("-inf")
        self._run_s = 0.0
        self._tokens = self._rows = 0
        self._fits = False
        #: the fit, in its units; within their bounds
        self._fixed, self._token, self._row = 0.0, 1.0, 0.0
        #: decayed sums of products of f(ixed part), t(okens), r(ows) and s(econds), each in its share of the batch
        self._ff = self._ft = self._fr = self._tt = self._tr = self._rr = 0.0
        self._fs: float = 0.0
        self._ts: float = 0.0
        self._rs: float = 0.0
        self._said = SAID
        self._believed = BELIEVED

    def weigh(self, tokens: int, rows: int) -> float:
        """What so many rows of so many tokens in all weigh, in tokens."""
        return tokens + rows * self.row

    def seconds(self, tokens: int, rows: int) -> float:
        """How long a forward of them takes."""
        return self._scale * (self._fixed * FIXED_S + self._token * tokens * FORWARD_S / self.said + self._row * rows * ROW_S)

    def done(self, now: float, run_s: float, tokens: int, rows: int, *, fits: bool) -> None:
        """A batch was answered, after `run_s` in the engine. One that does not fit the model teaches nothing."""
        if now - self._at >= TOGETHER_S:
            if self._fits:
                self._learn(min(self._run_s, self._at - self._before) / self._scale, self._tokens, self._rows)
            self._before = self._at
            self._tokens = self._rows = 0
            self._run_s = 0.0
            self._fits = True
        self._at = now
        self._tokens += tokens
        self._rows += rows
        if run_s > self._run_s:
            self._run_s = run_s
        if not fits:
            self._fits = False

    def _learn(self, seconds: float, tokens: int, rows: int) -> None:
        if seconds <= 0.0:
            # A worker need not say how long a batch took.
            return
        f, t, r = FIXED_S, tokens * FORWARD_S / self.said, rows * ROW_S
        fixed, token, row = self._fixed, self._token, self._row
        expected = fixed * f + token * t + row * r
        most = expected + self._believed * max(expected, LITTLE_S)
        if seconds > most:
            seconds = most
            self._believed = min(self._believed * WIDER, WIDEST)
        else:
            self._believed = max(self._believed * NARROWER, BELIEVED)
        # In shares: a tenth too much is as wrong for a small batch as for a large one.
        whole = f + t + r
        f, t, r, s = f / whole, t / whole, r / whole, seconds / whole
        self._ff = ff = KEPT * self._ff + f * f
        self._ft = ft = KEPT * self._ft + f * t
        self._fr = fr = KEPT * self._fr + f * r
        self._tt = tt = KEPT * self._tt + t * t
        self._tr = tr = KEPT * self._tr + t * r
        self._rr = rr = KEPT * self._rr + r * r
        self._fs = fs = KEPT * self._fs + f * s
        self._ts = ts = KEPT * self._ts + t * s
        self._rs = rs = KEPT * self._rs + r * s
        self._said = said = max(self._said * SAID_KEPT, SAID_AT_LAST)
        # Each given the two others, within its bounds. They start where the last batch left them: one round of it is enough.
        self._token = token = min(max((ts + said - ft * fixed - tr * row) / (tt + said), LEAST_TOKEN), MOST_TOKEN)
        self._row = row = min(max((rs - fr * fixed - tr * token) / (rr + said), 0.0), MOST_ROW_S / ROW_S)
        self._fixed = fixed = min(max((fs - ft * token - fr * row) / (ff + said), 0.0), MOST_FIXED_S / FIXED_S)
        self.tokens = max(1, int(self.said * (1.0 - fixed * FIXED_S / FORWARD_S) / token))
        self.row = row * ROW_S * self.said / (token * FORWARD_S)

    def check(self) -> None:
        assert LEAST_TOKEN <= self._token <= MOST_TOKEN, self
        assert 0.0 <= self._row <= MOST_ROW_S / ROW_S and 0.0 <= self._fixed <= MOST_FIXED_S / FIXED_S, self
        assert 1 <= self.tokens <= self.said / LEAST_TOKEN and self.row >= 0.0, self

    def __repr__(self) -> str:
        return f"<Pace tokens={self.tokens} row={self.row:.1f} said={self.said}>"
