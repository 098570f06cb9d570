"""The pieces around the engine that need no SGLang: read-out, the host's thread, the notes of its processes, the CPU bridge."""

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import psutil
import pytest
import torch

from enginepool.protocol.messages import Part
from enginepool.workers.cpu_bridge import sgl_kernel
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.fork_server import why_it_cannot_fork
from enginepool.workers.sglang.host import build
from enginepool.workers.sglang.host.engine import SglangEngine
from enginepool.workers.sglang.host.host import EngineHost
from enginepool.workers.sglang.host.process import NOTES_VARIABLE, LogNotes, keep_notes
from enginepool.workers.sglang.host.without_cuda import cuda_answered_by_a_child
from enginepool.workers.sglang.operations.score import head_scores, label_scores
from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.patches.scheduler import (
    answer_at_once,
    answer_before_the_next_launch,
    gather_of_sequences,
    open_session_for_tickets,
    report_every_forward,
    report_no_load,
)
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.outputs import forward_count, refuse_aborted
from enginepool.workers.sglang.weights import answer_files
from tests.engine.forked import run_code

# --- read-out ----------------------------------------------------------------------------------------------------------


def test_rows_that_entered_together_are_one_forward() -> None:
    assert forward_count([1234.25]) == 1
    assert forward_count([1234.25, 1234.25, 1234.25]) == 1


def test_rows_that_entered_apart_are_several_forwards_in_any_order() -> None:
    assert forward_count([12.5, 12.3, 12.5, 12.4]) == 3
    assert forward_count([12.5, 12.5 + 1e-9]) == 2


def test_a_row_without_a_time_is_an_error_not_a_forward() -> None:
    with pytest.raises(EngineError, match="does not say"):
        forward_count([1.0, 0.0])


def test_the_times_of_rows_are_read_from_the_messages_that_answer_them() -> None:
    async def answer() -> None:
        tm = SimpleNamespace(enable_metrics=False, seen=[])

        async def handle(message: Any) -> None:
            tm.seen.append(message.time_stats)

        tm._handle_batch_output = handle
        entries = Entries(tm, lambda packed: packed.rows)
        entries.expect(["a", "b", "c"])
        rows = [SimpleNamespace(entered=time) for time in (1.5, 1.5, 2.5)]
        stats = SimpleNamespace(rows=rows)
        await tm._handle_batch_output(SimpleNamespace(rids=["a", "other", "b"], time_stats=stats, cached_tokens=[4, 5, 6]))
        await tm._handle_batch_output(SimpleNamespace(rids=["c"], time_stats=None))
        assert tm.seen == [None, None], "what was unpacked here is not unpacked again"
        assert entries.pop(["b", "a", "c"]) == [(2.5, 6), (1.5, 4), (0.0, 0)]
        assert entries.pop(["a", "other"]) == [(0.0, 0), (0.0, 0)], "nothing is kept"

    asyncio.run(answer())


def labeled(*logprobs: tuple[int, float]) -> list[tuple[float, int, None]]:
    return [(value, token, None) for token, value in logprobs]


def wanted(*labels: int, softmax: bool = False, logprobs: bool = False) -> Part:
    return Part([], list(labels), softmax, logprobs=logprobs)


def test_a_label_that_is_asked_twice_is_answered_twice() -> None:
    scores = label_scores([labeled((3, np.log(0.5)), (9, np.log(0.25)))], wanted(9, 3, 9))
    np.testing.assert_allclose(scores, [[0.25, 0.5, 0.25]], rtol=1e-6)
    shares = label_scores([labeled((3, np.log(0.5)), (9, np.log(0.25)))], wanted(9, 3, 9, softmax=True))
    np.testing.assert_allclose(shares, [[0.25, 0.5, 0.25]], rtol=1e-6)


