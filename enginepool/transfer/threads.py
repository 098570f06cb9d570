"""Threads that nothing may wait for long, and that the program's end nevertheless does not cut off in the middle of torch.

A daemon thread that comes back from torch into an interpreter that is being taken down is ended there by force, which aborts
the whole process. Such a thread often releases a process group as its last step, after it has reported that it is done.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable

#: Seconds that the end of the program waits for all of them together. A thread that still waits for a dead peer is left.
_END_S = 2.0

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Do `work` on a thread of its own, which has begun when this returns."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _running.add(thread)
    thread.start()
    return thread


@atexit.register
def _let_end() -> None:  # pyright: ignore[reportUnusedFunction] (called at the program's end)
    end = time.monotonic() + _END_S
    for thread in list(_running):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))
