"""This host, as processes that share it see it: which one it is, memory that others map, paths of sockets. No torch here."""

import errno
import os
from pathlib import Path

#: where files are memory
SHARED = Path("/dev/shm")
#: bytes that large files leave free there: an engine leaves its answers in small ones, and ends where it cannot
SPARE_BYTES = 16 << 20
#: bytes that the path of a Unix socket has at most: `sun_path` of unix(7) is 108, with a null at the end
LONGEST_PATH = 107
#: errors of a disk that has no room, also for this user alone, or that cannot be written: an operator mends the disk
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def os_error(error: OSError) -> str:
    """One line for a user: the file, where the error names one, and what is wrong."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def check_room(folder: Path, nbytes: int) -> None:
    """Raises OSError: so many bytes more in `folder` would leave less than `SPARE_BYTES` free, or there is no such folder."""
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < nbytes + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_file(path: Path, data: bytes) -> None:
    """As `Path.write_bytes`. Raises OSError, which names the file also where the disk is full."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def host_identity() -> str:
    """The same text in all processes of this host, until it is booted again, that see each other.

    Two containers of one host may not: what `/proc/PID` of a peer names is another process there.
    """
    return f"{_BOOT.read_text('ascii').strip()}/{os.readlink(_PROCESSES)}"


def unnamed_file(directory: Path) -> int:
    """A new file without a name in `directory`: it is gone with the last process that has it open. Raises OSError."""
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
