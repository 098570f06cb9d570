"""A moment in the life of a request, as a line of a file: processes of a traced pool write it, and the benchmark reads it."""

import os
import time
from collections import defaultdict
from pathlib import Path

#: the folder of the files
VARIABLE = "ENGINEPOOL_BENCH_MARKS"

#: what happened -> of what -> when, in seconds; the clock is the same for all processes of a host
Marks = dict[str, dict[str, float]]


class Marker:
    """Writes the moments of this process, each by one system call of a few microseconds: a killed process loses none."""

    def __init__(self) -> None:
        path = Path(os.environ[VARIABLE]) / str(os.getpid())
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def mark(self, what: str, *keys: str, at: float | None = None) -> None:
        """It happened now, or at `at` on the monotonic clock. `keys`: what it happened to, and what belongs to that."""
        when = time.monotonic() if at is None else at
        os.write(self._file, f"{when:.7f} {what} {' '.join(keys)}\n".encode())


def read_marks(folder: Path) -> tuple[Marks, dict[str, list[str]]]:
    """The last time of each moment, and what belongs to each key, of all processes."""
    marks: Marks = defaultdict(dict)
    related: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            when, what, key, *others = line.split(" ")
            marks[what][key] = float(when)
            related[key] += [other for other in others if other not in related[key]]
    return marks, related
