"""The simulator finds what it is for in generations too: each bug that is planted here is seen within a few schedules."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from enginepool.client.session.received_tokens import ReceivedTokens
from enginepool.coordinator.core import machine
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import Effect
from enginepool.coordinator.core.events import Event, TokensGenerated
from enginepool.coordinator.core.generation_state import GenerationState, RunningSequence
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet import reports, workers
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests import generations, making_room
from enginepool.coordinator.requests.stream_messages import UnsentTokens
from enginepool.coordinator.scheduling import batches, generation_slots
from enginepool.coordinator.weights import outcomes, phases
from enginepool.coordinator.weights.update import Update
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages import FrameSpec, SequenceEnd, StartGeneration
from enginepool.protocol.messages.weights import LoadWeights
from enginepool.workers.events import ResumeEngine, SendToCoordinator, StepsDone, WorkerEffect
from enginepool.workers.ledger import TaskLedger
from enginepool.workers.machine import WorkerMachine
from enginepool.workers.weights.machine import WorkerUpdates
from tests.sim.conversations import BLOCK
from tests.sim.planted import Mutate, find
from tests.sim.simulation import simulate

SEEDS = range(1, 301)


def the_last_token_before_a_loss_is_generated_twice(patch: pytest.MonkeyPatch) -> None:
    real = batches.start_message

    def start_message(batch: RunningBatch) -> tuple[StartGeneration, list[Buffer]]:
        message, [prompt] = real(batch)
        if message.at:
            prompt = bytes(prompt)[:-4]
            message = replace(message, frames=[FrameSpec("prompt", "int32", (len(prompt) // 4,))])
        return message, [prompt]

    patch.setattr(batches, "start_message", start_message)


def a_worker_that_generates_nothing_keeps_its_tasks(patch: pytest.MonkeyPatch) -> None:
    real = Worker.owed

    def owed(self: Worker) -> list[RunningBatch]:
        return [batch for batch in real(self) if batch.slices[0][0].generation is None]

    patch.setattr(Worker, "owed", owed)


def a_sequence_names_only_the_worker_at_which_it_ended(patch: pytest.MonkeyPatch) -> None:
    real = generations.note_sequence

    def note_sequence(batch: RunningBatch, place: int) -> None:
        state = batch.slices[0][0].generation
        if state is not None and state.sequences[place].end is not None:
            real(batch, place)

    patch.setattr(generations, "note_sequence", note_sequence)


def credit_is_ignored(patch: pytest.MonkeyPatch) -> None:
    state: Any = GenerationState
    real = state.__init__

    def init(self: GenerationState[Any], work: GenerateWork) -> None:
        real(self, work)
        self.credit = self.credit and 1 << 30

    patch.setattr(state, "__init__", init)


def a_request_that_is_sent_again_begins_at_position_0(patch: pytest.MonkeyPatch) -> None:
    def brought(self: GenerateWork) -> Iterator[bytes]:
        return (b"" for _ in range(self.rows))

    patch.setattr(GenerateWork, "brought", brought)


def a_resumed_sequence_has_as_many_new_tokens_as_at_first(patch: pytest.MonkeyPatch) -> None:
    real = batches.start_message

    def start_message(batch: RunningBatch) -> tuple[StartGeneration, list[Buffer]]:
        message, frames = real(batch)
        work = batch.slices[0][0].work
        assert isinstance(work, GenerateWork)
        return replace(message, sampling=replace(message.sampling, max_new_tokens=work.sampling.max_new_tokens)), frames

    patch.setattr(batches, "start_message", start_message)


def a_resumed_sequence_forgets_how_many_tokens_it_must_have(patch: pytest.MonkeyPatch) -> None:
    real = batches.start_message

    def start_message(batch: RunningBatch) -> tuple[StartGeneration, list[Buffer]]:
        message, frames = real(batch)
        least = 0 if message.at else message.sampling.min_new_tokens
        return replace(message, sampling=replace(message.sampling, min_new_tokens=least)), frames

    patch.setattr(batches, "start_message", start_message)


def a_resumed_sequence_loses_its_adapter(patch: pytest.MonkeyPatch) -> None:
    real = batches.start_message

    def start_message(batch: RunningBatch) -> tuple[StartGeneration, list[Buffer]]:
        message, frames = real(batch)
        return replace(message, adapter="" if message.at else message.adapter), frames

    patch.setattr(batches, "start_message", start_message)


def what_an_engine_counted_is_forgotten_with_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GenerateWork, "constrained", False)


def no_worker_is_told_of_a_cancel(patch: pytest.MonkeyPatch) -> None:
    def stop_tasks(core: Any, tasks: Any) -> None:
        """Nothing."""

    patch.setattr(generations, "stop_tasks", stop_tasks)


def a_slot_is_taken_from_a_lower_priority_without_a_stop(patch: pytest.MonkeyPatch) -> None:
    def stop_tasks(core: Context, tasks: Any) -> None:
        """None is told."""

    def make_room(requests: Any, group: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(making_room, "stop_tasks", stop_tasks)
            return making_room.make_room(requests, group)

    patch.setattr(machine, "make_room", make_room)


def workers_go_on_with_what_is_stopped(patch: pytest.MonkeyPatch) -> None:
    def stop(self: TaskLedger, epoch: int, counters: Sequence[int]) -> list[Any]:
        return []

    patch.setattr(TaskLedger, "stop", stop)


def generations_outlive_their_link(patch: pytest.MonkeyPatch) -> None:
    def stop_none(self: TaskLedger, *_: object) -> list[Any]:
        return []

    patch.setattr(TaskLedger, "stop_all", stop_none)
    patch.setattr(TaskLedger, "stop_up_to", stop_none)


def all_tokens_are_said_to_be_of_the_last_weights(patch: pytest.MonkeyPatch) -> None:
    real = RunningSequence.extend

    def extend(self: RunningSequence, tokens: Buffer, logprobs: Buffer, version: int, hidden_states: Buffer = b"") -> None:
        if self.spans:
            self.spans[-1][0] = version
        real(self, tokens, logprobs, version, hidden_states)

    patch.setattr(RunningSequence, "extend", extend)


def workers_label_tokens_with_what_they_heard_is_committed(patch: pytest.MonkeyPatch) -> None:
    real = WorkerMachine._generated  # pyright: ignore[reportPrivateUsage]

    def generated(self: WorkerMachine, event: StepsDone) -> list[WorkerEffect]:
        effects = real(self, event)
        version = self.updates.committed[1]
        return [
            replace(one, message=replace(one.message, version=version)) if isinstance(one, SendToCoordinator) else one
            for one in effects
        ]

    patch.setattr(WorkerMachine, "_generated", generated)


def a_new_link_gets_tokens_before_its_request(patch: pytest.MonkeyPatch) -> None:
    def expect(self: GenerationState[Any]) -> None:
        """Nothing."""

    patch.setattr(GenerationState, "expect", expect)


def sequences_that_come_back_keep_their_spans_alone(patch: pytest.MonkeyPatch) -> None:
    def begin_again(self: RunningSequence) -> None:
        del self.tokens[self.start :], self.logprobs[:]

    patch.setattr(RunningSequence, "begin_again", begin_again)


def what_names_an_exact_version_outlives_it(patch: pytest.MonkeyPatch) -> None:
    def end_passed(requests: Any, group: Any, _: int) -> None:
        """Nothing."""

    patch.setattr(outcomes, "end_passed", end_passed)


def _ask_for_no_prompt(patch: pytest.MonkeyPatch, where: Callable[[GenerationState[RunningBatch]], Container[int]]) -> None:
    """Prompts whose numbers are there have no log-probabilities asked for."""
    real: Any = generation_slots.__dict__["_wanted_of_prompt"]

    def wanted_of_prompt(batch: RunningBatch) -> int:
        request, start, _ = batch.slices[0]
        work, state = request.work, request.generation
        assert state is not None and isinstance(work, GenerateWork)
        return 0 if start // work.n in where(state) else real(batch)

    patch.setattr(generation_slots, "_wanted_of_prompt", wanted_of_prompt)


def a_prompt_is_asked_for_once_though_its_worker_is_lost(patch: pytest.MonkeyPatch) -> None:
    _ask_for_no_prompt(patch, lambda state: state.prompt_tasks)


def prompts_keep_their_logprobs_when_their_sequences_begin_again(patch: pytest.MonkeyPatch) -> None:
    _ask_for_no_prompt(patch, lambda state: state.prompts)


def another_coordinator_replaces_the_logprobs_of_a_prompt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReceivedTokens, "_has_begun", lambda self, number: False)  # pyright: ignore


def hidden_states_of_a_backlog_are_those_of_its_first_tokens(patch: pytest.MonkeyPatch) -> None:
    real = RunningSequence.states
    patch.setattr(RunningSequence, "states", lambda self, at, count: real(self, self.start, count))  # pyright: ignore


def sequences_that_come_back_keep_their_hidden_states(patch: pytest.MonkeyPatch) -> None:
    def begin_again(self: RunningSequence) -> None:
        del self.tokens[self.start :], self.logprobs[:], self.spans[:]

    patch.setattr(RunningSequence, "begin_again", begin_again)


def routed_experts_are_kept_by_the_numbers_of_their_task(patch: pytest.MonkeyPatch) -> None:
    def take_experts(worker: Worker, e: TokensGenerated) -> str:
        (layers, k), end = e.expert_shape, 0
        for counter, number, rows in e.experts:
            first, end = end, end + 2 * layers * k * rows
            if (batch := worker.batches.get((e.epoch, counter))) is not None:
                state = batch.slices[0][0].generation
                assert state is not None
                state.sequences[number].routed_experts = bytes(memoryview(e.routed_experts)[first:end])
        return ""

    patch.setattr(reports, "take_experts", take_experts)


def what_waits_for_credit_is_sent_before_the_tokens_of_the_turn(patch: pytest.MonkeyPatch) -> None:
    send, handle = UnsentTokens.send, machine.Machine.handle

    def later(self: machine.Machine, *events: Event) -> list[Effect]:
        effects = handle(self, *events)
        send(self.requests.unsent)
        return effects

    def not_yet(self: UnsentTokens) -> None:
        """Nothing."""

    patch.setattr(UnsentTokens, "send", not_yet)
    patch.setattr(machine.Machine, "handle", later)


def ends_are_sent_apart_from_tokens_with_logprobs(patch: pytest.MonkeyPatch) -> None:
    def end(self: UnsentTokens, request: Request, end: SequenceEnd) -> None:
        self.of(0, False, 0).end(request, end)

    patch.setattr(UnsentTokens, "end", end)


@pytest.mark.parametrize(
    "mutate",
    [
        the_last_token_before_a_loss_is_generated_twice,
        a_worker_that_generates_nothing_keeps_its_tasks,
        a_sequence_names_only_the_worker_at_which_it_ended,
        credit_is_ignored,
        a_request_that_is_sent_again_begins_at_position_0,
        a_resumed_sequence_has_as_many_new_tokens_as_at_first,
        a_resumed_sequence_forgets_how_many_tokens_it_must_have,
        a_resumed_sequence_loses_its_adapter,
        what_an_engine_counted_is_forgotten_with_it,
        no_worker_is_told_of_a_cancel,
        a_slot_is_taken_from_a_lower_priority_without_a_stop,
        workers_go_on_with_what_is_stopped,
        generations_outlive_their_link,
        all_tokens_are_said_to_be_of_the_last_weights,
        workers_label_tokens_with_what_they_heard_is_committed,
        a_new_link_gets_tokens_before_its_request,
        sequences_that_come_back_keep_their_spans_alone,
        what_names_an_exact_version_outlives_it,
        a_prompt_is_asked_for_once_though_its_worker_is_lost,
        hidden_states_of_a_backlog_are_those_of_its_first_tokens,
        sequences_that_come_back_keep_their_hidden_states,
        routed_experts_are_kept_by_the_numbers_of_their_task,
        ends_are_sent_apart_from_tokens_with_logprobs,
        what_waits_for_credit_is_sent_before_the_tokens_of_the_turn,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_in_generations_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, updates=seed % 2 == 0, generating=True))


# --- updates that keep generations in their engines --------------------------------------------------------------------------


def weights_have_their_version_from_the_load_on(patch: pytest.MonkeyPatch) -> None:
    real = WorkerUpdates.load

    def load(self: WorkerUpdates, *, generates: bool) -> list[WorkerEffect]:
        effects = real(self, generates=generates)
        if isinstance(self.loading, LoadWeights):
            self.version = self.loading.version
        return effects

    patch.setattr(WorkerUpdates, "load", load)


def a_load_waits_for_no_batch(patch: pytest.MonkeyPatch) -> None:
    def waited_for(update: Update, worker: Worker) -> bool:
        return worker.busy and not update.keeps_generations

    patch.setattr(phases, "_waited_for", waited_for)


def a_load_drops_generations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerUpdates, "keeps_generations", False)


def an_engine_without_a_commit_stays_paused(patch: pytest.MonkeyPatch) -> None:
    real = WorkerUpdates.new_epoch

    def new_epoch(self: WorkerUpdates) -> list[WorkerEffect]:
        return [effect for effect in real(self) if not isinstance(effect, ResumeEngine)]

    patch.setattr(WorkerUpdates, "new_epoch", new_epoch)


def a_drain_never_keeps_generations(patch: pytest.MonkeyPatch) -> None:
    """The coordinator takes them back, and the worker was told that they stay."""
    real = WorkerRegistry.recall

    def stop_tasks(core: Context, tasks: Any) -> None:
        """None is told."""

    def recall(self: WorkerRegistry, worker: Worker, *, streams: bool = True) -> list[Any]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(workers, "stop_tasks", stop_tasks)
            return real(self, worker)

    patch.setattr(WorkerRegistry, "recall", recall)


@pytest.mark.parametrize(
    "mutate",
    [
        weights_have_their_version_from_the_load_on,
        a_load_waits_for_no_batch,
        a_load_drops_generations,
        an_engine_without_a_commit_stays_paused,
        a_drain_never_keeps_generations,
        prompts_keep_their_logprobs_when_their_sequences_begin_again,
        another_coordinator_replaces_the_logprobs_of_a_prompt,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_in_updates_that_keep_generations_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, updates=True, generating=True))


# --- conversations -------------------------------------------------------------------------------------------------------


def prefixes_are_known_by_their_prompts_alone(patch: pytest.MonkeyPatch) -> None:
    def remember(batch: Any, request: Any, place: int, remembered: int) -> int:
        return remembered

    patch.setattr(generations, "remember", remember)


def blocks_are_told_apart_by_their_place_alone(patch: pytest.MonkeyPatch) -> None:
    def blocks_of(tokens: bytes, known: Sequence[int] = (), adapter: str = "") -> list[int]:
        return list(range(len(tokens) // 4 // BLOCK))

    patch.setattr(generation_slots, "blocks_of", blocks_of)


def at_most_one_token_counts_as_cached(patch: pytest.MonkeyPatch) -> None:
    real = reports.count_cached

    def count_cached(worker: Worker, e: TokensGenerated) -> str:
        return real(worker, replace(e, cached=[(task, min(tokens, 1)) for task, tokens in e.cached]))

    patch.setattr(reports, "count_cached", count_cached)


@pytest.mark.parametrize(
    "mutate",
    [
        prefixes_are_known_by_their_prompts_alone,
        blocks_are_told_apart_by_their_place_alone,
        at_most_one_token_counts_as_cached,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_in_prefix_affinity_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, generating=True, talking=True))


def no_group_starts_again_after_its_engines_ran_out_of_memory(patch: pytest.MonkeyPatch) -> None:
    def resume(core: Context) -> None:
        """Nothing."""

    patch.setattr(machine, "resume", resume)


def sequences_run_out_of_memory_as_often_as_they_are_given_again(patch: pytest.MonkeyPatch) -> None:
    def halve(worker: Worker, now: float) -> bool:
        return True

    patch.setattr(workers, "halve", halve)


@pytest.mark.parametrize(
    "mutate",
    [
        no_group_starts_again_after_its_engines_ran_out_of_memory,
        sequences_run_out_of_memory_as_often_as_they_are_given_again,
    ],
    ids=lambda mutate: mutate.__name__,
)
def test_a_planted_bug_in_sequences_without_memory_is_found(mutate: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    find(mutate, monkeypatch, SEEDS, lambda seed: simulate(seed, 1 + seed % 8, generating=True, starved=True))
