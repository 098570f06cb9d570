"""The forward cost model: how long a forward takes on a worker, learned from its finished batches.

    seconds of a forward = fixed + tokens * seconds of a token + rows * seconds of a row

A worker declares its `pace`: the tokens of a forward of FORWARD_S. It measures the pace once, before there is any load, in full
batches with rows of one length. It also declares what its smallest forward takes: that is the first fixed part. Where that is
more than half of FORWARD_S, forwards are twice as long. A worker that needs longer forwards, as on a CPU, also declares the
length of its forwards. All times below are then scaled to that length.

Real batches differ from the measured ones. Short rows cost the host of the engine more than their tokens do. Long rows cost
more for each token. Hosts slow down. So the model fits its three numbers to the latest batches by least squares. Old batches
count less, the declared pace counts as a prior, and each number has bounds. A batch may take far longer than expected, because
of a pause or an update. The model first counts only part of the excess, and all of it once such batches follow each other.

A batch lowers the weight of older batches like it, and of no others (directional forgetting). Under low load, all batches of an
hour may be of one size. They say how long such a batch takes, and not which part of that is fixed. What larger batches said of
that before counts again when the queue fills.

The fixed part keeps the other two numbers right. Under low load batches are small, and a forward of one row takes milliseconds
however short the row is. Without a fixed part the model would take that time for the cost of a row, and batches would stay
small under high load.

The time of a batch is the time since the previous batch was done. A batch that the engine got later, while it was idle, takes
longer: no other forward hides what the host does for it. From such a batch, the fixed part on an idle engine is learned, and
nothing else, unless it took less than its tokens and rows should. So a kind of batch that has only been seen there can be
compared with one that has followed others.

Answers that arrive together are learned as one batch. Either the coordinator read them late or the engine ran them as one
forward, and in both cases only the sum of their times is known. A model that dropped all but the first would count the time of
all for the first.
"""

from copy import copy

from enginepool.protocol.capabilities import FORWARD_S, MAX_BUDGET

#: Answers that are fewer seconds apart arrived in one turn of the loop, or come from one forward.
TOGETHER_S = 0.001
#: Each new batch multiplies the weight of older ones like it by this: about the latest fifty of a kind count.
KEPT = 0.98
#: Once the limit of what is believed (below) is so wide, as several batches in a row took longer, older ones count for less.
SURPRISED, KEPT_IF_SURPRISED = 1.5, 0.6
#: What is known of a direction is rounding error below this.
LITTLE_KNOWN = 1e-6
#: The weight of the declared pace, in batches: at the start, at least, and the factor by which each batch lowers it.
SAID, SAID_AT_LAST, SAID_KEPT = 1.0, 0.02, 0.95
#: Units and upper bounds of the fixed part and of the seconds of a row. The unit of tokens is the declared pace.
FIXED_S, MOST_FIXED_S = 0.005, FORWARD_S * 0.75
ROW_S, MOST_ROW_S = 0.0005, 0.005
LEAST_TOKEN, MOST_TOKEN = 0.25, 4.0
#: Paces and lengths of forwards that differ by no more than this factor may be of one device: measured twice, they are never
#: quite equal.
ALIKE = 1.5
#: A forward takes at least so many times as long as the smallest one.
LEAST_FORWARDS = 2
#: A short forward weighs the pace divided by this number, or as much as the fixed part. A request of a higher priority that
#: arrives waits for two of them: one runs, one is launched.
SHORT = 3
#: The time of a batch counts up to this share above the expected time (at least above LITTLE_S). Each batch above that limit
#: widens the limit, and each batch within it narrows the limit again.
BELIEVED, LITTLE_S = 0.5, FORWARD_S / 4
WIDER, NARROWER, WIDEST = 1.5, 0.5, 16.0
#: What the latest batch counts in the fixed part on an idle engine, once there were many. Before, all count alike, and the
#: declared time as one of them: the worker may have measured it while its host was busy.
IDLE_WEIGHT = 0.05


