"""A fork server, what it forks, and a launcher whose workers are forked."""

import asyncio
import errno
import multiprocessing.util
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from enginepool.config import GroupConfig, PoolConfig, Timing
from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.launchers import fork_servers, local
from enginepool.coordinator.launchers.base import LauncherContext
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.host.child_process import ChildProcess
from enginepool.host.fork_server import ForkServer
from enginepool.workers import fork_server as of_workers
from tests.process.daemons import PATIENCE_S

#: a fork server that has imported nothing, and says so, or what its first argument is
SERVER = """
import json, os, socket, sys
from enginepool.host.fork_server import serve
connection = socket.socket(fileno=json.loads(os.environ.pop("ENGINEPOOL_FORK_SERVER"))["socket"])
os.set_inheritable(connection.fileno(), False)
os.environ["SET_BY_IMPORT"] = "1"
connection.send(sys.argv[1].encode() if len(sys.argv) > 1 else b"ready")
forked = serve(connection)
forked.become({"SET_BY_IMPORT": (None, "1")})
forked.run()
"""
#: says in its output what it is, and ends with the end of the pipe that it has
TELLS = """
import json, os, sys
files = {int(name): os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit() and
    os.path.exists(f"/proc/self/fd/{name}")}
print(json.dumps([sys.argv, dict(os.environ), sorted(files), os.getsid(0) == os.getpid(), os.getppid()]), flush=True)
os.read(9, 1)
sys.exit(7)
"""


@pytest.fixture
def server() -> Iterator[tuple[ForkServer, ChildProcess]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "ENGINEPOOL_FORK_SERVER": msgspec.json.encode({"socket": theirs.fileno()}).decode()}
    process = ChildProcess.start([sys.executable, "-c", SERVER], environment, inherited=[theirs.fileno()])
    theirs.close()
    assert ours.recv(100) == b"ready"
    yield ForkServer(ours), process
    ours.close()
    process.reap()


class Told(msgspec.Struct, array_like=True):
    """What a process of `TELLS` says."""

    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]
    leads: bool
    parent: int


def forked(server: ForkServer, environment: dict[str, str], **options: bool) -> tuple[int, int, Told]:
    """A process of `TELLS`: its pid, a descriptor whose end lets it end, and what it has said."""
    read, write = os.pipe()
    wait, held = os.pipe()
    try:
        pid = server.fork(["-c", TELLS, "one"], environment, {1: write, 9: wait}, **options)
    finally:
        os.close(write)
        os.close(wait)
    with open(read) as output:
        return pid, held, msgspec.json.decode(output.readline(), type=Told)


def test_a_forked_process_is_a_child_with_its_own_environment_and_nothing_of_its_siblings(
    server: tuple[ForkServer, ChildProcess],
) -> None:
    found = [forked(server[0], {"NAME": name}, leads_session=leads) for name, leads in (("a", True), ("b", False))]
    for (pid, held, told), name in zip(found, ("a", "b"), strict=True):
        assert told.arguments == ["-c", "one"]
        assert told.environment == {"NAME": name, "SET_BY_IMPORT": "1"}
        assert told.descriptors == [0, 1, 2, 9]
        assert (told.leads, told.parent) == (name == "a", os.getpid())
        os.close(held)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_variable_of_the_process_counts_more_than_one_that_an_import_has_set(server: tuple[ForkServer, ChildProcess]) -> None:
    pid, held, told = forked(server[0], {"SET_BY_IMPORT": "2"})
    assert told.environment == {"SET_BY_IMPORT": "2"}
    os.close(held)
    os.waitpid(pid, 0)


def test_a_fork_server_ends_with_the_process_that_has_its_connection_and_what_it_forked_goes_on() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "ENGINEPOOL_FORK_SERVER": msgspec.json.encode({"socket": theirs.fileno()}).decode()}
    process = ChildProcess.start([sys.executable, "-c", SERVER], environment, inherited=[theirs.fileno()])
    theirs.close()
    assert ours.recv(100) == b"ready"
    server = ForkServer(ours)
    pid, held, _ = forked(server, {})
    server.close()
    assert process.reap() == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        server.fork(["-c", ""], {}, {})
    os.close(held)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


