"""Packed and plain batches in one engine: each forward is one or the other. No SGLang here: its classes are arguments.

SGLang has multi-item scoring for all forwards of a server or for none. It then runs without CUDA graphs, and ends when a
forward has rows of both kinds. But the delimiters come with each request, so that a forward tells what it is. With the changes
here

- a forward has rows of one kind: those of the other kind wait for the next one;
- a plain forward is attended to as in an engine without multi-item scoring;
- forwards of both kinds run as CUDA graphs. Attention is outside the graphs, and delimiters are never looked for in padding;
- the settings stay as they are. What SGLang would change there, the worker's own rules require.
"""

import functools
from typing import Any


def keep_graphs(resolution: Any, name: str) -> None:
    """Have SGLang's settings left as they are where there is multi-item scoring. `resolution` has, by this name, the step that
    switches CUDA graphs and the radix cache off: a module of functions, or in older versions the class of the settings."""

    @functools.wraps(getattr(resolution, name))
    def handle_multi_item_scoring(_settings: Any) -> None:
        """Nothing: see `host/settings.py`."""

    setattr(resolution, name, handle_multi_item_scoring)


def keep_kinds_apart(scheduler: Any) -> None:
    """Have packed rows and others in forwards of their own. `scheduler` is SGLang's class.

    The kind of the first of the highest priority is next.
    """
    plan = scheduler.get_new_batch_prefill

    def get_new_batch_prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting = self.waiting_queue
        if not waiting:
            return plan(self, *args, **kwargs)
        sign = self.policy.priority_sign
        first = is_packed(min(waiting, key=lambda one: one.priority * sign))
        others = [one for one in waiting if is_packed(one) != first]
        if not others:
            return plan(self, *args, **kwargs)
        self.waiting_queue = [one for one in waiting if is_packed(one) == first]
        try:
            return plan(self, *args, **kwargs)
        finally:
            self.waiting_queue = [*self.waiting_queue, *others]

    scheduler.get_new_batch_prefill = get_new_batch_prefill


def is_packed(request: Any) -> bool:
    """Whether a request of SGLang, or a forward, is one of packed rows."""
    return request.multi_item_delimiter_indices is not None


def attend_as_each_forward_says(backend: Any) -> None:
    """Have only packed forwards planned for multi-item scoring. `backend` is SGLang's class of FlashInfer's attention."""
    initialize = backend.init_forward_metadata

    def init_forward_metadata(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.enable_mis = is_packed(batch)
        return initialize(self, batch, *args, **kwargs)

    backend.init_forward_metadata = init_forward_metadata


def run_packed_as_graphs(runner: Any) -> None:
    """Have packed forwards run as CUDA graphs as plain ones do, where attention stays outside the graphs. `runner` is SGLang's
    class that replays those of prefills.

    Each graph has its own tensor of positions. SGLang fills it before attention is planned, and only then knows the positions
    that begin again with each item.
    """
    can_run, plan = runner.can_run_graph, runner._prepare_forward_metadata_for_replay

    def can_run_graph(self: Any, batch: Any) -> bool:
        return can_run(self, batch) and not (is_packed(batch) and self._is_full_backend)

    def prepare_forward_metadata_for_replay(self: Any, batch: Any, of_graph: Any, *args: Any) -> Any:
        planned = plan(self, batch, of_graph, *args)
        if is_packed(batch):
            of_graph.positions[: len(batch.positions)].copy_(batch.positions)
        return planned

    runner.can_run_graph = can_run_graph
    runner._prepare_forward_metadata_for_replay = prepare_forward_metadata_for_replay
