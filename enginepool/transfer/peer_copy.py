"""A group whose ranks are on one host, and copy each bucket out of the memory of the rank before them.

A broadcast of NCCL is a kernel on each of its GPUs, and a GPU runs the kernels of two processes in turns: what a stager takes
its engine does not compute. Copies out of memory that another process shares (CUDA IPC) are made by a GPU's copy engines,
beside its kernels. Rank 1 copies out of the publisher's buckets, rank 2 out of the memory of rank 1, and so on: no GPU gives
a byte away twice. Nobody copies unasked: each rank has a connection to rank 0, hears there which buckets the rank before it
has, and says which it has itself. A rank that dies closes its connection.
"""

import hmac
import importlib
import queue
import socket
import threading
from contextlib import nullcontext, suppress
from typing import Any

import msgspec

from enginepool.protocol.updates import MemoryRegion
from enginepool.transfer import threads
from enginepool.transfer.process_group import Broadcast, CollectiveError, ProcessGroup
from enginepool.transfer.shared_memory import open_space, place_of

torch: Any = importlib.import_module("torch")

#: who connects says at once who he is
HELLO_S = 2.0
_LENGTH = 4
_LONGEST = 1 << 16
#: The memory of another rank's GPU is kept open: its two buffers, or its one space, and what replaces them.
_OPEN = 4


class PeerHello(msgspec.Struct):
    """The first word on a connection."""

    rank: int
    token: str


class Here(msgspec.Struct):
    """To rank 0: the bucket is in the memory of who says it, at `at` in `space`, where another rank wants to know that. From
    rank 0: the bucket is there in the memory of the rank before."""

    number: int
    nbytes: int
    space: MemoryRegion | None = None
    at: int = 0


class _Way(Broadcast):
    """One bucket of a group that copies."""

    def __init__(self, group: "Origin | Taker", number: int) -> None:
        self._group = group
        self._number = number

    def order(self, timeout_s: float) -> None:
        self._group.order(self._number, timeout_s)

    def wait(self, timeout_s: float) -> None:
        self._group.over(self._number, timeout_s)


class _Copies(ProcessGroup):
    """What both sides have."""

    def __init__(self, name: str, world: int, rank: int, device: Any) -> None:
        super().__init__(name, world, rank, device, on_device=_is_gpu(device))
        self._changed = threading.Condition()
        #: why the group is of no more use
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


class Origin(_Copies):
    """Rank 0: its buckets lie in regions of its own, and stay there until rank 1 has them.

    Args:
        listener: where the other ranks connect to, within `timeout_s`; it is closed then.
    """

    def __init__(self, name: str, world: int, device: Any, listener: socket.socket, token: str, timeout_s: float) -> None:
        """Raises OSError: they do not come."""
        super().__init__(name, world, 0, device)
        #: buckets that each rank has
        self._have = [0] * world
        self._peers: dict[int, socket.socket] = {}
        listener.settimeout(timeout_s)
        try:
            while len(self._peers) < world - 1:
                peer = listener.accept()[0]
                rank = _greeted(peer, token)
                if rank is None or rank in self._peers or not 0 < rank < world:
                    peer.close()
                    continue
                _make_quick(peer)
                self._peers[rank] = peer
        except BaseException:
            # Whatever it is, and it is raised again, those who have come must hear that nothing comes of it.
            self.abort()
            raise
        for rank in self._peers:
            # It waits for words alone, and may be cut off at the program's end.
            threading.Thread(target=self._listen, args=(rank,), name="copies", daemon=True).start()

    def begin(self, bucket: Any) -> Broadcast:
        self._still_there()
        number = self._numbered()
        try:
            space, at = place_of(bucket)
            if bucket.is_cuda:
                torch.cuda.current_stream(bucket.device).record_event().synchronize()
            _say(self._peers[1], Here(number, bucket.numel(), space, at))
        except (OSError, RuntimeError) as error:
            self._still_there()
            raise CollectiveError(f"group {self.name}: {_one_line(error)}") from error
        return _Way(self, number)

    def order(self, number: int, timeout_s: float) -> None:
        """See `Broadcast`."""
        self.over(number, timeout_s)

    def over(self, number: int, timeout_s: float) -> None:
        """See `Broadcast.wait`."""
        self._until(lambda: self._have[1] > number, timeout_s)

    def finish(self, timeout_s: float) -> None:
        """See `ProcessGroup`: by way of this rank they hear what the one before them has."""
        self._until(lambda: min(self._have[1:]) >= self._begun, timeout_s)

    def _listen(self, rank: int) -> None:
        """Until the end: what this rank has, the next one may copy."""
        other = rank
        try:
            while (here := _said(self._peers[rank], Here)) is not None:
                if rank + 1 < self.world:
                    other = rank + 1
                    _say(self._peers[other], here)
                    other = rank
                with self._changed:
                    self._have[rank] = here.number + 1
                    self._changed.notify_all()
            self._lose(f"has lost rank {rank}: it has closed its connection")
        except Exception as error:  # whatever it is: who waits has to hear of it
            self._lose(f"has lost rank {other}: {_one_line(error)}")

    def abort(self) -> None:
        self._lose("was given up")
        for peer in self._peers.values():
            _hang_up(peer)


