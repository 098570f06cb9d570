"""Memory that a publisher lends, held by the worker before its engine opens it.

The path in a `MemoryRegion` comes from a peer. It may name a file that only this worker's user can read, a device, or a
descriptor of another program. What it names is pinned without being opened (`O_PATH`), and looked at there: it must be memory
without a name that its owner can no longer shrink (a memfd with `F_SEAL_SHRINK`, which no file in a directory can be), of
exactly the announced size, with the announced seal at its end. Only then are bytes read. The engine is given a descriptor of
the worker itself, so that nothing that the publisher does to its own descriptors changes what is opened.
"""

import fcntl
import hmac
import os

import msgspec

from enginepool.protocol.messages.weights import DESCRIPTOR, SEAL_BYTES, MemoryRegion


class LentMemoryError(Exception):
    """This is not memory that a publisher lends. The message is one line, and says nothing of what is in it."""


def pin(space: MemoryRegion) -> tuple[int, MemoryRegion]:
    """(a descriptor of this process, the same memory as the engine opens it by that descriptor). Close it after the update.

    Raises:
        LentMemoryError: it is something else.
        OSError: it is gone.
    """
    if len(space.seal) != SEAL_BYTES:
        raise LentMemoryError(f"regions: a seal has {SEAL_BYTES} bytes, got {len(space.seal)}")
    if not DESCRIPTOR.fullmatch(space.path):
        raise LentMemoryError("regions: a path must have the form /proc/PID/fd/N")
    pinned = os.open(space.path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not _is_memory(pinned):
            raise LentMemoryError(f"regions: {space.path} is not a memfd")
        held = os.open(_own(pinned), os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(pinned)
    if wrong := _wrong(held, space):
        os.close(held)
        raise LentMemoryError(f"regions: {space.path} {wrong}")
    return held, msgspec.structs.replace(space, path=_own(held))


def _own(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _is_memory(pinned: int) -> bool:
    """Whether it lies in the file system that memfds alone lie in, so that opening it has no effect and cannot block."""
    probe = os.memfd_create("enginepool-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(pinned).st_dev == os.fstat(probe).st_dev
    finally:
        os.close(probe)


def _wrong(held: int, space: MemoryRegion) -> str:
    """What tells it from the memory that was announced, or ""."""
    if not fcntl.fcntl(held, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return "is a memfd without F_SEAL_SHRINK"
    size = os.fstat(held).st_size
    if size != space.nbytes or size < SEAL_BYTES:
        return f"has {size} bytes, not {space.nbytes} with a seal at the end"
    if not hmac.compare_digest(os.pread(held, SEAL_BYTES, size - SEAL_BYTES), space.seal):
        return "does not end with its seal"
    return ""
