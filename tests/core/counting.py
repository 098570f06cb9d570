"""How much work a call does, in numbers that do not depend on the machine: instructions of Python, and bytes at their peak.

A loop over n requests executes at least n instructions; a copy of n references allocates at least 8 n bytes. So a step that
must not grow with the queue is run with a short queue and with a long one, and compared. What loops inside C without a copy (a
sum over a buffer) is seen by neither: tests of such code count what the buffer gives out.
"""

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Python instructions that a call executed, and the most bytes that it had allocated at any moment."""

    steps: int
    nbytes: int


def cost_of(call: Callable[[], object]) -> Cost:
    """Run `call` and count. Tracing of others (a debugger, coverage) is put back afterwards."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            steps += 1
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return Cost(steps, peak - start)
