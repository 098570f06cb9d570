"""What one request may take of a scheduler that all of them share."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.patches.request_limits import PatternSearch, SlowPattern, end_slow_searches

#: it can divide a text in exponentially many ways, and matches none
SLOW = r"(([\s\S])+)+(?!)"


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    """The timer of a test's own time limit, and what it calls, as they were."""
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


def test_a_search_for_a_stop_pattern_ends_and_is_not_tried_again() -> None:
    search = PatternSearch()
    found = search("b+", "abba")
    assert found is not None and found.span() == (1, 3)
    assert search("c", "abba") is None
    for text in ("a" * 64, "a"):
        with pytest.raises(SlowPattern):
            search(SLOW, text)
    assert search("b", "abba") is not None


class Req:
    """Of SGLang, as far as it looks for stop patterns."""

    module: Any
    finished_reason: Any = None

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def look(self, accepted: int) -> bool:
        return self._check_str_based_finish(accepted)

    def _check_str_based_finish(self, new_accepted_len: int = 1) -> bool:
        return self.module.re.search(self.pattern, "a" * 64) is not None


def test_a_sequence_ends_of_its_slow_stop_pattern_and_the_scheduler_goes_on() -> None:
    def reason(text: str, status: int, kind: str) -> str:
        return f"{kind} {status}: {text}"

    Req.module = module = SimpleNamespace(Req=Req, FINISH_ABORT=reason)
    end_slow_searches(module)
    slow, other = Req(SLOW), Req("a")
    assert slow.look(1)
    assert slow.finished_reason.startswith("BadRequestError 400: stop_regex: a search took longer than 0.1 s")
    assert other.look(1) and other.finished_reason is None
