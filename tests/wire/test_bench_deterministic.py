"""The benchmark of the deterministic mode compares what it says, with the simulated engine, whose rows have equal bits."""

import asyncio
import sys

import pytest

from bench.deterministic_gpu import DEFAULT, Plan, Requests, compared, differing, main, saturate
from bench.table import Row
from enginepool import Pool

TINY = Plan(0.1, 1, 2, 3, (2, 5), 4, 6, 3, 5)


def test_it_counts_tokens_and_rows_whose_bits_differ() -> None:
    async def scenario() -> None:
        async with Pool.start("any-name", engine="sim") as pool:
            await pool.ready(60.0)
            requests = Requests(TINY, 1000)
            rate, took = await saturate(pool, requests.logprobs, 2, TINY.seconds, 7)
            assert rate > 0 and len(took) >= 2 and await requests.score(pool, 1) == 10 * (4 + 6)
            assert await differing(pool, TINY, requests) == {"score": (0, 0.0), "logprobs": (0, 0.0)}

    asyncio.run(scenario())


def test_a_ratio_is_that_to_the_pool_as_it_is_and_counts_have_none() -> None:
    rows = [Row("a", DEFAULT, 4.0, "", None, (4.0, 4.0)), Row("b", DEFAULT, 0, "rows")]
    rows += [Row("a", "deterministic", 3.0, "", None, (3.0, 3.0)), Row("b", "deterministic", 1, "rows")]
    assert [(row.what, row.value, row.ratio) for row in compared(rows)] == [
        ("a", 4.0, None), ("a", 3.0, 0.75), ("b", 0, None), ("b", 1, None),
    ]  # fmt: skip
    assert [row.ratio for row in compared(rows[2:])] == [None, None], "where the pool as it is was left out"


def test_a_pool_that_it_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["deterministic_gpu", "--only", "default,other"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("--only: 'other': there are default,deterministic,no-graphs")
