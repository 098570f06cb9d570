"""Which sequences of a request to generate go into the free slots of a worker, and what they cost it. Pure.

A task runs samples of one prompt that have no tokens yet: the engine computes their prompt once. A sequence that has tokens is
a task of its own, whose prompt are all tokens so far. A worker is given no more than it runs at once: what waits, waits in the
queue, in the order of priorities.
"""

from msgspec.structs import replace

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Request, RunningBatch, Slice
from enginepool.coordinator.core.request_state import RUNNING
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.lanes import Lane
from enginepool.coordinator.scheduling.prefix_affinity import bound
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.row_cuts import take
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import FrameSpec, StartGeneration
from enginepool.protocol.prefix_blocks import blocks_of
from enginepool.protocol.ragged import Offsets

#: New tokens that a sequence is expected to have at most. Few have more, and an engine that runs out of room for tokens takes
#: sequences back into its own queue. SGLang's scheduler counts with the same number.
EXPECTED_TOKENS = 4096
#: Of sequences that end together, the first ones are remembered, up to so many blocks. 2,048 of 4,096 tokens would take 0.2 s,
#: and most of them would push out those before them.
MOST_REMEMBERED = 4096


def preferred(core: Context, request: Request, least: Worker) -> Worker:
    """The worker that had the beginning of the next prompt, if it has room, and not much more to do than `least`."""
    state = request.generation
    assert state is not None
    prompt = request.back[0][0] // _generation(request).n, _adapter(request)
    if state.blocks[0] != prompt:
        state.blocks = prompt, blocks_of(_prompt(request, prompt[0]), adapter=prompt[1])
    prefixes = request.group.prefixes
    found = prefixes.find(state.blocks[1])
    if found is None:
        return least
    worker, shared = found
    if worker is least or not worker.open or worker.sequences > bound(least.sequences, shared):
        return least
    if shared and not prefixes.may_have(worker, least, shared):
        return least
    return worker if _task(core, request, worker) is not None else least


def place(core: Context, queue: Queue[Request], lane: Lane[Request], worker: Worker) -> RunningBatch | None:
    """A task of the head of `lane` on `worker`, which has the least to do, or on the one that had the beginning of its prompt.
    If that one has no room: on any that has. None when no sequence of it fits now."""
    head = lane.head
    assert head is not None and head.generation is not None
    worker = preferred(core, head, worker)
    found = _task(core, head, worker)
    if found is None:
        # The worker with the fewest tokens may have no slot left, and another one with more tokens may have some.
        for worker in sorted(generating(head.group), key=lambda one: (one.cost, one.order)):
            if (found := _task(core, head, worker)) is not None:
                break
    if found is None:
        return None
    cost, slice_ = found
    head.group.prefixes.add(head.generation.blocks[1], worker)
    # Tokens are charged as they come: a client may ask for many more.
    has = len(head.generation.sequences[slice_[1]].tokens)
    weight = cost - (slice_[2] - slice_[1]) * expected_tokens(_generation(head), has)
    take(core, slice_)
    if head.state != RUNNING:
        queue.charge(lane, weight)
    else:
        queue.pop(lane, weight)
    return RunningBatch(core.task_id(), worker, [slice_], cost, slice_[2] - slice_[1])


def look_again(core: Context, group: Group) -> None:
    """Tokens were charged: another client may be first in line now than that of the request for which there is no room. Looking
    for room takes a look at each worker, and tokens come with each step of each of them."""
    group.queue.pass_time()
    if (blocked := group.blocked) is not None:
        lane = group.queue.head(sequences=blocked.generation is not None if group.mixed else None)
        if lane is None or lane.head is not blocked:
            core.wake(group)


def generating(group: Group) -> list[Worker]:
    """The workers of a group that may be given sequences, if they have room."""
    return [worker for worker in group.workers.values() if worker.open]


def _task(core: Context, request: Request, worker: Worker) -> tuple[int, Slice] | None:
    """(tokens, slice) of the next sequences of `request` that fit at `worker` now; None: not one does."""
    can = worker.capabilities
    assert can is not None
    if not media_fit(core, request, worker):
        return None
    cost, slice_ = next_sequences(request, worker, can.most_sequences - worker.sequences)
    return (cost, slice_) if slice_[2] > slice_[1] and cost <= can.most_sequence_tokens - worker.sequence_tokens else None


def media_fit(core: Context, request: Request, worker: Worker) -> bool:
    """Whether `worker` may be sent the media of the next sequences of `request`: it has read earlier media, or there is room.
    Samples that go on after some tokens are a task each, with a copy of their media. Many at once would be more than a worker
    may leave unread, and it would be lost."""
    nbytes = media_bytes(request, request.back[0][0])
    return not worker.unread_media or worker.unread_media + nbytes <= core.config.limits.buffer_bytes // 2


