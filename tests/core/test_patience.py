"""Staying awake for a reply: it is done while it pays, and given up quickly where it does not."""

from hypothesis import given
from hypothesis import strategies as st

from enginepool.coordinator.shell.adaptive_poll import MOST_SKIPPED, AdaptivePoll


def waits(patience: AdaptivePoll, sends: int, *, found: bool) -> int:
    """How many of `sends` are waited after, when each wait ends like this."""
    count = 0
    for _ in range(sends):
        if patience.worth():
            patience.learn(found)
            count += 1
    return count


def test_replies_that_come_at_once_are_waited_for_every_time() -> None:
    assert waits(AdaptivePoll(), 100, found=True) == 100


def test_after_misses_in_a_row_almost_no_wait_is_left() -> None:
    patience = AdaptivePoll()
    assert waits(patience, 10 * MOST_SKIPPED, found=False) < 20
    assert waits(patience, 10 * MOST_SKIPPED, found=False) <= 10


def test_one_reply_in_time_restores_it() -> None:
    patience = AdaptivePoll()
    waits(patience, 1000, found=False)
    while not patience.worth():
        pass
    patience.learn(True)
    assert waits(patience, 50, found=True) == 50


@given(st.lists(st.booleans(), max_size=200))
def test_a_wait_is_never_further_away_than_the_most_that_are_skipped(found: list[bool]) -> None:
    patience = AdaptivePoll()
    for outcome in found:
        skipped = 0
        while not patience.worth():
            skipped += 1
        assert skipped <= MOST_SKIPPED
        patience.learn(outcome)
