"""What a worker says that it generated: whether any engine could have, and whether it is numbers. Pure."""

from math import isnan

import numpy as np

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.generation_state import RunningSequence
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.protocol.messages import STEP_FAILED, Capabilities, Step


def of_another_model(e: ev.TokensGenerated, can: Capabilities) -> str:
    """Why no engine with these capabilities generated this, or ""."""
    if e.largest >= can.vocab:
        return f"it generated a token id that is outside 0..{can.vocab - 1}"  # which would go to other engines as a prompt
    return f"it sent hidden states of size {e.hidden}, instead of {can.hidden}" if e.hidden not in (0, can.hidden) else ""


def impossible_step(work: GenerateWork, sequence: RunningSequence, step: Step, width: int, hidden: int) -> str:
    """Why an engine cannot have generated this, or ""."""
    if step.reason in STEP_FAILED and not step.count:
        return ""  # of a task that the worker cannot read, it does not know the position
    has, most = len(sequence.tokens), work.sampling.max_new_tokens
    plain = not hidden and not work.hidden_states and not work.routed_experts
    if plain and step.at == has and has + step.count <= most and work.width == width and sequence.end is None:
        return ""  # as nearly all of them
    if sequence.end is not None:
        return f"sequence {step.sequence}: more after its end"
    if step.at != has:
        return f"sequence {step.sequence}: position {step.at}, after {has} tokens"
    if has + step.count > most:
        return f"sequence {step.sequence}: {has + step.count} tokens, of max_new_tokens = {most}"
    if work.width != width and step.count and (work.width or width > 1):
        return f"sequence {step.sequence}: {width} logprobs of each token, instead of {work.width}"
    if step.reason and work.routed_experts and not sequence.routed_experts:
        return f"sequence {step.sequence}: its end without routed experts"
    if work.hidden_states != (hidden > 0) and step.count:
        return f"sequence {step.sequence}: hidden states of size {hidden}, and hidden_states = {work.hidden_states}"
    return ""


def not_a_number(logprobs: memoryview, hidden_states: Buffer) -> str:
    """What of tokens is NaN, or ""."""
    if any(map(isnan, logprobs.cast("f"))):
        return "logprob"
    return "hidden state" if hidden_states and np.isnan(np.frombuffer(hidden_states, np.float32)).any() else ""
