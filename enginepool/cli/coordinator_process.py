"""`enginepool serve` is two processes: this one starts the coordinator, passes signals on to it, and starts it again after a
failure. Workers go on meanwhile and are adopted; clients send again what has no answer.

The coordinator ends with this process, however this one ends (PR_SET_PDEATHSIG): its successor needs its sockets.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

from enginepool.config import PoolConfig, encode_config
from enginepool.coordinator.shell.log import log
from enginepool.host.restart_policy import BAD_CONFIG, HOST_FAULT, RESTART, RestartPolicy, exit_text

COMMAND = (sys.executable, "-m", "enginepool.coordinator.shell.daemon")
#: as sys/prctl.h has it
_PR_SET_PDEATHSIG = 1
#: exit codes of a first coordinator that has said why it cannot start
_CANNOT_START = (1, BAD_CONFIG, HOST_FAULT)


def keep_running(config: PoolConfig, policy: RestartPolicy | None = None) -> int:
    """Run the coordinator until it has drained, or has failed too often; returns the exit code for this process."""
    policy = policy or RestartPolicy()
    stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it
        stops.remove(signal.SIGHUP)
    # Blocked, and waited for one by one: none can come between two steps.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    try:
        return _keep_running(config, policy, stops)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep_running(config: PoolConfig, policy: RestartPolicy, stops: set[signal.Signals]) -> int:
    starts = 0
    while True:
        child = _start(config)
        starts += 1
        stopping, code = _wait(child, stops)
        status = code if code >= 0 else 128 - code
        if code == 0 or stopping or (starts == 1 and code in _CANNOT_START):
            return BAD_CONFIG if code == HOST_FAULT else status
        if code == RESTART:
            continue
        wait_s = policy.after_end(code, time.monotonic())
        if wait_s is None:
            log(f"the coordinator {policy.given_up} with {exit_text(code)}: the pool ends; what the coordinator said is above")
            return status
        if code == HOST_FAULT:
            log(f"the coordinator cannot start on this host now: it is tried again every {wait_s:g} s; the reason is above")
        else:
            log(f"the coordinator ended with {exit_text(code)}: it is started again after {wait_s:g} s, and adopts its workers")
        if signal.sigtimedwait(stops, wait_s) is not None:
            log(f"asked to end without a coordinator: its workers end within {config.timing.orphan_s:g} s")
            return status


def _start(config: PoolConfig) -> "subprocess.Popen[bytes]":
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that counted
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # A session of its own: Ctrl-C in a terminal comes here alone, and is passed on once.
    return subprocess.Popen(
        COMMAND,
        env={**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _wait(child: "subprocess.Popen[bytes]", stops: set[signal.Signals]) -> tuple[bool, int]:
    """Whether the child was told to end, and its exit code. In a container, this process also reaps what the child left."""
    stopping = False
    while True:
        number = signal.sigwaitinfo({*stops, signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            stopping = True
            os.kill(child.pid, number)
            continue
        while (ended := _ended_child()) is not None:
            pid, code = ended
            if pid == child.pid:
                child.returncode = code
                return stopping, code


def _ended_child() -> tuple[int, int] | None:
    """A child that has ended, and its exit code (negative: the signal)."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None
