"""`enginepool serve` is two processes. This one starts the coordinator, passes signals on to it, and starts it again after a
failure. Workers run on meanwhile and are adopted. Clients resend requests without an answer.

The coordinator ends with this process, however this process ends (PR_SET_PDEATHSIG): a successor needs the sockets.
"""

import ctypes
import os
import signal
import sys
import time

from enginepool.config import PoolConfig
from enginepool.config_loader import encode_config
from enginepool.coordinator.shell.log import log
from enginepool.host import os_error
from enginepool.host.child_process import ChildProcess, keep_exit_codes
from enginepool.host.restart_policy import (
    BAD_CONFIG,
    CANNOT_WRITE,
    HOST_FAULT,
    RESTART,
    RestartPolicy,
    exit_text,
)

COMMAND = (sys.executable, "-m", "enginepool.coordinator.shell.daemon")
#: as sys/prctl.h has it
_PR_SET_PDEATHSIG = 1
#: exit codes of a first coordinator that has said why it cannot start
_CANNOT_START = (1, BAD_CONFIG, CANNOT_WRITE)


def keep_running(config: PoolConfig, policy: RestartPolicy | None = None) -> int:
    """Run the coordinator until it has drained, or has failed too often; returns the exit code for this process.
    Raises OSError: the first one could not be started, or a later one too often.

    The signals that stop it stay blocked: one that arrives while this process ends must not replace its exit code.
    """
    policy = policy or RestartPolicy()
    stops = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it
        stops.remove(signal.SIGHUP)
    keep_exit_codes()
    # Signals are blocked and waited for one by one, so none arrives between two steps.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    first, child, status = True, None, 0
    while True:
        try:
            child = _start(config, stops)
        except OSError as error:
            wait_s = policy.after_failed_start(error, time.monotonic())
            if child is None or wait_s is None:
                raise
            log(f"the coordinator could not be started again: {os_error(error)}; the next try is after {wait_s:g} s")
            if _told_to_end(stops, wait_s, config):
                return status
            continue
        stopping, code = _wait(child, stops)
        status = code if code >= 0 else 128 - code
        if code == 0 or stopping or (first and code in _CANNOT_START):
            return BAD_CONFIG if code == CANNOT_WRITE else status
        # A coordinator that a disk has kept from starting has not checked the configuration.
        first = first and code == HOST_FAULT
        if code == RESTART:
            continue
        wait_s = policy.after_end(code, time.monotonic())
        if wait_s is None:
            log(f"the coordinator {policy.given_up} with {exit_text(code)}: the pool ends; what the coordinator said is above")
            return status
        if code in (CANNOT_WRITE, HOST_FAULT):
            log(f"the coordinator cannot start on this host now: it is tried again every {wait_s:g} s; the reason is above")
        else:
            log(f"the coordinator ended with {exit_text(code)}: it is started again after {wait_s:g} s, and adopts its workers")
        if _told_to_end(stops, wait_s, config):
            return status


def _told_to_end(stops: set[signal.Signals], wait_s: float, config: PoolConfig) -> bool:
    """Wait until the next start, while there is no coordinator; True: a signal came."""
    told = signal.sigtimedwait(stops, wait_s) is not None
    if told:
        log(f"asked to end without a coordinator: its workers end within {config.timing.orphan_s:g} s")
    return told


def _start(config: PoolConfig, stops: set[signal.Signals]) -> ChildProcess:
    """Signals that come while it starts wait until it can act on them (`on_stop_signals`)."""
    parent = os.getpid()
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, stops)

    environment = {**os.environ, "ENGINEPOOL_CONFIG": encode_config(config).decode()}
    return ChildProcess.start(COMMAND, environment, prepare=prepare)


def _wait(child: ChildProcess, stops: set[signal.Signals]) -> tuple[bool, int]:
    """Whether the child was told to end, and its exit code. In a container, this process also reaps orphans of the child."""
    stopping = False
    while True:
        number = signal.sigwaitinfo({*stops, signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            stopping = True
            child.send(number)
            continue
        while (ended := _ended_child()) is not None:
            pid, code = ended
            if pid == child.pid:
                child.reaped(code)
                return stopping, code


def _ended_child() -> tuple[int, int] | None:
    """A child that has ended, and its exit code (negative: the signal)."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None
