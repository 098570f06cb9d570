"""What answers and updates amount to: rates, gaps, versions, holds. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from bench.table import Row, Target

#: (begin, end), moments of `time.monotonic`
Window = tuple[float, float]

OURS_STAGED, OURS_DIRECT = "enginepool, staged", "enginepool, direct"
RAW, PER_TENSOR, FLAT = "raw NCCL broadcast", "SGLang, tensor by tensor", "SGLang, flattened buckets"
LOADED = "enginepool, staged, under load"
ALONE = "its bytes alone, staged"
CEASELESS = "during continuous transfers"
#: burdens on a GPU: of the first one its engine's host has as much to do as the GPU, of the second one the GPU alone
SHORT, LONG = "short requests", "requests of 10 x 300 tokens"
#: phases in the order in which they come, and as they are called here
PHASES = {
    "join": "group", "prepare": "prepare", "staged": "staged to hold", "drain": "drain", "load": "load", "copy": "copy",
    "flush": "flush", "journal": "journal", "first_answer": "first answer",
}  # fmt: skip


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One answered request: when it was asked and answered, seconds of it in the engine, and of which version it is."""

    asked: float
    answered: float
    run_s: float
    version: int
    items: int


class Update(msgspec.Struct, frozen=True):
    """One update: moments at the trainer, and what the pool's history keeps of it. `phases` in µs."""

    began: float
    flowing: float
    ended: float
    version: int
    phases: dict[str, int]
    digest: str = ""

    @property
    def transfer_s(self) -> float:
        """Seconds in which bytes passed, until all workers had them verified."""
        return self.phases["transfer"] / 1e6

    @property
    def hold_ms(self) -> float:
        """Beyond the drain: from there to the moment at which work may start again."""
        return (self.phases.get("load", 0) + self.phases.get("journal", 0)) / 1e3


class Continuous(NamedTuple):
    """A time in which so many updates, or their bytes, followed each other, and quiet ones around it."""

    window: Window
    quiet: Sequence[Window]
    updates: int


class Passed(NamedTuple):
    """One kind of update in one run: the first that there was, and those after it."""

    who: str
    bucket_bytes: int
    updates: list[Update]


def items_per_second(answers: Sequence[Answer], windows: Sequence[Window]) -> float:
    """Items that were computed in the windows, each spread evenly over the time in which its engine had it."""
    done = 0.0
    for answer in answers:
        begin = answer.answered - max(answer.run_s, 1e-6)
        for first, last in windows:
            both = min(answer.answered, last) - max(begin, first)
            if both > 0:
                done += answer.items * both / (answer.answered - begin)
    whole = sum(last - first for first, last in windows)
    return done / whole if whole else 0.0


def longest_gap_ms(answers: Sequence[Answer], window: Window) -> float:
    """The longest time in the window without an answer."""
    moments = sorted({window[0], window[1], *(a.answered for a in answers if window[0] <= a.answered <= window[1])})
    return 1000 * max((after - before for before, after in pairwise(moments)), default=0.0)


def wrong_versions(answers: Sequence[Answer], updates: Sequence[Update], before: int) -> int:
    """Answers of a version that was not committed, or older than the one committed when they were asked."""
    known = {before, *(update.version for update in updates)}
    wrong = 0
    for answer in answers:
        least = max((update.version for update in updates if update.ended <= answer.asked), default=before)
        wrong += answer.version not in known or answer.version < least
    return wrong


def taken_ms(answers: Sequence[Answer], continuous: Continuous) -> float:
    """What each of the updates took of its engine's time, by what was not computed meanwhile."""
    normal, during = items_per_second(answers, continuous.quiet), items_per_second(answers, [continuous.window])
    first, last = continuous.window
    return 1000 * (1 - during / normal) * (last - first) / continuous.updates if normal else 0.0


def gigabytes(nbytes: int, seconds: float) -> float:
    """GB/s."""
    return nbytes / seconds / 1e9 if seconds else 0.0


def size_of(bucket_bytes: int) -> str:
    """A bucket in words."""
    if not bucket_bytes:
        return "one call"
    return f"{bucket_bytes >> 20} MiB" if bucket_bytes >= 1 << 20 else f"{bucket_bytes >> 10} KiB"


