"""What arrivals of tokens say about an update: how long no token came, and how long each stream waited."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.in_flight.streams import Arrival


class Standstill(NamedTuple):
    """Seconds from the last token of the weights before to the first one of a version: of all streams together, of the stream
    that waited least, and of the one that waited longest. Tokens of one step arrive one after the other, so that all together
    wait less than any of them."""

    all_s: float
    shortest_s: float
    longest_s: float


def standstill(arrivals: Sequence[Arrival], version: int) -> Standstill | None:
    """That of the update to `version`; None: no stream had tokens before and after it."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    last = first = None
    for arrival in arrivals:
        if arrival.version < version:
            before[arrival.stream] = arrival.at
            last = arrival.at if first is None else last
        elif arrival.version >= version:
            first = arrival.at if first is None else first
            after.setdefault(arrival.stream, arrival.at)
    if last is None or first is None:
        return None
    waits = [after[stream] - at for stream, at in before.items() if stream in after]
    return Standstill(first - last, min(waits, default=first - last), max(waits, default=first - last))


def step_s(arrivals: Sequence[Arrival], window: tuple[float, float]) -> float:
    """The usual time between two tokens of one stream in this window: the median."""
    latest: dict[int, float] = {}
    apart: list[float] = []
    for arrival in within(arrivals, window):
        if arrival.stream in latest and not arrival.first:
            apart.append(arrival.at - latest[arrival.stream])
        latest[arrival.stream] = arrival.at
    return float(np.median(apart)) if apart else 0.0


def longest_gap_s(arrivals: Sequence[Arrival], window: tuple[float, float]) -> float:
    """The longest time without a token of any stream in this window."""
    times = [window[0], *(arrival.at for arrival in within(arrivals, window)), window[1]]
    return float(np.max(np.diff(times)))


def tokens_per_s(arrivals: Sequence[Arrival], window: tuple[float, float]) -> float:
    """Tokens of all streams a second in this window."""
    return sum(arrival.tokens for arrival in within(arrivals, window)) / max(1e-9, window[1] - window[0])


def within(arrivals: Sequence[Arrival], window: tuple[float, float]) -> list[Arrival]:
    """Those in this window."""
    return [arrival for arrival in arrivals if window[0] <= arrival.at < window[1]]
