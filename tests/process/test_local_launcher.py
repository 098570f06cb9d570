"""The local launcher and its records of worker processes: which it adopts, which it ends, and which it must leave alone."""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from enginepool.config import GroupConfig
from enginepool.coordinator.core.events import WorkerExited
from enginepool.coordinator.core.group_weights import EarlierWorker
from enginepool.coordinator.launchers.base import LauncherContext
from enginepool.coordinator.launchers.local import LocalLauncher
from enginepool.coordinator.launchers.stagers import Stagers
from enginepool.host import child_process as records
from enginepool.host import host_identity
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.processes import Processes

#: answers each line, for as long as it lives
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
#: starts a child in its own session, says its id, and ends
LEAVES_ONE = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"


class Scene:
    """A launcher on a loop of its own, in a state directory that an earlier one has left."""

    def __init__(self, processes: Processes, directory: Path) -> None:
        self.processes = processes
        self.directory = directory / "state"
        self.config = sim_pool(directory, workers=1)
        self.exited: list[WorkerExited] = []
        (self.directory / "workers").mkdir(parents=True)

    def stranger(self) -> "subprocess.Popen[str]":
        """A process that leads a session, as a worker does."""
        return self.processes.start(
            [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def record(self, pid: int, *, index: int = 0, **fields: Any) -> Path:
        """What an earlier launcher wrote of its worker."""
        path = self.directory / "workers" / f"g-{index}.1.1.json"
        record = {
            "group": "g", "index": index, "incarnation": path.stem, "model": self.config.groups["g"].model, "pid": pid,
            "created": 0.0, "host": host_identity(),
        }  # fmt: skip
        path.write_bytes(msgspec.json.encode(record | fields))
        return path

    def run(self, act: Callable[[LocalLauncher], Any]) -> Any:
        async def story() -> Any:
            launcher = LocalLauncher(LauncherContext(self.config, self.directory, "ipc://nowhere", None, self._exited))
            found = act(launcher)
            await asyncio.sleep(0)
            return found

        return asyncio.run(story())

    def _exited(self, event: WorkerExited) -> None:
        self.exited.append(event)


@pytest.fixture
def scene(processes: Processes, tmp_path: Path) -> Scene:
    return Scene(processes, tmp_path)


def answers(process: "subprocess.Popen[str]") -> bool:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("there?\n")
        process.stdin.flush()
    return process.stdout.readline() == "there?\n"


def test_a_worker_that_still_runs_is_taken_up(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    worker = scene.stranger()
    path = scene.record(worker.pid, created=records.created_at(worker.pid))
    [found] = scene.run(lambda launcher: launcher.adopt())
    assert found == EarlierWorker("g", 0, path.stem)
    assert path.exists() and answers(worker)
    assert f"worker {path.stem} of an earlier coordinator still runs as process {worker.pid}\n" in capfd.readouterr().err


@pytest.mark.parametrize("other", ["process", "host"])
def test_a_process_that_got_the_id_of_a_dead_worker_is_left_alone(
    scene: Scene, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a reboot, or in a container that was started again, the same numbers are given to others."""
    stranger = scene.stranger()
    if other == "process":
        path = scene.record(stranger.pid, created=records.created_at(stranger.pid) - 1000)
    else:
        path = scene.record(stranger.pid, created=records.created_at(stranger.pid), host="another boot/pid:[1]")
    assert scene.run(lambda launcher: launcher.adopt()) == [EarlierWorker("g", 0, path.stem, lives=False)]
    assert not path.exists()
    assert answers(stranger)
    assert f"worker {path.stem} ended while no coordinator ran\n" in capfd.readouterr().err


def test_what_a_dead_worker_has_left_in_its_session_is_ended(scene: Scene) -> None:
    worker = scene.processes.start(
        [sys.executable, "-c", LEAVES_ONE], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    created = records.created_at(worker.pid)
    assert worker.stdout is not None
    left = psutil.Process(int(worker.stdout.readline()))
    scene.processes.adopt(left)
    assert worker.wait(PATIENCE_S) == 0
    path = scene.record(worker.pid, created=created)
    assert scene.run(lambda launcher: launcher.adopt()) == [EarlierWorker("g", 0, path.stem, lives=False)]
    psutil.wait_procs([left], PATIENCE_S)
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("size", "seen"), [(1, "7"), (2, "8,9")])
def test_a_worker_sees_the_gpus_that_its_engine_needs(
    scene: Scene, size: int, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,8,9")
    options = {"tp_size": size}
    groups = {name: GroupConfig(model="none", workers=1, options=options, fork_server=False) for name in ("other", "g")}
    config = msgspec.structs.replace(scene.config, groups=groups)

    async def story() -> str:
        ended, gone = asyncio.Event(), asyncio.Event()

        def exited(_: WorkerExited) -> None:
            ended.set()

        launcher = LocalLauncher(LauncherContext(config, scene.directory, "ipc://nowhere", None, exited))
        launcher.start("g", 0, "g-0.1.1")
        record = msgspec.json.decode((scene.directory / "workers" / "g-0.1.1.json").read_bytes())
        while not (environment := psutil.Process(record["pid"]).environ()):  # the kernel is still in execve
            await asyncio.sleep(0)
        found = environment["CUDA_VISIBLE_DEVICES"]
        launcher.finish(gone.set)
        async with asyncio.timeout(PATIENCE_S):
            await ended.wait()
            await gone.wait()
        return found

    assert asyncio.run(story()) == seen


def test_a_worker_whose_slot_was_removed_is_ended(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    config = msgspec.structs.replace(scene.config.groups["g"], gpus=["0"])
    scene.config = msgspec.structs.replace(scene.config, groups={"g": config})
    worker = scene.stranger()
    path = scene.record(worker.pid, index=1, created=records.created_at(worker.pid))
    assert scene.run(lambda launcher: launcher.adopt()) == [EarlierWorker("g", 1, path.stem, lives=False)]
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    line = f"worker {path.stem} is ended: the configuration has no worker g-1\n"
    assert line in capfd.readouterr().err


@pytest.mark.parametrize("config", ["without the slot", "with the slot"])
def test_no_worker_is_started_before_the_sessions_of_earlier_ones_have_ended(
    scene: Scene, config: str, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    """What is left may hold a GPU. A process that is killed may take seconds to give its memory back."""
    worker = scene.stranger()
    left = scene.stranger()
    index = 0 if config == "with the slot" else 1
    created = records.created_at(worker.pid)
    path = scene.record(worker.pid, index=index, created=created)
    if index == 0:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(PATIENCE_S)
    members = [left.pid]

    def session_member(_: int) -> int | None:
        return members[0] if members else None

    monkeypatch.setattr(records, "session_member", session_member)

    async def story() -> None:
        launcher = LocalLauncher(LauncherContext(scene.config, scene.directory, "ipc://nowhere", None, scene.exited.append))
        launcher.adopt()
        first = len(children)
        assert launcher.start("g", 0, "g-0.2.0") and launcher.start("g", 0, "g-0.2.1")
        launcher.stop("g-0.2.0", "it is not wanted")
        if index == 1:
            await asyncio.to_thread(worker.wait, PATIENCE_S)
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert len(children) == first and path.exists(), "one of the session is still there"
        members.clear()
        left.kill()
        async with asyncio.timeout(PATIENCE_S):
            while len(children) == first:
                await asyncio.sleep(0.01)
        assert not path.exists() and len(children) == first + 1
        launcher.stop_all()

    asyncio.run(story())
    assert scene.exited[0].reason == "it is not wanted"  # the loop may hear of the end of the other one, too
    for child in children:
        child.wait(PATIENCE_S)


@pytest.mark.parametrize("slot", [0, 1])
def test_an_adopted_worker_keeps_its_gpu_and_no_other_worker_gets_it(
    scene: Scene, slot: int, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    """The group before its own has one worker more in the new configuration."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    before = scene.config.groups["g"]
    other = GroupConfig(model="none", workers=2, fork_server=False)
    groups = {"other": other, "g": msgspec.structs.replace(other, workers=1, options=before.options)}
    scene.config = msgspec.structs.replace(scene.config, groups=groups)
    worker = scene.stranger()
    scene.record(worker.pid, created=records.created_at(worker.pid), gpus="1")
    seen: list[dict[str, str]] = []

    def adopt(launcher: LocalLauncher) -> list[EarlierWorker]:
        found = launcher.adopt()
        seen.append(launcher._environment("other", slot))  # pyright: ignore[reportPrivateUsage]
        assert answers(worker)
        launcher.stop_all()
        return found

    assert [one.lives for one in scene.run(adopt)] == [True]
    assert seen[0]["CUDA_VISIBLE_DEVICES"] == ["0", "2"][slot]
    for child in children:
        child.kill()
        child.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("had", "why"),
    [
        ({"gpus": "1"}, "gives g-0 GPU 0, and it has 1"),  # this one is another worker's now
        # Its answers would be those of another model than the status says, and than those of workers that start later.
        ({"model": "old"}, "gives g-0 the model none, and it has old"),
        ({"model": ""}, "gives g-0 the model none, and it has an unknown one"),
    ],
    ids=["gpus", "model", "unknown model"],
)
def test_a_worker_that_is_not_what_the_configuration_says_is_ended(
    scene: Scene, had: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    group = GroupConfig(model="none", fork_server=False)
    groups = {"other": msgspec.structs.replace(group, gpus=["1"]), "g": group}
    scene.config = msgspec.structs.replace(scene.config, groups=groups)
    worker = scene.stranger()
    fields: dict[str, Any] = {"created": records.created_at(worker.pid), "gpus": "0", **had}
    path = scene.record(worker.pid, **fields)
    assert scene.run(lambda launcher: launcher.adopt()) == [EarlierWorker("g", 0, path.stem, lives=False)]
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    assert f"worker {path.stem} is ended: the configuration {why}\n" in capfd.readouterr().err


@pytest.mark.parametrize(("slot", "ends"), [("g.0", False), ("g.1", True), ("other.0", True)])
def test_a_stager_whose_slot_was_removed_is_asked_to_end(scene: Scene, slot: str, ends: bool) -> None:
    """It holds staged weights in the memory of a GPU that another worker may get."""
    config = msgspec.structs.replace(scene.config.groups["g"], options={"tensors": [["w", "float32", [4]]]})
    scene.config = msgspec.structs.replace(scene.config, groups={"g": config})
    stager = scene.stranger()
    (scene.directory / "stagers").mkdir()
    record = {"pid": stager.pid, "created": records.created_at(stager.pid), "host": host_identity()}
    (scene.directory / "stagers" / f"{slot}.json").write_bytes(msgspec.json.encode(record))
    scene.run(lambda launcher: launcher.adopt())
    if ends:
        assert stager.wait(PATIENCE_S) == -signal.SIGTERM
    else:
        assert answers(stager)


@pytest.mark.parametrize(("held", "starts"), [("1", True), ("0", False), ("", False), ("GPU-1", False)])
def test_a_process_that_never_ends_keeps_workers_from_its_own_gpus_alone(
    scene: Scene,
    held: str,
    starts: bool,
    monkeypatch: pytest.MonkeyPatch,
    children: "list[subprocess.Popen[bytes]]",
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As one does that waits for the driver of a broken GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("enginepool.coordinator.launchers.leftovers.LATE_S", 0.01)
    group = GroupConfig(model="none", fork_server=False)
    scene.config = msgspec.structs.replace(scene.config, groups={"g": group})
    stuck, left = scene.stranger(), scene.stranger()
    scene.record(stuck.pid, index=1, created=records.created_at(stuck.pid), gpus=held)

    def session_member(_: int) -> int:
        return left.pid

    monkeypatch.setattr(records, "session_member", session_member)

    async def story() -> None:
        launcher = LocalLauncher(LauncherContext(scene.config, scene.directory, "ipc://nowhere", None, scene.exited.append))
        launcher.adopt()
        await asyncio.to_thread(stuck.wait, PATIENCE_S)
        await asyncio.sleep(0.1)
        first = len(children)
        assert launcher.start("g", 0, "g-0.2.0")
        assert (len(children) > first) == starts
        launcher.stop_all()

    asyncio.run(story())
    assert f"session {stuck.pid} still has a process after 0.01 s" in capfd.readouterr().err
    for child in children:
        child.kill()
        child.wait(PATIENCE_S)


def test_a_clock_that_is_set_makes_no_other_process_of_one(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = scene.stranger()
    created = records.created_at(worker.pid)
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600.0)
    assert records.lives(worker.pid, created)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record can be written any more."""

    def write_bytes(path: Path, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.fixture
def children(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> "list[subprocess.Popen[bytes]]":
    """Every process that is started from now on."""
    found: list[subprocess.Popen[bytes]] = []
    popen: Any = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        found.append(popen(*args, **options))
        processes.adopt(psutil.Process(found[-1].pid))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@pytest.mark.usefixtures("full")
def test_a_worker_of_which_no_record_can_be_written_is_one_that_could_not_be_started(
    scene: Scene, children: "list[subprocess.Popen[bytes]]"
) -> None:
    scene.run(lambda launcher: launcher.start("g", 0, "g-0.2.1"))
    [child] = children
    assert child.poll() == -signal.SIGKILL
    [exited] = scene.exited
    reason = exited.reason
    assert exited.incarnation == "g-0.2.1" and exited.unstarted
    assert re.fullmatch(r"the worker process could not be started: /\S+g-0\.2\.1\.json: No space left on device", reason)


def test_folders_that_were_removed_are_made_again_with_the_records_of_what_runs(
    scene: Scene, children: "list[subprocess.Popen[bytes]]"
) -> None:
    found: list[list[str]] = []

    def start(launcher: LocalLauncher) -> None:
        launcher.start("g", 0, "g-0.2.1")
        shutil.rmtree(scene.directory)
        scene.directory.mkdir()
        launcher.start("g", 0, "g-0.2.2")
        launcher.restore_folders()
        found.append(sorted(path.stem for path in (scene.directory / "workers").glob("*.json")))

    scene.run(start)
    for child in children:
        child.kill()
        child.wait()
    assert scene.exited == [] and len(children) == 2
    assert found == [["g-0.2.1", "g-0.2.2"]]


def test_a_worker_whose_log_cannot_be_made_names_the_file_and_is_one_that_could_not_be_started(scene: Scene) -> None:
    def start(launcher: LocalLauncher) -> None:
        shutil.rmtree(scene.directory / "logs")
        (scene.directory / "logs").write_text("a file")
        launcher.start("g", 0, "g-0.2.1")

    scene.run(start)
    [exited] = scene.exited
    assert exited.unstarted
    assert exited.reason == f"the worker process could not be started: {scene.directory}/logs: File exists"


def test_the_end_of_a_worker_is_found_out_although_no_file_descriptor_is_left_for_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice each: no process can be watched, and none can be looked for."""
    monkeypatch.setattr(records, "RETRY_S", 0.01)
    failed: list[str] = []

    def none_left(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if failed.count(name) < 2:
                failed.append(name)
                raise OSError(errno.EMFILE, "Too many open files")
            return real(*arguments)

        return call

    monkeypatch.setattr(os, "pidfd_open", none_left("watch", os.pidfd_open))
    worker = scene.stranger()
    scene.record(worker.pid, created=records.created_at(worker.pid))

    async def story() -> None:
        gone = asyncio.Event()

        def exited(event: WorkerExited) -> None:
            scene.exited.append(event)
            gone.set()

        launcher = LocalLauncher(LauncherContext(scene.config, scene.directory, "ipc://nowhere", None, exited))
        [found] = launcher.adopt()
        monkeypatch.setattr(psutil, "process_iter", none_left("look", psutil.process_iter))
        launcher.stop(found.incarnation, "it is silent")
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()

    asyncio.run(story())
    [exited] = scene.exited
    assert exited == WorkerExited(exited.now, "g-0.1.1", "it is silent")
    assert sorted(failed) == ["look", "look", "watch", "watch"]


#: ends when it is asked to, some time later, and says that it has
ENDS_LATER = """
import os, signal, sys, time
def end(*_):
    time.sleep(0.5)
    open(os.environ["SAID"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(os.environ["SAID"] + ".ready", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("unwatched", [0, 3])
def test_stagers_are_waited_for_when_a_pool_ends_well(
    unwatched: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    popen: Any = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen([sys.executable, "-c", ENDS_LATER], **options))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    (tmp_path / "logs").mkdir()
    said = {place: tmp_path / place for place in ("g.0", "g.1")}
    # No file descriptor is left at first.
    monkeypatch.setattr(records, "RETRY_S", 0.01)
    real, errors = os.pidfd_open, [OSError(errno.EMFILE, "Too many open files")] * unwatched

    def watch(pid: int) -> int:
        if errors:
            raise errors.pop()
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", watch)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.02)

    async def story() -> None:
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        for place, path in said.items():
            stagers.ensure(place, {"SAID": str(path)}, device="cpu", gpus=1)
        await until(lambda: all(path.with_name(f"{path.name}.ready").exists() for path in said.values()))
        gone = asyncio.Event()
        stagers.finish(gone.set)
        assert not gone.is_set()
        async with asyncio.timeout(PATIENCE_S):
            await gone.wait()
        assert all(path.exists() for path in said.values())

    asyncio.run(story())
    assert [child.poll() for child in children] == [0, 0]
    assert list((tmp_path / "stagers").glob("*.json")) == []


def test_a_stager_for_whose_connection_no_descriptor_is_left_is_connected_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    listens = "import socket, sys, time\ns = socket.socket(socket.AF_UNIX)\ns.bind(sys.argv[1])\ns.listen()\nprint(s.accept())"
    command = (sys.executable, "-c", listens, str(tmp_path / "stagers" / "g.0.sock"))
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.COMMAND", command)
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.CONNECT_S", 0.01)
    (tmp_path / "logs").mkdir()

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def story() -> None:
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        with monkeypatch.context() as patch:
            patch.setattr("enginepool.coordinator.launchers.stagers.socket.socket", none_left)
            stagers.ensure("g.0", {}, device="cpu", gpus=1)
        await asyncio.to_thread(children[0].wait, PATIENCE_S)  # it was connected
        stagers.end()

    asyncio.run(story())
    assert children[0].returncode == 0


@pytest.mark.parametrize("gpus", ["0", "1"])
def test_a_stager_whose_gpu_is_another_worker_s_now_is_started_again_with_its_own(
    gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.AGAIN_S", (0.01, 0.01))
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.COMMAND", sleeps)
    (tmp_path / "logs").mkdir()
    (tmp_path / "stagers").mkdir()
    path = tmp_path / "stagers" / "g.0.json"
    earlier = subprocess.Popen(sleeps, start_new_session=True)
    record = {"pid": earlier.pid, "created": records.created_at(earlier.pid), "host": host_identity(), "gpus": gpus}
    path.write_bytes(msgspec.json.encode(record))

    async def story() -> None:
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        stagers.ensure("g.0", {"CUDA_VISIBLE_DEVICES": "1"}, device="cuda", gpus=1)
        async with asyncio.timeout(PATIENCE_S):
            while gpus == "0" and not (path.exists() and b'"gpus":"1"' in path.read_bytes()):
                await asyncio.sleep(0.01)
        assert (earlier.poll() is None) == (gpus == "1")
        # It was asked to end: it writes the snapshots that it owes.
        assert gpus == "1" or earlier.returncode == -signal.SIGTERM
        stagers.end()

    asyncio.run(story())
    for child in children:
        child.wait(PATIENCE_S)


def test_stagers_that_have_ended_in_time_do_not_end_those_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of external workers goes on in its directory when the settings of its group have changed."""
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.FINISH_S", 0)

    async def story() -> bool:
        stagers, record, gone = Stagers(tmp_path, None, PATIENCE_S), tmp_path / "stagers" / "g.0.json", asyncio.Event()

        def follow() -> None:
            record.write_text("of the next one")
            gone.set()

        stagers.finish(follow)
        await gone.wait()
        await asyncio.sleep(0)  # what is due happens
        return record.exists()

    assert asyncio.run(story())


@pytest.mark.usefixtures("full")
def test_a_stager_of_which_no_record_can_be_written_is_ended_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: "list[subprocess.Popen[bytes]]"
) -> None:
    monkeypatch.setattr("enginepool.coordinator.launchers.stagers.AGAIN_S", (0.01, 0.01))
    (tmp_path / "logs").mkdir()

    async def story() -> None:
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        stagers.ensure("g.0", {}, device="cpu", gpus=1)
        async with asyncio.timeout(PATIENCE_S):
            while len(children) < 3:
                await asyncio.sleep(0.01)
        stagers.end()

    asyncio.run(story())
    assert [child.poll() for child in children] == [-signal.SIGKILL] * len(children)


@pytest.mark.usefixtures("full", "children")
def test_a_stager_that_cannot_be_started_is_due_once_however_often_its_worker_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    due: list[asyncio.TimerHandle] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later

        def noted(*args: Any) -> asyncio.TimerHandle:
            due.append(call_later(*args))
            return due[-1]

        monkeypatch.setattr(loop, "call_later", noted)
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        for _ in range(10):
            stagers.ensure("g.0", {}, device="cpu", gpus=1)
        stagers.end()

    asyncio.run(story())
    assert [handle.cancelled() for handle in due] == [True] * 9 + [False]


def test_all_stagers_are_ended_also_where_their_records_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    async def story() -> list[int]:
        stagers = Stagers(tmp_path, None, PATIENCE_S)
        sleepers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
        for number, sleeper in enumerate(sleepers):
            records.ProcessRecord.of(sleeper.pid).write(tmp_path / "stagers" / f"g.{number}.json")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", read_only)
            stagers.end()
        return [sleeper.wait(PATIENCE_S) for sleeper in sleepers]

    assert asyncio.run(story()) == [-signal.SIGKILL] * 2


def ends(scene: Scene, monkeypatch: pytest.MonkeyPatch, code: str) -> WorkerExited:
    """How the launcher says that a worker which runs this code has ended."""
    monkeypatch.setattr("enginepool.coordinator.launchers.local.COMMAND", (sys.executable, "-c", code))

    async def story() -> WorkerExited:
        ended: asyncio.Future[WorkerExited] = asyncio.get_running_loop().create_future()
        launcher = LocalLauncher(LauncherContext(scene.config, scene.directory, "ipc://nowhere", None, ended.set_result))
        launcher.start("g", 0, "g-0.1.1")
        try:
            return await asyncio.wait_for(ended, PATIENCE_S)
        finally:
            launcher.stop_all()

    return asyncio.run(story())


def test_a_worker_without_room_on_a_disk_can_be_started_again_and_the_room_is_said(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = ends(scene, monkeypatch, "import os; print(OSError(28, os.strerror(28)), flush=True); os._exit(78)")
    assert not event.permanent and event.failed
    space = r"\d+\.\d MiB in "
    said = rf"exit code 78: \[Errno 28\] No space left on device; free: {space}{scene.directory}, {space}\S+"
    assert re.fullmatch(said, event.reason), event.reason


@pytest.mark.parametrize(("line", "said"), [("ready to serve", ""), ("RuntimeError: no", ": RuntimeError: no")])
def test_a_worker_that_was_killed_has_the_last_line_of_its_log_as_reason_only_if_it_is_an_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    event = ends(scene, monkeypatch, f"import os; print({line!r}, flush=True); os.kill(os.getpid(), 9)")
    assert event.reason == f"ended by SIGKILL{said}" and not event.failed
