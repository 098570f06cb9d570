"""What one request may take of a scheduler that all of them share."""

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.patches.request_limits import (
    CALM_S,
    GRAMMARS_BYTES,
    GRAMMARS_TEXT,
    MOST_GRAMMARS,
    SEARCH_S,
    WARY_S,
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


def test_slow_patterns_that_follow_each_other_are_ended_early_and_after_a_while_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    search = PatternSearch()
    for at, most in (
        (100.0, SEARCH_S),
        (100.0, WARY_S),
        (99.0 + CALM_S, WARY_S),
        (98.9 + 2 * CALM_S, WARY_S),
        (200.0, SEARCH_S),
    ):
        now = at
        began = time.thread_time()
        with pytest.raises(SlowPattern) as ended:
            search(f"{SLOW}{at}{most}", "a" * 64)
        assert ended.value.args == (most,) and time.thread_time() - began >= most
        assert search("b+", "abba") is not None
    with pytest.raises(SlowPattern) as again:
        search(f"{SLOW}100.0{SEARCH_S}", "a")
    assert again.value.args == (SEARCH_S,), "as it was ended then"


def test_a_pattern_that_was_ended_early_for_another_one_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    search = PatternSearch()
    for pattern in (f"{SLOW}1", SLOW, SLOW):
        with pytest.raises(SlowPattern):
            search(pattern, "a" * 64)
    now += CALM_S
    assert search(SLOW, "") is None


class Req:
    """Of SGLang, as far as it looks for stop patterns."""

    module: Any
    finished_reason: Any = None

    def __init__(self, *patterns: str) -> None:
        self.sampling_params = SimpleNamespace(stop_regex_strs=list(patterns))
        self.output_ids: list[int] = []

    def look(self, accepted: int) -> bool:
        return self._check_str_based_finish(accepted)

    def _check_str_based_finish(self, new_accepted_len: int = 1) -> bool:
        return any(self.module.re.search(pattern, "a" * 64) is not None for pattern in self.sampling_params.stop_regex_strs)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Req` with the limits."""

    def reason(text: str, status: int, kind: str) -> str:
        return f"{kind} {status}: {text}"

    monkeypatch.setattr(Req, "_check_str_based_finish", Req.__dict__["_check_str_based_finish"])
    monkeypatch.setattr(Req, "module", SimpleNamespace(Req=Req, FINISH_ABORT=reason), raising=False)
    end_slow_searches(Req.module)


@pytest.mark.usefixtures("limited")
def test_a_sequence_ends_of_its_slow_stop_pattern_and_the_scheduler_goes_on() -> None:
    slow, other = Req(SLOW), Req("a")
    assert slow.look(1)
    assert slow.finished_reason.startswith("BadRequestError 400: stop_regex: a search took longer than 0.1 s")
    assert other.look(1) and other.finished_reason is None


@pytest.mark.usefixtures("limited")
def test_a_sequence_ends_of_many_searches_none_of_which_is_too_slow_and_so_do_others_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    # Each look at the clock finds that a third of the time for one search has passed.
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * SEARCH_S / 3)
    patterns = [f"{letter}+" for letter in "bcd"]
    many, same, others = Req(*patterns), Req(*patterns), [Req(pattern) for pattern in (*patterns, "e")]
    assert many.look(1), "three searches, and the looks around them"
    assert many.finished_reason.startswith("BadRequestError 400: stop_regex: the searches take too long")
    assert same.look(1) and same.finished_reason.startswith("BadRequestError 400: stop_regex: ")
    for other in others:  # also one with a pattern that the slow request had
        assert not other.look(1) and other.finished_reason is None


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
    backend.reset()
    for number in range(10):
        compiled = SimpleNamespace(ctx=SimpleNamespace(memory_size_bytes=GRAMMARS_BYTES // 2))
        backend.set_cache(("regex", str(number)), compiled)
        assert ("regex", str(number)) in backend.cache and len(backend.cache) <= 3
