"""Why a worker ended is read off the end of what it wrote."""

import signal
import subprocess
import sys

import pytest

from enginepool.coordinator.launchers.exit_reasons import (
    OUT_OF_MEMORY,
    PERMANENT,
    cause,
    failed_by_itself,
    how_it_ended,
    last_line,
)
from enginepool.protocol.messages import Ping
from enginepool.workers.events import Exit, FromCoordinator, Note, WorkerTick
from enginepool.workers.machine import WorkerMachine


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"", ""),
        (b"\n \r\n\r", ""),
        (b"first\nlast", "last"),
        (b"first\nlast\n\n", "last"),
        (b"windows\r\n", "windows"),
        (b"Loading:   0%\rLoading:  50%\rLoading: 100%\n", ""),
        (b"loading m\nLoading:   0%\rLoading:  50%\r", "loading m"),
        (b"loading m\nLoading:  50%\r", "loading m"),
        (b"a\n\rLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.1s/it]\r", "a"),
        (b"a\nLoading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.1s/it]\n", "a"),
        ("a\nCapturing:  45%|████▌     | 9/20 [00:12<00:14,  1.3s/it]".encode(), "a"),
        ("model.safetensors: 10%|█ | 1.0G/9.9G [00:10<01:30, 99MB/s]\r".encode(), ""),
        (b"a\nthe GPU is used to 99%\n", "the GPU is used to 99%"),
        (b"Loading:  50%\rout of memory\r\n", "out of memory"),
        (b"ready\n/site/gguf.py:76: UserWarning: Only CUDA supports it\n  warnings.warn(f'Only {what}')\n", "ready"),
        (b"ready\nDeprecationWarning: raised as an error\n", "DeprecationWarning: raised as an error"),
        (b"2026-11-23T12:00:01.123Z enginepool worker g-0.64f2ab.1: the worker of g ends: no", "the worker of g ends: no"),
        (b"\xe4\xb8 cut in the middle\nx" + 600 * b"y", "x" + 499 * "y"),
    ],
)
def test_the_last_line_that_is_no_progress_bar_says_how_a_process_ended(log: bytes, line: str) -> None:
    assert last_line(log) == line


@pytest.mark.parametrize("external", [True, False])
def test_a_silence_of_the_coordinator_that_a_worker_survived_is_not_its_last_word(external: bool) -> None:
    w = WorkerMachine("g-0.1.1", "g", now=0.0, external=external)
    notes = [effect for second in range(1, 20) for effect in w.handle(WorkerTick(second)) if isinstance(effect, Note)]
    notes += [effect for effect in w.handle(FromCoordinator(20.0, Ping(1))) if isinstance(effect, Note)]
    assert len(notes) == 2
    log = "ready\n" + "".join(f"2026-11-23T12:00:01.123Z enginepool worker g-0.1.1: {note.line}\n" for note in notes)
    assert last_line(log.encode()) == "ready"


def test_what_python_cleans_up_after_a_process_that_was_killed_is_not_its_last_word() -> None:
    code = (
        "import multiprocessing, os, signal\n"
        "semaphore = multiprocessing.get_context('spawn').Semaphore()\n"
        "print('the last word', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The process that cleans up has the pipe open, too, until it is done.
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.count(b"resource_tracker: ") == 2
    assert last_line(ended.stdout) == "the last word"


@pytest.mark.parametrize(
    ("code", "why", "line"),
    [
        (None, "", "exit code unknown (started by an earlier coordinator)"),
        (0, "", "exit code 0"),
        (70, "no such model", "exit code 70: no such model"),
        (-9, "no such model", "ended by SIGKILL: no such model"),
        (-(signal.SIGRTMIN + 1), "", "ended by SIGRTMIN+1"),
    ],
)
def test_how_a_worker_ended_says_why_where_that_is_known(code: int | None, why: str, line: str) -> None:
    assert how_it_ended(code, why) == line


NO_CAUSE = "weight updates will be received in memory of the host"


@pytest.mark.parametrize(
    ("code", "line", "why"),
    [
        *[(code, NO_CAUSE, "") for code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, None)],
        *[(code, NO_CAUSE, NO_CAUSE) for code in (0, 1, Exit.ENGINE_DIED, -signal.SIGSEGV, -signal.SIGABRT)],
        *[
            (code, line, line)
            for code in (-signal.SIGKILL, -signal.SIGTERM, None)
            for line in (
                "torch.OutOfMemoryError: CUDA out of memory",
                "OSError: [Errno 28] No space left on device",
                "the worker of g ends: no such model",
                "[2026-11-28 12:00:00] Received sigquit from a child process. It usually means the child failed.",
                "Fatal Python error: Aborted",
            )
        ],
        (-signal.SIGKILL, "", ""),
    ],
)
def test_a_line_that_tells_of_no_error_is_no_cause_of_an_end_by_a_signal_from_outside(
    code: int | None, line: str, why: str
) -> None:
    assert cause(code, line) == why


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        *[(code, False) for code in (None, Exit.DRAINED, Exit.OWNER_GONE, Exit.ORPHANED, Exit.REFUSED)],
        *[(code, True) for code in (1, 3, Exit.ENGINE_DIED, Exit.OUT_OF_MEMORY, Exit.UNUSABLE)],
        *[(-number, False) for number in (signal.SIGKILL, signal.SIGTERM)],
        *[(-number, True) for number in (signal.SIGSEGV, signal.SIGABRT)],
    ],
)
def test_a_process_that_fails_by_itself_is_told_from_one_that_is_ended(code: int | None, failed: bool) -> None:
    assert failed_by_itself(code) == failed


def test_the_coordinator_knows_the_exit_codes_of_workers() -> None:
    assert (PERMANENT, OUT_OF_MEMORY) == (Exit.UNUSABLE, Exit.OUT_OF_MEMORY) == (78, 71)
