"""What is asked of every contestant: the shapes of requests with their token ids, and how hard each is pushed."""

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

Head = Literal["causal", "reward"]


class Shape(msgspec.Struct, frozen=True):
    """A request of `items` rows of `query` + `item` token ids, drawn below `vocab`; `hidden` asks for pooled hidden states."""

    query: int
    items: int
    item: int
    vocab: int = 0
    labels: tuple[int, ...] = LABELS
    hidden: bool = False

    def request(self, number: int) -> "Request":
        """The token ids of request `number`, the same ones in every process and every run."""
        chance = np.random.default_rng((number, self.query, self.items, self.item))
        ids = chance.integers(0, self.vocab, self.query + self.items * self.item, dtype=np.int32)
        return Request(ids[: self.query], ids[self.query :].reshape(self.items, self.item))


class Request(NamedTuple):
    """query: int32 [length]; items: int32 [items, length]."""

    query: Ids
    items: Ids


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
    """All that one run measures. `seconds` is how long a phase lasts; `of_mix` names the workload that the mix sends.

    Every phase is measured `repetitions` times. Each repetition has arrivals of its own, the same for all contestants.
    """

    workloads: tuple[Workload, ...]
    seconds: float
    repetitions: int = 1
    mix: Mix | None = field(default_factory=Mix)
    of_mix: str = "pr"

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
            Workload("reward", rewarded, (20,), 8, "reward"),
            Workload("reward + hidden", msgspec.structs.replace(rewarded, hidden=True), (20,), 8, "reward"),
        )
    else:
        rewarded = Shape(120, 1, 480, labels=())
        workloads = (
            Workload("pr", Shape(120, 10, 180), (70, 120, 180), 64),
            Workload("long", Shape(1000, 50, 20), (), 16),
            Workload("reward", rewarded, (500,), 256, "reward"),
            Workload("reward + hidden", msgspec.structs.replace(rewarded, hidden=True), (500,), 256, "reward"),
        )
    return Plan(workloads, seconds=2.0, repetitions=1) if quick else Plan(workloads, seconds=40.0, repetitions=3)
