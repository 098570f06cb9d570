"""The process group in which new weights travel: a publisher is rank 0, stagers or engines are the other ranks.

It is the group that SGLang's own `init_weights_update_group` joins: a TCP store that rank 0 keeps open, a prefix in it that is
the group's name, and torch's helper over that. NCCL between GPUs, gloo between CPUs. If all ranks are GPUs of one host that can
read each other's memory, they copy instead (`peer_copy.py`). The only file that imports torch.distributed.

Every wait has a time limit. What a dead or stopped peer could delay (forming a group, a broadcast, an abort) runs in another
thread or is polled, and the caller gets CollectiveError when the time is over. The group cannot be used after that: `abort` it.
Its name is never used again.
"""

import contextlib
import importlib
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from enginepool.transfer import threads
from enginepool.transfer.nccl_environment import nccl_environment
from enginepool.transfer.peer_copy import CopyReceiver, CopySource
from enginepool.transfer.peer_probe import CHOOSES, agree, agree_at_0, decline, set_transport
from enginepool.transfer.process_group import Broadcast, CollectiveError, ProcessGroup, one_line
from enginepool.transfer.time_limit import within

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

#: The limit of torch's group, at which torch would end the process. The limits of this file are shorter.
_NEVER = timedelta(days=1)
#: Seconds; an abort that takes longer goes on in the background.
_ABORT_S = 5.0
#: Seconds between two polls of a broadcast; on a GPU they cost little of its time.
_POLL_S = 0.0001


class Rendezvous:
    """Rank 0 of all its groups: the TCP store in which their members find each other.

    Args:
        host: the address at which the other ranks reach this process; it listens on no other.
        port: 0 takes a free port.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._family = family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A socket of our own: torch's would listen on every interface.
        listener = socket.create_server((host, port), family=family, backlog=1024)
        port = int(listener.getsockname()[1])
        self._store: Any = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_seconds(60)
        )
        self._store.set(CHOOSES, "")
        self._host = host
        #: HOST:PORT
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def join(
        self,
        name: str,
        world: int,
        *,
        backend: str,
        device: Any = "cpu",
        timeout_s: float = 60.0,
        connect: bool = True,
        copies: bool = False,
    ) -> ProcessGroup:
        """Be rank 0 of group `name`, once all `world` ranks have joined.

        Args:
            timeout_s: seconds for all ranks to join.
            connect: begin with a broadcast of one byte, as `join` does on other ranks; SGLang's own ranks do not expect one.
            copies: if all ranks can, they copy the buckets, each of which lies in a `MemoryRegion`.

        Raises:
            CollectiveError: a rank did not join in time, or the group cannot be formed.
        """

        def form() -> ProcessGroup:
            store = self._store.clone()
            store.set_timeout(_seconds(timeout_s))
            own = dist.PrefixStore(name, store)
            if not copies:
                set_transport(own)
            elif (origin := self._copied(own, name, world, device, timeout_s)) is not None:
                return origin
            return _formed(own, name, world, 0, backend, device, timeout_s, first=connect)

        return _in_time(form, name, world, 0, timeout_s)

    def _copied(self, store: Any, name: str, world: int, device: Any, timeout_s: float) -> ProcessGroup | None:
        """The group, if all ranks copy."""
        with socket.create_server((self._host, 0), family=self._family, backlog=world) as listener:
            token = secrets.token_hex(16)
            if not agree_at_0(store, world, device, listener, token):
                return None
            return CopySource(name, world, device, listener, token, timeout_s)

    def close(self) -> None:
        """Stop listening. Groups that have formed live on."""
        self._store = None


def join(
    address: str,
    name: str,
    world: int,
    rank: int,
    *,
    backend: str,
    device: Any = "cpu",
    timeout_s: float = 60.0,
    copies: bool = False,
    stays: bool = False,
) -> ProcessGroup:
    """Be rank `rank` of the group `name` of `world` ranks, whose rank 0 listens at `address` (HOST:PORT).

    Args:
        timeout_s: seconds for all ranks to join.
        copies: copy the buckets out of the memory of the previous rank, if all ranks can.
        stays: buckets lie in a `MemoryRegion` until the update ends: the next rank may copy them.

    Raises:
        CollectiveError: a rank did not join in time, or the group cannot be formed.
    """

    def form() -> ProcessGroup:
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=_seconds(timeout_s))
        own = dist.PrefixStore(name, store)
        # Rank 0 may be another program, which uses torch's groups alone.
        if store.check([CHOOSES]):
            if not copies:
                decline(own, rank)
            elif (probe := agree(own, rank, device, stays=stays)) is not None:
                return CopyReceiver(name, world, rank, device, probe.address, probe.token, timeout_s)
        return _formed(own, name, world, rank, backend, device, timeout_s)

    return _in_time(form, name, world, rank, timeout_s)


class TorchGroup(ProcessGroup):
    """A process group of torch."""

    def __init__(self, group: Any, name: str, world: int, rank: int, backend: str, device: Any) -> None:
        super().__init__(name, world, rank, device, on_device=backend == "nccl")
        self._group = group
        self._aborted = False

    def begin(self, bucket: Any) -> Broadcast:
        if self._aborted:
            raise CollectiveError(f"group {self.name} was given up")
        try:
            work = dist.broadcast(bucket, src=0, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {self.name}: {one_line(error)}") from error
        return Broadcast(partial(self._order, work), partial(self._wait, work))

    def _order(self, work: Any, timeout_s: float) -> None:
        if not self.on_device:
            self._wait(work, timeout_s)
            return
        try:
            work.wait()
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {self.name}: {one_line(error)}") from error

    def _wait(self, work: Any, timeout_s: float) -> None:
        try:
            self._poll(work, timeout_s)
            work.wait(_seconds(timeout_s))
            if self.on_device and (error := _failure(work)):
                raise CollectiveError(f"group {self.name}: {error}")
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {self.name}: {one_line(error)}") from error

    def _poll(self, work: Any, timeout_s: float) -> None:
        # With a limit, torch's own wait would abort an NCCL group from its watchdog's thread; with gloo it ignores `abort`.
        # Neither has an event to wait for. This thread has no other work.
        end = time.monotonic() + timeout_s
        while not work.is_completed():
            if self._aborted:
                raise CollectiveError(f"group {self.name} was given up")
            if time.monotonic() >= end:
                raise CollectiveError(f"group {self.name}: a broadcast took more than {timeout_s:g} s")
            time.sleep(_POLL_S)

    def finish(self, timeout_s: float) -> None:
        """Each broadcast was waited for, and torch reports nothing about other ranks."""

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        held = [self._group]
        self._group = None
        with contextlib.suppress(CollectiveError):
            within(lambda: c10d._abort_process_group(held[0]), _ABORT_S)
        # Connections close with the last reference, and the other ranks notice. It does not return while a rank is stopped.
        threads.start(held.clear, "collective")


def _failure(work: Any) -> str:
    """Why NCCL's part of a broadcast failed, or ""."""
    try:
        error = work.exception()
    except (RuntimeError, AttributeError, TypeError):  # none, as some backends say it; NCCL's cannot be told in Python
        return ""
    return one_line(error) if isinstance(error, BaseException) else ""


