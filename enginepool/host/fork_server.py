"""A fork server: a process that has imported what other processes need, and forks them. Each would import it for seconds.

A forked process runs what a started one would run: Python with the same arguments, environment and output, as a child of the
process that asked for it. The two ends talk over a socket pair, which no other process can reach. The server ends when the
other end is closed.
"""

import contextlib
import ctypes
import errno
import os
import runpy
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl

import msgspec

#: seconds that a fork may take, and its caller waits. It takes milliseconds; a host with too much work needed more than 1 s.
FORK_S = 5.0
#: as sys/prctl.h has it
_PR_SET_CHILD_SUBREAPER = 36
#: bytes of a request, and descriptors that come with one
_LONGEST, _MOST_DESCRIPTORS = 1 << 20, 64
#: descriptors of a process that was just forked are lower
_HIGH = 200


class ForkServer:
    """The end of the process that asks for forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # A request is the environment of a process.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        self._prctl: Callable[..., int] = ctypes.CDLL(None).prctl

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Mapping[int, int],
        *,
        leads_session: bool = False,
    ) -> int:
        """Run Python with these arguments in a child of this process; its pid.

        Args:
            arguments: `-m MODULE` or `-c CODE`, and what follows.
            descriptors: of this process, by the numbers that they have in the child.

        Raises:
            OSError: it could not be forked, or the server has ended.
        """
        # Variables of a process need not be UTF-8.
        variables = [(os.fsencode(name), os.fsencode(value)) for name, value in environment.items()]
        request = ForkRequest(list(arguments), variables, list(descriptors), leads_session)
        # Another process is started where this one came too late: it is told to go on, or finds that it is not wanted.
        wanted, go_on = os.pipe()
        # The parent of a forked process ends at once, and so this process is its next one.
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._connection.settimeout(FORK_S)
            socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], [*descriptors.values(), wanted])
            answer = int(self._connection.recv(32) or -errno.ECONNRESET)
            os.write(go_on, b"\0")
        except OSError:
            self.close()  # a late answer is not one to the next request
            raise
        finally:
            self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            os.close(wanted)
            os.close(go_on)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        return answer

    def close(self) -> None:
        """The server ends."""
        self._connection.close()


class ForkRequest(msgspec.Struct, array_like=True):
    """What a process that was forked becomes. `numbers`: of its descriptors."""

    arguments: list[str]
    environment: list[tuple[bytes, bytes]]
    numbers: list[int]
    leads_session: bool


@dataclass(frozen=True)
class Forked:
    """A forked process, before it runs anything."""

    request: ForkRequest
    descriptors: Sequence[int]

    def become(self, set_by_imports: Mapping[str, tuple[str | None, str]]) -> None:
        """Take what the process was to have. `set_by_imports`: variables that imports have changed, each with its value before
        and after them; they change those of this process in the same way."""
        request = self.request
        # None has a number that another one is to have.
        copies = [fcntl(descriptor, F_DUPFD_CLOEXEC, _HIGH) for descriptor in self.descriptors]
        for descriptor in self.descriptors:
            os.close(descriptor)
        for number, copy in zip(request.numbers, copies, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        given = {os.fsdecode(name): os.fsdecode(value) for name, value in request.environment}
        changed = {name: now for name, (before, now) in set_by_imports.items() if given.get(name) == before}
        os.environ.clear()
        os.environ.update({**given, **changed})

    def run(self) -> None:
        """What Python does with these arguments. The caller then ends."""
        option, what, *rest = self.request.arguments
        if option == "-m":
            sys.argv = [what, *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [option, *rest]
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def serve(requests: socket.socket) -> Forked:
    """Fork what the other end asks for until it is closed, then end this process. Returns in each forked process."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, _MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        request = msgspec.msgpack.decode(message, type=ForkRequest)
        read, write = os.pipe()
        if _forked(request.leads_session, write):
            requests.close()
            os.close(read)
            given = len(request.numbers)
            for wanted in descriptors[given:]:  # none where there is room for no more
                if not os.read(wanted, 1):  # the other end did not wait for it
                    os._exit(0)
                os.close(wanted)
            return Forked(request, descriptors[:given])
        with contextlib.suppress(BrokenPipeError):
            requests.send(os.read(read, 32))
        for descriptor in (read, *descriptors):
            os.close(descriptor)


def _forked(leads_session: bool, write: int) -> bool:
    """Fork twice, so that the new process has no parent here, and write its pid, or a negative error number where it could not
    be forked. Returns whether this is the new process."""
    try:
        if between := os.fork():
            os.waitpid(between, 0)
            os.close(write)
            return False
    except OSError as error:
        _answer(write, -(error.errno or errno.EAGAIN))
        return False
    between = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        _answer(write, -(error.errno or errno.EAGAIN))
        os._exit(0)
    if leads_session:
        os.setsid()  # before the pid is known: it is killed by its session
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(between)) as ended:
        select.select([ended], [], [])  # its parent is the process that asked from here on
    _answer(write, os.getpid())
    return True


def _answer(write: int, number: int) -> None:
    os.write(write, str(number).encode())
    os.close(write)
