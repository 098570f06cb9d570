"""Log-probabilities of prompts, which come with the first tokens of a task: one for each token of a prompt, NaN for its first.
Pure.
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
    data, end = memoryview(e.prompt_logprobs), 0
    for counter, count in e.prompts:
        first, end = end, end + 4 * count
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
        if np.isnan(np.frombuffer(data[first + 4 : end], np.float32)).any():
            requests.fail(request, "engine_error", f"the logprob of a token of prompt {number} is NaN")
        elif number not in state.prompts:
            state.prompts[number] = bytes(data[first:end])
            send_prompts(requests.core, request, (number,))
    return ""
