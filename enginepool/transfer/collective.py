"""The process group in which new weights travel: a publisher is rank 0, stagers or engines are the others.

It is the group that SGLang's own `init_weights_update_group` joins: a TCP store that rank 0 holds open, a prefix in it that is
the group's name, and torch's helper over that. NCCL between GPUs, gloo between CPUs. Where all ranks are GPUs of one host that
reach each other's memory, they copy instead (`peer_copy.py`). The only file that imports torch.distributed.

Nothing here waits for ever. What a dead or stopped peer could hold up (forming a group, a broadcast, an abort) runs beside the
caller or is asked for its end, and the caller gets CollectiveError when the time is over. The group is then of no more use:
`abort` it. Its name is never used again.
"""

import contextlib
import importlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

from enginepool.transfer import threads
from enginepool.transfer.peer_copy import Origin, Taker
from enginepool.transfer.peer_probe import SAYS, agree, agree_at_0, decline, tell_way
from enginepool.transfer.process_group import Broadcast, CollectiveError, ProcessGroup

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

#: No collective ever runs into the group's own limit, at which torch ends the process: limits are kept here.
_NEVER = timedelta(days=1)
#: an abort that takes longer goes on in the background
_ABORT_S = 5.0
#: Asked for its end so often, a broadcast on a GPU costs little more than it takes.
_POLL_S = 0.0001
#: By default torch ends the process, a trainer too, when NCCL reports a lost peer; and it asks rank 0's store every second
#: whether to write a report, which it says it cannot for as long as a stager outlives its trainer.
_CALM = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
#: A trainer of two pools, or of two groups, may make two process groups at once: what was set before both is set after both.
_settings = threading.Lock()
_making: list[int] = []
_before: dict[str, str | None] = {}
#: SGLang sets these for its engines, and all ranks of a group must agree.
_LIKE_ENGINES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


class Rendezvous:
    """Rank 0's end of all its groups: the TCP store in which their members find each other.

    Args:
        host: the address that the other ranks reach this process at, and the only one that is listened on.
        port: 0 takes a free one.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._family = family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # A socket of our own: torch's would listen on every interface.
        listener = socket.create_server((host, port), family=family, backlog=1024)
        port = int(listener.getsockname()[1])
        self._store: Any = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_seconds(60)
        )
        self._store.set(SAYS, "")
        self._host = host
        #: HOST:PORT, as the other ranks are told
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
        """Be rank 0 of group `name`, once all `world` ranks are there. Raises CollectiveError.

        Args:
            connect: begin with a broadcast of one byte, as `join` does elsewhere; SGLang's own ranks do not wait for one.
            copies: where all ranks can, let them copy the buckets, each of which lies in a space of `regions`.
        """

        def form() -> ProcessGroup:
            store = self._store.clone()
            store.set_timeout(_seconds(timeout_s))
            own = dist.PrefixStore(name, store)
            if not copies:
                tell_way(own)
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
            return Origin(name, world, device, listener, token, timeout_s)

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
    """Be rank `rank` of the group `name` of `world` ranks, whose rank 0 listens at `address`. Raises CollectiveError.

    Args:
        copies: copy the buckets out of the memory of the rank before, where all ranks can.
        stays: buckets lie in a space of `regions`, where they stay until the update is over: another rank may copy them.
    """

    def form() -> ProcessGroup:
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=_seconds(timeout_s))
        own = dist.PrefixStore(name, store)
        # Rank 0 may be another program's, that knows of nothing but torch's groups.
        if store.check([SAYS]):
            if not copies:
                decline(own, rank)
            elif (card := agree(own, rank, device, stays=stays)) is not None:
                return Taker(name, world, rank, device, card.address, card.token, timeout_s)
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
            return TorchBroadcast(dist.broadcast(bucket, src=0, group=self._group, async_op=True), self)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {self.name}: {_one_line(error)}") from error

    def finish(self, timeout_s: float) -> None:
        """Torch tells each rank of its own part alone."""

    def abort(self) -> None:
        if self._aborted:
            return
        self._aborted = True
        held = [self._group]
        self._group = None
        with contextlib.suppress(CollectiveError):
            _beside(lambda: c10d._abort_process_group(held[0]), _ABORT_S)
        # Connections close with the last reference, and the other ranks hear of it; beside a stopped one that takes for ever.
        threads.start(held.clear, "collective")


class TorchBroadcast(Broadcast):
    """A broadcast of torch's."""

    def __init__(self, work: Any, group: TorchGroup) -> None:
        self._work = work
        self._group = group

    def order(self, timeout_s: float) -> None:
        if not self._group.on_device:
            self.wait(timeout_s)
            return
        try:
            self._work.wait()
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {self._group.name}: {_one_line(error)}") from error

    def wait(self, timeout_s: float) -> None:
        name = self._group.name
        try:
            self._poll(timeout_s)
            self._work.wait(_seconds(timeout_s))
            if self._group.on_device and (error := self._failure()):
                raise CollectiveError(f"group {name}: {error}")
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"group {name}: {_one_line(error)}") from error

    def _poll(self, timeout_s: float) -> None:
        # Torch's own wait with a limit would abort an NCCL group from its watchdog's thread; on gloo it is deaf to `abort`.
        # Neither tells of its end by an event; this is a thread of its own.
        end = time.monotonic() + timeout_s
        while not self._work.is_completed():
            if self._group._aborted:  # pyright: ignore[reportPrivateUsage]
                raise CollectiveError(f"group {self._group.name} was given up")
            if time.monotonic() >= end:
                raise CollectiveError(f"group {self._group.name}: a broadcast took more than {timeout_s:g} s")
            time.sleep(_POLL_S)

    def _failure(self) -> str:
        try:
            error = self._work.exception()
        except (RuntimeError, AttributeError, TypeError):  # none, as some backends say it; NCCL's cannot be told in Python
            return ""
        return _one_line(error) if isinstance(error, BaseException) else ""


