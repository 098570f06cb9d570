"""Log-probabilities of prompts, which come with the first tokens of a task: one for each token of a prompt, and the most
probable tokens in its place; NaN, and ids -1, for its first. Pure.
"""

import numpy as np

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.generations import StreamRequests
from enginepool.coordinator.requests.stream_messages import send_prompts
from enginepool.coordinator.scheduling.generation_slots import prompt_length


def take_prompts(requests: StreamRequests, worker: Worker, e: ev.TokensGenerated) -> str:
    """Keep the log-probabilities of prompts that a worker sent. Called before the new tokens of the same message are taken.
    Returns why no engine could have sent them, or ""."""
    data, end, top = memoryview(e.prompt_columns), 0, e.top
    width = 1 + 2 * top
    for counter, count in e.prompts:
        first, end = end, end + 4 * width * count
        batch = worker.batches.get((e.epoch, counter))
        if batch is None:
            continue  # it was taken back meanwhile
        request, start, _ = batch.slices[0]
        state, work = request.generation, request.work
        if state is None or not isinstance(work, GenerateWork) or not work.prompt_logprobs:
            return f"it sent log-probabilities of a prompt with task {counter}, which was not asked for them"
        number = start // work.n
        if count != prompt_length(request, number):
            return f"it sent {count} log-probabilities of a prompt of {prompt_length(request, number)} tokens"
        if top != work.top_logprobs:
            return f"it sent the {top} most probable tokens of a prompt; {work.top_logprobs} were asked for"
        rows = np.frombuffer(data[first:end], np.uint32).reshape(count, width)[1:]
        can, chances = worker.capabilities, rows.view(np.float32)
        if can is not None and rows[:, 1 : 1 + top].max(initial=0) >= can.vocab:
            return f"it sent a token id outside the vocabulary of {can.vocab} for prompt {number}"
        if np.isnan(chances[:, 0]).any() or np.isnan(chances[:, 1 + top :]).any():
            requests.fail(request, "engine_error", f"the logprob of a token of prompt {number} is NaN")
        elif number not in state.prompts:
            state.prompts[number] = bytes(data[first:end])
            send_prompts(requests.core, request, (number,))
    return ""
