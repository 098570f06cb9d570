"""Folders that a process has for itself, and the folders of a pool.

A process removes its private folder when it ends. Where the process was killed, the next process that makes such a folder
removes the old one.

A private folder has a file that is locked for as long as its process, or a child that it forked, lives: a process id says
nothing where containers share a file system.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

_HELD = ".held"
#: in a folder of snapshots in shared memory: the pool that it belongs to
OWNER = "owner.json"


class PrivateFolder:
    """A new folder in `parent`, which begins with `prefix`; those of dead processes that begin so are removed.

    Args:
        forget: called with each of these before, to remove what belongs to it elsewhere.
    """

    def __init__(self, parent: Path, prefix: str, forget: Callable[[Path], object] = lambda path: None) -> None:
        _remove_aborted(parent, prefix, forget)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # It has its name only when it is locked.
        unheld = self.path / f"{_HELD}.new"
        self._lock = os.open(unheld, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # on a file system without locks the folder of a dead process is not found
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unheld.rename(self.path / _HELD)

    def remove(self) -> None:
        """With all that is in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_aborted(parent: Path, prefix: str, forget: Callable[[Path], object]) -> None:
    for held in parent.glob(f"{prefix}*/{_HELD}"):
        with contextlib.suppress(OSError):  # of another user, already removed, or locked
            lock = os.open(held, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    forget(held.parent)
                    shutil.rmtree(held.parent, ignore_errors=True)
            finally:
                os.close(lock)


def lock_file(path: Path) -> IO[str]:
    """Lock a file, which is made where it is missing, until the returned file is closed.

    Raises:
        OSError: it cannot be made; BlockingIOError: another process has locked it.
    """
    lock = open(path, "a")  # noqa: SIM115 (held for the life of the lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


def exposed(folder: Path) -> str:
    """Why other users could reach what lies in `folder`, or put something else in its place; "" where they cannot.

    The folder itself is this user's, and neither to be read, written nor entered by others, with any umask. What leads
    there, symbolic links too, is this user's or the system's; others may write to none of it, but for a folder like /tmp,
    in which they cannot rename the files of other users.
    """
    why, real = _replaceable(folder)
    if why:
        return why
    status = real.stat()
    if status.st_uid != os.geteuid():
        return f"{real} belongs to another user"
    if status.st_mode & 0o077:
        shared = status.st_mode & stat.S_ISVTX  # such as /tmp, which other users need
        advice = "name a directory of your own" if shared else "chmod 700 it"
        return f"others can enter {real} (mode {stat.S_IMODE(status.st_mode):04o}): {advice}"
    return ""


def written_by_others(folder: Path) -> str:
    """Why other users could put something into `folder`, which they may read, or something else in its place; "" where they
    cannot. Where it is missing, those count who could make it. Raises OSError."""
    at = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    why, real = _replaceable(at)
    if why:
        return why
    status = real.stat()
    if status.st_uid not in _trusted():
        return f"{real} belongs to another user"
    if status.st_mode & 0o022:
        advice = "" if status.st_mode & stat.S_ISVTX else "chmod go-w it, or "
        return f"others can write to {real} (mode {stat.S_IMODE(status.st_mode):04o}): {advice}name another directory"
    return ""


def _trusted() -> set[int]:
    """The users of whom this one expects no harm."""
    return {os.geteuid(), 0, Path("/").stat().st_uid}


def _replaceable(folder: Path) -> tuple[str, Path]:
    """(why other users could put something else in the place of `folder`, or ""; where its links lead)."""
    whole = Path.cwd() / folder  # with its `..`, which may stand behind a link
    trusted = _trusted()
    for link in (*reversed(whole.parents), whole):
        if link.is_symlink() and link.lstat().st_uid not in trusted:
            return f"the symbolic link {link} belongs to another user", whole
    real = whole.resolve(strict=True)
    for parent in real.parents:
        status = parent.stat()
        if status.st_uid not in trusted:
            return f"{parent} belongs to another user", real
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            mode = stat.S_IMODE(status.st_mode)
            return f"others can write to {parent} (mode {mode:04o}): chmod go-w it, or name another directory", real
    return "", real


def make_private(folder: Path) -> None:
    """Make `folder` where it is missing, for this user alone. Raises OSError."""
    for parent in reversed(folder.parents):
        with contextlib.suppress(FileExistsError):
            parent.mkdir(mode=0o755)
    try:
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # the umask may have taken something of it
    except FileExistsError:
        if not folder.is_dir():
            raise


def snapshot_folders(state: Path) -> dict[str, str]:
    """Where the pool that keeps its state in `state` keeps snapshots of weights, by the group option."""
    pool = hashlib.blake2b(str(state.resolve()).encode(), digest_size=6).hexdigest()
    return {"memory": f"/dev/shm/enginepool-{pool}", "disk": str(state.resolve() / "snapshots")}
