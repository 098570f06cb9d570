"""The simulator finds bugs in changes of adapters: each one that is planted here is seen within a few schedules."""

from typing import Any

import pytest

from enginepool.coordinator.core.group_adapters import GroupAdapters
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.requests import generations
from enginepool.coordinator.weights import adapter_changes, worker_adapters
from enginepool.protocol.messages.adapters import AdapterChanged
from enginepool.workers.adapter_state import AdapterState
from enginepool.workers.events import CommandDone, RunCommand, WorkerEffect
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate

SEEDS = range(1, 201)


def workers_get_work_before_they_have_what_is_committed(patch: pytest.MonkeyPatch) -> None:
    def lacked(self: GroupAdapters[Request], loaded: object) -> None:
        """Nothing."""

    patch.setattr(GroupAdapters, "lacked", lacked)


def a_version_is_unloaded_while_sequences_use_it(patch: pytest.MonkeyPatch) -> None:
    def used(worker: Worker) -> set[str]:
        return set()

    patch.setattr(worker_adapters, "_used", used)


def tokens_are_said_to_be_of_the_version_that_is_committed_in_the_end(patch: pytest.MonkeyPatch) -> None:
    real = generations.note_sequence

    def note_sequence(batch: RunningBatch, place: int) -> None:
        request = batch.slices[0][0]
        batch.adapter_version = request.group.adapters.version(request.work.adapter)  # type: ignore[attr-defined]
        real(batch, place)

    patch.setattr(generations, "note_sequence", note_sequence)


def a_resumed_sequence_names_its_last_version_alone(patch: pytest.MonkeyPatch) -> None:
    real = generations.note_sequence

    def note_sequence(batch: RunningBatch, place: int) -> None:
        state = batch.slices[0][0].generation
        assert state is not None
        sequence = state.sequences[place]
        real(batch, place)
        sequence.adapters = tuple((version, sequence.start) for version, _ in sequence.adapters[-1:])

    patch.setattr(generations, "note_sequence", note_sequence)


def what_is_not_wanted_stays_in_engines(patch: pytest.MonkeyPatch) -> None:
    def used(worker: Worker) -> set[str]:
        return worker.adapters.loaded

    patch.setattr(worker_adapters, "_used", used)


def requests_outlive_their_adapter(patch: pytest.MonkeyPatch) -> None:
    def end(requests: Any, request: Any) -> bool:
        return True

    patch.setattr(adapter_changes, "end_with_tokens", end)


def a_worker_never_says_what_it_loaded_for_an_earlier_coordinator(patch: pytest.MonkeyPatch) -> None:
    real = AdapterState.done

    def done(self: AdapterState, event: CommandDone) -> bool:
        real(self, event)
        return False

    patch.setattr(AdapterState, "done", done)


def a_change_that_is_delivered_twice_runs_twice(patch: pytest.MonkeyPatch) -> None:
    real = AdapterState.take

    def take(self: AdapterState, message: Any, epoch: int, stage: str) -> list[WorkerEffect]:
        again = message.task == self._change  # pyright: ignore[reportPrivateUsage]
        return [RunCommand(message)] if again and message.task[0] == epoch else real(self, message, epoch, stage)

    patch.setattr(AdapterState, "take", take)


def a_failed_load_is_a_success(patch: pytest.MonkeyPatch) -> None:
    real = worker_adapters.AdapterWorkers.answered

    def answered(self: worker_adapters.AdapterWorkers, worker: Worker, message: AdapterChanged) -> None:
        if message.code == "engine_error":
            message.code, message.digest = "", "0" * 32
        real(self, worker, message)

    patch.setattr(worker_adapters.AdapterWorkers, "answered", answered)


@pytest.mark.parametrize(
    "mutate",
    [
        workers_get_work_before_they_have_what_is_committed,
        a_version_is_unloaded_while_sequences_use_it,
        tokens_are_said_to_be_of_the_version_that_is_committed_in_the_end,
        a_resumed_sequence_names_its_last_version_alone,
        what_is_not_wanted_stays_in_engines,
        requests_outlive_their_adapter,
        a_worker_never_says_what_it_loaded_for_an_earlier_coordinator,
        a_change_that_is_delivered_twice_runs_twice,
        a_failed_load_is_a_success,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_in_changes_of_adapters_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, generating=True, adapting=True))


def engines_that_sleep_are_told_to_load(patch: pytest.MonkeyPatch) -> None:
    real = worker_adapters._can  # pyright: ignore[reportPrivateUsage]

    def can(worker: Worker) -> bool:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(Worker, "sleeps", False)
            return real(worker)

    patch.setattr(worker_adapters, "_can", can)


def test_a_planted_bug_in_adapters_of_engines_that_sleep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int) -> object:
        return simulate(seed, 1 + seed % 8, generating=True, adapting=True, sleeping=True)

    find(engines_that_sleep_are_told_to_load, monkeypatch, SEEDS, run)
