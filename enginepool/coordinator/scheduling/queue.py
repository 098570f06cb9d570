"""The queue of a group: fair between clients, a lane for each signature.

Only requests of one signature share a batch: that of their work, and whether it can be packed. A lane
has a line for each priority, and a line has a flow for each client: its requests, oldest first. Who is next:

1. Between priorities, the line with the smallest key. `keys` of a line are those of its requests, and each request that leaves
   takes the oldest one with it. So a priority ages as if it were first in, first out, in any order of its clients.
2. Within a priority, the client with the smallest start (start-time fair queueing). Virtual time is counted in what a worker
   computes, in tokens: a row weighs at least as many as it has of a batch that is full of rows. A client that is served begins
   that much later next time, in each lane. A client that had nothing waiting begins at the present virtual time: it has no
   credit for what it did not use. A request that was cut is charged part by part, so that other clients have their turn
   between its parts. A sequence is charged for its prompt, and then for its tokens as they come.
3. Within a client, the oldest request.

Virtual time follows the starts of those who are served. It moves by a part of what is computed as well (`DRIFT`), or a stream
of new clients, each of which begins at the present, would keep it, and those who wait, where they are.

Requests of clients whose link was cut stand in a line of their own, behind all others, until the client says hello again.

Every step costs O(log n) of the clients and priorities that wait. Entries of requests that no longer wait are left in place,
dropped when they reach the top, and swept out together once they are half of the queue: cancelling costs O(1) and memory stays
in proportion to what waits. The same holds for the keys and turns that a client leaves behind when its requests are moved: a
move costs O(log n) for each of them.
"""

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Generic

from enginepool.coordinator.core.request_state import QUEUED  # TEXT waits too: in the queue of suspects
from enginepool.coordinator.operations.base import of_sequences
from enginepool.coordinator.scheduling.lanes import AWAY, Lane, Line, QueueClient, QueueLevel, R, arrival

#: virtual time moves by at least this part of a fair share of what is computed
DRIFT = 0.25


