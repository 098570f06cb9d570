"""How this process ends without leaving anything behind."""

import contextlib
import os
import sys
import time
from typing import NoReturn

import psutil

from enginepool.workers.events import Exit


def end_process(code: Exit) -> NoReturn:
    """Kill every process that belongs to this one and exit at once, without running destructors. Callable from any thread.

    An engine's children may be stuck or orphaned, so a worker that leads its process group kills the rest of the group, and
    one that was started by hand, inside another program's group, its descendants.
    """
    for _ in range(10):
        rest = _belonging()
        if not rest:
            break
        for process in rest:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(rest, timeout=0.1)
        time.sleep(0.01)  # what they started while they were killed appears only now; no event tells of it
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _belonging() -> list[psutil.Process]:
    me = os.getpid()
    found = {process.pid: process for process in psutil.Process(me).children(recursive=True)}
    if os.getpgid(0) == me:
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if pid != me and os.getpgid(pid) == me:
                    found[pid] = psutil.Process(pid)
    alive: list[psutil.Process] = []
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive
