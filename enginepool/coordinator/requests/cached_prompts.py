"""What engines had of prompts in their prefix caches: for the usage in an answer, and for the status. Pure."""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.generation_slots import prompt_length


def count_cached(worker: Worker, e: ev.TokensGenerated) -> str:
    """Count what a worker says, before the tokens that it says it with. Returns why no engine could have said it, or ""."""
    for counter, cached in e.cached:
        batch = worker.batches.get((e.epoch, counter))
        if batch is None:
            continue  # it was taken back meanwhile
        request, start, _ = batch.slices[0]
        state, work = request.generation, request.work
        if state is None or not isinstance(work, GenerateWork):
            return f"it had a prompt of the batch of rows {counter} in its cache"
        number = start // work.n
        prompt = prompt_length(request, number)
        whole = prompt + len(state.sequences[start].tokens)
        if not 0 <= cached <= whole:
            return f"it had {cached} of {whole} tokens in its cache"
        # Each prompt counts once, as it was when its first task began.
        state.cached.setdefault(number, min(cached, prompt))
        for counts in (worker, worker.group.counts):
            counts.prompt_tokens += whole
            counts.cached_tokens += cached
    return ""
