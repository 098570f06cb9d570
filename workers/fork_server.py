"""The fork server of workers: `python -m enginepool.workers.fork_server` with its configuration in the environment.

It imports SGLang once, and forks the workers of a host. Each worker has a fork server of its own, which forks the engine's
processes: those are children of the worker, and end with it.

    fork server       of `enginepool serve`, `Pool.start` or `enginepool worker`
      worker          a child of the launcher; leads its session
        fork server   forked from the worker before the worker runs anything
        scheduler     a child of the worker, forked by the worker's fork server; likewise the detokenizer

A forked process must find nothing that only its parent could use: no thread, no CUDA. Where an import leaves that, workers are
started as if there were no fork server.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing.util
import os
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy

from enginepool.host.fork_server import ForkServer, serve
from enginepool.workers.log import say

VARIABLE = "ENGINEPOOL_FORK_SERVER"
#: the first message of a fork server that can be used; any other is the reason why it cannot be
READY = b"ready"
#: Begin the names of variables that are read when a program or a library is loaded, which a forked process does not do again.
_READ_AT_LOAD = ("GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")


class ForkServerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its configuration. `socket`: the descriptor of its end of the connection. `device`, `compiles`: as the engines have them,
    because they decide how SGLang is imported."""

    socket: int
    device: str
    compiles: bool


class _ReadNames:
    """Notes the names of the environment variables that are read meanwhile."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    @contextlib.contextmanager
    def noted(self) -> Generator[None]:
        kind: Any = type(os.environ)
        read = kind.__getitem__

        def get(environment: Any, name: str) -> str:
            self.names.add(name)
            return read(environment, name)

        kind.__getitem__ = get
        try:
            yield
        finally:
            kind.__getitem__ = read


def main() -> None:
    """The process entry. Each forked process gets here, too, and runs what was asked for."""
    spec = msgspec.json.decode(os.environ.pop(VARIABLE), type=ForkServerSpec)
    connection = socket.socket(fileno=spec.socket)
    os.set_inheritable(spec.socket, False)
    before, read = dict(os.environ), _ReadNames()
    try:
        with read.noted():
            gpus = _import(spec)
        why_not = why_it_cannot_fork(gpus)
    except Exception as error:
        why_not = f"{type(error).__name__}: {error}"
    if why_not:
        connection.send(why_not.encode()[:1000])
        return
    imported_in = dict(os.environ)
    changed = {name: (before.get(name), now) for name, now in imported_in.items() if before.get(name) != now}
    title: Any = importlib.import_module("setproctitle")  # SGLang has it, and names its processes
    title.getproctitle()  # it finds the place of the title now, and not when the environment was replaced
    with contextlib.suppress(OSError):  # the launcher has ended
        connection.send(READY)
    while True:
        forked = serve(connection)
        forked.become(changed)
        numpy.random.seed()  # else all would draw the same; Python seeds its own again
        title.setproctitle(" ".join([Path(sys.executable).name, *forked.request.arguments]))
        if not forked.request.leads_session:
            break
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            fork_what_is_spawned(ForkServer(ours), imported_in, read.names)
            break
        ours.close()
        connection = theirs
        title.setproctitle("enginepool fork server")
    forked.run()


def _import(spec: ForkServerSpec) -> int:
    """What workers and the processes of their engines import. Returns the number of GPUs."""
    gc.disable()
    # Arrow is imported where it is installed, and would start a thread.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    build: Any = importlib.import_module("enginepool.workers.sglang.host.build")
    stand_ins: Any = importlib.import_module("enginepool.workers.sglang.host.without_cuda")
    importlib.import_module("enginepool.workers.sglang.host.engine")
    with stand_ins.cuda_answered_by_a_child() as gpus:
        build.import_ahead(spec.device, compiles=spec.compiles)
    # Forked processes share what is frozen: it is not looked at in their garbage collections.
    gc.freeze()
    gc.enable()
    return gpus


def why_it_cannot_fork(gpus: int) -> str:
    """Why a process that is forked from this one could not be used; "": it can be. A child tries CUDA."""
    torch: Any = importlib.import_module("torch")
    if (pid := os.fork()) == 0:
        os._exit(bool(gpus) and not _cuda_can_be_used())
    if os.waitpid(pid, 0)[1] or torch.cuda.is_initialized():
        return "a process that is forked cannot use CUDA: an import has initialized it, or the driver does not work"
    # numpy's threads have ended at the fork, and start again where they are needed.
    names: dict[int, str] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ends
            names[int(task.name)] = (task / "comm").read_text().strip()
    del names[os.getpid()]
    return f"an import has started threads: {', '.join(sorted(names.values()))}" if names else ""


def _cuda_can_be_used() -> bool:
    """In a process that was forked. torch may know from its parent how many GPUs there are, and be unable to use them."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


def fork_what_is_spawned(server: ForkServer, imported_in: Mapping[str, str], read: set[str]) -> None:
    """In this process, have `multiprocessing` fork from `server` what it would start with `spawn`.

    A process that is to have another program, such as `numactl`, is started as ever, and so is one in whose environment a
    variable has changed that an import has read. The GPUs that are visible are no such variable: no import asks CUDA itself.
    """
    util: Any = multiprocessing.util
    start = util.spawnv_passfds
    settled = {name for name in read if not name.startswith("ENGINEPOOL_")} - {"CUDA_VISIBLE_DEVICES"}

    def spawnv_passfds(path: bytes | str, args: Sequence[Any], passfds: Sequence[int]) -> int:
        command, now = [os.fsdecode(arg) for arg in args], dict(os.environ)
        if os.fsdecode(path) != sys.executable or command[-1] != "--multiprocessing-fork":
            return start(path, args, passfds)
        changed = {name for name in imported_in.keys() | now.keys() if imported_in.get(name) != now.get(name)}
        if late := sorted(name for name in changed if name in settled or name.startswith(_READ_AT_LOAD)):
            names = ", ".join(late)
            say(f"a process of the engine is started without the fork server: {names} changed after SGLang was imported")
            return start(path, args, passfds)
        try:
            return server.fork(command[command.index("-c") :], now, {number: number for number in passfds})
        except OSError:  # the server was killed
            return start(path, args, passfds)

    util.spawnv_passfds = spawnv_passfds


if __name__ == "__main__":
    main()
