"""What streams of two priorities get of a full engine, in simulated time (bench/README.md)."""

from bench.generation_priorities import HIGH, LOAD, LOW, alone_s, mixed, most

SECONDS = 10.0


def test_on_an_overloaded_engine_a_high_priority_has_its_first_token_soon_and_the_low_one_goes_on() -> None:
    full = most(SECONDS)
    found = mixed(LOAD * full, SECONDS)
    high, low = found.seen[HIGH], found.seen[LOW]
    assert high.at(0.99) <= 3 * alone_s()
    assert found.stopped, "low sequences gave their slots"
    assert (len(high.answered) + len(low.answered)) / SECONDS >= 0.7 * full, "the first ones end after 1.7 s"
