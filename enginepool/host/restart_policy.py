"""When a coordinator that ended is started again, for everything that starts one: `Pool.start` and `enginepool serve`."""

import errno
from collections import deque

from enginepool.host.child_process import signal_name

#: exit code of a coordinator that was told to end
STOPPED = 0
#: exit code of a coordinator that is to be started again at once, which is no failure (sysexits: EX_TEMPFAIL)
RESTART = 75
#: exit code of a coordinator that ended because of an internal error (sysexits: EX_SOFTWARE)
INTERNAL_ERROR = 70
#: exit code of a coordinator whose configuration cannot be used
BAD_CONFIG = 2
#: exit code of a coordinator that cannot make or write its files, for example without permission (sysexits: EX_CANTCREAT). At a
#: first start the configuration is wrong; later it is tried again.
CANNOT_WRITE = 73
#: exit code of a coordinator that cannot start because a disk is full or read-only, perhaps for a while (sysexits: EX_IOERR)
HOST_FAULT = 74
#: seconds after which a coordinator is started again that ended with CANNOT_WRITE or HOST_FAULT, or failed with `_PASSING`
HOST_FAULT_S = 5.0
#: Errors of a start that say nothing of the next one: descriptors, memory, processes or room on a disk ran out.
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC)


class RestartPolicy:
    """When a dead coordinator is started again: at once at first, later after 0.1 s doubling to 5 s; not when it has died
    more than `most` times within `window_s`."""

    def __init__(self, most: int = 5, window_s: float = 60.0) -> None:
        self.most, self.window_s = most, window_s
        self._deaths: deque[float] = deque()

    def after_end(self, code: int | None, now: float) -> float | None:
        """Seconds to wait before the next start; None: no more. A fault of the host does not count: it may last a night."""
        if code == RESTART:
            return 0.0
        return HOST_FAULT_S if code in (CANNOT_WRITE, HOST_FAULT) else self.after_death(now)

    def after_failed_start(self, error: OSError, now: float) -> float | None:
        """Seconds to wait before the next start, where there is no process; None: no more."""
        return HOST_FAULT_S if error.errno in _PASSING else self.after_death(now)

    def after_death(self, now: float) -> float | None:
        """Seconds to wait before the next start; None: no more."""
        self._deaths.append(now)
        while self._deaths[0] < now - self.window_s:
            self._deaths.popleft()
        deaths = len(self._deaths)
        if deaths > self.most:
            return None
        return 0.0 if deaths == 1 else min(0.1 * 2 ** (deaths - 2), 5.0)

    @property
    def given_up(self) -> str:
        """Why it is not started again; the exit code or the signal follows."""
        return f"ended more than {self.most} times within {self.window_s:g} s, the last time"


def exit_text(code: int | None) -> str:
    """An exit code, or the signal that a negative one stands for; None: it is unknown."""
    if code is None:
        return "an unknown exit code"
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code)}"
