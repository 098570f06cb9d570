"""Sessions of workers of an earlier coordinator that are ended: no worker is started before they have, as they hold GPUs."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from enginepool.host.child_process import ChildProcess, ProcessRecord


class Leftovers:
    """The sessions that one launcher ends when it starts."""

    def __init__(self) -> None:
        #: ids of sessions that have members
        self._sessions: set[int] = set()
        self._waiting: list[Callable[[], None]] = []

    def end(self, record: ProcessRecord, path: Path) -> None:
        """End the session that this process leads or led. Its record, at `path`, is removed when nothing is left of it."""
        process = ChildProcess(record.pid)
        process.kill()
        self._sessions.add(record.pid)
        process.watch(lambda _: self._ended(record.pid, path), session=True)

    def _ended(self, session: int, path: Path) -> None:
        with contextlib.suppress(OSError):  # on a disk that cannot be written; the record names a process that has ended
            path.unlink(missing_ok=True)
        self._sessions.remove(session)
        if not self._sessions:
            waiting, self._waiting = self._waiting, []
            for start in waiting:
                start()

    def when_gone(self, start: Callable[[], None]) -> None:
        """Call `start` once all of them have ended, often at once."""
        if self._sessions:
            self._waiting.append(start)
        else:
            start()
