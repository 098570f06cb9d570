"""Changes to SGLang's scheduler: how much of it one request may take. No SGLang here: its classes are arguments.

The scheduler looks for stop patterns between two steps, on its only thread. Every sequence of the engine waits for it.
"""

import re
import signal
import time
from collections import OrderedDict
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

#: Seconds of the processor that a search for a stop pattern may take. Most take microseconds; one that tries all ways to divide
#: a text would take years.
SEARCH_S = 0.1
#: patterns that took longer, which are not searched for again: each sample of a prompt has the same one
MOST_SLOW = 4096
#: Grammars that an engine keeps, and characters of them together. A schema of 60,000 characters can take 25 MB.
MOST_GRAMMARS, GRAMMARS_TEXT = 1024, 1 << 20


class SlowPattern(Exception):
    """A search was ended."""


class PatternSearch:
    """`re.search` that ends after SEARCH_S. Made and called on the main thread, which takes signals."""

    def __init__(self) -> None:
        #: when the search that runs has to end, on the clock of this thread: it stands still while other programs run
        self._end: float | None = None
        self._slow: OrderedDict[str, None] = OrderedDict()
        signal.signal(signal.SIGALRM, self._look)

    def __call__(self, pattern: str, text: str) -> re.Match[str] | None:
        """Raises SlowPattern."""
        if pattern in self._slow:
            raise SlowPattern
        self._end = time.thread_time() + SEARCH_S
        signal.setitimer(signal.ITIMER_REAL, SEARCH_S, SEARCH_S)
        try:
            return re.search(pattern, text)
        except SlowPattern:
            self._slow[pattern] = None
            if len(self._slow) > MOST_SLOW:
                self._slow.popitem(last=False)
            raise
        finally:
            self._end = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _look(self, *_: object) -> None:
        if self._end is not None and time.thread_time() >= self._end:
            self._end = None
            raise SlowPattern


def end_slow_searches(batch: Any) -> None:
    """Have a sequence end whose stop pattern takes too long, instead of the engine. `batch` is SGLang's module of requests.

    Ranks of one engine look for themselves, and have to find the same: this is for engines of one rank.
    """
    batch.re = SimpleNamespace(search=PatternSearch(), error=re.error)
    check = batch.Req._check_str_based_finish

    def _check_str_based_finish(self: Any, *args: Any, **kwargs: Any) -> bool:
        try:
            return check(self, *args, **kwargs)
        except SlowPattern:
            text = f"stop_regex: a search took longer than {SEARCH_S:g} s; use a pattern without repeats inside repeats"
            self.finished_reason = batch.FINISH_ABORT(text, HTTPStatus.BAD_REQUEST, "BadRequestError")
            return True

    batch.Req._check_str_based_finish = _check_str_based_finish


def forget_grammars(backend: Any) -> None:
    """Have an engine forget the grammars that it keeps once they are many. `backend` is SGLang's class that compiles them.

    SGLang keeps each grammar until its caches are flushed, which may never be.
    """
    keep = backend.set_cache

    def set_cache(self: Any, key: Any, value: Any) -> None:
        if len(self.cache) >= MOST_GRAMMARS or sum(len(str(known)) for known in self.cache) > GRAMMARS_TEXT:
            self.reset()
        keep(self, key, value)

    backend.set_cache = set_cache
