"""A real coordinator between a light client and greedy ones."""

from bench.fairness import rows_of
from bench.processes import ROOT


def test_a_light_client_is_answered_while_greedy_ones_keep_the_queue_full() -> None:
    """Compared in requests, not in time: the engine is as fast for all of them."""
    rows = {(row.what, row.who): row.value for row in rows_of(ROOT, 2.0, (8,))}
    assert rows["8 greedy", "requests"] > 1, "it had several answers before the 8,000 items that were asked before it"
    assert rows["8 greedy", "items of the greedy"] > 0