#: between its fork and its answer a process waits for a signal
SLOW = SERVER.replace(
    "connection = ",
    """import signal
begin_session = os.setsid
def slowly():
    begin_session()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.write(1, str(os.getpid()).encode())
    signal.sigwait({signal.SIGUSR1})
os.setsid = slowly
connection = """,
    1,
)


def test_a_process_that_is_forked_too_late_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another one has been started in its place: two engines would share a GPU."""
    monkeypatch.setattr("enginepool.host.fork_server.FORK_S", 1.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said, says = os.pipe()
    environment = {**os.environ, "ENGINEPOOL_FORK_SERVER": msgspec.json.encode({"socket": theirs.fileno()}).decode()}
    with open(says, "wb") as output:
        process = ChildProcess.start([sys.executable, "-c", SLOW], environment, log=output, inherited=[theirs.fileno()])
    theirs.close()
    assert ours.recv(100) == b"ready"
    server = ForkServer(ours)
    with open(tmp_path / "output", "wb") as output, pytest.raises(TimeoutError):
        server.fork(["-c", "print('runs', flush=True)"], dict(os.environ), {1: output.fileno()}, leads_session=True)
    late = int(os.read(said, 100))
    process.kill()
    process.reap()
    with open(os.pidfd_open(late)) as ended:
        os.kill(late, signal.SIGUSR1)
        assert select.select([ended], [], [], PATIENCE_S)[0]
    os.close(said)
    assert (tmp_path / "output").read_text() == ""
    with suppress(ChildProcessError):  # where this process has become its parent
        os.waitpid(late, 0)


# --- what multiprocessing spawns --------------------------------------------------------------------------------------


class Recorder:
    """In place of a fork server, or of what starts processes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def fork(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 1

    def start(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 2


def test_what_multiprocessing_spawns_is_forked_unless_it_reads_something_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder: Any = Recorder()
    util: Any = multiprocessing.util
    monkeypatch.setattr(util, "spawnv_passfds", recorder.start)
    monkeypatch.setenv("READ", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    of_workers.fork_what_is_spawned(recorder, dict(os.environ), {"READ", "CUDA_VISIBLE_DEVICES"})
    python, code = os.fsencode(sys.executable), ["-c", "spawn_main()", "--multiprocessing-fork"]

    def spawned(path: bytes = python, arguments: list[str] = code) -> int:
        return util.spawnv_passfds(path, [path, "-B", *arguments], [7])

    assert spawned() == 1
    assert recorder.calls == [(code, dict(os.environ), {7: 7})]
    assert spawned(b"/usr/bin/numactl") == 2
    assert spawned(arguments=["-c", "from multiprocessing.resource_tracker import main"]) == 2
    monkeypatch.setenv("NOT_READ", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert spawned() == 1
    assert capsys.readouterr().err == ""
    for name in ("READ", "LD_PRELOAD", "OMP_NUM_THREADS"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "other")
            assert spawned() == 2
        assert f"without the fork server: {name} changed after SGLang was imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "on_gpus", "forked"),
    [
        ({}, True, True),
        ({}, False, True),
        ({"options": {"tp_size": 2}}, False, True),
        ({"options": {"tp_size": 2}}, True, False),
        ({"options": {"tp_size": 2}, "fork_server": True}, True, True),
        ({"fork_server": False}, False, False),
        ({"engine": "sim", "fork_server": True}, False, False),
    ],
)
def test_workers_with_several_gpus_are_forked_only_where_their_group_says_so(
    options: dict[str, Any], on_gpus: bool, forked: bool
) -> None:
    assert fork_servers.is_wanted(GroupConfig(model="m", **options), on_gpus=on_gpus) == forked


# --- a launcher --------------------------------------------------------------------------------------------------------


class Launched:
    """A launcher of two workers, which run `WORKER`."""

    def __init__(self, directory: Path, ready_s: float) -> None:
        (directory / "state").mkdir()
        self.ended: asyncio.Queue[WorkerExited] = asyncio.Queue()
        group = GroupConfig(model=str(directory), workers=2, gpus=["6", "7"], fork_server=True, kernel_cache="/kernels")
        config = PoolConfig(groups={"g": group}, state_dir=str(directory / "state"), timing=Timing(starting_s=2 * ready_s))
        context = LauncherContext(config, directory / "state", "ipc://nowhere", None, self.ended.put_nowait)
        self.launcher = LocalLauncher(context)
        self.directory = directory / "state"

    async def reported(self) -> WorkerExited:
        return await asyncio.wait_for(self.ended.get(), PATIENCE_S)

    def server(self) -> psutil.Process:
        """The fork server that runs."""
        [found] = [one for one in psutil.Process().children() if one.status() != "zombie" and SERVER in one.cmdline()]
        return found


#: says what its launcher has set for it, and ends
SETTINGS = """
import os, sys
names = ("CUDA_VISIBLE_DEVICES", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "SET_BY_IMPORT")
print(*(os.environ.get(name) for name in names), flush=True)
sys.exit(7)
"""
#: says whether it was forked, and ends
WORKER = "import os, sys; print('forked' if 'SET_BY_IMPORT' in os.environ else 'started', flush=True); sys.exit(7)"
FORKED, STARTED = "exit code 7: forked", "exit code 7: started"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run an act with a launcher. `command`: of its fork server."""
    monkeypatch.setattr(
        "enginepool.coordinator.launchers.stagers.COMMAND", (sys.executable, "-c", "import time; time.sleep(600)")
    )
    monkeypatch.setattr(local, "COMMAND", (sys.executable, "-c", WORKER))

    def run(act: Callable[[Launched], Any], *command: str, ready_s: float = PATIENCE_S) -> None:
        monkeypatch.setattr(fork_servers, "COMMAND", (sys.executable, "-c", *command))

        async def story() -> None:
            others = psutil.Process().children()  # of other tests
            launched = Launched(tmp_path, ready_s)
            try:
                await act(launched)
            finally:
                launched.launcher.stop_all()
                async with asyncio.timeout(PATIENCE_S):
                    while {*psutil.Process().children()} - {*others}:
                        await asyncio.sleep(0.01)  # until the loop has reaped them

        asyncio.run(story())

    return run


def test_forked_workers_have_the_gpus_and_the_kernel_cache_of_their_configuration(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "COMMAND", (sys.executable, "-c", SETTINGS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, "/elsewhere")  # as SGLang does for the process that imports it

    async def act(launched: Launched) -> None:
        for index in (0, 1):
            assert launched.launcher.start("g", index, f"g-{index}.1")
            found = await launched.reported()
            assert found.reason == f"exit code 7: {6 + index} /kernels/triton /kernels 1"
        launched.server()  # one for both

    run(act, SERVER)


def test_variables_that_are_no_utf_8_reach_forked_workers(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    told = "import os, sys; print(os.environb[b'CITY'].hex(), 'SET_BY_IMPORT' in os.environ, flush=True); sys.exit(7)"
    monkeypatch.setattr(local, "COMMAND", (sys.executable, "-c", told))
    city = b"Orl\xe9ans"
    monkeypatch.setenv("CITY", os.fsdecode(city))

    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert (await launched.reported()).reason == f"exit code 7: {city.hex()} True"

    run(act, SERVER)


def test_the_logs_of_the_fork_server_and_of_stagers_stay_while_those_of_ended_workers_go(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KEPT_LOGS", 1)

    async def act(launched: Launched) -> None:
        for number in range(4):
            assert launched.launcher.start("g", 0, f"g-0.{number}")
            assert (await launched.reported()).reason == FORKED
        kept = ["fork-server.log", "g-0.2.log", "g-0.3.log", "stager-g.0.log"]
        assert sorted(os.listdir(launched.directory / "logs")) == kept

    run(act, SERVER)


def test_workers_wait_for_their_fork_server_and_share_it(run: Callable[..., None]) -> None:
    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert launched.launcher.start("g", 1, "g-1.1")
        assert [(await launched.reported()).reason for _ in range(2)] == [FORKED, FORKED]
        launched.server()
        assert launched.launcher.start("g", 0, "g-0.2")
        assert (await launched.reported()).reason == FORKED

    run(act, SERVER)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ((SERVER, "an import has initialized CUDA"), "an import has initialized CUDA"),
        (("raise SystemExit(3)",), "it ended: exit code 3"),
    ],
)
def test_a_fork_server_that_cannot_be_used_is_said_and_workers_are_started(
    run: Callable[..., None], capfd: pytest.CaptureFixture[str], command: tuple[str, ...], why: str
) -> None:
    async def act(launched: Launched) -> None:
        for incarnation in ("g-0.1", "g-0.2"):
            assert launched.launcher.start("g", 0, incarnation)
            assert (await launched.reported()).reason == STARTED

    run(act, *command)
    assert capfd.readouterr().err.count(f"workers are started without a fork server: {why}\n") == 1


def test_a_fork_server_for_which_no_descriptor_is_left_costs_no_worker_and_is_started_later(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def act(launched: Launched) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", none_left)
            assert launched.launcher.start("g", 0, "g-0.1")
        assert (await launched.reported()).reason == STARTED
        assert launched.launcher.start("g", 0, "g-0.2")
        assert (await launched.reported()).reason == FORKED

    run(act, SERVER)
    why = "it could not be started: Too many open files"
    assert capfd.readouterr().err.count(f"workers are started without a fork server: {why}\n") == 1


def test_a_fork_server_that_takes_too_long_keeps_no_worker_from_its_start(run: Callable[..., None]) -> None:
    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert (await launched.reported()).reason == STARTED

    run(act, "import time; time.sleep(600)", ready_s=0.01)


def test_a_fork_server_that_is_killed_costs_no_worker_and_is_started_again(run: Callable[..., None]) -> None:
    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert (await launched.reported()).reason == FORKED
        server = launched.server()
        server.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (the launcher is not to notice it)
        assert launched.launcher.start("g", 0, "g-0.2"), "its end was not noticed yet"
        assert (await launched.reported()).reason == STARTED
        assert launched.launcher.start("g", 0, "g-0.3")
        assert (await launched.reported()).reason == FORKED
        assert launched.server() != server

    run(act, SERVER)


def test_a_fork_server_that_hangs_is_replaced(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert (await launched.reported()).reason == FORKED
        server = launched.server()
        server.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("enginepool.host.fork_server.FORK_S", 0.1)
            assert launched.launcher.start("g", 0, "g-0.2")
        assert "ended, because a fork took longer than 5 s; the worker is started without it\n" in capfd.readouterr().err
        assert (await launched.reported()).reason == STARTED
        async with asyncio.timeout(PATIENCE_S):
            while server.is_running():
                await asyncio.sleep(0.01)
        assert launched.launcher.start("g", 0, "g-0.3")
        assert (await launched.reported()).reason == FORKED

    run(act, SERVER)


def test_a_worker_that_is_stopped_while_it_waits_is_not_started(run: Callable[..., None]) -> None:
    async def act(launched: Launched) -> None:
        assert launched.launcher.start("g", 0, "g-0.1")
        assert launched.launcher.start("g", 1, "g-1.1")
        launched.launcher.stop("g-0.1", "it is not wanted")
        assert (await launched.reported()).reason == "it is not wanted"
        assert (await launched.reported()).reason == FORKED
        assert not (launched.directory / "logs" / "g-0.1.log").exists()

    run(act, SERVER)