def _formed(
    store: Any, name: str, world: int, rank: int, backend: str, device: Any, timeout_s: float, *, first: bool = True
) -> ProcessGroup:
    """A process group of torch, in its own store."""
    with _environment(backend):
        made = _form(store, name, world, rank, backend, timeout_s)
    group = TorchGroup(made, name, world, rank, backend, device)
    try:
        # The first collective is what connects NCCL's ranks, and takes 0.4 s.
        if first:
            group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s)
    except BaseException:
        # Whatever it is, and it is raised again, nobody else can leave this group.
        threads.start(group.abort, "collective")
        raise
    return group


def _in_time(form: Callable[[], ProcessGroup], name: str, world: int, rank: int, timeout_s: float) -> ProcessGroup:
    try:
        # A little more: a limit that torch keeps itself comes with a better reason.
        return _beside(form, timeout_s + 2.0, late=lambda group: group.abort())
    except (CollectiveError, RuntimeError, ValueError, OSError) as error:
        raise CollectiveError(f"group {name}, rank {rank} of {world}: {_one_line(error)}") from error


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
    """How NCCL serves a group."""
    base: Any = c10d.ProcessGroupNCCL.Options

    class Options(base):
        # Where the process has a default group that is bound to a device, torch would split this one off from that, which all
        # ranks there had to join, and none here is in.
        split_from = property(lambda self: None, lambda self, value: None)  # pyright: ignore[reportUnknownLambdaType]

    options: Any = Options()
    # The next bucket's broadcast, and whoever waits for it, goes before what is done with the last one on the same GPU.
    options.is_high_priority_stream = True
    options._timeout = limit
    return options


@contextlib.contextmanager
def _environment(backend: str) -> Generator[None]:
    """NCCL's settings for this group alone, as it reads them when it is made."""
    if backend != "nccl":
        yield
        return
    with _settings:
        for key, value in _LIKE_ENGINES.items():
            os.environ.setdefault(key, value)
        if not _making:
            _before.update({key: os.environ.get(key) for key in _CALM})
        _making.append(1)
        os.environ.update(_CALM)
    try:
        yield
    finally:
        with _settings:
            _making.pop()
            for key, value in () if _making else _before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value


def _beside(work: Callable[[], Any], timeout_s: float, late: Callable[[Any], object] = lambda result: None) -> Any:
    """The result of `work`, which runs on a thread of its own, or CollectiveError; it may then go on there for ever.

    `late`: called with a result that comes when nobody waits for it any more.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []
    turn = threading.Lock()
    over = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure.append(error)
            return
        with turn:
            if not over:
                outcome.append(result)
                return
        late(result)

    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def on_device() -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread begins on device 0
        run()

    threads.start(on_device, "collective").join(timeout_s)
    with turn:
        over = True
    if failure:
        raise failure[0]
    if not outcome:
        raise CollectiveError(f"no answer within {timeout_s:g} s")
    return outcome[0]


def _seconds(timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
