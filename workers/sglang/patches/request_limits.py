"""Changes to SGLang's scheduler: how much of it one request may take. No SGLang here: its classes are arguments.

The scheduler looks for stop patterns between two steps, on its only thread. Every sequence of the engine waits for it.
"""

import re
import signal
import time
from collections import OrderedDict
from collections.abc import Hashable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

#: Seconds of the processor that a search for a stop pattern may take. Most take microseconds; one that tries all ways to divide
#: a text would take years.
SEARCH_S = 0.1
#: Seconds that a search may take for so many seconds after one was ended: a client with one slow pattern may have many.
WARY_S, CALM_S = 0.01, 10.0
#: and so many more for each token that all searches of a sequence together may take; few patterns take 20 µs
SEARCHES_S = 0.0005
#: patterns that took longer, which are not searched for again: each sample of a prompt has the same one
MOST_SLOW = 4096
#: Grammars that an engine keeps, and characters and bytes of them together. A pattern of 60,000 characters can take 300 MB.
MOST_GRAMMARS, GRAMMARS_TEXT, GRAMMARS_BYTES = 1024, 1 << 20, 256 << 20


class SlowPattern(Exception):
    """A search was ended, now or before, after so many seconds."""


class PatternSearch:
    """`re.search` that ends after SEARCH_S, or WARY_S. Made and called on the main thread, which takes signals."""

    def __init__(self) -> None:
        #: when the search that runs has to end, on the clock of this thread: it stands still while other programs run
        self._end: float | None = None
        #: after how many seconds each was ended
        self._slow: OrderedDict[Hashable, float] = OrderedDict()
        #: until when searches are ended early, on the clock of the host
        self._wary_until = 0.0
        signal.signal(signal.SIGALRM, self._look)

    def __call__(self, pattern: str, text: str) -> re.Match[str] | None:
        """Raises SlowPattern."""
        most = WARY_S if time.monotonic() < self._wary_until else SEARCH_S
        if (ended := self._slow.get(pattern, 0.0)) >= most:  # one that was ended early is tried again when it may take longer
            raise SlowPattern(ended)
        self._end = time.thread_time() + most
        signal.setitimer(signal.ITIMER_REAL, most, most)
        try:
            return re.search(pattern, text)
        except SlowPattern:
            self.remember(pattern, most)
            raise SlowPattern(most) from None
        finally:
            self._end = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def remember(self, slow: Hashable, after: float = SEARCH_S) -> None:
        """Search no more for this pattern, or for these patterns together: others may have some of them."""
        self._wary_until = time.monotonic() + CALM_S
        self._slow[slow] = after
        if len(self._slow) > MOST_SLOW:
            self._slow.popitem(last=False)

    def remembers(self, slow: Hashable) -> bool:
        return slow in self._slow

    def _look(self, *_: object) -> None:
        if self._end is not None and time.thread_time() >= self._end:
            self._end = None
            raise SlowPattern


def end_slow_searches(batch: Any) -> None:
    """Have a sequence end whose stop pattern takes too long, instead of the engine. `batch` is SGLang's module of requests.

    Ranks of one engine look for themselves, and have to find the same: this is for engines of one rank.
    """
    search = PatternSearch()
    batch.re = SimpleNamespace(search=search, error=re.error)
    check = batch.Req._check_str_based_finish

    def _check_str_based_finish(self: Any, *args: Any, **kwargs: Any) -> bool:
        patterns = tuple(self.sampling_params.stop_regex_strs)
        if not patterns:
            return check(self, *args, **kwargs)
        began = time.thread_time()
        try:
            if not search.remembers(patterns):
                found = check(self, *args, **kwargs)
                self._searched = getattr(self, "_searched", 0.0) + time.thread_time() - began
                if found or self._searched <= SEARCH_S + SEARCHES_S * len(self.output_ids):
                    return found
                search.remember(patterns)
            text = "stop_regex: the searches take too long; use fewer patterns, and simpler ones"
        except SlowPattern as slow:
            text = f"stop_regex: a search took longer than {slow.args[0]:g} s; use a pattern without repeats inside repeats"
        self.finished_reason = batch.FINISH_ABORT(text, HTTPStatus.BAD_REQUEST, "BadRequestError")
        return True

    batch.Req._check_str_based_finish = _check_str_based_finish


def _bytes_of(grammar: Any) -> int:
    """Of one that XGrammar compiled, which says it; 0: of another one."""
    return getattr(getattr(grammar, "ctx", None), "memory_size_bytes", 0)


def forget_grammars(backend: Any) -> None:
    """Have an engine forget the grammars that it keeps once they are many. `backend` is SGLang's class that compiles them.

    SGLang keeps each grammar until its caches are flushed, which may never be.
    """
    keep = backend.set_cache

    def set_cache(self: Any, key: Any, value: Any) -> None:
        text, size = sum(len(str(known)) for known in self.cache), sum(map(_bytes_of, self.cache.values()))
        if len(self.cache) >= MOST_GRAMMARS or text > GRAMMARS_TEXT or size > GRAMMARS_BYTES:
            self.reset()
        keep(self, key, value)

    backend.set_cache = set_cache
