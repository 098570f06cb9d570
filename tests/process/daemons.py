"""Real coordinators as processes of a test: started, waited for by what they say, ended by id with their workers."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Literal

import msgspec

from enginepool.config import GroupConfig, Limits, PoolConfig, RestartConfig, Timing
from enginepool.config_loader import encode_config
from enginepool.host.folders import snapshot_folders
from tests.process.processes import Processes

#: how long anything here may take before the test fails
PATIENCE_S = 100.0
#: how much of a bar of progress is there
_BAR = re.compile(r"\d+%\|.*\d+/\d+ \[")


def sim_pool(
    directory: Path,
    *,
    workers: int = 2,
    options: Mapping[str, Any] | None = None,
    generates: bool = False,
    limits: Limits | None = None,
    snapshot: Literal["memory", "disk", "none"] = "memory",
    **timing: float,
) -> PoolConfig:
    """A pool of sim workers on ipc sockets in `directory`. A test that stops one gives it less than `silence_s` of so long."""
    times: dict[str, float] = {"silence_s": 10.0, "ping_s": 0.25, "orphan_s": 60.0, **timing}
    return PoolConfig(
        groups={
            "g": GroupConfig(
                model="sim",
                engine="sim",
                workers=workers,
                operations=["generate"] if generates else [],
                ageing_s=1.0,
                snapshot=snapshot,
                options=dict(options or {}),
                checkpoint_roots=[str(directory.parent)],
            )
        },
        listen=f"ipc://{directory}/pool.sock",
        state_dir=str(directory / "state"),
        limits=limits or Limits(),
        timing=msgspec.convert(times, Timing),
        restart=RestartConfig(backoff_s=0.1, backoff_max_s=0.5, max_restarts=1000),
    )


class Daemon:
    """A coordinator process. It ends, and its workers with it, when `processes` does. `within`: a command that runs it."""

    def __init__(self, processes: Processes, config: PoolConfig, within: Sequence[str] = ()) -> None:
        self.config = config
        self._processes = processes
        #: where clients and workers dial; as configured, until it listens
        self.address, self.workers = config.listen, config.listen_workers
        self.lines: list[str] = []
        self._said: Queue[str] = Queue()
        # A pipe of our own: the thread that reads it closes it, when the coordinator has ended.
        read, write = os.pipe()
        self._reader = threading.Thread(target=self._read, args=(read,), daemon=True)
        self._reader.start()
        processes.then(self._clean)
        try:
            self.process = self._launch({**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()}, write, within)
        finally:
            os.close(write)

    def _launch(self, environment: Mapping[str, str], stderr: int, within: Sequence[str]) -> "subprocess.Popen[Any]":
        return self._processes.start(
            [*within, sys.executable, "-m", "enginepool.coordinator.shell.daemon"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )

    def _clean(self) -> None:
        """Once it has ended."""
        end_workers(self.config.state_dir)
        shutil.rmtree(snapshot_folders(Path(self.config.state_dir))["memory"], ignore_errors=True)
        self._reader.join(PATIENCE_S)

    def _read(self, descriptor: int) -> None:
        with open(descriptor) as stream:
            for line in stream:
                self.lines.append(line.rstrip())
                self._said.put(line.rstrip())

    def wait_for(self, text: str, limit_s: float = PATIENCE_S) -> str:
        """The next line with `text` in it; before it, no silence is longer than `limit_s`."""
        while True:
            try:
                line = self._said.get(timeout=limit_s)
            except Empty:
                raise AssertionError(f"no line with {text!r} came; so far: {self.lines}") from None
            if text in line:
                return line

    def listening(self) -> "Daemon":
        words = self.wait_for("listening on").replace(",", " ").split()
        self.address, self.workers = words[words.index("on") + 1], words[words.index("workers") + 2]
        return self

    def successor(self) -> "Daemon":
        """The next coordinator with the same configuration; it listens."""
        return type(self)(self._processes, self.config).listening()

    def last_words(self, group: str, lines: int = 60) -> str:
        """The ends of what all workers of a group have written, also of those that are gone; bars of progress are left out."""
        told: list[str] = []
        for log in sorted(Path(self.config.state_dir).glob(f"logs/{group}-*.log"), key=lambda path: path.stat().st_mtime):
            written = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").splitlines()
            kept = [line[:400] for line in written if line.strip() and not _BAR.search(line)]
            told += [f"--- {log.name}, the last {min(lines, len(kept))} of {len(kept)} lines", *kept[-lines:]]
        return "\n".join(told) or f"no worker of {group} has a log"

    def kill(self) -> None:
        """SIGKILL: no goodbye, no draining."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self) -> int:
        """SIGTERM, and wait until it and its workers have drained."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


def end_workers(state_dir: str) -> None:
    """End workers and stagers that outlived their coordinator, by the ids in the pool's own records."""
    for path in [*Path(state_dir).glob("workers/*.json"), *Path(state_dir).glob("stagers/*.json")]:
        pid = msgspec.json.decode(path.read_bytes())["pid"]
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
