"""The benchmarks of weights in flight and of a trainer next to an engine measure what they say, with the simulated engine."""

import asyncio
from typing import Any

import pytest

from bench.colocated_gpu import ASLEEP, FALSE, PHASES, WEIGHTS, Cycle, Cycles, Generated, different
from bench.colocated_gpu import rows_of as rows_of_cycles
from bench.in_flight.figures import longest_gap_s, standstill, step_s, tokens_per_s
from bench.in_flight.streams import Arrival, Finished
from bench.in_flight_gpu import LOST, STILL, Scale, chosen_answers, measure, rows_of, targets
from bench.table import judge
from enginepool import Pool, WeightPublisher
from tests.process.weights import TENSORS, some_weights

ARRIVALS = [
    Arrival(1.0, 0, 4, 1, True), Arrival(1.1, 1, 4, 2, True), Arrival(1.2, 0, 4, 1, False), Arrival(1.3, 1, 4, 1, False),
    Arrival(1.8, 1, 5, 1, False), Arrival(2.0, 0, 5, 3, False), Arrival(2.4, 0, 5, 1, True),
]  # fmt: skip


def test_an_engine_stands_still_from_the_last_old_token_to_the_first_new_one() -> None:
    found = standstill(ARRIVALS, 5)
    assert (
        found is not None
        and found.all_s == pytest.approx(0.5)
        and (found.shortest_s, found.longest_s) == pytest.approx((0.5, 0.8))
    )
    assert standstill(ARRIVALS, 6) is None and standstill(ARRIVALS[4:], 5) is None
    assert step_s(ARRIVALS, (1.0, 1.5)) == pytest.approx(0.2)
    assert longest_gap_s(ARRIVALS, (1.0, 2.6)) == pytest.approx(0.5)
    assert tokens_per_s(ARRIVALS, (1.0, 2.0)) == 6.0


def test_answers_with_log_probabilities_and_many_spans_are_computed_again() -> None:
    one, two, three = (
        Finished([1], 3, [5, 6, 7], [-1.0] * 3 if known else [], [1, 1, 2], spans)
        for known, spans in ((True, ((1, 3),)), (True, ((1, 2), (2, 1))), (False, ((1, 2), (2, 1))))
    )
    assert chosen_answers([one, two, three], 5) == [two, one]
    assert one.span_is_wrong and not two.span_is_wrong


def test_tokens_are_timed_and_none_is_lost_while_weights_change() -> None:
    async def scenario() -> None:
        options = {"forward_s": 0.002, "end_every": 0, "tensors": TENSORS}
        async with Pool.start("any-name", engine="sim", operations=["generate"], options=options) as pool:
            await pool.ready(60.0)
            async with WeightPublisher(pool, device="cpu") as publisher:

                async def publish(version: int, mode: str) -> dict[str, Any]:
                    record = await publisher.publish(some_weights(version), version, in_flight=mode)  # type: ignore[arg-type]
                    return {"began": 0.0, "ended": 1.0, "record": {"phases": record.phases}}

                phase = await measure(pool, publish, "in_place", 1, Scale(4, 5, 100, 2, 0.05, 1.0, 1, 0.0), 1000)
        rows = rows_of(phase)
        found = {row.what: row.value for row in rows}
        assert found[f"in_place: {STILL}"] and found["in_place: answers"] >= 4 and found["in_place: answers that failed"] == 0
        assert found[f"in_place: {LOST}"] == found["in_place: answers with other spans than their chunks"] == 0
        assert sum(verdict.found is not None for verdict in judge(rows, targets("in_place"))) == 2
        assert all(len(one.spans) > 1 for one in chosen_answers(phase.streams.finished, 1))

    asyncio.run(scenario())


class Trainer:
    """Takes orders as the process of the benchmark does."""

    def __init__(self, publisher: WeightPublisher, loop: asyncio.AbstractEventLoop) -> None:
        self._publisher, self._loop = publisher, loop

    def ask(self, order: dict[str, Any], timeout: float) -> dict[str, Any]:
        """In a thread."""
        if order["do"] == "publish":
            weights = some_weights(WEIGHTS.index(order["which"]))
            published = self._publisher.publish(weights, order["version"], transfer=order["transfer"])
            asyncio.run_coroutine_threadsafe(published, self._loop).result(timeout)
        return {"mib": 5.0, "free_mib": 3.0, "peak_mib": 4.0}


def test_a_cycle_ends_with_an_engine_that_generates_by_the_weights_published() -> None:
    async def scenario() -> Cycle:
        options = {"end_every": 0, "tensors": TENSORS, "sleep_loses_weights": True}
        async with Pool.start("any-name", engine="sim", operations=["generate"], options=options) as pool:
            await pool.ready(60.0)
            async with WeightPublisher(pool, device="cpu") as publisher:
                trainer: Any = Trainer(publisher, asyncio.get_running_loop())
                work = Cycles(pool, trainer, [[1, 2, 3], [4, 5, 6]], 8, 0.5)
                await work.publish()
                return await work.cycle()

    cycle = asyncio.run(scenario())
    assert set(cycle.seconds) == set(PHASES) and (cycle.asleep, cycle.peak, cycle.free) == (5.0, 4.0, 3.0)
    assert [(one.which, len(one.tokens)) for one in cycle.generated] == [(WEIGHTS[0], 8)] * 2


def test_tokens_of_a_cycle_are_compared_with_those_of_the_same_weights() -> None:
    before = [Generated(which, [1, 2], tokens, []) for which, tokens in (("first", [7, 8]), ("other", [9, 9]))]
    cycles = [
        Cycle(dict.fromkeys(PHASES, 1.0), asleep, 9.0, 4.0, 1.0, [Generated(which, [1, 2], tokens, [])])
        for asleep, which, tokens in ((3.0, "first", [7, 8]), (7.0, "other", [7, 9]), (5.0, "first", [7, 8]))
    ]
    assert different(before, cycles[:1]) == 0 and different(before, cycles) == 1
    found = {row.what: row.value for row in rows_of_cycles(before, 9.0, cycles)}
    assert found[FALSE] == 1 and found[f"{ASLEEP}: highest less lowest"] == 2.0
