"""Pace: the time that a forward of several requests is meant to take. One number for both sides."""

#: Seconds of a forward of several requests on a GPU. A request of high priority waits for the one that runs and for one more.
FORWARD_S = 0.025
