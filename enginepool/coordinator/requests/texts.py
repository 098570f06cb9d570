"""Requests of text: a worker tokenizes them, or is lost while it has them. Pure."""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import DONE, QUEUED
from enginepool.coordinator.core.transitions import end_text, enter_request
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.labels import remember
from enginepool.coordinator.operations.tokenize import with_ids
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.scheduling.batches import text_due
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Result, Timings, Usage


def tokenized(requests: RequestLifecycle, worker: Worker, e: ev.TextTokenized) -> None:
    """The ids of a text request, or why there are none."""
    short = worker.texts.short
    oldest = next(iter(short), None) == e.task
    request = end_text(requests.core, worker, e.task)
    if oldest and short:
        # A tokenizer works on one short text at a time. The deadline of the next one starts now.
        task, (text, due) = next(iter(short.items()))
        short[task] = text, max(due, text_due(requests.core, worker, text))
    if request is None or request.state == DONE:
        return
    if e.message:
        if e.code == "bad_request":
            requests.fail(request, e.code, e.message, field=e.field, limit=e.limit)
        else:
            requests.fail(request, "engine_error", e.message)
        return
    group = request.group
    old = request.work
    if old.operation.of_tokenizer:
        _answered(requests, worker, request, e)
        return
    try:
        work = with_ids(old, e.specs, e.frames, e.truncated, e.labels)
    except MemoryError:
        requests.no_memory(request)
        return
    except WireError as error:
        requests.fail(request, "engine_error", error.message)
        return
    if e.labels:
        remember(group.label_ids, old, e.labels)
    request.work = work
    group.tokens += work.tokens - old.tokens
    # The text was harmless. The ids may still kill a worker.
    if request.suspect:
        request.suspect = False
        requests.core.levels.readmit(request)
    enter_request(request, QUEUED)
    if requests.check(request):
        request.queue.push(request)


def _answered(requests: RequestLifecycle, worker: Worker, request: Request, e: ev.TextTokenized) -> None:
    """What the tokenizer says is the answer."""
    work = request.work
    try:
        tokens = work.operation.check_answer(work, request.answer, e.specs, e.frames)
    except WireError as error:
        requests.fail(request, "engine_error", error.message)
        return
    timings = Timings(int((requests.core.now - request.arrival) * 1e6), 0)
    usage = Usage(work.rows, tokens)
    requests.finish_with(
        request, Result(request.id, worker.version, [], usage, timings, list(e.specs), workers=worker.named), e.frames
    )


def texts_lost(requests: RequestLifecycle, worker: Worker, reason: str) -> None:
    """A worker is lost while it has texts. The first short one and the long one were being tokenized: each runs alone from now
    on. The others wait again.

    The worker may have begun with the second text already, if the answer to the first one was lost with the worker. So a text
    that waited at one lost worker becomes a suspect when a second worker is lost with it.
    """
    trial = worker.group.trial
    in_hand = {next(iter(lane)) for lane in worker.texts.lanes if lane}
    for task in worker.texts:
        request = end_text(requests.core, worker, task)
        if request is None or request.state == DONE:
            continue
        request.suspect = request.suspect or task in in_hand or request.bystander
        request.bystander = True
        request.queue.push(request)
        if trial is not None and trial.id == task:
            requests.died_alone(request, reason)
