"""Child processes of a benchmark: tethered to it, spoken to in JSON lines, waited for with a bound, and their CPU time read."""

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
#: The ports that the system gives away, also to every connection that any process opens.
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Where `python -m bench...` works, wherever we were started.
ROOT = Path(__file__).parents[1]


def tether() -> None:
    """Runs in the child before exec: when the benchmark dies, however it dies, this process dies too."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process in a session of its own. Our own ones end at the end of their stdin; others at SIGTERM.

    Args:
        argv: program and arguments; a leading `-m` runs a module of this interpreter.
        scratch: folder for its log, which holds stderr (and stdout of a process that does not speak JSON lines).
        speaks: whether it answers in JSON lines on stdout.
        tethered: killed when the benchmark dies; a process with others to stop must see the end of its stdin instead.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        scratch: Path,
        env: Mapping[str, str] | None = None,
        speaks: bool = True,
        tethered: bool = True,
    ) -> None:
        command = [sys.executable, *argv] if argv[0] == "-m" else list(argv)
        self.name = argv[1] if argv[0] == "-m" else Path(argv[0]).name
        self.log = scratch / f"{self.name}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if speaks else log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=tether if tethered else None,
            )
        self.pid = self.process.pid
        self._unread = b""

    def hear(self, timeout: float) -> Any:
        """The next JSON line that the child writes."""
        out = self.process.stdout
        assert out is not None, f"{self.name} was started without a voice"
        end = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ready, _, _ = select.select([out], [], [], max(0.0, end - time.monotonic()))
            more = os.read(out.fileno(), 65536) if ready else b""
            if not more:
                silence = f"said nothing for {timeout:g} s" if not ready else "ended"
                raise RuntimeError(f"{self.name} {silence}; its last words: {self.last_words()}")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return json.loads(line)

    def ask(self, question: Mapping[str, object], timeout: float) -> Any:
        """Write one JSON line and return the answer to it."""
        self.tell(question)
        return self.hear(timeout)

    def tell(self, question: Mapping[str, object]) -> None:
        """Write one JSON line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question).encode() + b"\n")
        self.process.stdin.flush()

    def check(self) -> None:
        """Raise if the process has ended by itself."""
        code = self.process.poll()
        if code is not None:
            raise RuntimeError(f"{self.name} ended with {code}; its last words: {self.last_words()}")

    def last_words(self) -> str:
        """The end of its log, on one line."""
        words = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(words[-4:])[-600:] or "(none)"

    def stop(self, limit: float = 5.0, *, hint: signal.Signals | None = None) -> None:
        """Close its stdin (and send `hint`), give it `limit` seconds, then kill what is left of its process group."""
        process = self.process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if hint is not None and process.poll() is None:
            process.send_signal(hint)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def stdin_ended() -> bool:
    """In a child that reads no commands: whether the benchmark has closed our stdin."""
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and os.read(0, 4096) == b""


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, as the operating system counts it (steps of 10 ms on Linux)."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def free_port() -> int:
    """An unused TCP port of the loopback interface, outside the range from which the system assigns ports."""
    first = int(EPHEMERAL.read_text().split()[0])
    for port in random.SystemRandom().sample(range(min(10_000, first // 2), first), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"100 ports below {first} are in use, or cannot be used")
