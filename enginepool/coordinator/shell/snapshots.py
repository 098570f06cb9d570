"""Snapshots of weights that belong to no pool, or that no commit names: each is as large as a model.

Stagers write snapshots. In the folders of this pool a commit decides: the journal names at most one snapshot of a group, and
the others of the group are removed. Nothing is removed at a start. The journal may be an old copy then, and a snapshot that it
does not name may be the only copy of later weights.

A folder in shared memory names its pool in the file OWNER. The next pool of the same user removes the folder when the
coordinator of its pool has ended and the state directory is gone.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from enginepool.host import SHARED, host_identity, write_file
from enginepool.host.child_process import created_at, lives
from enginepool.host.folders import OWNER, exposed, make_private, snapshot_folders


class _Owner(msgspec.Struct, frozen=True):
    """The pool of a folder. `device`: of its state directory. Only a process with these `host` and `mounts` can judge whether
    that directory is gone."""

    state: str
    device: int
    pid: int
    made: float
    host: str
    mounts: str


class SnapshotFolders:
    """The folders of the pool that keeps its state in `state`, by the group option `snapshot`. A thread removes files.

    Args:
        log: takes lines for the operator, in any thread.
    """

    def __init__(self, state: Path, log: Callable[[str], None]) -> None:
        self.paths = snapshot_folders(state)
        self._memory = Path(self.paths["memory"])
        self._state = state
        self._log = log
        #: the snapshot that the journal names, by group
        self._named: dict[str, str] = {}
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "snapshots")

    def start(self) -> None:
        """Remove the folders of pools that are gone."""
        self._thread.submit(self._start)

    def committed(self, group: str, snapshot: str) -> None:
        """The journal names `snapshot`, or none (""): remove the others of the group. Called before a stager hears of it."""
        self._named[group] = snapshot
        if not self._closed:
            self._thread.submit(self._tidy, group)

    def remove_memory(self) -> None:
        """Remove what this pool has in shared memory: it has no successor."""
        self.close()
        shutil.rmtree(self._memory, ignore_errors=True)

    def close(self) -> None:
        """Return when the thread has ended. Idempotent."""
        self._closed = True
        self._thread.shutdown(cancel_futures=True)

    # --- in the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for file in SHARED.glob(f"enginepool-*/{OWNER}"):
            # It is of another user, or was removed by another pool meanwhile, or is damaged.
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                if file.parent != self._memory and (state := _gone(file)):
                    shutil.rmtree(file.parent)
                    self._log(f"{file.parent} is removed: it has snapshots of the pool in {state}, which is gone")
        with contextlib.suppress(OSError):
            if self._memory.exists():
                self._sign()

    def _tidy(self, group: str) -> None:
        with contextlib.suppress(OSError):  # the stager that writes the snapshot names what is wrong
            if os.path.dirname(self._named[group]) == str(self._memory):
                make_private(self._memory)
                self._sign()
        snapshot = re.compile(re.escape(group) + r"(\+\d+)?-[0-9a-f]{32}(\.\d+)?")
        for folder in map(Path, self.paths.values()):
            with contextlib.suppress(OSError):
                for file in sorted(folder.iterdir()) if not exposed(folder) else ():
                    if snapshot.fullmatch(file.name) and self._unnamed(file, group):
                        file.unlink(missing_ok=True)

    def _unnamed(self, file: Path, group: str) -> bool:
        """Whether the latest commit does not name it, and no process writes it."""
        writer = file.suffix.removeprefix(".")
        return str(file) != self._named[group] and not (writer and os.path.exists(f"/proc/{writer}"))

    def _sign(self) -> None:
        """Write down which pool the folder in shared memory belongs to. Raises OSError."""
        if exposed(self._memory):
            return
        pid = os.getpid()
        owner = _Owner(str(self._state.resolve()), self._state.stat().st_dev, pid, created_at(pid), host_identity(), _mounts())
        fresh = self._memory / f"{OWNER}.new"
        write_file(fresh, msgspec.json.encode(owner))
        os.replace(fresh, self._memory / OWNER)


def _gone(file: Path) -> str:
    """The state directory of the pool that wrote this file, if nothing is left of that pool; or "". Raises OSError."""
    if exposed(file.parent):
        return ""
    owner = msgspec.json.decode(file.read_bytes(), type=_Owner)
    if (owner.host, owner.mounts) != (host_identity(), _mounts()) or lives(owner.pid, owner.made):
        return ""
    state = Path(owner.state)
    if state.exists():
        return ""
    # A disk that is not mounted now comes back.
    there = next(parent for parent in state.parents if parent.exists())
    return owner.state if there.stat().st_dev == owner.device else ""


def _mounts() -> str:
    """The mount namespace: a path of another one may be there although this process does not see it."""
    return os.readlink("/proc/self/ns/mnt")
