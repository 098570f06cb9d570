"""How much memory this process may take: RLIMIT_AS, and the limits of its control groups."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from enginepool.coordinator.requests.memory import Bound


def bounds(root: Path = Path("/")) -> list[Bound]:
    """All bounds that there are; `root`: where /proc and /sys are."""
    with contextlib.suppress(OSError, ValueError):
        size, resident = (int(pages) for pages in (root / "proc/self/statm").read_text().split()[:2])
        page = os.sysconf("SC_PAGE_SIZE")
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        found = [] if soft == resource.RLIM_INFINITY else [Bound("RLIMIT_AS", soft, size * page)]
        return found + [Bound(f"the memory limit of {path}", most, resident * page) for path, most in _groups(root)]
    return []


def _groups(root: Path) -> Iterator[tuple[str, int]]:
    """The files with a limit of this process's control group and of those around it, of version 2 and 1, with their values."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif controllers == "memory":
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be that on the host, and only the top is there.
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            with contextlib.suppress(OSError, ValueError):
                most = int((top / group / name).read_text())
                if most < 1 << 60:
                    yield f"/{(top / group / name).relative_to(root)}", most
