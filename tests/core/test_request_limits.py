"""What one request may take of a scheduler that all of them share."""

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.patches.request_limits import (
    GRAMMARS_TEXT,
    MOST_GRAMMARS,
    PatternSearch,
    SlowPattern,
    end_slow_searches,
    forget_grammars,
)

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


class GrammarBackend:
    """Of SGLang, as far as it keeps grammars."""

    def __init__(self) -> None:
        self.cache: dict[tuple[str, str], object] = {}

    def set_cache(self, key: tuple[str, str], value: object) -> None:
        self.cache[key] = value

    def reset(self) -> None:
        self.cache.clear()


def test_grammars_that_an_engine_keeps_are_bounded_in_number_and_size() -> None:
    forget_grammars(GrammarBackend)
    backend, most = GrammarBackend(), 0
    for number in range(2 * MOST_GRAMMARS):
        backend.set_cache(("regex", str(number)), object())
        assert ("regex", str(number)) in backend.cache
        most = max(most, len(backend.cache))
    assert most == MOST_GRAMMARS
    backend.reset()
    long = GRAMMARS_TEXT // 16
    for number in range(64):
        backend.set_cache(("json", f"{number:0{long}}"), object())
        assert len(backend.cache) <= 17
