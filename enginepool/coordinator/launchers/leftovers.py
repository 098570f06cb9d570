"""Sessions of workers of an earlier coordinator that are ended: no worker is started on their GPUs before they have."""

import contextlib
from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable
from pathlib import Path

from enginepool.coordinator.launchers.gpus import surely_apart
from enginepool.coordinator.launchers.worker_record import WorkerRecord
from enginepool.coordinator.shell.log import log
from enginepool.host.child_process import ChildProcess

#: seconds after which it is logged that a session which was killed has not ended: the driver of a broken GPU keeps processes
LATE_S = 10.0


class Leftovers:
    """The sessions that one launcher ends when it starts."""

    def __init__(self) -> None:
        #: of each session that has members, the GPUs of its worker, as CUDA_VISIBLE_DEVICES has them; "": none, or unknown
        self._sessions: dict[int, str] = {}
        #: starts that wait, each with its GPUs
        self._waiting: list[tuple[str, Callable[[], None]]] = []

    def end(self, record: WorkerRecord, path: Path) -> None:
        """End the session that this process leads or led. Its record, at `path`, is removed when nothing is left of it."""
        process = ChildProcess(record.pid)
        process.kill()
        self._sessions[record.pid] = record.gpus
        text = (
            f"worker {record.incarnation} was killed, and session {record.pid} still has a process after {LATE_S:g} s: "
            "workers that may share a GPU with it are started when it has ended"
        )
        late = get_running_loop().call_later(LATE_S, log, text)
        process.watch(lambda _: self._ended(record.pid, path, late), session=True)

    def _ended(self, session: int, path: Path, late: TimerHandle) -> None:
        late.cancel()
        with contextlib.suppress(OSError):  # on a disk that cannot be written; the record names a process that has ended
            path.unlink(missing_ok=True)
        self._sessions.pop(session, None)
        waiting, self._waiting = self._waiting, []
        for gpus, start in waiting:
            self.when_gone(gpus, start)

    def when_gone(self, gpus: str, start: Callable[[], None]) -> None:
        """Call `start`, of a worker with these GPUs, once all of them have ended that may hold one of these. Often at once."""
        if all(surely_apart(gpus, held) for held in self._sessions.values()):
            start()
        else:
            self._waiting.append((gpus, start))
