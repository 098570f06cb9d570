"""A process group on one host: each rank copies the buckets out of the memory of the rank before it.

A broadcast of NCCL is a kernel on each of its GPUs, and a GPU runs the kernels of two processes in turns: the time that a
stager uses, its engine does not have. Copies out of memory that another process shares (CUDA IPC) are made by the copy engines
of a GPU, while its kernels run. Rank 1 copies out of the publisher's buckets, rank 2 out of the memory of rank 1, and so on:
each GPU sends each byte once.

Each rank has a connection to rank 0, where it hears which buckets the rank before it has, and tells which buckets it has.
A rank that dies closes its connection.
"""

import importlib
import queue
import socket
import threading
from contextlib import nullcontext
from functools import partial
from typing import Any

from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer import threads
from enginepool.transfer.peer_messages import BucketReady, PeerHello, greeted, hang_up, prepare, receive, send
from enginepool.transfer.process_group import Broadcast, CollectiveError, ProcessGroup, one_line
from enginepool.transfer.shared_memory import open_space, place_of

torch: Any = importlib.import_module("torch")

#: Regions of other ranks that a rank keeps open: two buffers or one staging region, and those that replace them.
_OPEN = 4


class CopyGroup(ProcessGroup):
    """What rank 0 and the other ranks share."""

    def __init__(self, name: str, world: int, rank: int, device: Any) -> None:
        super().__init__(name, world, rank, device, on_device=_is_gpu(device))
        self._changed = threading.Condition()
        #: why the group cannot be used any more; "" while it can
        self._lost = ""
        self._begun = 0

    def _until(self, true: Any, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: true() or self._lost, timeout_s):
                raise CollectiveError(f"group {self.name}: a copy took more than {timeout_s:g} s")
            self._still_there(unless=true())

    def _still_there(self, *, unless: bool = False) -> None:
        if self._lost and not unless:
            raise CollectiveError(f"group {self.name} {self._lost}")

    def _lose(self, why: str) -> None:
        """The first reason stays."""
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()

    def _numbered(self) -> int:
        self._begun += 1
        return self._begun - 1


