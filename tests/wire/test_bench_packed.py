"""The benchmark of packed and plain answers compares what it says, with the simulated engine, whose answers are exact."""

import asyncio
import math
import sys

import numpy as np
import pytest

from bench.packed_gpu import ALONE, APART, OTHERWISE, Shape, ask, main, rows_of
from enginepool import Pool


def test_the_same_rows_are_asked_in_every_run_and_each_answer_is_that_of_its_item() -> None:
    async def scenario() -> None:
        shape = Shape(12, 10, 3, 30)
        query, items = shape.drawn(300)
        again = shape.drawn(300)
        assert len(query) == 12 and {3 <= len(item) <= 30 for item in items} == {True}
        assert all(np.array_equal(one, other) for one, other in zip([query, *items], [again[0], *again[1]], strict=True))
        async with Pool.start("any-name", engine="sim") as pool:
            await pool.ready(60.0)
            found = await ask(pool, "causal", query, items)
            assert found.shape == (10, 2) and found.std() > 0
            np.testing.assert_array_equal((await ask(pool, "causal", query, items[::-1]))[::-1], found)

    asyncio.run(scenario())


def test_answers_are_compared_with_those_of_the_same_pool() -> None:
    packed = np.array([1.0, 2.0]), np.array([1.5, 2.0])
    plain = np.array([2.0, 2.0]), np.array([2.0, 2.0])
    rows = rows_of("a", packed, plain)
    found = [(row.what, row.who, row.value, row.ratio) for row in rows]
    assert found[:3] == [("a: apart on average", APART, 0.5, 2.0), ("a: apart on average", OTHERWISE, 0.25, None),
                         ("a: apart on average", ALONE, 0, None)]  # fmt: skip
    assert found[3:] == [("a: apart at most", APART, 1.0, 2.0), ("a: apart at most", OTHERWISE, 0.5, None),
                         ("a: apart at most", ALONE, 0, None)]  # fmt: skip
    assert [row.ratio for row in rows_of("a", plain, plain) if row.who == APART] == [1.0, 1.0]
    assert [row.ratio for row in rows_of("a", plain, packed) if row.who == APART] == [math.inf, math.inf]


def test_a_size_that_it_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["packed_gpu", "--sizes", "0.6b,9b"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[-1].endswith("--sizes: '9b': there are 0.6b, 4b, 8b")
