"""Requests that name one exact weight version: no other weights answer them, and they end once newer ones are committed. Pure.

A generation that has begun ends as `interrupted`, with its tokens. Every other request ends with `version_passed`. Where
versions begin again, a generation that has begun ends too: its version names other weights now. Other requests wait for them.
"""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import DONE
from enginepool.coordinator.core.transitions import end_batch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.generations import StreamRequests, answer, end_early, flush, interrupted, stop_tasks


def passed(version: int, group: Group) -> str:
    """Why no weights of the group answer a request for this version, which is older than the committed one."""
    return f"version is {version}, but the committed weight version is {group.version}"


def end_passed(requests: StreamRequests, group: Group, before: int) -> None:
    """Other weights than those of version `before` are committed: requests that name an earlier one get their final answer."""
    for request in group.exact.before(group.version):
        version = request.exact_version
        assert version is not None and request.state != DONE, request
        if not end_with_tokens(requests, request):
            requests.fail(request, "version_passed", passed(version, group), field="version", limit=str(group.version))
    if group.version <= before:
        for request in group.exact.all():
            if not end_with_tokens(requests, request) and request.generation is not None:
                _put_back(requests, list(request.generation.tasks.values()))


def end_with_tokens(requests: StreamRequests, request: Request) -> bool:
    """End a request that has generated tokens as `interrupted`, with all of them. False: it has none, and goes on."""
    if not _has_begun(request):
        return False
    state, work = request.generation, request.work
    assert state is not None and isinstance(work, GenerateWork)
    for start, end in state.unfinished(0, work.rows):
        for place in range(start, end):
            end_early(work, state, place)
    if work.stream:
        flush(requests.core, request)
    answer(requests, request)
    return True


def _has_begun(request: Request) -> bool:
    """Whether some of its tokens were generated."""
    state = request.generation
    return state is not None and any(len(sequence.tokens) > sequence.start for sequence in state.sequences)


def take_back(requests: StreamRequests, worker: Worker, e: ev.TokensGenerated) -> None:
    """The engine of a worker has other weights than the committed ones: it runs no request that names its version."""
    tasks: list[RunningBatch] = []
    for counter in {step.task for step in e.steps}:
        batch = worker.batches.get((e.epoch, counter))
        request = None if batch is None else batch.slices[0][0]
        if batch and request and request.generation is not None and request.exact_version not in (None, e.version):
            tasks.append(batch)
    _put_back(requests, tasks)


def _put_back(requests: StreamRequests, tasks: list[RunningBatch]) -> None:
    """What these generate is not wanted: their sequences wait for the weights that they name."""
    for batch in tasks:
        end_batch(requests.core, batch)
        interrupted(requests, batch, lost=False)
    stop_tasks(requests.core, tasks)
