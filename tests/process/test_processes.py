"""A test that fails leaves no process, also none that ignores signals."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.process import processes as module
from tests.process.processes import Processes

#: Starts a child of its own, ignores SIGTERM like it, and says the child's id.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:] != ["leaf"]:
    print(subprocess.Popen([sys.executable, "-c", sys.orig_argv[2], "leaf"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_what_a_failing_test_started_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    monkeypatch.setattr(module, "_GENTLE_S", 0.1)
    started: list[subprocess.Popen[bytes]] = []
    found: list[psutil.Process] = []

    def failing() -> None:
        with Processes() as processes:
            child = processes.start([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
            started.append(child)
            assert child.stdout is not None
            found.append(psutil.Process(int(child.stdout.readline())))
            if stopped:
                child.send_signal(signal.SIGSTOP)
            raise AssertionError("the test fails")

    with pytest.raises(AssertionError, match="the test fails"):
        failing()
    assert [child.returncode for child in started] == [-signal.SIGKILL]
    assert psutil.wait_procs(found, 30)[1] == []


def test_what_ended_by_itself_is_left_alone_and_cleaned_up_after() -> None:
    order: list[str] = []
    with Processes() as processes:
        processes.then(lambda: order.append("cleaned"))
        child = processes.start([sys.executable, "-c", "raise SystemExit(3)"])
        processes.then(lambda: order.append(f"ended with {child.wait()}"))
    assert order == ["ended with 3", "cleaned"]