class CopySource(CopyGroup):
    """Rank 0: its buckets lie in regions of its own, and stay there until rank 1 has copied them.

    Args:
        listener: where the other ranks connect.
        token: secret of the group, which each rank sends first.
        timeout_s: seconds for all ranks to connect.
    """

    def __init__(self, name: str, world: int, device: Any, listener: socket.socket, token: str, timeout_s: float) -> None:
        """Raises OSError: a rank did not connect in time."""
        super().__init__(name, world, 0, device)
        #: number of buckets that each rank has
        self._have = [0] * world
        self._peers: dict[int, socket.socket] = {}
        listener.settimeout(timeout_s)
        try:
            while len(self._peers) < world - 1:
                peer = listener.accept()[0]
                rank = greeted(peer, token)
                if rank is None or rank in self._peers or not 0 < rank < world:
                    peer.close()
                    continue
                prepare(peer)
                self._peers[rank] = peer
        except BaseException:
            # The ranks that have connected must hear that the group failed. The error is raised again.
            self.abort()
            raise
        for rank in self._peers:
            # It only reads messages, and may be killed at the end of the program.
            threading.Thread(target=self._listen, args=(rank,), name="copies", daemon=True).start()

    def begin(self, bucket: Any) -> Broadcast:
        self._still_there()
        number = self._numbered()
        try:
            space, at = place_of(bucket)
            if bucket.is_cuda:
                torch.cuda.current_stream(bucket.device).record_event().synchronize()
            send(self._peers[1], BucketReady(number, bucket.numel(), space, at))
        except (OSError, RuntimeError) as error:
            self._still_there()
            raise CollectiveError(f"group {self.name}: {one_line(error)}") from error
        wait = partial(self._wait, number)
        return Broadcast(wait, wait)

    def _wait(self, number: int, timeout_s: float) -> None:
        self._until(lambda: self._have[1] > number, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """See `ProcessGroup`: rank 0 forwards the messages of all ranks."""
        self._until(lambda: min(self._have[1:]) >= self._begun, timeout_s)

    def _listen(self, rank: int) -> None:
        """Until the end: tell the next rank which buckets this rank has."""
        other = rank
        try:
            while (here := receive(self._peers[rank], BucketReady)) is not None:
                if rank + 1 < self.world:
                    other = rank + 1
                    send(self._peers[other], here)
                    other = rank
                with self._changed:
                    self._have[rank] = here.number + 1
                    self._changed.notify_all()
            self._lose(f"has lost rank {rank}: it has closed its connection")
        except Exception as error:  # of any kind: threads that wait must be told
            self._lose(f"has lost rank {other}: {one_line(error)}")

    def abort(self) -> None:
        self._lose("was given up")
        for peer in self._peers.values():
            hang_up(peer)


class CopyReceiver(CopyGroup):
    """A rank above 0."""

    def __init__(self, name: str, world: int, rank: int, device: Any, address: str, token: str, timeout_s: float) -> None:
        """Raises OSError: rank 0 cannot be reached."""
        super().__init__(name, world, rank, device)
        self._stream: Any = torch.cuda.Stream(device) if self.on_device else None
        #: by bucket that has begun: its target, and the event of the GPU to wait for; then the event that ends its copy
        self._targets: dict[int, tuple[Any, Any]] = {}
        self._events: dict[int, Any] = {}
        #: number of buckets whose copies have begun, and number of complete ones
        self._copied = self._have = 0
        #: held while a copy is started; after the group is lost, no copy starts once it was held
        self._copying = threading.Lock()
        self._opened: dict[bytes, Any] = {}
        self._copied_buckets: queue.SimpleQueue[tuple[Any, BucketReady] | None] = queue.SimpleQueue()
        host, _, port = address.rpartition(":")
        self._origin = socket.create_connection((host, int(port)), timeout_s)
        prepare(self._origin)
        send(self._origin, PeerHello(rank, token))
        threads.start(self._copy, "copies")
        threads.start(self._announce, "copied")

    def begin(self, bucket: Any) -> Broadcast:
        self._still_there()
        number = self._numbered()
        after = torch.cuda.current_stream(bucket.device).record_event() if self.on_device else None
        with self._changed:
            self._targets[number] = bucket, after
            self._changed.notify_all()
        return Broadcast(partial(self._order, number), partial(self._wait, number))

    def _order(self, number: int, timeout_s: float) -> None:
        self._until(lambda: self._copied > number, timeout_s)
        event = self._events.pop(number, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _wait(self, number: int, timeout_s: float) -> None:
        self._until(lambda: self._have > number, timeout_s)
        self._events.pop(number, None)

    def finish(self, timeout_s: float) -> None:
        """This rank forwards no messages."""

    def _copy(self) -> None:
        """Until the end: start the copies that have begun here and that the previous rank is ready for."""
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # a thread begins on device 0
            while (here := receive(self._origin, BucketReady)) is not None:
                self._until(lambda number=here.number: number in self._targets, threading.TIMEOUT_MAX)
                self._copied_buckets.put(self._copy_one(here))
            self._lose("has lost rank 0: it has closed its connection")
        except CollectiveError:
            self._lose("was given up")
        except OSError as error:
            self._lose(f"has lost rank 0: {one_line(error)}")
        except Exception as error:  # as in `CopySource`
            self._lose(f"cannot copy: {one_line(error)}")
        finally:
            self._copied_buckets.put(None)
            hang_up(self._origin)

    def _copy_one(self, here: BucketReady) -> tuple[Any, BucketReady]:
        into, after = self._targets.pop(here.number)
        if here.space is None or here.nbytes != into.numel():
            raise ValueError(f"bucket {here.number} has {here.nbytes} bytes at one rank and {into.numel()} at another")
        try:
            source = self._open(here.space)[here.at : here.at + here.nbytes]
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"the memory of rank {self.rank - 1} cannot be opened: {one_line(error)}") from error
        event = None
        with self._copying, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._still_there()
            if self._stream is not None:
                self._stream.wait_event(after)
            into.copy_(source, non_blocking=True)
            if self._stream is not None:
                event = self._stream.record_event()
        space, at = place_of(into) if self.rank + 1 < self.world else (None, 0)
        with self._changed:
            self._events[here.number] = event
            self._copied = here.number + 1
            self._changed.notify_all()
        return event, BucketReady(here.number, here.nbytes, space, at)

    def _open(self, space: MemoryRegion) -> Any:
        if not space.handle:
            # A path may name another file later; a GPU's handle always names the same memory.
            return open_space(space)
        if space.handle not in self._opened:
            if len(self._opened) == _OPEN:
                del self._opened[next(iter(self._opened))]
            self._opened[space.handle] = open_space(space, across=True)
        return self._opened[space.handle]

    def _announce(self) -> None:
        """Until the end: wait for copies, and tell rank 0 that they are complete."""
        try:
            while (told := self._copied_buckets.get()) is not None:
                event, here = told
                if event is not None:
                    event.synchronize()
                with self._changed:
                    self._have = here.number + 1
                    self._changed.notify_all()
                send(self._origin, here)
        except Exception as error:  # as in `CopySource`
            self._lose(f"has lost rank 0: {one_line(error)}")
        if self._stream is not None:
            self._stream.synchronize()  # running copies still read
        self._opened.clear()

    def abort(self) -> None:
        self._lose("was given up")
        hang_up(self._origin)
        with self._copying:
            if self._stream is not None:
                self._stream.synchronize()  # running copies still write


def _is_gpu(device: Any) -> bool:
    return bool(torch.device(device).type == "cuda")
