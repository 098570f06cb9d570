"""Processes that are written down: a pid is given again, so the time at which its process was made is kept beside it."""

import psutil


def made_at(pid: int) -> float:
    """When a process of ours was made, in seconds since the epoch."""
    return psutil.Process(pid).create_time()


def lives(pid: int, made: float) -> bool:
    """Whether the process with this pid is the one that was made then, and has not ended."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - made) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
