"""Where the time of a request went: the steps between its moments, which follow each other without a gap. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from bench.tracing.marks import Marks


class Step(NamedTuple):
    """What happens between two moments. `of`: what the later moment belongs to: the call, the request, its batch, or its rows,
    as SGLang has them."""

    name: str
    until: str
    of: str


#: in the order of time; the first one begins with the call
STEPS = (
    Step("client: encode; wire to the coordinator", "arrived", "request"),
    Step("coordinator: queue, until its batch leaves", "left", "request"),
    Step("wire to the worker", "received", "batch"),
    Step("worker: decode, check, make prompts", "asked", "batch"),
    Step("worker: SGLang's tokenizer manager, until all rows are sent", "sent", "rows"),
    Step("wire to the scheduler, and until it looks", "got", "rows"),
    Step("scheduler: read the rows", "queued", "rows"),
    Step("scheduler: wait for the forwards before", "planning", "rows"),
    Step("scheduler: make the batch", "launching", "rows"),
    Step("scheduler: launch (on a CPU: the forward)", "launched", "rows"),
    Step("device: until its results are here", "computed", "rows"),
    Step("scheduler: read-out and answer", "replied", "rows"),
    Step("wire to the worker, and until it looks", "heard", "rows"),
    Step("worker: SGLang's tokenizer manager, until all rows are read", "read", "rows"),
    Step("worker: assemble, encode", "encoded", "batch"),
    Step("wire to the coordinator", "back", "batch"),
    Step("coordinator: assemble the answer", "answered", "request"),
    Step("wire to the client; client: decode", "returned", "call"),
)


class Call(NamedTuple):
    """A call of a client, in seconds on the clock of the marks."""

    began: float
    ended: float


def steps_of(call: Call, request: str, marks: Marks, related: dict[str, list[str]]) -> list[float]:
    """Seconds that a request spent in each step: their sum is what its call took. Of several batches, the last one counts.

    A moment that was not marked, or after the next one, as where a scheduler answers before its launch has returned, gives its
    step no time: the steps around it have all of it.
    """
    [*_, batch] = related[request]
    [*_, rows] = related[batch]
    keys = {"request": request, "batch": batch, "rows": rows}
    moments = [call.ended if step.of == "call" else marks.get(step.until, {}).get(keys[step.of]) for step in STEPS]
    latest = call.ended
    for place in reversed(range(len(moments))):
        moment = moments[place]
        latest = moments[place] = latest if moment is None else max(call.began, min(moment, latest))
    before, found = call.began, list[float]()
    for moment in moments:
        assert moment is not None
        found.append(moment - before)
        before = moment
    return found


def numbers(marks: Marks) -> list[str]:
    """The requests that arrived, by their numbers."""
    return sorted(marks["arrived"], key=lambda name: int(name[1:]))


def traced(calls: Sequence[Call], marks: Marks, related: dict[str, list[str]]) -> list[list[float]]:
    """The steps of each call. Call N of one client is its request N. Raises ValueError."""
    return [steps_of(call, request, marks, related) for call, request in zip(calls, numbers(marks), strict=True)]
