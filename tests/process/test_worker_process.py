"""A real worker process with the sim engine, against a bare ROUTER that speaks for the coordinator."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from bench.processes import free_port
from enginepool.protocol.messages import (
    Accept,
    Batch,
    Done,
    Drain,
    ErrorReply,
    Exiting,
    Expired,
    FrameSpec,
    FromWorker,
    Idle,
    Message,
    Part,
    Ping,
    Pong,
    Ready,
    Register,
    Stage,
    Tokenize,
    Tokenized,
)
from enginepool.workers.events import Exit
from enginepool.workers.link import LIFELINE_GRACE_S, ORPHAN_GRACE
from enginepool.workers.sim.scores import expected_scores
from tests.process.processes import Processes

#: nothing here takes so long; a test that waits for it fails
PATIENCE_S = 60.0
#: a batch that takes so long is still there for what comes after it, also where a process gets no CPU for a while
LONG_S = 3.0

M = TypeVar("M")


class Coordinator:
    """What the workers dial: one ROUTER. Times out instead of waiting without end."""

    def __init__(self, address: str = "") -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.set(zmq.LINGER, 0)
        self.router.set(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self.router.set(zmq.ROUTER_MANDATORY, 1)
        # A port that no other process is given while a successor takes it over.
        self.router.bind(address or f"tcp://127.0.0.1:{free_port()}")
        self.endpoint = self.router.get_string(zmq.LAST_ENDPOINT)
        self.decoder = msgspec.msgpack.Decoder(FromWorker)
        self.peer = b""

    def close(self) -> None:
        self.context.destroy(linger=0)

    def send(self, message: Message, *frames: bytes) -> None:
        self.send_raw(msgspec.msgpack.encode(message), *frames)

    def send_raw(self, *frames: bytes) -> None:
        self.router.send_multipart([self.peer, *frames])

    def receive(self) -> tuple[Message, list[bytes]]:
        self.peer, header, *frames = self.router.recv_multipart()
        return self.decoder.decode(header), frames

    def expect(self, kind: type[M]) -> tuple[M, list[bytes]]:
        """The next message, which must be of this kind."""
        message, frames = self.receive()
        assert isinstance(message, kind), message
        return message, frames

    def until(self, kind: type[M]) -> M:
        """The next message of this kind; others before it are skipped."""
        while True:
            message, _ = self.receive()
            if isinstance(message, kind):
                return message

    def accept(self, epoch: int = 5, orphan_s: float = 60.0) -> None:
        self.until(Register)
        self.send(Accept(epoch, orphan_s=orphan_s))

    def until_loading(self) -> None:
        while self.until(Stage).stage != "loading":
            pass

    def accept_until_ready(self, epoch: int = 5) -> Ready:
        self.accept(epoch)
        return self.until(Ready)


def spec(endpoint: str, **changes: Any) -> dict[str, Any]:
    return {"endpoint": endpoint, "group": "policy", "incarnation": "w1", "engine": "sim", "model": "m", **changes}


class Started:
    """A worker process whose stderr goes to a file, as under the supervisor."""

    def __init__(self, processes: Processes, configuration: str | None, log: Path, pass_fds: tuple[int, ...] = ()) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "ENGINEPOOL_WORKER"}
        if configuration is not None:
            environment["ENGINEPOOL_WORKER"] = configuration
        self.log = log
        with log.open("wb") as stderr:
            self.process = processes.start(
                [sys.executable, "-W", "error", "-m", "enginepool.workers.main"],
                first=signal.SIGKILL,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                start_new_session=True,
                pass_fds=pass_fds,
            )

    def ends(self) -> int:
        """Its exit code."""
        return self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return self.log.read_text()


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    router = Coordinator()
    yield router
    router.close()


Start = Callable[..., Started]


@pytest.fixture
def start(processes: Processes, coordinator: Coordinator, tmp_path: Path) -> Start:
    """Starts workers that dial `coordinator`."""
    workers: list[Started] = []

    def start(pass_fds: tuple[int, ...] = (), **changes: Any) -> Started:
        configuration = json.dumps(spec(changes.pop("endpoint", coordinator.endpoint), **changes))
        workers.append(Started(processes, configuration, tmp_path / f"{len(workers)}.log", pass_fds))
        return workers[-1]

    return start


def faults(kind: str, **when: Any) -> dict[str, Any]:
    return {"options": {"faults": [{"kind": kind, **when}]}}


QUERY, ITEMS = [1, 2, 3], [[4], [5, 6]]


def batch(epoch: int, n: int, *, query: Sequence[int] = QUERY, hidden: bool = False) -> tuple[Message, bytes, bytes, bytes]:
    ids = [token for item in ITEMS for token in item]
    specs = [
        FrameSpec("query", "int32", (len(query),)),
        FrameSpec("items", "int32", (len(ids),)),
        FrameSpec("item_lengths", "uint32", (len(ITEMS),)),
    ]
    frames = [np.array(query, np.int32), np.array(ids, np.int32), np.array([len(item) for item in ITEMS], np.uint32)]
    header = Batch((epoch, n), [Part(specs, labels=[7, 8], hidden=hidden)])
    return header, *(frame.tobytes() for frame in frames)  # pyright: ignore[reportReturnType]


# --- work ---------------------------------------------------------------------------------------------------------------


def test_a_worker_registers_loads_and_answers(coordinator: Coordinator, start: Start) -> None:
    worker = start()
    register, _ = coordinator.expect(Register)
    assert (register.group, register.incarnation, register.pid, register.epoch) == ("policy", "w1", worker.process.pid, 0)
    coordinator.send(Accept(5))
    assert coordinator.expect(Idle)[0].epoch == 5
    coordinator.expect(Stage)
    ready = coordinator.until(Ready)
    assert (ready.capabilities.engine, ready.capabilities.kind, ready.version) == ("sim", "causal", 0)
    coordinator.send(*batch(5, 1))
    done, frames = coordinator.expect(Done)
    assert (done.batch, done.forwards, done.version) == ((5, 1), 1, 0)
    assert done.parts[0].frames == [FrameSpec("scores", "float32", (2, 2))]
    scores = np.frombuffer(frames[0], np.float32).reshape(2, 2)
    assert np.array_equal(scores, expected_scores(QUERY, ITEMS, labels=(7, 8))["scores"])


def test_hidden_states_come_back_whole_however_large(coordinator: Coordinator, start: Start) -> None:
    start(options={"kind": "classifier", "labels": 3, "hidden": 50_000, "seed": 4})
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1, hidden=True))
    done, (scores, hidden) = coordinator.expect(Done)
    want = expected_scores(QUERY, ITEMS, classes=3, hidden=50_000, seed=4)
    assert [spec.shape for spec in done.parts[0].frames] == [(2, 3), (2, 50_000)]
    assert scores == want["scores"].tobytes()
    assert hidden == want["hidden"].tobytes()


def test_a_batch_delivered_twice_runs_once_and_is_answered_again(coordinator: Coordinator, start: Start) -> None:
    start(**faults("lie_forwards", at_batch=2))
    coordinator.accept_until_ready()
    answers: list[tuple[Done, list[bytes]]] = []
    for _ in range(2):
        coordinator.send(*batch(5, 1))
        answers.append(coordinator.expect(Done))
    assert answers[0] == answers[1]
    coordinator.send(*batch(5, 2))
    assert coordinator.expect(Done)[0].forwards == 2, "only now the engine had its second batch"


def test_a_higher_epoch_drops_what_runs(coordinator: Coordinator, start: Start) -> None:
    start(**faults("slow", at_batch=1, seconds=LONG_S))
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1))
    coordinator.send(Accept(6))
    assert coordinator.expect(Idle)[0].epoch == 6
    coordinator.expect(Ready)
    coordinator.send(*batch(6, 2))
    assert coordinator.expect(Done)[0].batch == (6, 2)


def test_work_that_was_not_accepted_is_refused(coordinator: Coordinator, start: Start) -> None:
    start()
    coordinator.accept_until_ready()
    coordinator.send(*batch(4, 1))
    assert coordinator.expect(ErrorReply)[0].code == "hello_required"


def test_text_is_tokenized(coordinator: Coordinator, start: Start) -> None:
    start()
    coordinator.accept_until_ready()
    specs = [FrameSpec("query", "utf8", (1,)), FrameSpec("items", "utf8", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    coordinator.send(Tokenize((5, 1), specs), b"q", "aé".encode(), np.array([1, 2], np.uint32).tobytes())
    tokenized, (items, lengths) = coordinator.expect(Tokenized)
    assert tokenized.task == (5, 1)
    assert np.frombuffer(items, np.int32).tolist() == [byte + 3 for byte in "qaqé".encode()]
    assert np.frombuffer(lengths, np.uint32).tolist() == [2, 3]
    coordinator.send(Tokenize((5, 2), specs), b"q", "aé".encode(), np.array([2, 1], np.uint32).tobytes())
    assert coordinator.expect(Tokenized)[0].code == "malformed"


def test_a_refused_part_is_answered_and_the_worker_lives_on(coordinator: Coordinator, start: Start) -> None:
    start(**faults("error", at_batch=1))
    coordinator.accept_until_ready()
    for n, code in ((1, "engine_error"), (2, "")):
        coordinator.send(*batch(5, n))
        assert coordinator.expect(Done)[0].parts[0].code == code


def test_what_the_header_does_not_say_is_answered_malformed(coordinator: Coordinator, start: Start) -> None:
    start()
    coordinator.accept_until_ready()
    header, query, items, lengths = batch(5, 1)
    coordinator.send(header, query, items[:-4], lengths)
    assert coordinator.expect(Done)[0].parts[0].code == "malformed"
    header, query, items, lengths = batch(5, 2)
    coordinator.send(header, query, items, lengths, b"more")
    assert coordinator.expect(Done)[0].parts[0].code == "malformed"
    header, query, items, _ = batch(5, 3)
    coordinator.send(header, query, items, np.array([1, 1], np.uint32).tobytes())
    assert "sum 2; frame 'items' has 3" in coordinator.expect(Done)[0].parts[0].message


@pytest.mark.parametrize("labels", [[0] * 1_100_000, "none"], ids=["header too long", "field of a wrong type"])
def test_work_that_cannot_be_read_is_answered_with_an_error_for_each_part(
    labels: object, coordinator: Coordinator, start: Start
) -> None:
    start()
    coordinator.accept_until_ready()
    parts: list[dict[str, Any]] = [{"frames": [], "labels": labels}, {"frames": []}]
    coordinator.send_raw(msgspec.msgpack.encode({"type": "batch", "batch": [5, 1], "parts": parts}))
    done, _ = coordinator.expect(Done)
    assert (done.batch, [part.code for part in done.parts]) == ((5, 1), ["engine_error"] * 2)
    assert "cannot be read" in done.parts[0].message
    coordinator.send_raw(msgspec.msgpack.encode({"type": "tokenize", "task": [5, 2], "frames": labels}))
    tokenized, _ = coordinator.expect(Tokenized)
    assert (tokenized.task, tokenized.code) == ((5, 2), "engine_error")


def test_messages_that_cannot_be_read_are_dropped_with_a_line(coordinator: Coordinator, start: Start) -> None:
    worker = start()
    coordinator.accept_until_ready()
    for header in (b"\xff", b"", msgspec.msgpack.encode({"type": "surprise"}), msgspec.msgpack.encode({"type": "accept"})):
        coordinator.send_raw(header)
    coordinator.send(Ping(1))
    coordinator.expect(Pong)
    assert worker.said().count("dropped a message of the coordinator") == 4


# --- liveness -----------------------------------------------------------------------------------------------------------


def test_pings_are_answered_while_the_main_thread_stands_still(coordinator: Coordinator, start: Start) -> None:
    start(**faults("block_on_load", seconds=600.0))
    coordinator.accept()
    coordinator.until_loading()
    for at in (11, 12):
        coordinator.send(Ping(at))
        assert coordinator.expect(Pong)[0] == Pong(at, stage="loading")


def test_a_worker_registers_with_the_next_coordinator(coordinator: Coordinator, start: Start) -> None:
    start()
    coordinator.accept_until_ready()
    coordinator.close()
    successor = Coordinator(coordinator.endpoint)
    try:
        assert successor.expect(Register)[0].epoch == 5
        successor.send(Accept(6))
        assert successor.expect(Idle)[0].epoch == 6
        successor.expect(Ready)
        successor.send(*batch(6, 1))
        assert successor.expect(Done)[0].batch == (6, 1)
    finally:
        successor.close()


def test_an_orphan_ends(start: Start) -> None:
    worker = start(endpoint="tcp://127.0.0.1:1", orphan_s=0.5)
    assert worker.ends() == Exit.ORPHANED
    assert "no word from a coordinator for 0.5 s" in worker.said()


def test_a_worker_that_was_accepted_is_an_orphan_after_the_time_it_was_told(coordinator: Coordinator, start: Start) -> None:
    worker = start()
    coordinator.accept(orphan_s=0.5)
    assert worker.ends() == Exit.ORPHANED


def test_a_worker_whose_incarnation_expired_registers_again_without_loading_again(
    coordinator: Coordinator, start: Start
) -> None:
    worker = start(external=True, orphan_s=0.5)
    coordinator.accept_until_ready()
    coordinator.send(Expired("w1", "it was silent for 12.0 s"))
    register, _ = coordinator.expect(Register)
    assert (register.incarnation, register.pid, register.epoch) == ("w1+2", worker.process.pid, 5)
    coordinator.send(Accept(5, orphan_s=0.5))
    assert coordinator.expect(Idle)[0].epoch == 5
    coordinator.expect(Ready)
    coordinator.send(*batch(5, 1))
    coordinator.expect(Done)
    # Silent for longer than `orphan_s`, it is still there: it asks again.
    coordinator.until(Register)
    assert worker.said().count("was given up") == 1


def test_a_refused_worker_whose_main_thread_stands_still_is_ended_by_its_link(coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("block_on_load", seconds=600.0))
    coordinator.accept()
    coordinator.until_loading()
    coordinator.send(ErrorReply("superseded", "it was loading for more than 1800 s"))
    assert worker.ends() == Exit.REFUSED
    assert "the coordinator refuses this worker" in worker.said()


def test_a_closed_lifeline_ends_the_worker(coordinator: Coordinator, start: Start) -> None:
    read_end, write_end = os.pipe()
    worker = start(pass_fds=(read_end,), lifeline_fd=read_end)
    os.close(read_end)
    coordinator.accept_until_ready()
    os.close(write_end)
    assert worker.ends() == Exit.OWNER_GONE


def test_a_closed_lifeline_ends_a_worker_whose_main_thread_stands_still(coordinator: Coordinator, start: Start) -> None:
    read_end, write_end = os.pipe()
    worker = start(pass_fds=(read_end,), lifeline_fd=read_end, **faults("block_on_load", seconds=600.0))
    os.close(read_end)
    coordinator.accept()
    coordinator.until_loading()
    os.close(write_end)
    assert worker.ends() == Exit.OWNER_GONE


def test_an_orphan_whose_main_thread_stands_still_ends(coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("block_on_load", seconds=600.0))
    coordinator.accept(orphan_s=1.0)
    coordinator.until_loading()
    assert worker.ends() == Exit.ORPHANED


def test_a_worker_that_was_stopped_for_longer_than_an_orphan_lives_goes_on(coordinator: Coordinator, start: Start) -> None:
    """A batch system suspends a job with its coordinator: neither could send."""
    worker = start()
    coordinator.accept(orphan_s=1.0)
    coordinator.until(Ready)
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(ORPHAN_GRACE * 1.0 + LIFELINE_GRACE_S + 0.5)  # shorter, and no process had a reason to end it
    worker.process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.1)  # much less than an orphan lives: this process may be late, too
    coordinator.send(Ping(7))
    assert coordinator.until(Pong).at == 7


# --- the end ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "drain"])
def test_a_drain_finishes_what_runs_then_ends(how: str, coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("slow", at_batch=1, seconds=LONG_S))
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1))
    if how == "drain":
        coordinator.send(Drain())
    else:
        coordinator.send(Ping())
        coordinator.expect(Pong)
        worker.process.send_signal(signal.SIGTERM)
    assert coordinator.expect(Stage)[0].stage == "draining"
    assert coordinator.expect(Done)[0].batch == (5, 1)
    bye, _ = coordinator.expect(Exiting)
    assert not bye.failed
    assert worker.ends() == 0


def test_a_worker_whose_log_cannot_be_written_works_on_and_drains(processes: Processes, coordinator: Coordinator) -> None:
    full = Started(processes, json.dumps(spec(coordinator.endpoint)), Path("/dev/full"))
    coordinator.accept_until_ready()
    coordinator.send(Accept(4, orphan_s=60.0))  # of a coordinator that was: it says so
    coordinator.send(*batch(5, 1))
    assert coordinator.until(Done).batch == (5, 1)
    full.process.send_signal(signal.SIGTERM)
    assert full.ends() == Exit.DRAINED


def test_a_drain_gives_up_on_work_that_hangs(coordinator: Coordinator, start: Start) -> None:
    worker = start(drain_s=0.3, **faults("hang"))
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1))
    coordinator.send(Drain())
    assert "1 unfinished" in coordinator.until(Exiting).reason
    assert worker.ends() == 0


def test_sigterm_while_loading_ends_the_worker(coordinator: Coordinator, start: Start) -> None:
    worker = start(options={"load_s": 600.0})
    coordinator.accept()
    coordinator.until_loading()
    worker.process.send_signal(signal.SIGTERM)
    coordinator.until(Exiting)
    assert worker.ends() == 0


def test_the_reason_of_a_crash_arrives(coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("crash", at_batch=1))
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1))
    bye, _ = coordinator.expect(Exiting)
    assert bye.failed
    assert "crash asked for" in bye.reason
    assert worker.ends() == Exit.ENGINE_DIED
    assert bye.reason in worker.said()


def test_the_reason_why_an_engine_cannot_load_arrives(coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("crash_on_load"))
    coordinator.accept()
    bye = coordinator.until(Exiting)
    assert bye.failed
    assert "crash_on_load" in bye.reason
    assert worker.ends() == Exit.ENGINE_DIED


@pytest.mark.parametrize(("kind", "code"), [("abort", -signal.SIGKILL), ("exit_on_load", 3)])
def test_the_hard_faults_of_the_sim_leave_no_word(kind: str, code: int, coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults(kind))
    coordinator.accept()
    if kind == "abort":
        coordinator.until(Ready)
        coordinator.send(*batch(5, 1))
    assert worker.ends() == code


def test_a_superseded_worker_ends_at_once(coordinator: Coordinator, start: Start) -> None:
    worker = start(**faults("hang"))
    coordinator.accept_until_ready()
    coordinator.send(*batch(5, 1))
    coordinator.send(ErrorReply("superseded", "a newer one is here"))
    assert worker.ends() == Exit.REFUSED
    assert "a newer one is here" in worker.said()


END_WITH_CHILDREN = """
import subprocess, sys
from enginepool.workers.events import Exit
from enginepool.workers.process import end_process
sleeper = "import time; time.sleep(600)"
orphaning = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleeper!r}]).pid, flush=True)"
subprocess.run([sys.executable, "-c", orphaning])
print(subprocess.Popen([sys.executable, "-c", sleeper]).pid, flush=True)
end_process(Exit.ENGINE_DIED)
"""


def test_the_end_leaves_no_process_behind_not_even_an_orphaned_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END_WITH_CHILDREN],
        stdout=subprocess.PIPE,
        start_new_session=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == Exit.ENGINE_DIED
    children = [int(pid) for pid in ended.stdout.split()]
    assert len(children) == 2
    for pid in children:
        try:
            assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            continue


# --- what cannot start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        (None, "ENGINEPOOL_WORKER is not set"),
        ("{", "ENGINEPOOL_WORKER is not JSON"),
        (spec("tcp://127.0.0.1:1", engine="vllm"), "engine = 'vllm': must be one of sglang, sim"),
        (spec("tcp://127.0.0.1:1", retries=3), "unknown field `retries`"),
        (spec("tcp://127.0.0.1:1", model=""), "model = '': must name a model"),
        ({"endpoint": "tcp://127.0.0.1:1"}, "missing required field `model`"),
        (spec("tcp://127.0.0.1:1", drain_s=-1), "drain_s = -1"),
        (spec("tcp://127.0.0.1:1", lifeline_fd=999), "cannot start"),
        (spec("localhost"), "endpoint = 'localhost'"),
        (spec("tcp://127.0.0.1"), "endpoint tcp://127.0.0.1: Invalid argument"),
        (spec("tcp://127.0.0.1:1", options={"speed": 9}), "options of engine sim: Object contains unknown field `speed`"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    processes: Processes, configuration: str | dict[str, Any] | None, says: str, tmp_path: Path
) -> None:
    text = json.dumps(configuration) if isinstance(configuration, dict) else configuration
    worker = Started(processes, text, tmp_path / "log")
    assert worker.ends() == Exit.UNUSABLE
    assert says in worker.said()
    assert worker.said().count("\n") == 1


def test_a_worker_whose_kernel_cache_cannot_be_made_names_the_setting_and_is_started_again(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    cache = f"{tmp_path}/file/below"
    worker = Started(processes, json.dumps(spec("tcp://127.0.0.1:1", kernel_cache=cache)), tmp_path / "log")
    assert worker.ends() == Exit.ENGINE_DIED
    assert worker.said().endswith(f"cannot start: kernel_cache = '{cache}': Not a directory\n")
    made = f"{tmp_path}/new/kernels"
    worker = Started(
        processes, json.dumps(spec("tcp://127.0.0.1:1", kernel_cache=made, options={"speed": 9})), tmp_path / "log"
    )
    assert worker.ends() == Exit.UNUSABLE and Path(made).is_dir()
