"""The weights benchmark measures what it says: its pieces, and all of it but SGLang's own updates on the simulated engine."""

import importlib
import io
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench import weights_gpu
from bench.score import plot as curves
from bench.score.workloads import Shape
from bench.table import Row, judge
from bench.weights import steps
from bench.weights.field import LOOK_S, Burden, Field, Scale
from bench.weights.figures import (
    ALONE,
    FLAT,
    LOADED,
    LONG,
    OURS_DIRECT,
    OURS_STAGED,
    RAW,
    SHORT,
    Answer,
    Continuous,
    Passed,
    Update,
    continuous_rows,
    items_per_second,
    load_rows,
    longest_gap_ms,
    size_of,
    targets,
    update_rows,
    wrong_versions,
)
from bench.weights.obeying import obey
from bench.weights.parts import PARTS
from bench.weights.plot import Bar, draw
from tests.process.forking import ForkedProcess, server

TENSORS: list[Any] = [["embed", "float32", [300, 20]], ["head", "bfloat16", [5000]], ["norm", "float32", [3]]]
#: A worker is not back sooner than the others have answered, even if they stand still for a second.
SIM: dict[str, Any] = {
    "load_s": 1.5, "forward_s": 0.005, "batch_tokens": 400, "batch_rows": 8, "inflight_tokens": 800, "inflight_rows": 16,
}  # fmt: skip
BUCKET = 8192


def updated(version: int, began: float, **phases: int) -> Update:
    return Update(began, began + 0.1, began + 1.0, version, phases)


def test_an_answers_items_count_where_its_engine_had_them() -> None:
    answers = [Answer(0.0, 2.0, 2.0, 0, 10), Answer(0.0, 4.0, 1.0, 0, 6)]
    assert items_per_second(answers, [(0.0, 4.0)]) == pytest.approx(4.0)
    assert items_per_second(answers, [(1.0, 2.0), (3.0, 3.5)]) == pytest.approx((5 + 3) / 1.5)
    assert items_per_second(answers, []) == 0.0


def test_gaps_count_from_and_to_the_ends_of_the_window() -> None:
    answers = [Answer(0.0, at, 0.1, 0, 1) for at in (1.0, 1.5, 4.0, 9.0)]
    assert longest_gap_ms(answers, (1.0, 4.0)) == pytest.approx(2500)
    assert longest_gap_ms(answers, (2.0, 3.0)) == pytest.approx(1000)


def test_versions_that_were_not_committed_or_are_old_are_wrong() -> None:
    updates = [updated(1, 10.0), updated(2, 20.0)]
    right = [(0.0, 0), (10.5, 1), (12.0, 1), (12.0, 2), (22.0, 2)]
    wrong = [(12.0, 0), (22.0, 1), (22.0, 3)]
    assert wrong_versions([Answer(at, at + 1, 0.1, version, 1) for at, version in right], updates, 0) == 0
    assert wrong_versions([Answer(at, at + 1, 0.1, version, 1) for at, version in wrong], updates, 0) == 3


def test_first_and_repeated_updates_stand_apart_and_the_hold_in_its_parts() -> None:
    phases = [{"transfer": 100_000, "load": 40_000, "journal": 10_000, "drain": 5000}] + [
        {"transfer": 20_000, "load": 8000, "journal": 2000, "drain": 7000, "first_answer": 3000}
    ] * 2
    updates = [updated(version, 10.0 * version, **some) for version, some in enumerate(phases)]
    rows = {row.what: row for row in update_rows("x", 10_000_000, Passed(OURS_STAGED, 1 << 20, updates), 1.0)}
    assert rows["x, 1 MiB, first: transfer"].value == pytest.approx(0.1)
    assert rows["x, 1 MiB, repeated: transfer"].ratio == pytest.approx(0.5)
    assert rows["x, 1 MiB, repeated: transfer takes"].value == pytest.approx(20)
    assert rows["x, 1 MiB, first: hold beyond the drain"].value == pytest.approx(50)
    assert rows["x, 1 MiB, repeated: hold beyond the drain"].value == pytest.approx(10)
    assert rows["x, 1 MiB, repeated: first answer"].value == pytest.approx(3)
    assert "x, 1 MiB, first: first answer" not in rows
    direct = update_rows("x", 10_000_000, Passed(OURS_DIRECT, 1 << 20, updates[1:]), None)
    assert direct[0].value == pytest.approx(10_000_000 / 0.008 / 1e9) and direct[0].ratio is None


