"""Folders that a process has for itself: removed at its end, or, where it was killed, by whoever makes the next one; and those
of a pool.

A private folder has a file that is locked for as long as its process, or a child that it forked, lives: a process id says
nothing where containers share a file system.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_HELD = ".held"


class PrivateFolder:
    """A new folder in `parent`, which begins with `prefix`; those of dead processes that begin so are removed.

    Args:
        forget: called with each of these before, to remove what belongs to it elsewhere.
    """

    def __init__(self, parent: Path, prefix: str, forget: Callable[[Path], object] = lambda path: None) -> None:
        _remove_abandoned(parent, prefix, forget)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # It has its name only when it is locked.
        unheld = self.path / f"{_HELD}.new"
        self._lock = os.open(unheld, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody finds out that it is abandoned
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unheld.rename(self.path / _HELD)

    def remove(self) -> None:
        """With all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(parent: Path, prefix: str, forget: Callable[[Path], object]) -> None:
    for held in parent.glob(f"{prefix}*/{_HELD}"):
        with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile, or held
            lock = os.open(held, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    forget(held.parent)
                    shutil.rmtree(held.parent, ignore_errors=True)
            finally:
                os.close(lock)


def snapshot_folders(state: Path) -> dict[str, str]:
    """Where the pool that keeps its state in `state` keeps snapshots of weights, by the group option."""
    pool = hashlib.blake2b(str(state.resolve()).encode(), digest_size=6).hexdigest()
    return {"memory": f"/dev/shm/enginepool-{pool}", "disk": str(state.resolve() / "snapshots")}