def test_softmax_over_labels_is_right_where_probabilities_vanish() -> None:
    scores = label_scores([labeled((1, -900.0), (2, -901.0))], wanted(1, 2, softmax=True))
    np.testing.assert_allclose(scores, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
    heads = head_scores([[1000.0, 1000.0]], wanted(softmax=True))
    np.testing.assert_allclose(heads, [[0.5, 0.5]])


def test_a_head_that_is_a_probability_has_it_divided_by_the_temperature() -> None:
    """As in sentence-transformers, softmax is over what the activation gives."""
    wide = 1 / (1 + np.exp([-1.0, 2.0])) / 0.5
    found = head_scores([[1.0, -2.0]], Part([], softmax=True, temperature=0.5), "sigmoid")
    np.testing.assert_allclose(found, [np.exp(wide) / np.exp(wide).sum()], rtol=1e-6)


def test_logarithms_are_finite_where_probabilities_vanish() -> None:
    row = labeled((1, -900.0), (2, -901.0))
    assert label_scores([row], wanted(1, 2)).tolist() == [[0.0, 0.0]], "in float32 these are no probabilities"
    assert label_scores([row], wanted(1, 2, logprobs=True)).tolist() == [[-900.0, -901.0]]
    shares = label_scores([row], wanted(1, 2, softmax=True, logprobs=True))
    np.testing.assert_allclose(shares, [[-np.log1p(np.exp(-1)), -np.log1p(np.exp(1))]], rtol=1e-6)
    heads = head_scores([[0.0, -2000.0]], wanted(softmax=True, logprobs=True))
    assert heads.tolist() == [[0.0, -2000.0]]
    assert heads.dtype == np.float32


def test_a_bare_number_for_a_row_is_the_output_of_a_head_with_one_label() -> None:
    """SGLang drops the dimension of a cross-encoder's one label, as of bge-reranker-v2-m3."""
    assert head_scores([1.5, -2.0], wanted()).tolist() == [[1.5], [-2.0]]
    assert head_scores([[1.5, 0.5]], wanted()).tolist() == [[1.5, 0.5]]


def test_a_row_that_the_engine_gave_up_is_an_error() -> None:
    refuse_aborted([{"meta_info": {"finish_reason": {"type": "length"}}}, {"meta_info": {"finish_reason": None}}])
    with pytest.raises(EngineError, match="aborted a row: too long"):
        refuse_aborted([{"meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}}])


# --- the host's thread -------------------------------------------------------------------------------------------------


class FakeEngine:
    """An engine of one process, which does what it is told."""

    def __init__(self, role: str, code: str) -> None:
        self.process = multiprocessing.get_context("spawn").Process(target=_engine_process, args=(role, code))
        self.process.start()
        self.stopped_by = ""

    def shutdown(self) -> None:
        self.stopped_by = threading.current_thread().name
        self.process.kill()
        self.process.join()


def _engine_process(role: str, code: str) -> None:
    keep_notes(role)
    if code == "raise":
        logging.getLogger("sglang.scheduler").error("it failed: Traceback\n  File x\nValueError: no memory for the pool\n\n")
        sys.exit(0)
    if code == "exit":
        sys.exit(3)
    signal.pause()


class Lost:
    """Takes the host's word that the engine is gone."""

    def __init__(self) -> None:
        self.reason = ""
        self.event = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.event.set()

    def wait(self) -> str:
        assert self.event.wait(60)
        return self.reason


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NOTES_VARIABLE, raising=False)


def test_an_error_that_ends_the_engine_is_the_reason() -> None:
    lost = Lost()
    host = EngineHost(lambda: FakeEngine("scheduler", "raise"), lost)
    host.start().result(60)
    assert lost.wait() == "the engine's scheduler failed: ValueError: no memory for the pool"
    assert host.last_error() == lost.reason
    host.stop()


def test_an_exit_without_a_word_is_told_by_its_code() -> None:
    lost = Lost()
    host = EngineHost(lambda: FakeEngine("detokenizer", "exit"), lost)
    engine = host.start().result(60)
    assert lost.wait() == f"the engine's detokenizer (pid {engine.process.pid}) ended with exit code 3"
    host.stop()


def test_a_signal_that_ends_the_engine_is_named() -> None:
    lost = Lost()
    host = EngineHost(lambda: FakeEngine("scheduler", "wait"), lost)
    engine = host.start().result(60)
    os.kill(engine.process.pid, signal.SIGKILL)
    assert "was killed by SIGKILL" in lost.wait()
    host.stop()


def test_stopping_is_not_losing_and_happens_on_the_thread_that_built() -> None:
    lost = Lost()
    host = EngineHost(lambda: FakeEngine("scheduler", "wait"), lost)
    engine = host.start().result(60)
    host.stop()
    assert engine.stopped_by == "engine-host"
    assert not engine.process.is_alive()
    assert not lost.event.is_set()


def test_stopping_ends_a_build_that_waits_for_its_processes() -> None:
    children: list[int] = []
    begun = threading.Event()

    def build() -> FakeEngine:
        engine = FakeEngine("scheduler", "wait")
        children.append(engine.process.pid or 0)
        begun.set()
        engine.process.join()
        raise RuntimeError("the scheduler died")

    host = EngineHost(build, Lost())
    built = host.start()
    assert begun.wait(60)
    host.stop()
    with pytest.raises(RuntimeError, match="the scheduler died"):
        built.result(60)
    assert not psutil.pid_exists(children[0])


@pytest.mark.parametrize(("folder", "kept"), [("short", True), ("long" * 15, False)])
def test_sockets_that_sglang_makes_go_with_the_engine_where_their_paths_are_short_enough(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: str, kept: bool
) -> None:
    directory = tmp_path_factory.mktemp(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    made: list[Path] = []

    def build() -> FakeEngine:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            made.append(Path(file.name))
        return FakeEngine("scheduler", "wait")

    host = EngineHost(build, Lost())
    host.start().result(60)
    assert made[0].exists() and (made[0].parent != directory) == kept
    assert tempfile.tempdir == str(directory)
    host.stop()
    assert made[0].exists() != kept


def test_a_failed_build_is_told_to_who_waits() -> None:
    def build() -> FakeEngine:
        raise OSError("no such model")

    host = EngineHost(build, Lost())
    with pytest.raises(OSError, match="no such model"):
        host.start().result(60)
    host.stop()


# --- in the engine's processes -----------------------------------------------------------------------------------------


def test_notes_of_a_process_outlive_a_host_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES_VARIABLE, str(tmp_path / "notes"))
    (tmp_path / "notes").mkdir()
    logger = logging.getLogger("sglang")
    before = list(logger.handlers)
    try:
        keep_notes("scheduler")
        note = tmp_path / "notes" / str(os.getpid())
        assert note.read_text() == "scheduler\n"
        logger.error("one line")
        assert note.read_text() == "scheduler\none line\n"
        frames = 'Traceback (most recent call last):\n  File "x.py", line 1\n    f()\n'
        logger.error(
            f"hit an exception: {frames}KeyError: 1\n\nDuring handling:\n{frames}CUDA error: out of memory\nSearch for it\n"
        )
        assert note.read_text() == "scheduler\nCUDA error: out of memory\n"
        note.unlink()
        note.parent.rmdir()
        logger.error("to nobody")
        assert not note.parent.exists()
    finally:
        logger.handlers = before


def test_a_note_for_which_the_disk_has_no_room_raises_nothing_in_the_engine() -> None:
    notes = LogNotes(Path("/dev/full"), "scheduler")
    for said in ("one line", "half a character: \ud800"):
        notes.handle(logging.LogRecord("sglang", logging.ERROR, "x.py", 1, said, None, None))


# --- the scheduler -----------------------------------------------------------------------------------------------------


def test_every_row_reports_its_forward_with_and_without_metrics() -> None:
    class Stats:
        """As SGLang's: rows stay silent without metrics."""

        enable_metrics = False
        forward_entry_time = 1.5

        def __getstate__(self) -> dict[str, float]:
            return {"others": 3.0} if self.enable_metrics else {}

    report_every_forward(Stats)
    assert Stats().__getstate__() == {"entered": 1.5}
    Stats.enable_metrics = True
    assert Stats().__getstate__() == {"others": 3.0, "entered": 1.5}


@pytest.mark.parametrize(
    ("replicas", "level", "kept"), [(1, "ERROR", (None, False)), (2, "ERROR", ("shared", False)), (1, "INFO", (None, True))]
)
def test_a_scheduler_says_how_much_it_has_to_do_only_to_who_reads_it(
    replicas: int, level: str, kept: tuple[str | None, bool], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create_writer(ports: None) -> str:
        """As SGLang's, which makes a file in /dev/shm that stays."""
        return "shared"

    create = "create_load_snapshot_writer"
    monkeypatch.setitem(globals(), create, create_writer)

    class Reporting:
        """What is changed of SGLang's scheduler."""

        def __init__(self) -> None:
            self.load_snapshot_writer = globals()[create](None)
            self.metrics_reporter = SimpleNamespace(is_stats_logging_rank=True)

    caplog.set_level(level, logger=__name__)
    report_no_load(Reporting, replicas)
    made = Reporting()
    assert (made.load_snapshot_writer, made.metrics_reporter.is_stats_logging_rank) == kept


def test_engines_answer_where_there_is_room_and_are_asked_nothing_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk, full = tmp_path / "memory", tmp_path / "disk", set[Path]()
    memory.mkdir()
    disk.mkdir()

    def statvfs(place: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=0 if place in full else 1 << 20, f_frsize=4096)

    monkeypatch.setattr(answer_files, "SHARED", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(os, "statvfs", statvfs)
    answers = answer_files.AnswerFiles()
    for place in (memory, disk):
        first, second = answers.name("answer", 2)
        assert first != second and first.parent.parent == place
        full.add(place)
    with pytest.raises(EngineError, match=rf"{memory}, {disk}: neither can be written and has 16 MiB"):
        answers.name("answer", 1)
    answers.close()
    assert not [*memory.iterdir(), *disk.iterdir()]


def test_labels_of_packed_sequences_are_those_of_the_function_that_is_replaced() -> None:
    def pick(logprobs: Any, rows: list[int], tokens: list[int]) -> Any:
        return logprobs[torch.tensor(rows), torch.tensor(tokens)]

    def original(logprobs: Any, *_: object) -> str:
        return f"original of {logprobs.shape[0]}"

    logprobs = torch.arange(7 * 10, dtype=torch.float32).view(7, 10)
    gather = gather_of_sequences(pick, original)  # pyright: ignore[reportArgumentType]
    values, tokens = gather(logprobs, [[3, 9], [5]], "prefill", [3, 4], no_copy_to_cpu=True)
    assert [value.tolist() for value in values] == [[[3, 9], [13, 19], [23, 29]], [[35], [45], [55], [65]]]
    assert tokens == [[[3, 9]] * 3, [[5]] * 4]
    assert gather(logprobs, [[3], None], "prefill", [3, 4], no_copy_to_cpu=True) == "original of 7"
    assert gather(logprobs, [[3], [4]], "decode", no_copy_to_cpu=True) == "original of 7"
    assert gather(logprobs, [[3], [4]], "prefill", [3, 4]) == "original of 7"


def test_a_scheduler_is_told_to_answer_the_host_itself() -> None:
    ports = SimpleNamespace(tokenizer_ipc_name="host", detokenizer_ipc_name="text", nccl_port=5)
    changed = answer_at_once(ports)
    assert (changed.tokenizer_ipc_name, changed.detokenizer_ipc_name, changed.nccl_port) == ("host", "host", 5)
    assert ports.detokenizer_ipc_name == "text"


class Forward:
    """A forward that is over after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class FakeScheduler:
    """As much of SGLang's as is touched: `arrivals` are what each look at its socket finds."""

    def __init__(self, forward: Forward | None, arrivals: list[list[str]], **settings: int) -> None:
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1} | settings
        self.server_args = SimpleNamespace(**sizes)
        self.last_batch = SimpleNamespace(is_prefill_only=True, forward_mode=SimpleNamespace(is_extend=lambda: True))
        self.running_batch = SimpleNamespace(is_prefill_only=True, is_empty=lambda: True)
        self.is_generation = True
        self.waiting_queue: list[str] = []
        self.result_queue = [] if forward is None else [("batch", SimpleNamespace(copy_done=forward))]
        self.arrivals = arrivals
        self.request_receiver = SimpleNamespace(recv_requests=lambda: self.arrivals.pop(0))

    def event_loop_overlap(self) -> list[str]:
        return self.request_receiver.recv_requests()

    def is_disable_overlap_for_batch(self, batch: object, last_batch: object) -> bool:
        return batch == "theirs"


class Patched(FakeScheduler):
    """The same with the change."""


answer_before_the_next_launch(Patched)


def test_work_that_arrives_while_a_forward_runs_is_taken_before_its_answer() -> None:
    assert Patched(Forward(9), [[], [], ["new"]]).event_loop_overlap() == ["new"]
    assert Patched(Forward(1), [[], [], ["too late"]]).event_loop_overlap() == []
    assert Patched(None, [[], ["too late"]]).event_loop_overlap() == []


def test_the_scheduler_waits_for_nothing_while_it_has_work_decodes_or_has_other_ranks() -> None:
    waiting, decoding, ranks = (Patched(Forward(9), [[], ["later"]], **size) for size in ({}, {}, {"tp_size": 2}))
    waiting.waiting_queue.append("row")
    decoding.running_batch = SimpleNamespace(is_prefill_only=False, is_empty=lambda: False)
    for scheduler in (waiting, decoding, ranks):
        assert scheduler.event_loop_overlap() == []
        assert not scheduler.is_disable_overlap_for_batch("next", "last") or scheduler is waiting


def test_a_forward_that_is_nearly_over_is_answered_before_the_next_launch() -> None:
    assert Patched(Forward(0), []).is_disable_overlap_for_batch("next", "last")
    assert Patched(Forward(3), []).is_disable_overlap_for_batch("next", "last")
    assert not Patched(Forward(10**9), []).is_disable_overlap_for_batch("next", "last")
    assert not Patched(Forward(0), []).is_disable_overlap_for_batch(None, "last"), "there is nothing to launch"
    assert Patched(None, []).is_disable_overlap_for_batch("theirs", "last"), "what SGLang decides by itself holds"


# --- tickets between weight updates ------------------------------------------------------------------------------------


class Session(msgspec.Struct, frozen=True):
    selector: str
    loaded_weights: bool = False


_WeightUpdateSession = Session


class Updater:
    """SGLang 0.5.23's receiver of weight updates, as far as sessions go."""

    def __init__(self, session: Session | None = None) -> None:
        self._session = session
        self.selectors: list[str] = []

    def begin_weight_update(self, request: Any) -> None: ...

    def update_weights_from_tensor(self, request: Any) -> str:
        if self._session is None:
            return "refused"
        self.selectors.append(self._session.selector)
        self._session = msgspec.structs.replace(self._session, loaded_weights=True)
        if request.fails:
            raise RuntimeError("no")
        return "done"


def ask(updater: Any, load_format: str, *, fails: bool = False) -> Any:
    return updater.update_weights_from_tensor(SimpleNamespace(load_format=load_format, fails=fails))


def test_a_ticket_is_accepted_outside_a_weight_update_and_other_loads_are_not() -> None:
    patched = type("Patched", (Updater,), {"__module__": __name__})
    open_session_for_tickets(patched, "ours")
    updater = patched()
    assert ask(updater, "ours") == "done" and updater.selectors == ["target"]
    assert ask(updater, "direct") == "refused"
    with pytest.raises(RuntimeError, match="no"):
        ask(updater, "ours", fails=True)
    assert ask(updater, "direct") == "refused", "a ticket that failed leaves no session behind"


def test_a_ticket_leaves_a_session_of_another_caller_as_it_was() -> None:
    patched = type("Patched", (Updater,), {"__module__": __name__})
    open_session_for_tickets(patched, "ours")
    updater = patched(Session("all"))
    assert ask(updater, "ours") == "done"
    assert vars(updater)["_session"] == Session("all", loaded_weights=False)


def test_a_version_without_sessions_is_left_alone() -> None:
    class Older:
        def update_weights_from_tensor(self, request: Any) -> str:
            return "done"

    before = Older.update_weights_from_tensor
    open_session_for_tickets(Older, "ours")
    assert Older.update_weights_from_tensor is before


# --- the CPU bridge ----------------------------------------------------------------------------------------------------


def test_where_there_is_no_torchvision_its_names_can_be_imported_and_all_but_what_videos_need_not_called() -> None:
    """In a process of its own: it stays there."""
    code = """
from enginepool.workers.cpu_bridge import torchvision
torchvision.install()
import torchvision.transforms as transforms
from torchvision.transforms.functional import InterpolationMode
from torchvision.io import decode_jpeg
modes = {InterpolationMode.BICUBIC: 1, InterpolationMode.NEAREST: 2}
class Resize(transforms.Resize): pass
assert not hasattr(transforms, "__wrapped__") and not hasattr(InterpolationMode, "__wrapped__")
import torch
from torchvision.transforms.v2 import functional
frames = functional.resize(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), [4, 6], interpolation=InterpolationMode.BICUBIC)
assert frames.dtype == torch.uint8 and frames.shape == (2, 1, 4, 6)
frames = functional.normalize(functional.grayscale_to_rgb(frames).float(), mean=[6, 7, 8], std=[2, 2, 2])
assert frames.shape == (2, 3, 4, 6) and frames[1, :, 0, 0].tolist() == [0.5, 0.0, -0.5]
decode_jpeg(b"")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    reason = "NotImplementedError: torchvision.io.decode_jpeg was called, but the package torchvision is not installed"
    assert done.stderr.splitlines()[-1] == reason


INSTALL = """
import sys
sys.path.insert(0, sys.argv[1])
from enginepool.workers import cpu_bridge
cpu_bridge._bridge_sgl_kernel()
cpu_bridge._bridge_sgl_kernel()
import sgl_kernel
print(sgl_kernel.__name__, sgl_kernel.__file__)
"""


@pytest.mark.parametrize("name", ["fill_bonus_tokens_cpu", "a_name_of_the_next_release"])
def test_a_stand_in_for_a_kernel_says_why_it_cannot_work(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} was called, but"):
        getattr(sgl_kernel, name)(1, key=2)


def test_the_stand_in_has_no_submodules_and_none_of_the_names_that_python_asks_for() -> None:
    """SGLang looks for kernels in submodules only where it can do without them."""
    code = INSTALL + "assert not hasattr(sgl_kernel, '__wrapped__')\nimport sgl_kernel.allreduce"
    done = subprocess.run([sys.executable, "-c", code, ""], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: No module named 'sgl_kernel.allreduce'; 'sgl_kernel' is not a package" in done.stderr


@pytest.mark.parametrize(
    ("package", "real"),
    [
        ("ready = True", True),
        ("import sgl_kernel.missing_cuda", False),
        ("raise OSError('libcuda.so.1')", False),
        (None, False),
    ],
)
def test_a_package_that_works_is_left_alone(tmp_path: Path, package: str | None, real: bool) -> None:
    if package is not None:
        (tmp_path / "sgl_kernel").mkdir()
        (tmp_path / "sgl_kernel" / "__init__.py").write_text(package)
    done = subprocess.run([sys.executable, "-c", INSTALL, str(tmp_path)], capture_output=True, text=True, check=True)
    name, file = done.stdout.split()
    assert name == "sgl_kernel"
    assert (str(tmp_path) in file) == real


@pytest.mark.engine
def test_torchvision_and_linear_layers_are_usable_and_without_chance() -> None:
    """In a process of its own: both change torch for good."""
    code = """
import warnings
warnings.simplefilter("ignore")
from enginepool.workers import cpu_bridge
from enginepool.workers.sglang.host.process import start_biases_at_zero
cpu_bridge.install()
cpu_bridge.install()
import torch, torchvision, sgl_kernel
assert torch.nn.Linear(8, 3).bias.abs().sum() > 0
start_biases_at_zero()
head = torch.nn.Linear(8, 3)
assert head.bias.abs().sum() == 0 and head.weight.abs().sum() > 0
head.load_state_dict({"weight": head.weight, "bias": torch.ones(3)})
assert head.bias.sum() == 3
assert torch.nn.Linear(8, 3, bias=False).bias is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- a model whose updates SGLang refuses ------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_ticket_reaches_the_loader_of_a_model_whose_updates_sglang_refuses(tmp_path: Path) -> None:
    """In a process of its own: it changes SGLang's class for good."""
    code = """
import sys
import msgspec, torch
from sglang.srt.model_executor.model_runner_components import weight_updater as module
from enginepool.workers.sglang.patches.scheduler import pass_tickets_of_refused_updates
from enginepool.workers.sglang.host.settings import LOADER
fields = dict.fromkeys(module.WeightUpdater.__dataclass_fields__)
del fields["_model_update_group"]
model = torch.nn.Linear(2, 2)
fields |= {"device": "cpu", "custom_weight_loaders": {LOADER: None}, "get_model": lambda: model}
updater = module.WeightUpdater(**fields)
module._unsupported_derived_weight_cache_error = lambda *_: "a cache is on"
ticket = [(msgspec.json.encode({"do": "describe", "answer": sys.argv[1]}).decode(), torch.Tensor())]
assert updater.update_weights_from_tensor(ticket, load_format=LOADER) == (False, "a cache is on")
pass_tickets_of_refused_updates(module.WeightUpdater, LOADER)
assert updater.update_weights_from_tensor(ticket, load_format=LOADER) == (True, "Success")
assert updater.update_weights_from_tensor([], load_format="direct") == (False, "a cache is on")
"""
    answer = tmp_path / "answer"
    status, said = run_code(code, str(answer))
    assert status == 0, said
    assert msgspec.msgpack.decode(answer.read_bytes()) == {"refused": "SGLang refuses: a cache is on"}


def test_an_import_that_asks_for_gpus_gets_answers_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are pretended. A process that has asked CUDA could fork none that uses it."""
    cuda: Any = torch.cuda
    here, asked = os.getpid(), list[str]()

    def real(name: str, answer: Any) -> Any:
        def ask(*_: Any) -> Any:
            asked.extend([name] if os.getpid() == here else [])
            return answer

        return ask

    gpu = SimpleNamespace(name="H200", major=9, minor=0, total_memory=1 << 37, uuid=uuid4())
    for name, answer in (("is_available", True), ("device_count", 2), ("current_device", 1), ("get_device_properties", gpu)):
        monkeypatch.setattr(torch.cuda, name, real(name, answer))
    utils = SimpleNamespace(get_device_properties=real("triton", {"max_shared_mem": 232448}))
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    monkeypatch.setattr("torch._C._get_accelerator", real("accelerator", torch.device("cpu")))
    torch.get_device_module.cache_clear()
    with cuda_answered_by_a_child():
        assert torch.get_device_module() is cuda
        kept = cuda.current_device
        assert cuda.is_available() and cuda.device_count() == 2 and kept() == 0
        assert cuda.get_device_capability() == cuda.get_device_capability("cuda:1") == (9, 0)
        assert cuda.get_device_properties(1).total_memory == 1 << 37
        assert utils.get_device_properties(1) == {"max_shared_mem": 232448}
        assert asked == []
    assert kept() == cuda.current_device() == 1, "what was kept asks CUDA from now on"
    assert asked == ["current_device", "current_device"]
    torch.get_device_module.cache_clear()


def test_a_process_in_which_an_import_has_used_cuda_is_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process has initialized, those that are forked from it cannot use. torch would still say that there is a GPU."""

    class Cuda:
        of = 0

        def cuInit(self, flags: int) -> int:
            self.of = self.of or os.getpid()
            return 0 if self.of == os.getpid() else 3

    cuda = Cuda()
    monkeypatch.setattr("ctypes.CDLL", {"libcuda.so.1": cuda}.__getitem__)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "CUDA" not in why_it_cannot_fork(1), "a child has tried it, and this process has not"
    assert cuda.cuInit(0) == 0
    assert why_it_cannot_fork(1).startswith("a process that is forked cannot use CUDA: an import has initialized it")


@pytest.mark.parametrize(
    ("scaled", "given", "loaded", "found"),
    [
        (False, None, False, "0"),
        (True, None, False, None),
        (False, "1", False, "1"),
        (True, "1", False, "1"),
        (False, None, True, None),
    ],
)
def test_a_variable_that_sglang_would_change_after_its_import_is_set_before(
    monkeypatch: pytest.MonkeyPatch, scaled: bool, given: str | None, loaded: bool, found: str | None
) -> None:
    """Then the processes of an engine are forked: no import has read anything else. What a user has set stays, and so does what
    an import has read."""
    imported: list[tuple[str, str | None]] = []

    def module(name: str) -> Any:
        imported.append((name, os.environ.get(build.GEMM_VARIABLE)))
        if loaded and name == modules.ENGINE:
            monkeypatch.setitem(sys.modules, modules.DEEPSEEK_V4, ModuleType("loaded"))
        return SimpleNamespace(DEEPGEMM_SCALE_UE8M0=scaled)

    monkeypatch.setattr("importlib.import_module", module)
    monkeypatch.setattr(build, "_set_environment", lambda device, *, compiles: device)  # pyright: ignore
    monkeypatch.setitem(sys.modules, modules.DEEPSEEK_V4, ModuleType("loaded"))
    monkeypatch.delitem(sys.modules, modules.DEEPSEEK_V4)
    monkeypatch.setenv(build.GEMM_VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(build.GEMM_VARIABLE)
    build.import_ahead("cuda", compiles=False)
    assert dict(imported)[modules.REGISTRY] == found


def test_how_a_process_was_killed_counts_more_than_the_signal_that_sglang_sends_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reason(*told: str) -> str:
        engine: Any = SglangEngine(EngineSettings(model="m"))
        engine._on_sigquit()
        for how in told:
            engine._end.lose(how)
        return await asyncio.wait_for(engine.died(), 30.0)

    assert asyncio.run(reason("the engine's scheduler (pid 7) was killed by SIGKILL")).endswith("by SIGKILL")
    monkeypatch.setattr("enginepool.workers.sglang.host.engine.KILLED_S", 0.01)
    assert asyncio.run(reason()).endswith("failed and said so by SIGQUIT")


def test_threads_that_an_import_has_started_are_named() -> None:
    code = """
import importlib, threading
from enginepool.workers.fork_server import why_it_cannot_fork
importlib.import_module("torch").set_num_threads(1)
assert why_it_cannot_fork(0) == "", why_it_cannot_fork(0)
done = threading.Event()
thread = threading.Thread(target=done.wait)
thread.start()
with open(f"/proc/self/task/{thread.native_id}/comm", "w") as comm:
    comm.write("poller")
found = why_it_cannot_fork(0)
done.set()
assert found == "an import has started threads: poller", found
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gpus_that_differ_are_refused_for_a_common_import(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [SimpleNamespace(name=name, major=major, minor=0) for name, major in (("H200", 9), ("A100", 8))]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    utils = SimpleNamespace(get_device_properties=lambda _: {})  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=SimpleNamespace(utils=utils)))
    with pytest.raises(ValueError, match="the GPUs differ: H200, A100"), cuda_answered_by_a_child():
        pass
