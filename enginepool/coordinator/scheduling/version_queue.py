"""Requests that wait for a later weight version, or that name one exact version. Pure."""

from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from enginepool.coordinator.core.request_state import DONE
from enginepool.coordinator.scheduling.lanes import R, arrival

T = TypeVar("T")


class VersionQueue(Generic[R]):
    """Requests that wait for a later weight version, the smallest version first: a commit reads only the requests it releases.

    It is used like a `Queue`. A request leaves it in two ways: `due` returns it, or it gets its final answer. Its entry is
    stale after a final answer.
    """

    __slots__ = ("_heap", "_stale")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, R]] = []
        #: entries of requests that have their answer
        self._stale = 0

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._heap) - self._stale

    def push(self, request: R) -> None:
        """Add `request`, unless it waits here already."""
        if request.lane is self:
            return
        if request.lane is not None:
            request.lane.forget()
        request.lane = self
        heappush(self._heap, (request.min_version, request.seq, request))

    def forget(self) -> None:
        """A request that waited here has its answer. Sweeps when half of the entries are stale."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].state != DONE]
            heapify(self._heap)
            self._stale = 0

    def due(self, version: int) -> list[R]:
        """Take out the requests that wait for `version` or an earlier one, in the order of their arrival."""
        heap, out = self._heap, list[R]()
        while heap and heap[0][0] <= version:
            request = heappop(heap)[2]
            if request.state == DONE:
                self._stale -= 1
            else:
                request.lane = None
                out.append(request)
        out.sort(key=arrival)
        return out

    def waiting(self) -> list[R]:
        """The requests that wait, in no order."""
        return [request for _, _, request in self._heap if request.state != DONE]


class ExactVersions(Generic[T]):
    """Requests without an answer that name one exact weight version: a commit reads only those that it passes by."""

    __slots__ = ("_by_version", "_empty", "_versions")

    def __init__(self) -> None:
        self._by_version: dict[int, dict[T, None]] = {}
        #: a heap of its keys, and how many of them have no request
        self._versions: list[int] = []
        self._empty = 0

    def add(self, request: T, version: int) -> None:
        """A request that only this version answers."""
        known = self._by_version.get(version)
        if known is None:
            known = self._by_version[version] = {}
            heappush(self._versions, version)
        elif not known:
            self._empty -= 1
        known[request] = None

    def discard(self, request: T, version: int) -> None:
        """A request has its answer. Forgets versions without a request when half of all have none."""
        known = self._by_version.get(version)
        if known is None or request not in known:
            return
        del known[request]
        self._empty += not known
        if self._empty > 64 and 2 * self._empty > len(self._versions):
            self._by_version = {version: known for version, known in self._by_version.items() if known}
            self._versions, self._empty = sorted(self._by_version), 0

    def all(self) -> list[T]:
        """All requests."""
        return [request for known in self._by_version.values() for request in known]

    def before(self, version: int) -> list[T]:
        """Take out the requests that name an earlier version than this one."""
        out: list[T] = []
        while self._versions and self._versions[0] < version:
            known = self._by_version.pop(heappop(self._versions))
            self._empty -= not known
            out += known
        return out
