"""Whether it pays to stay awake for a reply: a wait that learns from what its waits found.

To fall asleep and be woken costs a thread switch on both sides, which on a virtual machine is most of what a hop costs: awake,
a coordinator took 0.22 ms a request where it took 0.30 ms asleep. So after a send, while hardly anything is in flight, the
shell may look for the reply a little longer before it sleeps, as adaptive mutexes and KVM's `halt_poll_ns` do. When the reply
does not come in that time, as from an engine that computes for milliseconds, the next waits of that kind are left out: one
after the first miss, then two, four, up to MOST_SKIPPED. One wait that found something forgets it all.
"""

#: how long one wait lasts, in seconds; the shell keeps it
WAIT_S = 150e-6
#: with more requests than this in the pool the shell does not wait: the next message arrives before the loop would sleep
FEW = 2
MOST_SKIPPED = 256


class AdaptivePoll:
    """One kind of send, and what waiting after it was worth."""

    __slots__ = ("_misses", "_skip")

    def __init__(self) -> None:
        #: waits in a row that found nothing, as a power of two; 0 after one that did
        self._misses = 0
        #: waits that are left out from now on
        self._skip = 0

    def worth(self) -> bool:
        """Whether to wait after this send."""
        if self._skip:
            self._skip -= 1
            return False
        return True

    def learn(self, found: bool) -> None:
        """What a wait came to."""
        self._misses = 0 if found else min(max(1, 2 * self._misses), MOST_SKIPPED)
        self._skip = self._misses