def update_rows(setting: str, nbytes: int, passed: Passed, raw: float | None) -> list[Row]:
    """The rows of one kind of update: transfer, and the hold in its parts, of the first and of the repeated ones.

    Args:
        setting: what stands before each row: model and receivers.
        raw: GB/s of the raw broadcast with the same buckets.
    """
    who, updates = passed.who, passed.updates
    direct = who == OURS_DIRECT
    rows: list[Row] = []

    def add(what: str, value: float, unit: str, ratio: float | None = None) -> None:
        rows.append(Row(f"{setting}, {what}", who, value, unit, ratio))

    for name, some in (("first", updates[:1]), ("repeated", updates[1:])):
        if not some:
            continue
        seconds = median(update.phases["load"] / 1e6 if direct else update.transfer_s for update in some)
        speed = gigabytes(nbytes, seconds)
        add(f"{size_of(passed.bucket_bytes)}, {name}: transfer", speed, "GB/s", speed / raw if raw else None)
        tail = f"{size_of(passed.bucket_bytes)}, {name}"
        add(f"{tail}: transfer takes", 1000 * seconds, "ms")
        add(f"{tail}: hold beyond the drain", median(update.hold_ms for update in some), "ms")
        for phase, called in PHASES.items():
            values = [update.phases[phase] / 1e3 for update in some if phase in update.phases]
            if values:
                add(f"{tail}: {called}", median(values), "ms")
    return rows


def load_rows(setting: str, answers: Sequence[Answer], failures: int, updates: Sequence[Update], before: int) -> list[Row]:
    """What clients saw of updates under load. The load ran undisturbed until the first of them."""
    asked = min((answer.answered for answer in answers), default=0.0)
    quiet = (asked, updates[0].began)
    continuous = Continuous((updates[0].began, updates[-1].ended), (quiet,), len(updates))
    normal, during = items_per_second(answers, continuous.quiet), items_per_second(answers, [continuous.window])
    who = LOADED
    usual = longest_gap_ms(answers, quiet)
    gaps = [longest_gap_ms(answers, (update.flowing, update.ended + 1.0)) for update in updates]
    return [
        Row(f"{setting}: scoring before updates", who, normal, "items/s"),
        Row(f"{setting}: scoring while they follow each other", who, during, "items/s", during / normal if normal else None),
        Row(f"{setting}: seconds of it", who, continuous.window[1] - continuous.window[0], "s"),
        Row(f"{setting}: updates in it", who, continuous.updates, ""),
        Row(f"{setting}: an update takes of its engine, with drain and hold", who, taken_ms(answers, continuous), "ms"),
        Row(f"{setting}: longest time without an answer", who, median(gaps), "ms"),
        Row(f"{setting}: longest time without an answer, normally", who, usual, "ms"),
        Row(f"{setting}: answers", who, len(answers), ""),
        Row(f"{setting}: answers of a wrong version", who, wrong_versions(answers, updates, before), ""),
        Row(f"{setting}: requests without an answer", who, failures, ""),
    ]  # fmt: skip


def continuous_rows(
    setting: str, answers: Sequence[Answer], continuous: Continuous, speed: float, raw: float | None
) -> list[Row]:
    """What a pool that is asked all the time does during continuous transfers, and alone.

    `speed`, `raw`: GB/s of those bytes, and of the raw broadcast.
    """
    normal, during = items_per_second(answers, continuous.quiet), items_per_second(answers, [continuous.window])
    return [
        Row(f"{setting}: scoring alone", ALONE, normal, "items/s"),
        Row(f"{setting}: scoring {CEASELESS}", ALONE, during, "items/s", during / normal if normal else None),
        Row(f"{setting}: seconds of it", ALONE, continuous.window[1] - continuous.window[0], "s"),
        Row(f"{setting}: transfer during scoring", ALONE, speed, "GB/s", speed / raw if raw else None),
        Row(f"{setting}: an update takes of its engine", ALONE, taken_ms(answers, continuous), "ms"),
    ]


def targets(setting: str, bucket: str) -> list[Target]:
    """The bounds, for one setting."""
    warm = f"{setting}, {bucket}, repeated"
    loaded = f"{setting}, {SHORT}, {bucket}, repeated"
    return [
        Target(f"{warm}: transfer", OURS_STAGED, 0.9, at_most=False),
        Target(f"{loaded}: transfer", LOADED, 0.45, at_most=False),
        Target(f"{setting}, {LONG}: scoring {CEASELESS}", ALONE, 0.95, at_most=False),
        Target(f"{warm}: hold beyond the drain", OURS_STAGED, 15, of_value=True),
        Target(f"{loaded}: hold beyond the drain", LOADED, 15, of_value=True),
        Target(f"{setting}, {bucket}, first: hold beyond the drain", OURS_STAGED, 60, of_value=True),
        Target(f"{warm}: transfer", OURS_DIRECT, 0.65, at_most=False),
        *(
            Target(f"{setting}, the killed worker is back after more than its {start}", who, 5, of_value=True)
            for who in (OURS_STAGED, OURS_DIRECT)
            for start in ("start", "engine's start")
        ),
        *(
            Target(f"{setting}, worker killed: all serve again after more than their {start}", OURS_DIRECT, 5, of_value=True)
            for start in ("start", "engines' start")
        ),
    ]
