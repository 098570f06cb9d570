"""Pace: the time that a forward of several requests is meant to take. The same numbers for both sides."""

#: Seconds of a forward of several requests on a GPU. A request of high priority waits for the one that runs and for one more.
#: Another device may need longer forwards, and says so in `Capabilities.forward_ms`.
FORWARD_S = 0.025
#: The longest forward that a worker may declare, in milliseconds.
MOST_FORWARD_MS = 10_000
