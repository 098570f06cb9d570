"""The share of time in which the GPU runs a kernel, as its driver samples it."""

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import threading
import time

from bench.processes import tether

EVERY_MS = 100


class GpuShare:
    """Samples the first visible GPU from `start` to `stop`; nothing where there is no nvidia-smi."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin to sample in the background."""
        smi = shutil.which("nvidia-smi")
        if smi is None:
            return
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", gpu, "-lms", str(EVERY_MS)]
        self._process = subprocess.Popen([smi, *query], stdout=subprocess.PIPE, text=True, preexec_fn=tether)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # "[N/A]" where the driver does not say
                self._samples.append((time.monotonic(), float(line)))

    def between(self, begin: float, end: float) -> float | None:
        """Per cent of the time between two moments of `time.monotonic`; None when nothing was sampled."""
        found = [share for at, share in self._samples if begin <= at < end]
        return statistics.fmean(found) if found else None

    def stop(self) -> None:
        """End the sampling."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
