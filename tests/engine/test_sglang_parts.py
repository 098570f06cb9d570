"""The pieces around the engine that need no SGLang: read-out, the host's thread, the notes of its processes, the CPU bridge."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from enginepool.workers.cpu_bridge import sgl_kernel
from enginepool.workers.engine import EngineError
from enginepool.workers.sglang_host import EngineHost
from enginepool.workers.sglang_process import NOTES_VARIABLE, keep_notes, report_every_forward
from enginepool.workers.sglang_readout import forward_count, head_scores, label_scores, refuse_aborted

# --- read-out ----------------------------------------------------------------------------------------------------------


def entered(*times: float) -> list[dict[str, Any]]:
    return [{"meta_info": {"forward_entry_time": time}} for time in times]


def test_rows_that_entered_together_are_one_forward() -> None:
    assert forward_count(entered(1700000000.25)) == 1
    assert forward_count(entered(1700000000.25, 1700000000.25, 1700000000.25 + 2e-7)) == 1


def test_rows_that_entered_apart_are_several_forwards_in_any_order() -> None:
    assert forward_count(entered(12.5, 12.3, 12.5, 12.4)) == 3


def test_rows_without_a_time_are_an_error_not_a_forward() -> None:
    silent: list[dict[str, Any]] = [{"meta_info": {}}]
    for answers in (entered(1.0, 0.0), silent):
        with pytest.raises(EngineError, match="metrics are off"):
            forward_count(answers)


def labelled(*logprobs: tuple[int, float]) -> dict[str, Any]:
    return {"meta_info": {"output_token_ids_logprobs": [[(value, token, None) for token, value in logprobs]]}}


def test_a_label_that_is_asked_twice_is_answered_twice() -> None:
    scores = label_scores([labelled((3, np.log(0.5)), (9, np.log(0.25)))], (9, 3, 9), softmax=False)
    np.testing.assert_allclose(scores, [[0.25, 0.5, 0.25]], rtol=1e-6)
    shares = label_scores([labelled((3, np.log(0.5)), (9, np.log(0.25)))], (9, 3, 9), softmax=True)
    np.testing.assert_allclose(shares, [[0.25, 0.5, 0.25]], rtol=1e-6)


def test_softmax_over_labels_is_right_where_probabilities_vanish() -> None:
    scores = label_scores([labelled((1, -900.0), (2, -901.0))], (1, 2), softmax=True)
    np.testing.assert_allclose(scores, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]], rtol=1e-6)
    heads = head_scores([[1000.0, 1000.0]], softmax=True)
    np.testing.assert_allclose(heads, [[0.5, 0.5]])


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
        logger.error("first\nlast")
        assert note.read_text() == "scheduler\nlast\n"
        note.unlink()
        note.parent.rmdir()
        logger.error("to nobody")
        assert not note.parent.exists()
    finally:
        logger.handlers = before


def test_every_row_reports_its_forward() -> None:
    class Stats:
        """As SGLang's: classifier rows stay silent."""

        has_timing_data = False

        def __getstate__(self) -> dict[str, float]:
            return {"forward_entry_time": 1.5} if self.has_timing_data else {}

    assert Stats().__getstate__() == {}
    report_every_forward(Stats)
    assert Stats().__getstate__() == {"forward_entry_time": 1.5}


# --- the CPU bridge ----------------------------------------------------------------------------------------------------


def test_a_stand_in_for_a_kernel_says_why_it_cannot_work() -> None:
    for name in sgl_kernel.NAMES:
        with pytest.raises(NotImplementedError, match=f"{name} was called, but"):
            getattr(sgl_kernel, name)()


INSTALL = """
import sys
sys.path.insert(0, sys.argv[1])
from enginepool.workers import cpu_bridge
cpu_bridge._bridge_sgl_kernel()
cpu_bridge._bridge_sgl_kernel()
import sgl_kernel
print(sgl_kernel.__name__, sgl_kernel.__file__)
"""


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
from enginepool.workers.sglang_process import start_biases_at_zero
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