def test_load_while_updates_follow_each_other_is_held_against_load_before_them() -> None:
    answers = [Answer(at - 0.1, at, 0.1, 0, 10) for at in (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0)]
    answers += [Answer(2.0 + 0.2 * i, 2.2 + 0.2 * i, 0.2, int(i >= 5), 10) for i in range(8)]
    updates = [updated(1, 2.0, transfer=400_000), updated(2, 2.5, transfer=400_000)]
    rows = {row.what: row for row in load_rows("x", answers, 1, updates, 0)}
    assert rows["x: scoring before updates"].value == pytest.approx(100)
    assert rows["x: scoring while they follow each other"].ratio == pytest.approx(0.5)
    length = rows["x: seconds of it"].value
    assert length == pytest.approx(updates[1].ended - updates[0].began)
    assert rows["x: an update takes of its engine, with drain and hold"].value == pytest.approx(1000 * length * 0.5 / 2)
    assert rows["x: requests without an answer"].value == 1
    assert rows["x: answers of a wrong version"].value == 0


def test_scoring_during_a_transfer_is_compared_with_times_without_it() -> None:
    answers = [Answer(at - 0.1, at, 0.1, 0, 10) for at in (1.1, 1.2, 1.3, 1.4, 2.2, 2.4, 3.2, 3.3, 3.4, 3.5)]
    continuous = Continuous((2.0, 2.5), ((1.0, 1.4), (3.1, 3.5)), 25)
    rows = {row.what: row for row in continuous_rows("x", answers, continuous, 150.0, 300.0)}
    assert rows["x: scoring alone"].value == pytest.approx(100)
    assert rows["x: scoring during continuous transfers"].ratio == pytest.approx(0.4)
    assert rows["x: seconds of it"].value == pytest.approx(0.5)
    assert rows["x: transfer during scoring"].ratio == pytest.approx(0.5)
    assert rows["x: an update takes of its engine"].value == pytest.approx(0.6 * 500 / 25)


def test_flattened_buckets_hold_whole_tensors() -> None:
    from bench.weights.trainer import cut

    runs = list(cut([3, 3, 3, 9, 1], 6))
    assert runs == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert list(cut([3, 3], 0)) == [slice(0, 2)]


def test_orders_are_answered_and_those_that_fail_by_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Servant:
        def do_double(self, number: int) -> dict[str, object]:
            return {"number": 2 * number}

    voice = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO('{"do": "double", "number": 4}\n{"do": "nothing"}\n'))
    obey(voice, Servant(), {"hello": 1})
    hello, answer, failure = voice.getvalue().splitlines()
    assert (hello, answer) == ('{"hello":1}', '{"number":8}')
    assert "AttributeError" in failure


def sim_field(directory: Path, receivers: int, stack: ExitStack) -> Field:
    """All that the benchmark starts, with the engine of the simulator."""
    torch: Any = importlib.import_module("torch")
    safetensors: Any = importlib.import_module("safetensors.torch")
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for name, dtype, shape in TENSORS}
    safetensors.save_file(tensors, str(directory / "model.safetensors"))
    burdens = (Burden(SHORT, Shape(3, 2, 4, vocab=50), 3, 2), Burden(LONG, Shape(3, 4, 4, vocab=50), 3, 1))
    scale = Scale((BUCKET,), burdens, idle=2, direct=1, continuous_s=1.0, engine="sim", options={**SIM, "tensors": TENSORS})
    logs = directory / "logs"
    logs.mkdir()
    return Field("sim", directory, "cpu", [], receivers, scale, logs, stack, lambda _line: None)


