"""Snapshots of committed weights, written one after the other during updates, which they delay as little as possible."""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from enginepool.workers.stager.snapshot import Footer, make_folder, remove_older
from enginepool.workers.stager.state import KeptUpdate

if TYPE_CHECKING:
    from enginepool.workers.stager.memory import Memory


class _Snapshot:
    """One that was asked for. `begun`: its memory is read; `left`: that is over, or was given up."""

    def __init__(self, memory: "Memory", footer: Footer, path: str, before: threading.Thread | None) -> None:
        self.memory, self.footer, self.path, self.before = memory, footer, path, before
        self.begun = False
        self.left = threading.Event()


class Snapshots:
    """Writes snapshots on threads of their own.

    Args:
        say: told in one line why there is none.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._turn = threading.Lock()
        #: that may still read their memory
        self._open: list[_Snapshot] = []
        self._thread: threading.Thread | None = None

    def write(self, kept: KeptUpdate, path: str) -> None:
        """Have `path` written, behind those that were asked for before. What is there already stays."""
        one = _Snapshot(kept.memory, Footer(kept.version, kept.digest, kept.manifest), path, self._thread)
        self._open = [*(other for other in self._open if not other.left.is_set()), one]
        self._thread = threading.Thread(target=self._write, args=(one,), name="save", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Return when all of them are written, or given up."""
        if self._thread is not None:
            self._thread.join()

    def leave_memory(self) -> None:
        """Return when none of them reads memory that was kept: it is about to change.

        One that is read now is waited for, as fast as the host's memory takes it; one behind a slow disk is given up.
        """
        snapshots = self._open
        with self._turn:
            for one in snapshots:
                if not one.begun:
                    one.left.set()
        for one in snapshots:
            one.left.wait()

    def _write(self, one: _Snapshot) -> None:
        if one.before is not None:
            one.before.join()
            one.before = None
        version, path = one.footer.version, one.path
        with self._turn:
            one.begun = True
            given_up = one.left.is_set()
        try:
            if given_up:
                self._say(f"no snapshot of version {version} in {path}: an update came while the one before it was written")
                return
            make_folder(path)
            if not os.path.exists(path):
                one.memory.save(path, one.footer, one.left.set)
                remove_older(path)
        except (OSError, RuntimeError) as error:
            self._say(f"no snapshot of version {version} in {path}: {error}")
        finally:
            one.left.set()
            del one.memory
