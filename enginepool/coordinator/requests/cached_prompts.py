"""Tokens of prompts, and those that engines found in their prefix caches, for the usage in an answer and the status. Pure."""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.generation_slots import prompt_length


def count_cached(worker: Worker, e: ev.TokensGenerated) -> str:
    """Count the cached tokens that a worker reports. Called before its new tokens are taken. Returns why no engine could have
    reported them, or ""."""
    lengths, can = dict(e.lengths), worker.capabilities
    for counter, cached in e.cached:
        batch = worker.batches.get((e.epoch, counter))
        if batch is None:
            continue  # it was taken back meanwhile
        if batch.counted:
            return f"it reported the cached tokens of task {counter} twice"
        batch.counted = True
        request, start, _ = batch.slices[0]
        state, work = request.generation, request.work
        if state is None or not isinstance(work, GenerateWork):
            return f"it reported cached tokens for task {counter}, which does not generate"
        number = start // work.n
        prompt = prompt_length(request, number)
        output = len(state.sequences[start].tokens)
        if number in work.media.spans and counter in lengths:
            if can is None or not output < lengths[counter] <= can.longest_sequence:
                return f"it reported a prompt of {lengths[counter]} tokens"
            prompt = state.expanded[number] = lengths[counter] - output
        whole = prompt + output
        if not 0 <= cached <= whole:
            return f"it reported {cached} cached tokens of a prompt of {whole}"
        # Each prompt counts once, as it was when its first task began.
        state.cached.setdefault(number, min(cached, prompt))
        for counts in (worker, worker.group.counts):
            counts.prompt_tokens += whole
            counts.cached_tokens += cached
    return ""
