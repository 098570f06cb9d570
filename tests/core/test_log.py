"""Lines of the log: one line each, bounded in length and in rate."""

import re

import pytest

from enginepool.coordinator.launchers.exit_reasons import last_line
from enginepool.coordinator.shell.log import BUDGETS, log
from enginepool.host.log_lines import LONGEST, LineBudget, LogLines, one_line
from enginepool.workers import log as worker_log

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def test_a_line_has_the_time_and_no_second_line(capfd: pytest.CaptureFixture[str]) -> None:
    log("worker a\nenginepool: forged\x1b[31m\u2028line")
    err = capfd.readouterr().err
    assert re.fullmatch(rf"{TIME} enginepool: .*\n", err)
    assert r"worker a\x0aenginepool: forged\x1b[31m\x2028line" in err


def test_a_line_is_bounded() -> None:
    assert len(one_line("x" * 1_000_000)) == LONGEST + 4


def test_peers_that_cause_lines_without_end_fill_no_disk() -> None:
    budget, lines = LineBudget(BUDGETS), 0
    kinds = [kind for kind in BUDGETS if kind]
    for centisecond in range(360_000):
        lines += sum(budget.take(kind, centisecond / 100) is not None for kind in kinds)
    assert lines <= sum(most + 3600 * per_s + 1 for most, per_s in (BUDGETS[kind] for kind in kinds))
    assert lines * LONGEST < 6_000_000, "bytes in an hour"


def test_lines_that_were_left_out_are_counted_and_other_kinds_are_not_left_out() -> None:
    budget = LineBudget(BUDGETS)
    most, per_s = BUDGETS["client"]
    taken = [budget.take("client", 0.0) for _ in range(most + 7)]
    assert taken == [0] * most + [None] * 7
    assert budget.take("worker", 0.0) == 0
    assert budget.take("client", 1.5 / per_s) == 7


@pytest.fixture
def worker_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a worker that has said nothing yet."""
    monkeypatch.setattr(worker_log, "_lines", LogLines("enginepool worker", worker_log.BUDGETS))


@pytest.mark.usefixtures("worker_lines")
def test_a_line_of_a_worker_has_the_time_and_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    worker_log.name_source("worker g-0.64f2ab.1")
    worker_log.say("no coordinator\nyet")
    assert re.fullmatch(rf"{TIME} enginepool worker g-0\.64f2ab\.1: no coordinator\\x0ayet\n", capfd.readouterr().err)


@pytest.mark.usefixtures("worker_lines")
def test_a_client_whose_requests_all_fail_in_the_engine_fills_no_disk(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(100_000):
        worker_log.report(ValueError("x" * 1_000_000), "work 1/1")
    err = capfd.readouterr().err
    most, _ = worker_log.BUDGETS["traceback"]
    assert len(re.findall(rf"(?m)^{TIME} enginepool worker: work 1/1: ValueError", err)) in (most, most + 1)
    assert len(err) < 400_000, "bytes of 100,000 failures"
    worker_log.say("the last line")
    assert last_line(capfd.readouterr().err.encode()) == "the last line"
