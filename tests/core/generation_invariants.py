"""What must hold of requests to generate between any two events."""

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.preemption import to_preempt


def check_generation(request: Request) -> None:
    """Every sequence is in a task, waits, or has ended; and no client is sent more than it gave credit for."""
    state, work = request.generation, request.work
    assert state is not None and isinstance(work, GenerateWork), request
    assert len(state.sequences) == work.rows, request
    where = [0] * work.rows
    for id_, task in state.tasks.items():
        assert task.worker.batches.get(id_) is task, (request, task)
        [(mine, start, end)] = task.slices
        assert mine is request and start // work.n == (end - 1) // work.n, (request, task)
        open_ = [i for i in range(start, end) if state.sequences[i].end is None]
        assert len(open_) == task.rows > 0, (request, task)
        for i in open_:
            where[i] += 1
    for start, end in request.back:
        for i in range(start, end):
            where[i] += 1
    for i, sequence in enumerate(state.sequences):
        assert where[i] == (sequence.end is None), (request, i, where[i])
        tokens = len(sequence.tokens)
        assert sequence.start <= sequence.sent <= tokens <= work.sampling.max_new_tokens, (request, i)
        assert sum(count for _, count in sequence.spans) == tokens - sequence.start, (request, i)
        assert len(sequence.logprobs) == (tokens - sequence.start) * work.width, (request, i)
        new = tokens - sequence.start
        assert bool(sequence.hidden_states) == (work.hidden_states and new > 0), (request, i)
        assert not new or len(sequence.hidden_states) % (4 * new) == 0, (request, i)
        if work.stream and i not in state.behind:
            assert sequence.sent == tokens, (request, i)
    assert not state.expected or state.behind.keys() == set(range(work.rows)), request
    assert request.flying == sum(task.rows for task in state.tasks.values()), request
    assert 0 <= state.taken <= state.sent, request
    assert not work.stream or state.sent - state.taken <= state.credit, request
    assert request.state != TEXT or not state.tasks, request


def check_preemption(core: Context, group: Group) -> None:
    """The next sequences wait for no slot that they may take from a lower priority."""
    if not group.on_hold and core.now >= group.resume_at and (lane := group.queue.head(sequences=True)) is not None:
        assert not to_preempt(core, lane, group), f"{lane.head} waits for a slot of a lower priority"