class Queue(Generic[R]):
    """Requests that wait. `request.lane` names the queue where its entry counts."""

    __slots__ = ("_charged", "_lanes", "_levels", "_stale", "size")

    def __init__(self) -> None:
        #: by the signature of the works, with the bit of those that can be packed
        self._lanes: dict[int, Lane[R]] = {}
        #: by priority
        self._levels: dict[int, QueueLevel] = {}
        #: priorities of which something was charged later
        self._charged: list[int] = []
        #: entries in all lanes, waiting or stale
        self.size = 0
        #: roughly as many of them are stale
        self._stale = 0

    def push(self, request: R) -> bool:
        """Add `request`, unless it stands here already. Whether it is now the head of its lane."""
        if request.lane is not None:
            if request.lane is self:
                return False
            request.lane.forget()
        request.lane = self
        self.size += 1
        signature = request.work.signature | request.packs
        lane = self._lanes.get(signature)
        if lane is None:
            lane = self._lanes[signature] = Lane()
        lane.size += 1
        client = request.client
        priority = AWAY if client.away else request.priority
        line = lane.lines.get(priority)
        if line is None:
            line = lane.lines[priority] = Line(priority, self._levels.setdefault(priority, QueueLevel()))
        flow = line.flows.get(client)
        if flow is None:
            level = line.level
            if line.virtual < level.virtual:
                # A lane is behind the others only while a client waits in it whose turn is that early.
                present = min(level.virtual, line[0][0]) if line.flows else level.virtual
                line.virtual = max(line.virtual, present)
            flow = line.flows[client] = deque((request,))
            heappush(line, (level.enter(client, line.virtual), request.seq, flow))
        elif request.seq > flow[-1].seq:
            flow.append(request)
        else:
            # It came back: its place is before some that arrived after it.
            flow.insert(bisect_left(flow, request.seq, key=arrival), request)
        key = inf if priority == AWAY else request.key
        line.add_key(key)
        listed = line.listed
        if listed is None:
            line.listed = key
            heappush(lane, (key, -priority, line))
        elif key < listed:
            lane.order()
        elif flow[0] is not request:
            # It waits behind another request of its client: the next request stays the same.
            return False
        lane.head = head = lane[0][2][0][2][0]
        return head is request

    def head(self, *, sequences: bool | None = None) -> Lane[R] | None:
        """The lane whose head is first; None when nothing waits. The head is one that waits.

        Args:
            sequences: of sequences to generate, or of rows alone; None: of both.
        """
        best: Lane[R] | None = None
        lanes = self._lanes
        for signature, lane in lanes.items():
            if sequences is None or of_sequences(signature) is sequences:
                while (request := lane.head) is not None:
                    if request.state <= QUEUED and request.lane is self:
                        if (len(lanes) > 1 or of_sequences(signature)) and lane.defer():
                            continue
                        if best is None or lane.before(best):
                            best = lane
                        break
                    self.drop(lane)
        return best

    def pop(self, lane: Lane[R], weight: float, *, forgotten: bool = False) -> None:
        """The head of `lane` was given to a worker, for which it weighs so much: it leaves. `forgotten`: it leaves
        unserved, and its key has left."""
        key, priority, line = lane[0]
        start, _, flow = line[0]
        request = flow.popleft()
        if request.lane is self:
            request.lane = None
        self.size -= 1
        lane.size -= 1
        # Who was not served in this lane is not behind others for it in another one, where virtual time may be less.
        after = start if forgotten else self._charge(line, request.client, start, weight)
        if flow:
            heapreplace(line, (after, flow[0].seq, flow))
        else:
            heappop(line)
            del line.flows[request.client]
        keys = line.keys
        if lane.moved or line.late or line.gone or len(keys) < 2:
            if not forgotten:
                line.take_key()
            line.settle()
            lane.settle()
            return
        if not forgotten:
            keys.popleft()
        if keys[0] != key:
            line.listed = keys[0]
            heapreplace(lane, (keys[0], priority, line))
        lane.head = lane[0][2][0][2][0]

    def charge(self, lane: Lane[R], weight: float) -> None:
        """A part of the head of `lane` was given to a worker, for which it weighs so much: the next part waits its turn."""
        line = lane[0][2]
        start, seq, flow = line[0]
        heapreplace(line, (self._charge(line, flow[0].client, start, weight), seq, flow))
        line.settle()
        lane.head = line[0][2][0]

    @staticmethod
    def _charge(line: Line[R], client: QueueClient, start: float, weight: float) -> float:
        """`client`, whose turn began at `start`, is served: where its next turn begins."""
        level = line.level
        virtual = line.virtual + DRIFT * weight / len(line.flows)
        if virtual < start:
            virtual = start
        line.virtual = virtual
        if level.virtual < virtual:
            level.virtual = virtual
        starts = level.starts
        after = starts.get(client, start)
        if after < start:
            after = start
        after += weight
        starts[client] = after
        return after

    def charge_later(self, request: R, weight: float) -> None:
        """A worker has computed more of `request`, which weighs so much: its client has its next turn later. Once for many,
        `pass_time` follows."""
        client = request.client
        priority = AWAY if client.away else request.priority
        level = self._levels.get(priority)
        if level is not None:
            level.starts[client] = level.starts.get(client, level.virtual) + weight
            if not level.charged:
                self._charged.append(priority)
            level.charged += weight

    def pass_time(self) -> None:
        """Virtual time moves by a part of what was charged later, too: new clients begin there."""
        for priority in self._charged:
            level, waits = self._levels[priority], False
            for signature, lane in self._lanes.items():
                line = lane.lines.get(priority)
                if line is not None and line.flows and of_sequences(signature):
                    waits = True
                    line.virtual += DRIFT * level.charged / len(line.flows)
                    level.virtual = max(level.virtual, line.virtual)
            if not waits:
                level.virtual += DRIFT * level.charged
            level.charged = 0.0
        self._charged.clear()

    def drop(self, lane: Lane[R]) -> None:
        """The head of `lane` no longer waits: drop its entry."""
        line, request = lane[0][2], lane.head
        assert request is not None
        line.forget(request)
        self.pop(lane, 0.0, forgotten=True)
        if self._stale:
            self._stale -= 1

    def forget(self) -> None:
        """A request that stood here no longer waits. Sweeps when half of the entries may be stale."""
        self._stale += 1
        if self._stale > 64 and self._stale * 2 > self.size:
            self.sort()

    def sort(self) -> None:
        """Build the lanes again from the waiting requests: most entries are stale, or what can be packed has changed."""
        requests = [request for lane in self._lanes.values() for request in lane.requests()]
        self._lanes.clear()
        self.size = self._stale = 0
        self._push_again(requests)

    def move(self, client: QueueClient) -> None:
        """`client.away` has changed: its requests go behind all others, or back among them."""
        moved: list[R] = []
        for lane in self._lanes.values():
            for line in lane.lines.values():
                if (flow := line.take_out(client)) is not None:
                    lane.moved = True
                    lane.size -= len(flow)
                    moved += flow
            lane.settle()
        self.size -= len(moved)
        self._stale -= min(self._stale, sum(request.state > QUEUED or request.lane is not self for request in moved))
        self._push_again(moved)

    def _push_again(self, requests: list[R]) -> None:
        """Of requests whose entries were taken out, those that wait come back."""
        requests.sort(key=arrival)
        for request in requests:
            if request.lane is self:
                request.lane = None
                if request.state <= QUEUED:
                    self.push(request)

    def waiting(self) -> list[R]:
        """The requests that wait, in no order."""
        return [
            request
            for lane in self._lanes.values()
            for request in lane.requests()
            if request.state <= QUEUED and request.lane is self
        ]  # fmt: skip