@pytest.mark.timeout(280)
def test_every_number_is_found_on_the_simulated_engine_and_no_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEADY_S", 1.0)
    names = {name: getattr(subprocess, name) for name in ("PIPE", "TimeoutExpired")}
    monkeypatch.setattr("bench.processes.subprocess", SimpleNamespace(Popen=ForkedProcess, **names))
    server()
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with ExitStack() as stack:
        field = sim_field(tmp_path, 2, stack)
        field.ready()
        measured = steps.Steps(field)
        for step in steps.STEPS:
            if step != "bare":
                getattr(measured, step)()
    rows = {(row.what, row.who): row for row in field.rows}
    warm = f"sim, {size_of(BUCKET)}, repeated"
    for who in (RAW, OURS_STAGED, OURS_DIRECT):
        assert rows[f"{warm}: transfer", who].value > 0
        assert rows[f"{warm}: transfer", who].ratio is not None
    assert rows[f"sim, {size_of(BUCKET)}, first: hold beyond the drain", OURS_STAGED].value > 0
    loaded = f"sim, short requests, {size_of(BUCKET)}, repeated"
    assert {part for part in ("drain", "load", "first answer") if (f"{loaded}: {part}", LOADED) in rows} == {
        "drain", "load", "first answer",
    }  # fmt: skip
    assert rows["sim, short requests: answers", LOADED].value > 0
    assert rows[f"{warm}: transfer", ALONE].ratio is not None
    assert rows["sim, short requests: seconds of it", ALONE].value > 0
    assert rows["sim, short requests: transfer during scoring", ALONE].value > 0
    assert ("sim, short requests: an update takes of its engine, without a look at its bytes", ALONE) in rows
    for what in ("short requests: answers of a wrong version", "short requests: requests without an answer"):
        assert rows[f"sim, {what}", LOADED].value == 0
    for part in PARTS:
        assert rows[f"sim, {size_of(BUCKET)}, {part}: transfer takes", ALONE].ratio is not None
    assert rows["sim, engines with another digest than was sent", OURS_STAGED].value == 0
    for who in (OURS_STAGED, OURS_DIRECT):
        assert rows["sim, worker killed: requests without an answer", who].value == 0
        assert rows["sim, worker killed: answers of a wrong version", who].value == 0
        back = rows["sim, the killed worker is back on the committed weights after", who].value
        engine_s = rows["sim, the killed worker: its engine starts again in", who].value
        assert engine_s >= SIM["load_s"] - 2 * LOOK_S
        assert rows["sim, the killed worker is back after more than its engine's start", who].value == back - engine_s
        gap = rows["sim, worker killed: longest time without an answer of the others", who].value
        # A staged update costs those that live nothing.
        assert 0 < gap < 1000 * back if who == OURS_STAGED else gap > 0
    assert rows["sim, worker killed: all serve again after", OURS_DIRECT].value >= back
    # What a verdict is passed on is found under the same name.
    found = [verdict.found is not None for verdict in judge(field.rows, targets("sim", size_of(BUCKET)))]
    assert all(found), found
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_step_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Standing:
        def __init__(self, *_: object) -> None:
            self.rows = [Row("ready", "none", 1.0, "")]

        def ready(self) -> None:
            pass

    class Broken:
        def __init__(self, field: Standing) -> None:
            self.rows = field.rows

        def raw(self) -> None:
            raise RuntimeError("no luck")

        def direct(self) -> None:
            self.rows.append(Row("direct", "none", 2.0, ""))

    monkeypatch.setattr(weights_gpu, "Field", Standing)
    monkeypatch.setattr(weights_gpu, "Steps", Broken)
    saved: list[tuple[int, int]] = []
    scale = weights_gpu.scale("cpu", True, [1], 50)
    until = time.monotonic() + steps.STEPS["kill"] - 1
    wanted = ["raw", "direct", "kill"]
    rows = weights_gpu.run(
        "x", tmp_path, "cpu", 1, scale, wanted, tmp_path, until, lambda rows, before: saved.append((len(rows), before))
    )
    assert [row.what for row in rows] == ["ready", "direct"]
    assert saved == [(1, 1), (2, 1)]
    said = capsys.readouterr().err
    assert "left out raw: no luck" in said
    assert "left out kill: " in said and "s are left, it may take 120" in said


def test_several_receivers_are_held_against_one() -> None:
    rows = [
        Row("a, 1 receiver, 512 MiB, repeated: transfer takes", OURS_STAGED, 20.0, "ms"),
        Row("a, 3 receivers, 512 MiB, repeated: transfer takes", OURS_STAGED, 25.0, "ms"),
    ]
    [row] = weights_gpu.compared(rows, [("a", 1, "a, 1 receiver"), ("a", 3, "a, 3 receivers")])
    assert row.ratio == pytest.approx(1.25)
    assert row.what.startswith("a, 3 receivers")


def test_the_picture_shows_speeds_and_holds(tmp_path: Path) -> None:
    rows = [
        Row("a, 512 MiB, repeated: transfer", RAW, 360.0, "GB/s"),
        Row("a, 512 MiB, repeated: transfer", FLAT, 200.0, "GB/s"),
        Row("a, short requests, 512 MiB, repeated: transfer", LOADED, 150.0, "GB/s"),
        Row("a, short requests, 512 MiB, repeated: drain", LOADED, 5.0, "ms"),
        Row("a, short requests, 512 MiB, repeated: load", LOADED, 6.0, "ms"),
    ]
    shown = weights_gpu.bars(rows, ["a"], "512 MiB")
    assert shown == {
        "a": [Bar(RAW, 360.0, {}), Bar(FLAT, 200.0, {}), Bar(LOADED, 150.0, {"drain": 5.0, "load": 6.0})],
    }
    if not curves.missing():
        draw(tmp_path / "plot.png", "a title", shown)
        assert (tmp_path / "plot.png").stat().st_size > 0
