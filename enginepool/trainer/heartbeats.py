"""Heartbeats of trainer ranks: each rank says, in the store of their process group, which update it is in and how it fares.

A collective cannot say that a rank is missing, and it can wait for many minutes. So no rank enters a collective of an update
before all ranks have begun that update, and a thread watches the other ranks while one waits. Rank 0 watches all ranks, the
others watch rank 0, whose word says what it has seen.

Rank 0 numbers the updates (`turn`). The other ranks begin the one that rank 0 is in. A rank that comes late, when rank 0 has
given that update up, hears why, and is in step again with its next call.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from enginepool.protocol.errors import brief
from enginepool.transfer import threads

#: seconds between two words of a rank, and between two looks at the words of the others
PERIOD_S = 0.5
#: the same, while ranks are waited for that have not begun the update
_MEETING_S = 0.01
#: a rank that says nothing for so long is lost, once something points to a lost rank
SUSPECT_S = 2.5
#: a failure of one rank is believed after so long: a rank that is lost makes the collectives of the others fail
BELIEVE_S = 3.0
#: a rank that leaves an update waits so long at most until the store has its last word
_LAST_WORD_S = 1.0


class RankFailed(Exception):
    """Another trainer rank is gone, has not begun the update, or failed in it."""


class Word(msgspec.Struct, array_like=True):
    """What a rank says: the update that it is in or was in last, the version that its caller named (-1: none), a number that
    grows while the rank lives, whether the update is over for it, and why it gave the update up."""

    turn: int = 0
    version: int = -1
    beat: int = 0
    over: bool = False
    failure: str = ""


class RankWatch:
    """Whether the other ranks let an update go on, as one rank sees it. Pure.

    Args:
        last: what this rank said last, in an earlier update.
        version: that the caller named, or None.
        timeout_s: as of `Heartbeats`.

    Attributes:
        word: what this rank is to say; its turn is 0 until rank 0 has begun the update.
        here: all ranks that this one watches have begun the update.
        failures: what they say of themselves in it, by rank.
    """

    def __init__(self, rank: int, size: int, last: Word, version: int | None, timeout_s: float, now: float) -> None:
        self._ranks = range(1, size) if rank == 0 else range(1)
        self._last, self._timeout_s, self._began = last.turn, timeout_s, now
        self.word = Word(last.turn + 1 if rank == 0 else 0, -1 if version is None else version)
        #: by rank: its last beat in this update, and when this rank saw it
        self._heard: dict[int, tuple[int, float]] = {}
        self._suspects_since = float("inf")
        self.here = False
        self.failures: dict[int, str] = {}

    def hear(self, now: float, words: Mapping[int, Word], *, broken: bool = False) -> str:
        """Why the update cannot go on, or "". `broken`: a collective failed, as when a rank is gone."""
        mine = self.word
        if not mine.turn and words and words[0].turn > self._last:
            if not words[0].over:
                mine.turn = words[0].turn
            elif words[0].failure and words[0].version == mine.version:
                mine.turn = words[0].turn
                return words[0].failure
        for rank, word in words.items():
            if mine.turn and word.turn > mine.turn:
                return f"trainer rank {rank} has begun a later update; all ranks make the same calls"
            if mine.turn and word.turn == mine.turn:
                if word.failure:
                    self.failures[rank] = word.failure
                if rank not in self._heard or self._heard[rank][0] != word.beat:
                    self._heard[rank] = word.beat, now
        missing = [rank for rank in self._ranks if rank not in self._heard]
        self.here = not missing
        if broken or self.failures:
            self._suspects_since = min(self._suspects_since, now)
        limit_s = self._timeout_s if now < self._suspects_since else min(SUSPECT_S, self._timeout_s)
        for rank, (_, at) in self._heard.items():
            if now - at > limit_s and not self.failures.get(rank):
                return f"trainer rank {rank} is gone: it has said nothing for {now - at:.1f} s"
        if self.failures and now - self._suspects_since >= BELIEVE_S:
            return self.failures[min(self.failures)]
        if missing and now - self._began > self._timeout_s:
            return f"{_names(missing)} not called `publish` for {self._timeout_s:g} s; all ranks make the same calls"
        return ""


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"trainer rank {ranks[0]} has"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"trainer ranks {', '.join(map(str, ranks[:8]))}{more} have"


class Heartbeats:
    """The heartbeats of one rank during one update, on a thread of their own.

    Args:
        store: of the ranks' process group.
        timeout_s: seconds in which every rank has to begin the update, and after which a silent rank is lost.
        lost: called at most once, in that thread, with why the update cannot go on: `RankFailed`, or what this rank gave to
            `fail`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        version: int | None,
        timeout_s: float,
        lost: Callable[[Exception], None],
    ) -> None:
        self._store, self._rank, self._size, self._version = store, rank, size, version
        self._timeout_s, self._lost = timeout_s, lost
        self._changed = threading.Condition()
        #: all of these under `_changed`
        self._here = False
        self._reason = ""
        self._failures: dict[int, str] = {}
        self._own = ""
        self._error: tuple[Exception, float] | None = None
        self._broken = False
        self._ends = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin the update."""
        self._thread = threads.start(self._run, "trainer-heartbeats")

    def wait_for_all(self, *, also_failed: bool = False) -> None:
        """Until all ranks that this one watches have begun the update. Raises RankFailed: one has not, or failed.

        Args:
            also_failed: ranks that said that they failed count, too: they are still in step, unless a collective failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._here or self._reason)
            in_step = also_failed and self._here and self._failures and not self._broken
            if self._reason and not in_step:
                raise RankFailed(self._reason)

    def fail(self, error: Exception) -> None:
        """This rank cannot do its part. All other ranks are told, also those in a collective."""
        with self._changed:
            if self._error is None:
                self._error = error, time.monotonic()
                self._own = brief(f"trainer rank {self._rank} failed: {type(error).__name__}: {error}")
            self._changed.notify_all()

    def why(self, *, broken: bool) -> str:
        """Which rank failed and why, as far as it can be known within seconds, or "".

        Args:
            broken: the ranks' collectives fail; else all ranks took part in one, and one said there that it failed.
        """
        with self._changed:
            self._broken = self._broken or broken
            self._changed.notify_all()
            known = (lambda: self._reason) if broken else (lambda: self._reason or self._failures)
            self._changed.wait_for(lambda: known() or self._ends, BELIEVE_S + 2 * PERIOD_S)
            return self._reason or next(iter(self._failures.values()), "")

    def end(self, failure: str = "") -> None:
        """The update is over on this rank. Returns when the other ranks can read that: a rank that has called `publish` for the
        next update would begin this one otherwise. `failure`: what ranks hear that have not been told otherwise."""
        with self._changed:
            self._own = self._own or brief(failure)
            self._ends = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_LAST_WORD_S)

    def _run(self) -> None:
        try:
            last = self._words([self._rank]).get(self._rank, Word())
            watch = RankWatch(self._rank, self._size, last, self._version, self._timeout_s, time.monotonic())
            while self._beat(watch):
                pass
        except Exception as error:  # of any kind: ranks wait for this thread
            text = " ".join(str(error).split()) or type(error).__name__
            self._give_up(f"the store of the trainer's process group is gone, and with it a trainer rank: {text}")

    def _beat(self, watch: RankWatch) -> bool:
        """One look at the others, and one word. False: it was the last."""
        others = range(1, self._size) if self._rank == 0 else [0]
        words = self._words(others)
        with self._changed:
            now = time.monotonic()
            reason = watch.hear(now, words, broken=self._broken)
            if not reason and self._error is not None and now - self._error[1] >= BELIEVE_S:
                # The others do not come to hear of it.
                reason = self._own
            self._here, self._failures = watch.here, dict(watch.failures)
            self._changed.notify_all()
        if reason:
            self._give_up(reason)
        word = watch.word
        with self._changed:
            word.beat, word.over, word.failure = word.beat + 1, self._ends, self._reason or self._own
        if word.turn:
            self._store.set(f"word/{self._rank}", msgspec.json.encode(word))
        if word.over:
            return False
        with self._changed:
            period = PERIOD_S if watch.here else _MEETING_S
            self._changed.wait_for(lambda: self._ends or (self._reason or self._own) != word.failure, period)
        return True

    def _words(self, ranks: Sequence[int]) -> dict[int, Word]:
        said = [rank for rank in ranks if self._store.check([f"word/{rank}"])]
        return {rank: msgspec.json.decode(self._store.get(f"word/{rank}"), type=Word) for rank in said}

    def _give_up(self, reason: str) -> None:
        with self._changed:
            if self._reason or self._ends:
                return
            self._reason = reason
            error = self._error[0] if self._error is not None and reason == self._own else RankFailed(reason)
            self._changed.notify_all()
        self._lost(error)