class ForwardCostModel:
    """The cost model of one worker, of its plain batches or of its packed ones.

    Args:
        said: the declared pace, in tokens of a forward of `forward_s`; more than 0.
        forward_s: target seconds of a forward of several requests on this worker; more than 0.
        fixed_s: declared seconds of the smallest forward.
        overlaps: whether the engine has a next batch while it computes one. Otherwise it is idle before each.
    """

    __slots__ = (
        "_alone", "_at", "_before", "_believed", "_ff", "_first_fixed", "_first_token", "_fits", "_fixed", "_fr", "_fs", "_ft",
        "_overlaps", "_row", "_rows", "_rr", "_rs", "_run_s", "_said", "_scale", "_token", "_tokens", "_tr", "_ts", "_tt",
        "forward_s", "idle_weight", "row", "said", "short", "tokens",
    )  # fmt: skip

    def __init__(self, said: int, forward_s: float = FORWARD_S, fixed_s: float = 0.0, *, overlaps: bool = True) -> None:
        self.said = said
        self._overlaps = overlaps
        self.forward_s = forward_s
        #: seconds on this worker for each second in the fit
        self._scale = forward_s / FORWARD_S
        #: what was declared, in units
        self._first_fixed = min(fixed_s / self._scale, MOST_FIXED_S) / FIXED_S
        self._first_token = 1.0 - self._first_fixed * FIXED_S / FORWARD_S
        # The next values describe the answers that arrived together and are not learned yet.
        #: `_at`: arrival of the last of them; `_before`: arrival of the last answer before them
        self._at = self._before = float("-inf")
        #: `_run_s`: the longest time of one of them in the engine; `_tokens`, `_rows`: their sums; `_fits`: the model covers
        #: all
        self._run_s = 0.0
        self._tokens = self._rows = 0
        self._fits = False
        #: the fitted numbers in their units, within their bounds
        self._fixed, self._token, self._row = self._first_fixed, self._first_token, 0.0
        #: decayed sums of products of f(ixed part), t(okens), r(ows) and s(econds), each divided by the size of its batch
        self._ff: float = 0.0
        self._ft: float = 0.0
        self._fr: float = 0.0
        self._tt: float = 0.0
        self._tr: float = 0.0
        self._rr: float = 0.0
        self._fs: float = 0.0
        self._ts: float = 0.0
        self._rs: float = 0.0
        self._said = SAID
        self._believed = BELIEVED
        #: the fixed part on an idle engine, in units
        self._alone = self._first_fixed
        #: the sum of the weights of what it was learned from: the declared time has 1, and a small batch up to 1. A large batch
        #: has hardly any, as nearly all of its time is that of its tokens and rows.
        self.idle_weight = 1.0
        #: weight of a forward of `forward_s`, in tokens; at least 1
        self.tokens = 0
        #: weight of a short forward, while requests of higher priorities arrive
        self.short = 0
        #: weight of a row besides its tokens, in tokens
        self.row = 0.0
        self._weigh()

    @classmethod
    def declared(cls, pace: int, forward_ms: int, fixed_ms: int, *, overlaps: bool = True) -> "ForwardCostModel":
        """The model of a worker that has measured so much: `pace` tokens in `forward_ms`."""
        wanted_ms = max(forward_ms, LEAST_FORWARDS * fixed_ms)
        return cls(
            min(max(1, pace * wanted_ms // forward_ms), MAX_BUDGET), wanted_ms / 1000, fixed_ms / 1000, overlaps=overlaps
        )

    def like(self, other: "ForwardCostModel") -> bool:
        """Whether workers that declare the one and the other may be on the same device: it computes as many tokens a second, in
        forwards as long. The length of the forwards bounds the fixed part that can be learned."""
        rates, lengths = (other.said / other.forward_s, self.said / self.forward_s), (other.forward_s, self.forward_s)
        return max(rates) <= ALIKE * min(rates) and max(lengths) <= ALIKE * min(lengths)

    def again(self) -> "ForwardCostModel":
        """The same for another process: what was learned, without answers that are not learned yet."""
        model = copy(self)
        model._at = model._before = float("-inf")
        model._tokens = model._rows = 0
        model._run_s, model._fits = 0.0, False
        return model

    def weigh(self, tokens: float, rows: float) -> float:
        """The weight of so many rows with so many tokens in all, in tokens."""
        return tokens + rows * self.row

    def seconds(self, tokens: float, rows: float) -> float:
        """The expected seconds of a forward of them that follows another one."""
        return self._scale * (self._fixed * FIXED_S + self._token * tokens * FORWARD_S / self.said + self._row * rows * ROW_S)

    @property
    def fixed_s(self) -> float:
        """The expected seconds of a forward besides its tokens and rows."""
        return self._scale * self._fixed * FIXED_S

    @property
    def idle_s(self) -> float:
        """The expected seconds that a forward takes longer on an idle engine; no less than minus `fixed_s`."""
        return self._scale * (self._alone - self._fixed) * FIXED_S if self._overlaps else 0.0

    def done(self, now: float, run_s: float, tokens: int, rows: int, *, fits: bool) -> None:
        """A batch was answered after `run_s` in the engine. The model learns nothing from a batch with `fits=False`."""
        if now - self._at >= TOGETHER_S:
            if self._fits:
                since_s = self._at - self._before
                self._learn(self._run_s / self._scale, since_s / self._scale, self._tokens, self._rows)
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

    def _learn(self, run_s: float, since_s: float, tokens: int, rows: int) -> None:
        """A batch was in the engine for `run_s`, and was answered `since_s` after the batch before."""
        if run_s <= 0.0:
            # A worker may leave out the time of a batch.
            return
        f, t, r = FIXED_S, tokens * FORWARD_S / self.said, rows * ROW_S
        expected = self._fixed * f + self._token * t + self._row * r
        if not self._overlaps:
            self._fit(f, t, r, self._believe(min(run_s, since_s), expected))
        elif run_s <= since_s:
            rest = expected - self._fixed * f
            found = self._believe(run_s, rest + self._alone * f) - rest
            share = f / (f + t + r)
            self.idle_weight += share
            self._alone += share * max(IDLE_WEIGHT, 1 / self.idle_weight) * (max(0.0, found) / f - self._alone)
            if found < 0.0:
                # Its tokens and rows cost less than was thought.
                self._fit(f, t, r, run_s)
            else:
                self._weigh()
        else:
            # So much of the host's time was not hidden, because the engine got the batch late.
            late = max(0.0, (self._alone - self._fixed) * f - (run_s - since_s))
            self._fit(f, t, r, max(0.0, self._believe(since_s, expected + late) - late))

    def _believe(self, seconds: float, expected: float) -> float:
        """What counts of the time of a batch."""
        most = expected + self._believed * max(expected, LITTLE_S)
        if seconds > most:
            self._believed = min(self._believed * WIDER, WIDEST)
            return most
        self._believed = max(self._believed * NARROWER, BELIEVED)
        return seconds

    def _fit(self, f: float, t: float, r: float, seconds: float) -> None:
        """A forward with a fixed part of so many seconds at first, with tokens and with rows of so many, took `seconds`."""
        fixed, token, row = self._fixed, self._token, self._row
        # Relative errors: ten percent too much is as wrong for a small batch as for a large one.
        whole = f + t + r
        f, t, r, s = f / whole, t / whole, r / whole, seconds / whole
        # Forgotten is the share 1 - KEPT of what is known in the direction x of this batch: M - (1 - KEPT) M x x' M / (x' M x).
        known_f = self._ff * f + self._ft * t + self._fr * r
        known_t = self._ft * f + self._tt * t + self._tr * r
        known_r = self._fr * f + self._tr * t + self._rr * r
        known = known_f * f + known_t * t + known_r * r
        kept = KEPT if self._believed < SURPRISED else KEPT_IF_SURPRISED
        gone = (1.0 - kept) / known if known > LITTLE_KNOWN else 0.0
        less = gone * (self._fs * f + self._ts * t + self._rs * r)
        self._ff = ff = self._ff + f * f - gone * known_f * known_f
        self._ft = ft = self._ft + f * t - gone * known_f * known_t
        self._fr = fr = self._fr + f * r - gone * known_f * known_r
        self._tt = tt = self._tt + t * t - gone * known_t * known_t
        self._tr = tr = self._tr + t * r - gone * known_t * known_r
        self._rr = rr = self._rr + r * r - gone * known_r * known_r
        self._fs = fs = self._fs + f * s - less * known_f
        self._ts = ts = self._ts + t * s - less * known_t
        self._rs = rs = self._rs + r * s - less * known_r
        self._said = said = max(self._said * SAID_KEPT, SAID_AT_LAST)
        ts, fs = ts + said * self._first_token, fs + said * self._first_fixed
        # Coordinate descent: each number is fitted given the two others, within its bounds. It starts from the last fit, so one
        # round is enough.
        self._token = token = min(max((ts - ft * fixed - tr * row) / (tt + said), LEAST_TOKEN), MOST_TOKEN)
        self._row = row = min(max((rs - fr * fixed - tr * token) / (rr + said), 0.0), MOST_ROW_S / ROW_S)
        self._fixed = fixed = min(max((fs - ft * token - fr * row) / (ff + said), 0.0), MOST_FIXED_S / FIXED_S)
        self._weigh()

    def _weigh(self) -> None:
        """What the fitted numbers mean for the size of forwards."""
        fixed, token, row = self._fixed, self._token, self._row
        self.tokens = max(1, int(self.said * (1.0 - fixed * FIXED_S / FORWARD_S) / token))
        self.row = row * ROW_S * self.said / (token * FORWARD_S)
        # The fixed part is paid for each forward, and on an idle engine it shows what the host does for each: a forward that is
        # cut to less than that computes little else, or waits for its host.
        least = max(fixed, self._alone) * FIXED_S * self.said / (token * FORWARD_S)
        self.short = max(1, min(self.tokens, int(max(self.tokens / SHORT, least))))

    def __repr__(self) -> str:
        return f"<Pace tokens={self.tokens} row={self.row:.1f} said={self.said}>"
