"""Processes that are written down, and how they ended: a pid is given again, so beside it is kept when its process was made."""

import os
import re
import signal
from pathlib import Path

import psutil

#: exit code of a worker for which starting again cannot help (sysexits: EX_CONFIG)
PERMANENT = 78
#: exit code of a worker whose engine ran out of memory in a batch (sysexits: EX_OSERR)
OUT_OF_MEMORY = 71
#: exit codes of a worker that has not failed: drained, or without its owner, its coordinator, or a place in the pool
_NO_FAILURE = (0, 72, 75, 76)
#: signals that a process sends to itself by what it does
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP)
#: clock ticks in a second, as /proc counts them
_TICKS = os.sysconf("SC_CLK_TCK")
#: after the name in parentheses, which may hold anything: the state, and when the process was made
_STATE, _MADE = 0, 19
#: in the progress bars of tqdm, and of what loads safetensors
_BAR = re.compile(r"\d%( Completed)? *\||\d+/\d+ \[\d+:\d\d")
#: in a Python warning (FILE:LINE: UserWarning: ...), in the line of code that is shown with it, and in what the cleaner of
#: semaphores and shared memory of Python has to say
_WARNING = re.compile(r":\d+: \w*Warning: |^\s*warnings\.warn\(|resource_tracker: ")
#: in a line of a worker on the silence of a coordinator, which it survived
_SILENCE = re.compile(r": (no word from a coordinator for \d+ s: this worker|the coordinator speaks again, after) ")
#: before each line of a worker: the time, and the worker
_PREFIX = re.compile(r"^[\d-]{10}T[\d:.]{12}Z enginepool (worker|stager)( \S+)?: ")


def made_at(pid: int) -> float:
    """When this process was made, in seconds since the host was booted: its clock may be set, and that stays the same.

    Raises OSError: there is none.
    """
    return int(_stat(pid)[_MADE]) / _TICKS


def is_the_one(pid: int, made: float) -> bool:
    """Whether the process with this pid, which may have ended and not been waited for, is the one that was made then."""
    try:
        return made_at(pid) == made
    except OSError:
        return False


def lives(pid: int, made: float) -> bool:
    """Whether the process with this pid is the one that was made then, and has not ended."""
    try:
        stat = _stat(pid)
    except OSError:
        return False
    return int(stat[_MADE]) / _TICKS == made and stat[_STATE] not in ("Z", "X")


def kill_session(leader: int) -> None:
    """SIGKILL what is in the session that `leader` leads or led. Nothing else can have that session id while a member lives."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def session_member(leader: int) -> int | None:
    """The pid of one that is in that session and has not ended. Raises OSError: nobody can look."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return None


def how_it_ended(code: int | None, why: str) -> str:
    """One line on the end of a process: its exit code, unknown for somebody else's child, and what is known of the reason."""
    if code is None:
        how = "exit code unknown (started by an earlier coordinator)"
    elif code >= 0:
        how = f"exit code {code}"
    else:
        how = f"ended by {signal.Signals(-code).name}"
    return f"{how}: {why}" if why else how


def failed_by_itself(code: int | None) -> bool:
    """Whether a worker with this exit code ended by an error of its own, not by a signal from outside, or as it was told."""
    if code is None:
        return False
    return -code in _OWN_SIGNALS if code < 0 else code not in _NO_FAILURE


def last_line(log: bytes) -> str:
    """The last line that says something of the process's end.

    Passed over are progress bars, Python's warnings and silences of a coordinator, which say what was before, and what the
    process writes that Python leaves behind to clean up after one that was killed. The time and the name of the process are
    left out.
    """
    for line in reversed(log.decode(errors="replace").split("\n")):
        drawn = "\r" in line.removesuffix("\r") or line.endswith("%\r")
        for text in reversed(line.split("\r")):
            bar = _BAR.search(text) or (drawn and "%" in text)
            if text.strip() and not bar and not _WARNING.search(text) and not _SILENCE.search(text):
                return _PREFIX.sub("", text.strip())[:500]
    return ""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