def media_bytes(request: Request, place: int) -> int:
    """Bytes of the media that a task with this sequence brings along."""
    work = _generation(request)
    return work.media.bytes_of(place // work.n)


def remember(batch: RunningBatch, request: Request, place: int, remembered: int) -> int:
    """A sequence of `batch` has ended: the engine of its worker has its prompt and its output, and what goes on from there
    prefers it. Returns `remembered`, the blocks of those that ended with it, with its own."""
    if remembered >= MOST_REMEMBERED:
        return remembered
    state = request.generation
    assert state is not None
    number, adapter = place // _generation(request).n, batch.adapter
    if state.blocks[0] != (number, adapter):
        # Its other samples mostly end soon, too.
        state.blocks = (number, adapter), blocks_of(_prompt(request, number), adapter=adapter)
    history = b"".join((_prompt(request, number), state.sequences[place].tokens))
    blocks = blocks_of(history, state.blocks[1], adapter)
    request.group.prefixes.add(blocks, batch.worker)
    return remembered + len(blocks)


def next_sequences(request: Request, worker: Worker, slots: int) -> tuple[int, Slice]:
    """(tokens, slice) of the next sequences of `request`: at most `slots`, which cost no more than `worker` has free, where one
    of them fits."""
    work, state, can = _generation(request), request.generation, worker.capabilities
    assert state is not None and can is not None
    start, end = request.back[0]
    prompt = prompt_length(request, start // work.n)
    first = state.sequences[start]
    new = expected_tokens(work, len(first.tokens))
    if slots < 1:
        return 0, (request, start, start)
    # At a worker that is empty, one sequence fits, however much its media are expected to take: else it would never run.
    room = can.most_sequence_tokens - prompt - len(first.tokens) - new
    prompt += min(work.media.expected_tokens(start // work.n), max(0, room))
    if first.tokens:
        return prompt + len(first.tokens) + new, (request, start, start + 1)
    end = min(end, (start // work.n + 1) * work.n, start + slots)
    free = can.most_sequence_tokens - worker.sequence_tokens
    end = min(end, start + max(1, (free - prompt) // new))
    last = start + 1
    while last < end and not state.sequences[last].tokens:
        last += 1
    return prompt + (last - start) * new, (request, start, last)


def expected_tokens(work: GenerateWork, has: int) -> int:
    """Room for the tokens that a sequence of `work` may still get, of those that it `has`."""
    return min(work.sampling.max_new_tokens - has, EXPECTED_TOKENS)


def start_message(batch: RunningBatch) -> tuple[StartGeneration, list[Buffer]]:
    """The message that starts the task `batch`, and its frames."""
    request, start, end = batch.slices[0]
    work, state = _generation(request), request.generation
    assert state is not None
    tokens = state.sequences[start].tokens
    prompt: Buffer = _prompt(request, start // work.n)
    if tokens:
        prompt = b"".join((prompt, tokens))
    sampling = work.sampling
    if tokens:
        least = max(0, sampling.min_new_tokens - len(tokens))
        sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(tokens), min_new_tokens=least)
    if sampling.sampling_seed is not None:
        # The samples of a prompt differ, and each goes on elsewhere as it began.
        sampling = replace(sampling, sampling_seed=(sampling.sampling_seed + start % work.n) & MAX_ID)
    batch.adapter, batch.adapter_version = _adapter(request), request.group.adapters.version(work.adapter)
    media, specs, frames = work.media.of_prompt(start // work.n)
    specs = [FrameSpec("prompt", "int32", (len(prompt) // 4,)), *specs]
    message = StartGeneration(
        batch.id, specs, sampling, n=end - start, at=len(tokens), logprobs=work.logprobs, top_logprobs=work.top_logprobs,
        prompt_logprobs=_wanted_of_prompt(batch) if work.prompt_logprobs else 0, priority=request.priority,
        media=media,
        adapter=batch.adapter,
        hidden_states=work.hidden_states, routed_experts=work.routed_experts,
    )  # fmt: skip
    return message, [prompt, *frames]


def _wanted_of_prompt(batch: RunningBatch) -> int:
    """Of how many tokens of its prompt a task gives log-probabilities: of all, unless they are known, or another task does."""
    request, start, _ = batch.slices[0]
    work, state = _generation(request), request.generation
    assert state is not None
    prompt = start // work.n
    if state.prompt_tasks.get(prompt) in state.tasks:
        return 0
    if prompt in state.prompts:
        samples = state.sequences[prompt * work.n : (prompt + 1) * work.n]
        if any(len(sample.tokens) > sample.start for sample in samples):
            return 0
        del state.prompts[prompt]  # all begin again: the weights of their first token may be later ones
    state.prompt_tasks[prompt] = batch.id
    return prompt_length(request, prompt)


def prompt_length(request: Request, prompt: int) -> int:
    return memoryview(request.work.frames[1]).cast("I")[prompt]


def _prompt(request: Request, prompt: int) -> memoryview:
    """The token ids of a prompt, as bytes."""
    frames = request.work.frames
    if request.offsets is None:
        request.offsets = Offsets(frames)
    first, count = request.offsets.span("items", memoryview(frames[1]).cast("I"), prompt, prompt + 1)
    return memoryview(frames[0])[4 * first : 4 * (first + count)]


def _adapter(request: Request) -> str:
    """What engines call the adapter that generates now for `request`."""
    return request.group.adapters.engine_name(_generation(request).adapter)


def _generation(request: Request) -> GenerateWork:
    work = request.work
    assert isinstance(work, GenerateWork)
    return work
