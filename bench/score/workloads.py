"""What is asked of every contestant: the shapes of requests with their token ids, and how hard each is pushed."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
#: Different requests that are sent in turn, so that no contestant profits from a recent prompt; each phase begins so many
#: further on, so that none is of the phase before.
VARIANTS = 2048
STRIDE = 512
#: Ids that every tokenizer has, or a server refuses them as labels.
LABELS = (100, 200)

#: Each of them is one token of the models that are made here, after a space.
_WORDS = (
    "answer answers asyncio batch by capital carries computed each engines every for forward have in is it items "
    "main model no number of one or pair pass passage pool print priority prompts query question relevant responses "
    "reward scores sends that the this to trainer version weights with yes"
)
WORDS = _WORDS.split()
#: of the frequencies of queries
ZIPF = 1.1

Head = Literal["causal", "reward"]
#: The phases of a workload, in their order: one request in flight, each of its rates, as many in flight as saturate.
PHASES = ("alone", "rates", "saturation")


class Shape(msgspec.Struct, frozen=True):
    """A request of `items` rows of `query` + `item` token ids, drawn below `vocab`.

    least: with (query, items, item), these are the least and the others the most of lengths that are drawn log-uniformly.
    queries: so many different queries, drawn by Zipf's law with the exponent 1.1; 0: each request has its own.
    text: words of one token each instead of ids. hidden: asks for pooled hidden states.
    """

    query: int
    items: int
    item: int
    vocab: int = 0
    labels: tuple[int, ...] = LABELS
    hidden: bool = False
    least: tuple[int, int, int] | None = None
    queries: int = 0
    text: bool = False

    def request(self, number: int) -> "Request":
        """What request `number` asks, the same in every process and every run."""
        most = (self.query, self.items, self.item)
        chance = np.random.default_rng((number, *most))
        if self.least is None:
            ids = chance.integers(0, self.vocab, self.query + self.items * self.item, dtype=np.int32)
            query, items = ids[: self.query], list(ids[self.query :].reshape(self.items, self.item))
        else:
            query_length, rows = (drawn(chance, least, most) for least, most in zip(self.least[:2], most[:2], strict=True))
            items = [
                chance.integers(0, self.vocab, drawn(chance, self.least[2], self.item), dtype=np.int32) for _ in range(rows)
            ]
            query = chance.integers(0, self.vocab, query_length, dtype=np.int32)
        if self.queries:
            weights = np.arange(1, self.queries + 1, dtype=np.float64) ** -ZIPF
            which = int(chance.choice(self.queries, p=weights / weights.sum()))
            query = np.random.default_rng((which, self.queries)).integers(0, self.vocab, self.query, dtype=np.int32)
        if self.text:
            return Request(in_words(query), [in_words(item) for item in items])
        return Request(query, items)


def drawn(chance: np.random.Generator, least: int, most: int) -> int:
    """An integer from `least` to `most`, log-uniformly."""
    return min(most, int(math.exp(chance.uniform(math.log(least), math.log(most + 1)))))


def in_words(ids: Ids) -> str:
    """A text of as many tokens."""
    return "".join(f" {WORDS[one % len(WORDS)]}" for one in ids)


class Request(NamedTuple):
    """A query and its items: token ids, or texts."""

    query: Ids | str
    items: list[Ids] | list[str]

    def listed(self) -> tuple[list[int] | str, list[list[int] | str]]:
        """The same without arrays."""
        query, *items = (one if isinstance(one, str) else one.tolist() for one in (self.query, *self.items))
        return query, items


@dataclass(frozen=True)
class Workload:
    """One kind of request and the load under which it is measured.

    rates: requests a second of open loops; saturated: requests kept in flight to find out what a contestant can do at most.
    """

    name: str
    shape: Shape
    rates: tuple[float, ...]
    saturated: int
    head: Head = "causal"


@dataclass(frozen=True)
class Mix:
    """Two priorities of one workload at `load` times the rate that saturates it; `high_share` of the requests are high."""

    name: str = "mix"
    load: float = 1.2
    high_share: float = 0.2
    #: Above what a second of waiting is worth, times the seconds that a phase lasts.
    high: int = 100


@dataclass(frozen=True)
class Plan:
    """All that one run measures. `seconds`: how long a phase under load lasts. `of_mix`: the workload that the mix sends.

    Every phase is measured `repetitions` times. Each repetition has arrivals of its own, the same for all contestants.
    """

    workloads: tuple[Workload, ...]
    seconds: float
    repetitions: int = 1
    mix: Mix | None = field(default_factory=Mix)
    of_mix: str = "pr"
    phases: frozenset[str] = frozenset(PHASES)

    def only(self, names: set[str]) -> "Plan":
        """The same with the named workloads alone."""
        kept = tuple(workload for workload in self.workloads if workload.name in names)
        mix = self.mix if self.mix is not None and self.mix.name in names else None
        return replace(self, workloads=kept, mix=mix)

    def at(self, rates: tuple[float, ...]) -> "Plan":
        """The same with these loads, in requests a second, for the workload that has more than one."""
        kept = (replace(one, rates=rates) if one.name == self.of_mix else one for one in self.workloads)
        return replace(self, workloads=tuple(kept))

    def of(self, head: Head) -> tuple[Workload, ...]:
        """What is measured on a model with this head."""
        return tuple(workload for workload in self.workloads if workload.head == head)


def plan(device: str, quick: bool) -> Plan:
    """What is measured on this device. Requests for a CPU are smaller: it is there to see that everything works."""
    if device == "cpu":
        rewarded = Shape(20, 1, 40, labels=())
        workloads = (
            Workload("pr", Shape(12, 10, 18), (4, 8), 4),
            Workload("long", Shape(100, 20, 5), (), 4),
            Workload("text", Shape(12, 10, 18, text=True), (4, 8), 4),
            Workload("zipf", Shape(30, 20, 12, least=(30, 20, 2), queries=40), (), 4),
            Workload("mixed", Shape(40, 37, 90, least=(2, 1, 1)), (), 4),
            Workload("single", Shape(4, 1, 2), (), 8),
            Workload("reward", rewarded, (20,), 8, "reward"),
            Workload("reward + hidden", msgspec.structs.replace(rewarded, hidden=True), (20,), 8, "reward"),
        )
    else:
        rewarded = Shape(120, 1, 480, labels=())
        workloads = (
            Workload("pr", Shape(120, 10, 180), (70, 120, 180), 64),
            Workload("long", Shape(1000, 50, 20), (), 16),
            Workload("text", Shape(120, 10, 180, text=True), (70,), 64),
            Workload("zipf", Shape(300, 20, 120, least=(300, 20, 20), queries=40), (), 24),
            Workload("mixed", Shape(400, 37, 900, least=(20, 1, 3)), (20,), 32),
            Workload("single", Shape(40, 1, 20), (), 256),
            Workload("reward", rewarded, (500,), 256, "reward"),
            Workload("reward + hidden", msgspec.structs.replace(rewarded, hidden=True), (500,), 256, "reward"),
        )
    return Plan(workloads, seconds=2.0, repetitions=1) if quick else Plan(workloads, seconds=40.0, repetitions=3)
