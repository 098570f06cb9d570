"""Attention writes where the next CUDA graph reads. No SGLang here: its classes are arguments.

Where attention is outside the graphs, SGLang makes room for its output and names it in the batch. FlashInfer is not told: it
fills a tensor of its own with zeros, writes the output over them, and SGLang copies that. The zeros and the copy are two
launches for each layer, and four times the traffic of one write.
"""

import functools
from typing import Any


def write_where_graphs_read(backend: Any, *wrappers: Any) -> None:
    """Have FlashInfer write into the room that a batch has for the output, if it has any.

    Args:
        backend: SGLang's class of FlashInfer's attention.
        wrappers: FlashInfer's classes that it runs.
    """
    attend = backend.forward_extend
    room: Any = None

    @functools.wraps(attend)
    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal room
        room = getattr(forward_batch, "_attn_output", None)
        try:
            return attend(self, q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            room = None

    def into_room(run: Any) -> Any:
        @functools.wraps(run)
        def run_into_room(planned: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
            # A graph with attention in it runs with fewer tokens than it was captured with: its zeros fill the rest.
            other = planned.is_cuda_graph_enabled or kwargs.keys() & {"out", "return_lse"}
            if room is not None and not other and fits(room, q):
                kwargs["out"] = room.view(q.shape)
            return run(planned, q, *args, **kwargs)

        return run_into_room

    backend.forward_extend = forward_extend
    for wrapper in wrappers:
        wrapper.run = into_room(wrapper.run)


def fits(room: Any, query: Any) -> bool:
    """Whether `room` can hold an output that has the shape and the type of `query`."""
    return room.dtype == query.dtype and room.numel() == query.numel() and room.is_contiguous()
