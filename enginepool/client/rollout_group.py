"""The samples of one prompt of a rollout, with their rewards: those of a finished group, and of one that is not."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginepool.client.generations import Generation
from enginepool.client.results import Floats


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """The finished samples of a prompt.

    Attributes:
        index: the position of the prompt, from 0.
        prompt: as it was given.
        samples: `n` of them, or fewer where `errors` says why; see `Generation`.
        rewards: float32 [samples]; NaN where the reward failed, as `errors` says.
        errors: what failed for this prompt alone; empty where nothing did.
        dropped: samples that were generated again, because their weights were too old or could not be continued.
    """

    index: int
    prompt: Any
    samples: tuple[Generation, ...]
    rewards: Floats
    errors: tuple[Exception, ...]
    dropped: int


@dataclass(slots=True, eq=False)
class Draft:
    """A group that is not finished. By number of the sample: those that ended, and their rewards."""

    index: int
    row: Any
    samples: dict[int, Generation] = field(default_factory=dict[int, Generation])
    rewards: dict[int, "asyncio.Task[float]"] = field(default_factory=dict[int, "asyncio.Task[float]"])
    errors: list[Exception] = field(default_factory=list[Exception])
    #: samples that cannot be generated
    failed: set[int] = field(default_factory=set[int])
    attempts: int = 0
    dropped: int = 0
    #: it counts in `max_in_flight`
    has_room: bool = True

    def missing(self, n: int) -> list[int]:
        return [i for i in range(n) if i not in self.samples and i not in self.failed]

    def drop(self, number: int) -> None:
        """A sample is to be generated again."""
        self.dropped += 1
        self.samples.pop(number, None)
        if (reward := self.rewards.pop(number, None)) is not None:
            reward.cancel()

    def finished(self) -> RolloutGroup:
        numbers = sorted(self.samples)
        rewards = np.array([self.rewards[i].result() for i in numbers], np.float32)
        samples = tuple(self.samples[i] for i in numbers)
        return RolloutGroup(self.index, self.row, samples, rewards, tuple(self.errors), self.dropped)