class Taker(_Copies):
    """Another rank."""

    def __init__(self, name: str, world: int, rank: int, device: Any, address: str, token: str, timeout_s: float) -> None:
        """Raises OSError: rank 0 is not there."""
        super().__init__(name, world, rank, device)
        self._stream: Any = torch.cuda.Stream(device) if self.on_device else None
        #: where each bucket goes that is begun, and after what on the GPU; when each that is being copied is there
        self._targets: dict[int, tuple[Any, Any]] = {}
        self._events: dict[int, Any] = {}
        #: buckets whose copies are begun, and that are here
        self._copied = self._have = 0
        #: held while a copy is begun; who holds it when the group is lost knows that no other one will be
        self._copying = threading.Lock()
        self._opened: dict[bytes, Any] = {}
        self._told: queue.SimpleQueue[tuple[Any, Here] | None] = queue.SimpleQueue()
        host, _, port = address.rpartition(":")
        self._origin = socket.create_connection((host, int(port)), timeout_s)
        _make_quick(self._origin)
        _say(self._origin, PeerHello(rank, token))
        threads.start(self._copy, "copies")
        threads.start(self._tell, "copied")

    def begin(self, bucket: Any) -> Broadcast:
        self._still_there()
        number = self._numbered()
        after = torch.cuda.current_stream(bucket.device).record_event() if self.on_device else None
        with self._changed:
            self._targets[number] = bucket, after
            self._changed.notify_all()
        return _Way(self, number)

    def order(self, number: int, timeout_s: float) -> None:
        """See `Broadcast`."""
        self._until(lambda: self._copied > number, timeout_s)
        event = self._events.pop(number, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def over(self, number: int, timeout_s: float) -> None:
        """See `Broadcast.wait`."""
        self._until(lambda: self._have > number, timeout_s)
        self._events.pop(number, None)

    def finish(self, timeout_s: float) -> None:
        """Nobody hears of anything by way of this rank."""

    def _copy(self) -> None:
        """Until the end: begin the copies that are asked for here and have been said to be possible."""
        try:
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)  # a thread begins on device 0
            while (here := _said(self._origin, Here)) is not None:
                self._until(lambda number=here.number: number in self._targets, threading.TIMEOUT_MAX)
                self._told.put(self._copy_one(here))
            self._lose("has lost rank 0: it has closed its connection")
        except CollectiveError:
            self._lose("was given up")
        except OSError as error:
            self._lose(f"has lost rank 0: {_one_line(error)}")
        except Exception as error:  # as in `Origin`
            self._lose(f"cannot copy: {_one_line(error)}")
        finally:
            self._told.put(None)
            _hang_up(self._origin)

    def _copy_one(self, here: Here) -> tuple[Any, Here]:
        into, after = self._targets.pop(here.number)
        if here.space is None or here.nbytes != into.numel():
            raise ValueError(f"bucket {here.number} has {here.nbytes} bytes at one rank and {into.numel()} at another")
        try:
            source = self._open(here.space)[here.at : here.at + here.nbytes]
        except (OSError, RuntimeError) as error:
            raise RuntimeError(f"the memory of rank {self.rank - 1} cannot be opened: {_one_line(error)}") from error
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
        return event, Here(here.number, here.nbytes, space, at)

    def _open(self, space: MemoryRegion) -> Any:
        if not space.handle:
            # A path names another file when the first one is gone; a GPU's handle names one piece of memory for ever.
            return open_space(space)
        if space.handle not in self._opened:
            if len(self._opened) == _OPEN:
                del self._opened[next(iter(self._opened))]
            self._opened[space.handle] = open_space(space, across=True)
        return self._opened[space.handle]

    def _tell(self) -> None:
        """Until the end: wait for copies, and say that they are done."""
        try:
            while (told := self._told.get()) is not None:
                event, here = told
                if event is not None:
                    event.synchronize()
                with self._changed:
                    self._have = here.number + 1
                    self._changed.notify_all()
                _say(self._origin, here)
        except Exception as error:  # as in `Origin`
            self._lose(f"has lost rank 0: {_one_line(error)}")
        if self._stream is not None:
            self._stream.synchronize()  # what was begun still reads
        self._opened.clear()

    def abort(self) -> None:
        self._lose("was given up")
        _hang_up(self._origin)
        with self._copying:
            if self._stream is not None:
                self._stream.synchronize()  # what was begun still writes


def _greeted(peer: socket.socket, token: str) -> int | None:
    """The rank that has connected; None: it is none of this group, or says nothing."""
    peer.settimeout(HELLO_S)
    try:
        hello = _said(peer, PeerHello)
    except (OSError, msgspec.MsgspecError):
        return None
    if hello is None or not hmac.compare_digest(hello.token.encode(), token.encode()):
        return None
    return hello.rank


def _is_gpu(device: Any) -> bool:
    return bool(torch.device(device).type == "cuda")


def _make_quick(peer: socket.socket) -> None:
    """Words go at once, and are waited for without end: else the second of two would wait for an answer to the first."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say(peer: socket.socket, message: Any) -> None:
    body = msgspec.msgpack.encode(message)
    peer.sendall(len(body).to_bytes(_LENGTH, "little") + body)


def _said(peer: socket.socket, kind: Any) -> Any:
    """The next message; None at the end. Raises OSError or MsgspecError: it is none."""
    head = _read(peer, _LENGTH)
    length = int.from_bytes(head, "little")
    if len(head) < _LENGTH or length > _LONGEST:
        return None
    body = _read(peer, length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None


def _read(peer: socket.socket, size: int) -> bytes:
    """So many bytes, fewer at the end."""
    parts = b""
    while len(parts) < size and (part := peer.recv(size - len(parts))):
        parts += part
    return parts


def _hang_up(peer: socket.socket) -> None:
    """Whoever reads or writes there wakes up."""
    with suppress(OSError):  # it may not be connected any more
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
