"""A process of SGLang's scheduler whose batches are traced. SGLang is imported where the worker's own entry imports it."""

import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from bench.tracing.marks import Marker
from enginepool.workers.sglang.host import process
from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.patches.row_forwards import BATCH_ID


def run_scheduler(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As the worker's own entry: `run` is SGLang's function. It is traced when all else has been changed."""
    return process.run_scheduler(partial(_run_traced, run), *args, **kwargs)


def _run_traced(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    trace(importlib.import_module(modules.SCHEDULER).Scheduler, Marker())
    return run(*args, **kwargs)


def trace(scheduler: Any, marker: Marker) -> None:
    """Mark when a scheduler has read a batch, launches it, has its results, and has answered. `scheduler` is SGLang's class."""
    take, plan, run, answer = (
        getattr(scheduler, name)
        for name in ("process_input_requests", "get_next_batch_to_run", "run_batch", "process_batch_result")
    )

    planned = [0.0]

    def traced_take(self: Any, found: Any) -> Any:
        rows = set(_rows(found))
        for one in rows:
            marker.mark("got", one)
        taken = take(self, found)
        for one in rows:
            marker.mark("queued", one)
        return taken

    def traced_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        # It is asked without a pause while rows wait: only the last time counts, which made the batch that is run next.
        planned[0] = time.monotonic()
        return plan(self, *args, **kwargs)

    def traced_run(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        rows = {req.rid[:BATCH_ID] for req in batch.reqs}
        for one in rows:
            marker.mark("planning", one, at=planned[0])
            marker.mark("launching", one)
        result = run(self, batch, *args, **kwargs)
        for one in rows:
            marker.mark("launched", one)
        return result

    def traced_answer(self: Any, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        rows = {req.rid[:BATCH_ID] for req in batch.reqs}
        if (copied := getattr(result, "copy_done", None)) is not None:
            copied.synchronize()  # as SGLang does first
        for one in rows:
            marker.mark("computed", one)
        answered = answer(self, batch, result, *args, **kwargs)
        for one in rows:
            marker.mark("replied", one)
        return answered

    scheduler.process_input_requests, scheduler.get_next_batch_to_run = traced_take, traced_plan
    scheduler.run_batch, scheduler.process_batch_result = traced_run, traced_answer


def _rows(found: Iterable[Any]) -> Iterator[str]:
    """The batches to which the rows of these messages belong."""
    for message in found:
        for one in getattr(message, "batch", None) or [message]:
            if isinstance(rid := getattr(one, "rid", None), str):
                yield rid[:BATCH_ID]
