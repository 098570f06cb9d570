"""Why a worker process ended: its exit code, and the last line of its log that says something about it."""

import os
import re
import signal
import tempfile
from pathlib import Path

from enginepool.host.child_process import signal_name

#: exit code of a worker for which starting again cannot help (sysexits: EX_CONFIG)
PERMANENT = 78
#: exit code of a worker whose engine ran out of memory in a batch (sysexits: EX_OSERR)
OUT_OF_MEMORY = 71
#: exit codes of a worker that has not failed: it was drained, or its owner, its coordinator or its worker slot is gone
_NO_FAILURE = (0, 72, 75, 76)
#: signals that the kernel sends to a process because of an error in it
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
#: in the progress bars of tqdm, and of what loads safetensors
_BAR = re.compile(r"\d%( Completed)? *\||\d+/\d+ \[\d+:\d\d")
#: in a Python warning (FILE:LINE: UserWarning: ...), in the line of code that is shown with it, and in lines of the cleaner
#: in Python of semaphores and shared memory
_WARNING = re.compile(r":\d+: \w*Warning: |^\s*warnings\.warn\(|resource_tracker: ")
#: in a line of a worker on the silence of a coordinator, which did not end the worker
_SILENCE = re.compile(r": (no word from a coordinator for \d+ s: this worker|the coordinator speaks again, after) ")
#: in a line that tells of an error: the name of an exception, or the words of engines and of workers
_ERROR = re.compile(r"(?:Error|Exception)\b|\b(?:error|exception|fatal|failed)\b| ends: ", re.IGNORECASE)
#: before each line of a worker: the time, and the worker
_PREFIX = re.compile(r"^[\d-]{10}T[\d:.]{12}Z enginepool (worker|stager)( \S+)?: ")


def how_it_ended(code: int | None, why: str) -> str:
    """One line on the end of a process: its exit code, None if it is unknown, and the reason as far as it is known."""
    if code is None:
        how = "exit code unknown (started by an earlier coordinator)"
    elif code >= 0:
        how = f"exit code {code}"
    else:
        how = f"ended by {signal_name(-code)}"
    return f"{how}: {why}" if why else how


def cause(code: int | None, line: str) -> str:
    """The last line of a log, where it may say why its process ended, else "".

    A process that a signal from outside has ended says nothing of it, so only an error counts: SGLang kills its own processes
    after one. The same holds where the exit code is unknown.
    """
    if code is None or (code < 0 and not failed_by_itself(code)):
        return line if _ERROR.search(line) else ""
    return line


def free_space(state: Path) -> str:
    """How much room the disks have on which a worker writes most: the error of a full disk seldom names one."""
    said: list[str] = []
    for folder in (state, Path(tempfile.gettempdir())):
        try:
            room = os.statvfs(folder)
        except OSError as error:
            said.append(f"unknown in {folder} ({error.strerror})")
        else:
            said.append(f"{room.f_bavail * room.f_frsize / 2**20:.1f} MiB in {folder}")
    return ", ".join(said)


def failed_by_itself(code: int | None) -> bool:
    """Whether a worker with this exit code ended because of its own error, not by a signal from outside or on request."""
    if code is None:
        return False
    return -code in _OWN_SIGNALS if code < 0 else code not in _NO_FAILURE


def last_line(log: bytes) -> str:
    """The last line that says something about the end of the process, without its time and the name of the process.

    Skipped are progress bars, Python's warnings, lines on the silence of a coordinator, and the lines of the process with which
    Python cleans up after a killed one.
    """
    for line in reversed(log.decode(errors="replace").split("\n")):
        drawn = "\r" in line.removesuffix("\r") or line.endswith("%\r")
        for text in reversed(line.split("\r")):
            bar = _BAR.search(text) or (drawn and "%" in text)
            if text.strip() and not bar and not _WARNING.search(text) and not _SILENCE.search(text):
                return _PREFIX.sub("", text.strip())[:500]
    return ""
