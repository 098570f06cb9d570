"""Snapshots of committed weights, written one after the other during updates, which they delay as little as possible."""

import errno
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from enginepool.host import SPARE_BYTES, os_error
from enginepool.protocol.layout import layout
from enginepool.workers.stager.snapshot import Footer, make_folder, remove_older
from enginepool.workers.stager.state import KeptUpdate

if TYPE_CHECKING:
    from enginepool.workers.stager.memory import Memory

#: seconds after which a snapshot that could not be written is tried again
AGAIN_S = 30.0


class _Snapshot:
    """One that was asked for. `reading`: a try runs, which may read its memory. `left`: its memory is not read now. `given_up`:
    its memory changes. `wake`: there is something else to do than to wait for the next try. `over`: there is no further try."""

    def __init__(self, memory: "Memory", footer: Footer, path: str, before: threading.Thread | None) -> None:
        self.memory, self.footer, self.path, self.before = memory, footer, path, before
        self.reading = self.given_up = self.over = False
        self.left, self.wake = threading.Event(), threading.Event()


class Snapshots:
    """Writes snapshots on threads of their own. The latest one is tried again until it is written.

    Args:
        say: takes lines for the log.
        missing: told after each try that failed, in one line, why the latest snapshot is not there; "": it is there after all.
    """

    def __init__(
        self, say: Callable[[str], None], missing: Callable[[str], None] = lambda _: None, again_s: float = AGAIN_S
    ) -> None:
        self._say, self._missing, self._again_s = say, missing, again_s
        self._turn = threading.Lock()
        #: that may still read their memory
        self._open: list[_Snapshot] = []
        self._thread: threading.Thread | None = None
        self._latest: _Snapshot | None = None
        #: `missing` was told last that it is not there
        self._told = False
        self._finishing = False

    def write(self, kept: KeptUpdate, path: str) -> None:
        """Have `path` written, behind those that were asked for before. What is there already stays."""
        one = _Snapshot(kept.memory, Footer(kept.version, kept.digest, kept.manifest), path, self._thread)
        self.stop_trying()
        with self._turn:
            self._open = [*(other for other in self._open if not other.over), one]
        self._latest = one
        self._thread = threading.Thread(target=self._write, args=(one,), name="save", daemon=True)
        self._thread.start()

    def stop_trying(self) -> None:
        """The latest one is of weights that are not committed any more: it has no further try."""
        before, self._latest = self._latest, None
        if before is not None:
            before.wake.set()

    def finish(self) -> None:
        """Return when all of them are written, or given up. One that waits has its last try now."""
        self._finishing = True
        if self._latest is not None:
            self._latest.wake.set()
        if self._thread is not None:
            self._thread.join()

    def leave_memory(self) -> None:
        """Return when none of them reads memory that was kept: it is about to change.

        One that is read now is waited for, as fast as the host's memory takes it; one behind a slow disk is given up.
        """
        with self._turn:
            snapshots = self._open
            for one in snapshots:
                one.given_up = True
                if not one.reading:
                    one.left.set()
                    one.wake.set()
        for one in snapshots:
            one.left.wait()

    # --- on a thread of its own -----------------------------------------------------------------------------------------

    def _write(self, one: _Snapshot) -> None:
        if one.before is not None:
            one.before.join()
            one.before = None
        try:
            self._try_until_written(one)
        finally:
            one.over = True
            del one.memory

    def _try_until_written(self, one: _Snapshot) -> None:
        said = ""
        while True:
            last = self._finishing
            why = self._try(one)
            if one is self._latest and (why or self._told):
                self._told = bool(why)
                self._missing(why)
            if why not in ("", said):
                self._say(why)
            elif said and not why:
                self._say(f"the snapshot of version {one.footer.version} is written: {one.path}")
            said = why
            if not why or last or one.given_up:
                return
            one.wake.wait(self._again_s)
            if one is not self._latest:
                return

    def _try(self, one: _Snapshot) -> str:
        """Why there is no such snapshot, in one line; "": there is one."""
        path = one.path
        none = f"no snapshot of version {one.footer.version} in {path}"
        with self._turn:
            if one.given_up:
                return "" if os.path.exists(path) else f"{none}: an update came while the one before it was written"
            one.reading = True
            one.left.clear()
        try:
            make_folder(path)
            if not os.path.exists(path):
                one.memory.save(path, one.footer, one.left.set)
                remove_older(path)
        except (OSError, RuntimeError) as error:
            return f"{none}: {_reason(error, one.footer)}"
        finally:
            with self._turn:
                one.reading = False
                one.left.set()
        return ""


def _reason(error: OSError | RuntimeError, footer: Footer) -> str:
    """In one line. On a full disk: how much room is needed."""
    if not isinstance(error, OSError):
        return str(error).partition("\n")[0]
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return os_error(error)
    size, spare = layout(footer.manifest).nbytes / 1e6, SPARE_BYTES / 1e6
    return f"{error.strerror}; it needs {size + spare:.1f} MB: {size:.1f} MB, and {spare:.1f} MB that stay free"
