"""The memory of the coordinator's process: when it is collected, and when it goes back to the system."""

import contextlib
import ctypes
import gc
import time
from typing import Literal

#: What requests are made of is freed by reference counts; a full collection over a long queue would stop everything.
GC_THRESHOLDS = (50_000, 50, 1000)
#: Allocations of so many bytes go back to the system when they are freed. glibc raises its own threshold with each large
#: message, up to 32 MB, and then keeps the memory of large answers.
MMAP_BYTES = 256 * 1024
#: So many free bytes at the end of a heap are kept. The default is 128 KiB, and fixed once the other threshold is set.
#: Requests that come together take more: their pages would be given back, and faulted in again, each time.
TRIM_BYTES = 4 * 1024 * 1024
#: as malloc.h has them
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1


def return_freed_memory() -> None:
    """Let the memory of large messages go back to the system when it is freed, where the C library is glibc."""
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


class CollectorPauses:
    """Counts garbage collections and their time. Every request in flight waits for them."""

    def __init__(self) -> None:
        self.count = 0
        self.microseconds = 0
        self._began = 0.0

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.count += 1
            self.microseconds += int((time.perf_counter() - self._began) * 1e6)

    def start(self) -> None:
        """Keep what exists now out of all collections, and count from now on."""
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self)
        gc.set_threshold(*GC_THRESHOLDS)

    def stop(self) -> None:
        """Idempotent."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self)
