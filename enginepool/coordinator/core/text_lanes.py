"""The texts that a worker has to tokenize. Pure.

It tokenizes short ones one after the other, and at the same time a long one, which may take as long as thousands of short ones.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginepool.protocol.messages import TaskId

if TYPE_CHECKING:
    from enginepool.coordinator.core.request import Request

#: A worker gets a short text while it has fewer than the first of these, or fewer than the second and fewer bytes of text than
#: the third. An urgent text waits behind those that a worker has. A tokenizer takes 5 to 20 ms for so many bytes.
LEAST_TEXTS, MOST_TEXTS, TEXT_BYTES = 2, 8, 16 << 10

#: tasks, in the order in which a worker tokenizes them, and when each must be done; that of the first one counts
Lane = OrderedDict[TaskId, tuple["Request", float]]


class TextLanes:
    """The texts of one worker."""

    __slots__ = ("long", "nbytes", "short")

    def __init__(self) -> None:
        self.short: Lane = OrderedDict()
        #: one at most
        self.long: Lane = OrderedDict()
        #: bytes of `short`
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self.short) + len(self.long)

    def __iter__(self) -> Iterator[TaskId]:
        return iter([*self.short, *self.long])

    def __contains__(self, task: object) -> bool:
        return task in self.short or task in self.long

    def __getitem__(self, task: TaskId) -> "Request":
        return (self.short if task in self.short else self.long)[task][0]

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.short, self.long

    def takes(self, *, long: bool) -> bool:
        """Whether there is room for one more."""
        if long:
            return not self.long
        return len(self.short) < LEAST_TEXTS or (len(self.short) < MOST_TEXTS and self.nbytes < TEXT_BYTES)

    def add(self, task: TaskId, request: "Request", due: float) -> None:
        (self.long if request.long_text else self.short)[task] = (request, due)
        if not request.long_text:
            self.nbytes += request.work.nbytes

    def pop(self, task: TaskId) -> "Request | None":
        """None: it is not there."""
        if task in self.long:
            return self.long.pop(task)[0]
        request, _ = self.short.pop(task, (None, 0.0))
        if request is not None:
            self.nbytes -= request.work.nbytes
        return request

    def due(self) -> float | None:
        """When the next one must be done; None: there is none."""
        return min((due for lane in self.lanes for _, due in list(lane.values())[:1]), default=None)

    def extend(self, gap: float) -> None:
        """All may take so many seconds longer."""
        for lane in self.lanes:
            for task, (request, due) in lane.items():
                lane[task] = request, due + gap
