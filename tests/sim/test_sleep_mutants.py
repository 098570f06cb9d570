"""The simulator finds bugs that are planted in what puts engines to sleep and wakes them."""

from typing import Any

import pytest
from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core import transitions
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.holding import GroupHolding
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.workers.memory_state import MemoryState
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate

SEEDS = range(1, 301)


def a_successor_forgets_what_sleeps(patch: pytest.MonkeyPatch) -> None:
    real = Machine._started  # pyright: ignore[reportPrivateUsage]

    def started(self: Machine, e: ev.Started) -> None:
        e.holds = {}
        real(self, e)

    patch.setattr(Machine, "_started", started)


def processes_are_started_while_their_group_sleeps(patch: pytest.MonkeyPatch) -> None:
    real = WorkerSlots.watch

    def watch(self: WorkerSlots) -> None:
        kept = {group: group.holds for group in self.core.groups.values()}
        for group in kept:
            group.holds = group.holds.without_sleep("", frozenset(("weights", "kv_cache", "cuda_graph")))
        real(self)
        for group, holds in kept.items():
            group.holds = holds

    patch.setattr(WorkerSlots, "watch", watch)


def generations_stay_where_they_are(patch: pytest.MonkeyPatch) -> None:
    def recall_streams(_: WorkerRegistry, _worker: Worker) -> None:
        """The engine is not empty."""

    real = GroupHolding.sleep

    def sleep(self: GroupHolding, *args: Any) -> int:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(WorkerRegistry, "recall_streams", recall_streams)
            return real(self, *args)

    patch.setattr(GroupHolding, "sleep", sleep)


def a_worker_that_sleeps_counts_as_ready(patch: pytest.MonkeyPatch) -> None:
    real = transitions._derived  # pyright: ignore[reportPrivateUsage]

    def derived(worker: Worker, now: float) -> WorkerState:
        state = real(worker, now)
        return WorkerState.READY if state is WorkerState.ASLEEP and worker.holds else state

    patch.setattr(transitions, "_derived", derived)


def what_a_worker_says_of_its_sleep_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    def settle(_: GroupHolding, _worker: Worker) -> None:
        """It is not told again."""

    patch.setattr(GroupHolding, "settle", settle)


def work_enters_an_engine_that_sleeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryState, "closed", False)


def a_worker_says_ready_while_it_goes_to_sleep(patch: pytest.MonkeyPatch) -> None:
    real = MemoryState.take

    def take(self: MemoryState, *args: Any, **named: Any) -> Any:
        effect = real(self, *args, **named)
        self.commanded.clear()
        return effect

    patch.setattr(MemoryState, "take", take)


def weights_that_sleep_are_updated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "weights_asleep", False)


def a_paused_group_begins_what_comes(patch: pytest.MonkeyPatch) -> None:
    real = Machine._control  # pyright: ignore[reportPrivateUsage]

    def control(self: Machine, e: ev.ControlAsked) -> None:
        real(self, e)
        for group in self.core.groups.values():
            if group.holds.paused and "" not in group.holds.asleep:
                group.holds = replace(group.holds, paused=False)
                transitions.release(self.core, group)

    patch.setattr(Machine, "_control", control)


def a_pause_is_confirmed_before_generations_are_taken_back(patch: pytest.MonkeyPatch) -> None:
    def pause(self: GroupHolding, group: Group, _: object) -> int:
        return self._set(group, replace(group.holds, paused=True))  # pyright: ignore[reportPrivateUsage]

    patch.setattr(GroupHolding, "pause", pause)


def what_changes_nothing_is_answered_at_once(patch: pytest.MonkeyPatch) -> None:
    real = GroupHolding._set  # pyright: ignore[reportPrivateUsage]

    def set_(self: GroupHolding, group: Group, holds: GroupHolds) -> int:
        return 0 if holds == group.holds else real(self, group, holds)

    patch.setattr(GroupHolding, "_set", set_)


def generations_that_stand_still_are_late(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Worker, "owed", Worker.oldest)


@pytest.mark.parametrize(
    "mutate",
    [
        what_changes_nothing_is_answered_at_once,
        generations_that_stand_still_are_late,
        a_paused_group_begins_what_comes,
        a_pause_is_confirmed_before_generations_are_taken_back,
        a_successor_forgets_what_sleeps,
        processes_are_started_while_their_group_sleeps,
        generations_stay_where_they_are,
        a_worker_that_sleeps_counts_as_ready,
        what_a_worker_says_of_its_sleep_is_not_compared,
        work_enters_an_engine_that_sleeps,
        a_worker_says_ready_while_it_goes_to_sleep,
        weights_that_sleep_are_updated,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_bug_planted_in_sleep_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(
        mutate,
        monkeypatch,
        SEEDS,
        lambda seed: simulate(seed, 1 + seed % 8, generating=seed % 2 == 0, updates=seed % 3 == 0, sleeping=True),
    )