def _formed(
    store: Any, name: str, world: int, rank: int, backend: str, device: Any, timeout_s: float, *, first: bool = True
) -> ProcessGroup:
    """A process group of torch, in its own store."""
    with nccl_environment(backend):
        made = _form(store, name, world, rank, backend, timeout_s)
    group = TorchGroup(made, name, world, rank, backend, device)
    try:
        # The first collective is what connects NCCL's ranks, and takes 0.4 s.
        if first:
            group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s)
    except BaseException:
        # Only this function can leave the group. The error is raised again.
        threads.start(group.abort, "collective")
        raise
    return group


def _in_time(form: Callable[[], ProcessGroup], name: str, world: int, rank: int, timeout_s: float) -> ProcessGroup:
    try:
        # A little more: torch enforces its own limit, with a better reason.
        return within(form, timeout_s + 2.0, late=lambda group: group.abort())
    except (CollectiveError, RuntimeError, ValueError, OSError) as error:
        raise CollectiveError(f"group {name}, rank {rank} of {world}: {one_line(error)}") from error


def _form(store: Any, name: str, world: int, rank: int, backend: str, timeout_s: float) -> Any:
    """What `sglang.srt.utils.init_custom_process_group` does: such a group needs no default group, and does not become it."""
    # gloo keeps the group's limit in its connections too; NCCL would end the process.
    limit = _NEVER if backend == "nccl" else _seconds(timeout_s)
    options = _nccl_options(limit) if backend == "nccl" else None
    group, _ = c10d._new_process_group_helper(
        world, rank, [], c10d.Backend(backend), store, group_name=name, backend_options=options, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    if backend == "gloo":
        group.set_timeout(_NEVER)
    return group


def _nccl_options(limit: timedelta) -> Any:
    """Options of an NCCL group."""
    base: Any = c10d.ProcessGroupNCCL.Options

    class NcclOptions(base):
        # If the process has a default group that is bound to a device, torch would split this group off from it. All ranks of
        # the default group would have to join that.
        split_from = property(lambda self: None, lambda self, value: None)  # pyright: ignore[reportUnknownLambdaType]

    options: Any = NcclOptions()
    # The next bucket's broadcast runs before the work on the last bucket on the same GPU.
    options.is_high_priority_stream = True
    options._timeout = limit
    return options


def _seconds(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s)
