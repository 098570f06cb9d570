"""What this process has open. Tests compare it with what was open before: another one may not have let go of everything yet."""

import os
from contextlib import suppress


def open_here() -> set[str]:
    """Each by its name and its number in the file system: several may have the same name."""
    found: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread has closed it meanwhile
            path = f"/proc/self/fd/{name}"
            found.add(f"{os.readlink(path)} {os.stat(path).st_ino}")
    return found


def lent_here() -> set[str]:
    """Memory that this process has for lending."""
    return {path for path in open_here() if path.startswith("/memfd:enginepool-weights ")}
