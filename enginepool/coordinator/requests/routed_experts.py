"""Routed experts, which come with the end of a sequence: to which experts each layer routed each token of prompt and output but
the last one. Pure.
"""

from collections import Counter

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.scheduling.generation_slots import prompt_length
from enginepool.protocol.basis import EXPERT_BYTES


def take_experts(worker: Worker, e: ev.TokensGenerated) -> str:
    """Keep the routed experts that a worker sent. Called before the new tokens of the same message are taken. Returns why no
    engine could have sent them, or ""."""
    can = worker.capabilities
    if e.experts and (can is None or e.expert_shape != can.experts):
        return f"it sent routed experts of shape {list(e.expert_shape)}, which its capabilities do not have"
    new = Counter[tuple[int, int]]()
    for step in e.steps if e.experts else ():
        new[step.task, step.sequence] += step.count
    (layers, k), end = e.expert_shape, 0
    for counter, number, rows in e.experts:
        first, end = end, end + EXPERT_BYTES * layers * k * rows
        batch = worker.batches.get((e.epoch, counter))
        if batch is None:
            continue  # it was taken back meanwhile
        request, start, stop = batch.slices[0]
        state, work = request.generation, request.work
        if state is None or not isinstance(work, GenerateWork) or not work.routed_experts or not 0 <= number < stop - start:
            return f"it sent routed experts with sequence {number} of task {counter}, which was not asked for them"
        sequence = state.sequences[start + number]
        has = len(sequence.tokens) + new[counter, number]
        if rows != (most := prompt_length(request, (start + number) // work.n) + has - 1):
            return f"it sent routed experts of {rows} tokens; prompt and output have {most} without the last one"
        part = memoryview(e.routed_experts)[first:end]
        # One alone keeps the frame in which it came; others would keep the frame of each other.
        sequence.routed_experts = part if len(e.experts) == 1 else bytes(part)
    return ""
