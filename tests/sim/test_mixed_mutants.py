"""The simulator finds bugs of workers that generate and run rows: each that is planted here is seen within a few schedules."""

import pytest

from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.protocol.messages import Capabilities
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate
from tests.sim.test_generation_mutants import SEEDS


def rows_and_sequences_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "mixed", False)


def sequences_take_the_room_of_rows(patch: pytest.MonkeyPatch) -> None:
    def most_sequences(self: Capabilities) -> int:
        return self.sequences + self.inflight_rows

    patch.setattr(Capabilities, "most_sequences", property(most_sequences))


def rows_take_the_room_of_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "row_tokens", 0)


def batches_count_next_to_sequences(patch: pytest.MonkeyPatch) -> None:
    def row_batches(self: Worker) -> int:
        return len(self.batches)

    patch.setattr(Worker, "row_batches", property(row_batches))


def rows_that_hang_have_time_while_tokens_arrive(patch: pytest.MonkeyPatch) -> None:
    def oldest(self: Worker) -> list[RunningBatch]:
        tasks = [batch for batch in self.batches.values() if batch.slices[0][0].generation is not None]
        return (tasks or [*self.batches.values()])[:1]

    patch.setattr(Worker, "oldest", oldest)


@pytest.mark.parametrize(
    "mutate",
    [
        rows_and_sequences_wait_for_each_other,
        sequences_take_the_room_of_rows,
        rows_take_the_room_of_sequences,
        batches_count_next_to_sequences,
        rows_that_hang_have_time_while_tokens_arrive,
    ],
)
def test_a_bug_of_workers_that_do_both_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, generating=True, paced=seed % 2 == 0))
