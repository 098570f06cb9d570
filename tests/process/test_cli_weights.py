"""`enginepool weights` on a whole pool of the sim engine, which has tensors to change."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from enginepool import BlockingPool
from enginepool.cli import weights
from enginepool.protocol.messages.weight_reports import UpdateRecord, WeightsReport, WorkerWeights
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

SHAPES = {"embed": (8, 4), "norm": (4,)}
Arrays = dict[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pool of two workers, all of which are ready."""
    with Processes() as processes:
        tensors = [[name, "float32", list(shape)] for name, shape in SHAPES.items()]
        config = sim_pool(tmp_path_factory.mktemp("pool"), options={"tensors": tensors})
        daemon = ForkedDaemon(processes, config).listening()
        with BlockingPool.connect(daemon.address) as pool:
            pool.ready(PATIENCE_S)
            end = time.monotonic() + PATIENCE_S
            while len([worker for worker in pool.weights().workers if not worker.message]) < 2:
                assert time.monotonic() < end
                time.sleep(0.01)
        yield daemon.address


def checkpoint(directory: Path, seed: int, **more: npt.NDArray[np.float32]) -> Path:
    """A directory with the tensors of the model."""
    rng = np.random.default_rng(seed)
    tensors: Arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file({**tensors, **more}, directory / "model.safetensors")
    return directory


def test_weights_are_published_from_a_directory_looked_at_and_set_version(address: str, tmp_path: Path) -> None:
    at = ("--connect", address)
    code, out, err = call("weights", "versions", *at)
    assert (code, err) == (0, "")
    assert "version 0, as in its checkpoint" in out

    code, out, err = call("weights", "publish", checkpoint(tmp_path, 1), "--version", 4, *at)
    assert (code, err) == (0, "")
    assert re.match(r"version 4 is committed on 2 of 2 workers, in \d+\.\d\d s\n", out)
    code, out, _ = call("weights", "versions", "--json", *at)
    report = json.loads(out)
    assert (report["version"], {worker["version"] for worker in report["workers"]}) == (4, {4})
    code, out, _ = call("weights", "digest", *at)
    assert (code, out.count(report["digest"])) == (0, 3)

    code, out, err = call("weights", "set-version", "--version", 9, *at)
    assert (code, err) == (0, "")
    assert out.startswith("version 9 is committed on 2 of 2 workers")
    code, out, _ = call("weights", "history", *at)
    assert code == 0
    assert [line.split()[1:4] for line in out.splitlines() if "committed" in line] == [
        ["4", "committed", "checkpoint"],
        ["9", "committed", "set_version"],
    ]

    target = tmp_path / "norm.npy"
    code, out, _ = call("weights", "get", "norm", "--output", target, *at)
    assert code == 0
    assert out.startswith("norm: 4\nleast ")
    assert np.load(target).shape == (4,)
    code, out, _ = call("weights", "validate", *at)
    assert (code, out.count("nothing")) == (0, 2)

    code, out, err = call("weights", "set-version", "--version", 1, "--new-run", *at)
    assert (code, err) == (0, "")


def test_an_engine_whose_digest_tells_nothing_is_not_comparable_and_that_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "not comparable: norm was sent as float32, and the engine holds it as float16"
    odd = WorkerWeights("judge/1", 3, code="unsupported", message=why)
    report = WeightsReport(1, "judge", 3, "0" * 32, [WorkerWeights("judge/0", 3, "0" * 32), odd])

    def ask(*_: object) -> WeightsReport:
        return report

    monkeypatch.setattr(weights, "ask_pool", ask)
    code, out, err = call("weights", "digest", env={"COLUMNS": "200"})
    assert (code, err) == (0, "") and why in out
    report.workers.append(WorkerWeights("judge/2", 3, "1" * 32))
    assert call("weights", "digest")[::2] == (1, "enginepool: the workers of judge hold different weights\n")
    report.workers[-1] = WorkerWeights("judge/2", 3, code="engine_error", message="lost")
    assert call("weights", "digest")[::2] == (1, "enginepool: judge/2: lost\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["set-version", "--version", "0"], "version"),
        (["publish", "no-such-directory", "--version", "1000"], "no-such-directory"),
        (["get", "no.such.weight"], "no.such.weight"),
        (["versions", "--group", "nope"], "nope"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_why(address: str, arguments: list[str], words: str) -> None:
    code, out, err = call("weights", *arguments, "--connect", address)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert words in err


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(address: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, 2, other=np.zeros(3, np.float32))
    code, _, err = call("weights", "publish", directory, "--version", 2000, "--connect", address)
    assert code == 1
    assert "unknown names: other" in err


def test_an_error_on_a_checkpoint_without_a_tensor_suggests_nothing_that_this_command_cannot_do(
    address: str, tmp_path: Path
) -> None:
    save_file({"norm": np.ones(SHAPES["norm"], np.float32)}, tmp_path / "model.safetensors")
    code, _, err = call("weights", "publish", tmp_path, "--version", 2000, "--connect", address)
    assert code == 1
    assert "missing names: " in err and "partial" not in err


@pytest.mark.parametrize("arguments", [["digest"], ["validate"], ["get", "norm"]])
def test_engines_that_could_not_be_asked_are_not_reported_as_valid(
    processes: Processes, tmp_path: Path, arguments: list[str]
) -> None:
    loading = sim_pool(tmp_path, options={"tensors": [["norm", "float32", [4]]], "load_s": 1000.0})
    code, _, err = call("weights", *arguments, "--connect", ForkedDaemon(processes, loading).listening().address)
    assert (code, err.count("\n")) == (1, 1)
    assert re.search("no worker of (group )?'?g'? is ready", err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["publish", "x"],
        ["set-version"],
        ["set-version", "--version", "-1"],
        ["get"],
        ["get", "x", "--output", "/no/such/x.npy"],
        ["nope"],
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    code, out, err = call("weights", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_table_is_not_cut_where_no_terminal_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    record = UpdateRecord(1_700_000_000_000, "process_group_broken", "checkpoint")
    record.members, record.committed, record.sent_bytes = 4096, 4000, 10**16
    report = WeightsReport(1, "judge", 3, "0" * 32, history=[record])

    def ask(*_: object) -> WeightsReport:
        return report

    monkeypatch.setattr(weights, "ask_pool", ask)
    _, out, _ = call("weights", "history", env={"COLUMNS": "80"})
    shown = ["1700000000000", "process_group_broken", "checkpoint", "4000/4096", "10000000000.0", "0.00", "-"]
    assert [line.split()[1:] for line in out.splitlines() if "4096" in line] == [shown]
