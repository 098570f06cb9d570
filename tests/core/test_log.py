"""Lines of the log: one line each, bounded in length and in rate."""

import re

import pytest

from enginepool.coordinator.log import BUDGETS, LONGEST, LineBudget, log, one_line


def test_a_line_has_the_time_and_no_second_line(capfd: pytest.CaptureFixture[str]) -> None:
    log("worker a\nenginepool: forged\x1b[31m\u2028line")
    err = capfd.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z enginepool: .*\n", err)
    assert r"worker a\x0aenginepool: forged\x1b[31m\x2028line" in err


def test_a_line_is_bounded() -> None:
    assert len(one_line("x" * 1_000_000)) == LONGEST + 4


def test_a_peer_that_causes_lines_without_end_fills_no_disk() -> None:
    budget, lines = LineBudget(), 0
    for millisecond in range(3_600_000):
        lines += budget.take("client", millisecond / 1000) is not None
    most, per_s = BUDGETS["client"]
    assert most <= lines <= most + 3600 * per_s + 1
    assert lines * LONGEST < 1_000_000, "bytes in an hour"


def test_lines_that_were_left_out_are_counted_and_other_kinds_are_not_left_out() -> None:
    budget = LineBudget()
    most, per_s = BUDGETS["client"]
    taken = [budget.take("client", 0.0) for _ in range(most + 7)]
    assert taken == [0] * most + [None] * 7
    assert budget.take("worker", 0.0) == 0
    assert budget.take("client", 1.5 / per_s) == 7
