"""Requests to generate: the tokens of workers go to their sequences and their clients, until each sequence has ended. Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from typing import Protocol

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.generation_state import GenerationState
from enginepool.coordinator.core.participants import note_sequence, places
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import DONE, QUEUED
from enginepool.coordinator.core.transitions import end_batch, shrink_batch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.step_checks import impossible_step, not_a_number, of_another_model
from enginepool.coordinator.requests.stream_messages import MOST_STATES, StreamMessages, UnsentTokens, in_pieces, send_prompts
from enginepool.coordinator.scheduling.generation_slots import expected_tokens, look_again, prompt_length, remember
from enginepool.protocol.generated import write_generated
from enginepool.protocol.messages import (
    STEP_FAILED,
    Generated,
    GenerationUsage,
    Message,
    Run,
    Sampling,
    SequenceEnd,
    Step,
    StopGeneration,
    Timings,
)

#: A request runs alone once so many workers were lost with it: of hundreds that a worker runs, one may have been the cause.
LOSSES = 2


class StreamRequests(Protocol):
    """What happens to requests: `lifecycle` implements it."""

    core: Context
    unsent: UnsentTokens

    def put_back(self, request: Request, ranges: list[tuple[int, int]]) -> None:
        """Sequences of a live request wait again."""
        ...

    def finish_with(self, request: Request, message: Message, frames: Listed[Buffer]) -> None:
        """The final answer of a live request is this one."""
        ...

    def fail(self, request: Request, code: str, message: str, *, field: str = "", limit: str = "") -> None:
        """The final answer of a live request is an error."""
        ...


def generated(requests: StreamRequests, worker: Worker, e: ev.TokensGenerated) -> str:
    """A worker generated tokens. Returns why no engine could have generated them, or ""."""
    core, batches, hidden = requests.core, worker.batches, e.hidden
    if e.epoch != core.epoch:
        return ""
    out = requests.unsent.of(e.top, hidden > 0, len(e.tokens) + len(e.logprobs) + len(e.hidden_states))
    if (can := worker.capabilities) is not None and (wrong := of_another_model(e, can)):
        return wrong
    finished, more, failed = list[Request](), dict[Request, None](), list[tuple[Request, str, str]]()
    tokens, logprobs, epoch, version, end = e.tokens, e.logprobs, e.epoch, e.version, 0
    width, none = 1 + 2 * e.top if len(logprobs) else 0, logprobs[:0]
    wrong, remembered = "", 0
    for step in e.steps:
        first, end = end, end + 4 * step.count
        if (batch := batches.get((epoch, step.task))) is None:
            continue  # it was taken back meanwhile
        request, start, stop = batch.slices[0]
        state, work = request.generation, request.work
        if state is None or not isinstance(work, GenerateWork):
            wrong = f"it generated for the batch of rows {step.task}"
            break
        place = start + step.sequence
        if not start <= place < stop:
            wrong = f"it generated sequence {step.sequence} of {stop - start}"
            break
        sequence = state.sequences[place]
        if wrong := impossible_step(work, sequence, step, width, hidden):
            wrong = f"it generated for request {request!r}: {wrong}"
            break
        if step.count:
            part = tokens[first:end]
            chances = logprobs[first * width : end * width] if work.logprobs else none
            states = e.hidden_states[first * hidden : end * hidden] if hidden else b""
            sequence.extend(part, chances, version, states)
            request.group.queue.charge_later(request, step.count)
            if (work.logprobs or hidden) and (what := not_a_number(chances, states)):
                failed.append((request, "error", f"the {what} of a token of sequence {place} is NaN"))
                continue
            if work.stream and _pass_on(out, request, place, step, version, part, chances, states):
                more[request] = None
        if step.reason in STEP_FAILED:
            failed.append((request, step.reason, str(step.matched)))
        elif step.reason:
            sequence.end = SequenceEnd(place, step.reason, step.matched)
            remembered = _ended(core, batch, request, place, remembered)
            if work.stream and place not in state.behind:
                requests.unsent.end(request, sequence.end)
            if not request.left:
                finished.append(request)
    look_again(core, worker.group)
    if more or failed or finished:
        requests.unsent.send()
    for request in more:
        flush(core, request)  # some of its tokens
    for request, reason, why in failed:
        if request.state != DONE:
            _fail(requests, request, reason, why)
    for request in (request for request in finished if request.state != DONE):
        answer(requests, request)
    return wrong


def _fail(requests: StreamRequests, request: Request, reason: str, why: str) -> None:
    """An engine could not run it, or refused what it asks, such as a grammar: engines alone can read these."""
    if reason == "error":
        requests.fail(request, "engine_error", why)
        return
    name = why.partition(":")[0]
    field = f"sampling.{name}" if name in Sampling.__struct_fields__ else ""
    requests.fail(request, "bad_request", f"sampling.{why}" if field else why, field=field)


def _pass_on(
    out: StreamMessages,
    request: Request,
    place: int,
    step: Step,
    version: int,
    tokens: Buffer,
    logprobs: Buffer,
    states: Buffer,
) -> bool:
    """Send these tokens to the client of a stream if it has credit for all of them. Returns whether it has credit for a part of
    them only."""
    state = request.generation
    assert state is not None
    if place not in state.behind and state.sent + step.count <= state.taken + state.credit:
        state.sequences[place].sent += step.count
        state.sent += step.count
        out.run(request.client, Run(request.id, place, step.at, step.count, version), tokens, logprobs, states)
        return False
    state.behind[place] = None
    return state.sent < state.taken + state.credit


def _ended(core: Context, batch: RunningBatch, request: Request, place: int, remembered: int) -> int:
    """A sequence of a task has ended: its slot is free. Returns `remembered`, as `remember` does."""
    state = request.generation
    assert state is not None and isinstance(request.work, GenerateWork)
    remembered = remember(batch, request, place, remembered)
    note_sequence(batch, place)
    request.flying -= 1
    request.left -= 1
    if batch.rows > 1:
        shrink_batch(core, batch, expected_tokens(request.work, 0))
        return remembered
    del state.tasks[batch.id]
    end_batch(core, batch)
    batch.worker.done += 1
    batch.worker.group.counts.batches += 1
    return remembered


# --- streams -------------------------------------------------------------------------------------------------------------


def credit(requests: StreamRequests, e: ev.CreditGiven) -> None:
    """A client has taken tokens of a stream: it is sent more of what waits here."""
    client = requests.core.client_of(e.link, e.id)
    request = None if client is None else client.live.get(e.id)
    if request is None or (state := request.generation) is None:
        return
    if state.taken < e.taken <= state.sent:
        state.taken = e.taken
        flush(requests.core, request)


def sent_again(core: Context, request: Request, received: GenerateWork) -> None:
    """A client sent a live stream again, on a new link, with the tokens that it has: the others follow."""
    state = request.generation
    if state is not None and received.stream:
        state.resume(received)
        core.again[request] = None


def follow(core: Context) -> None:
    """Send what follows in streams that were sent again in this turn: once, however often a client did so, for each time would
    take the memory of all their tokens."""
    again, core.again = core.again, {}
    for request in again:
        state = request.generation
        if state is None or not state.again or request.state == DONE:
            continue
        state.expected = state.again = False
        send_prompts(core, request, sorted(state.prompts))
        flush(core, request)


def flush(core: Context, request: Request) -> None:
    """Send what waits here and the client has credit for."""
    state, work = request.generation, request.work
    assert state is not None and isinstance(work, GenerateWork)
    out, waiting = StreamMessages(work.top_logprobs), 0
    for place in () if state.expected else tuple(state.behind):
        sequence, room = state.sequences[place], state.taken + state.credit - state.sent
        if sequence.sent < len(sequence.tokens) and not room:
            break
        for at, count, version in in_pieces(sequence.unsent(room), len(sequence.states(sequence.start, 1))):
            tokens = memoryview(sequence.tokens)[at : at + count].tobytes()
            first, width = at - sequence.start, work.width
            chances = memoryview(sequence.logprobs)[width * first : width * (first + count)].tobytes()
            states = sequence.states(at, count)
            waiting += len(states)
            if waiting > MOST_STATES:
                out.send(core)
                waiting = len(states)
            out.run(request.client, Run(request.id, place, at, count, version), tokens, chances, states)
            sequence.sent += count
            state.sent += count
        if sequence.sent == len(sequence.tokens):
            del state.behind[place]
            if sequence.end is not None:
                out.end(request, sequence.end)
    out.send(core)


# --- interruptions -------------------------------------------------------------------------------------------------------


def interrupted(requests: StreamRequests, batch: RunningBatch, *, lost: bool) -> None:
    """A worker no longer runs a task: its sequences go on elsewhere after their last token, as far as they can.

    A sequence that cannot be continued exactly begins again if its client has seen none of it. Otherwise it has ended.
    """
    request, start, stop = batch.slices[0]
    state, work = request.generation, request.work
    assert state is not None and isinstance(work, GenerateWork)
    del state.tasks[batch.id]
    ranges = state.unfinished(start, stop)
    count = sum(end - first for first, end in ranges)
    request.flying -= count
    for first, end in ranges:
        for place in range(first, end):
            _interrupt(work, state, place, inexact=work.inexact(batch.worker.capabilities))
            note_sequence(batch, place)
    if lost and state.lost_with is not batch.worker:
        # Once for all tasks that the worker had of it.
        state.losses, state.lost_with = state.losses + 1, batch.worker
        request.suspect = request.suspect or state.losses >= LOSSES
    ranges = state.unfinished(start, stop)
    request.left -= count - sum(end - first for first, end in ranges)
    if work.stream:
        flush(requests.core, request)
    if not request.left:
        answer(requests, request)
    elif ranges or (request.state == QUEUED and request.lane is not request.queue):
        # What waited before waits as a suspect now, also if nothing comes back.
        requests.put_back(request, ranges)


def _interrupt(work: GenerateWork, state: GenerationState[RunningBatch], place: int, *, inexact: bool) -> None:
    sequence = state.sequences[place]
    sequence.routed_experts = b""  # its worker may be lost for the message in which they came
    has = len(sequence.tokens)
    new = has - sequence.start
    if has == work.sampling.max_new_tokens or (new and (work.partial or (inexact and sequence.is_seen))):
        end_early(work, state, place)
    elif new and inexact:
        sequence.begin_again()


def end_early(work: GenerateWork, state: GenerationState[RunningBatch], place: int) -> None:
    """End a sequence with the tokens that it has."""
    full = len(state.sequences[place].tokens) == work.sampling.max_new_tokens
    state.sequences[place].end = SequenceEnd(place, "length" if full else "interrupted")
    if work.stream:
        state.behind[place] = None


def stop(core: Context, request: Request) -> None:
    """A request is answered while workers run sequences of it: they end within one step."""
    state = request.generation
    if state is None or not state.tasks:
        return
    tasks, state.tasks = list(state.tasks.values()), {}
    request.flying = 0
    for batch in tasks:
        end_batch(core, batch)
    stop_tasks(core, tasks)


def stop_tasks(core: Context, tasks: Iterable[RunningBatch]) -> None:
    """Tell workers that these tasks are no longer wanted."""
    by_worker: dict[Worker, list[int]] = {}
    for batch in tasks:
        by_worker.setdefault(batch.worker, []).append(batch.id[1])
    for worker, counters in by_worker.items():
        if not worker.lost:
            core.effects.append(ToWorker(worker.link, StopGeneration(core.epoch, counters)))


# --- the answer ----------------------------------------------------------------------------------------------------------


def answer(requests: StreamRequests, request: Request) -> None:
    """All sequences of a request have ended: its final answer."""
    state, work = request.generation, request.work
    assert state is not None and isinstance(work, GenerateWork)
    now = requests.core.now
    for batch in state.tasks.values():  # they end with the answer
        _, start, stop = batch.slices[0]
        for place in range(start, stop):
            note_sequence(batch, place)
    began = request.started or now
    tokens = sum(len(sequence.tokens) for sequence in state.sequences)
    prompts = work.tokens + sum(count - prompt_length(request, number) for number, count in state.expanded.items())
    usage = GenerationUsage(len(state.sequences), prompts, tokens, sum(state.cached.values()))
    timings = Timings(int((began - request.arrival) * 1e6), int((now - began) * 1e6))
    answered = [sequence.answered(sequence.end) for sequence in state.sequences if sequence.end is not None]
    empty = Generated(
        request.id, request.group.version, usage, timings, [], [], [], workers=request.workers, places=places(request)
    )
    if any(sequence.adapters for sequence in state.sequences):
        empty.adapters = [list(sequence.adapters) for sequence in state.sequences]
    can = request.group.capabilities
    experts = None if not work.routed_experts else (0, 0) if can is None else can.experts
    message, frames = write_generated(
        empty, answered, work.logprobs, work.top_logprobs, state.prompts, hidden_states=work.hidden_states, experts=experts
    )
    requests.finish_with(request, message, frames)
