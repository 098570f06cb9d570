"""Plans of FlashInfer from lengths that the host knows, in SGLang's scheduler. No SGLang here: its classes are arguments.

SGLang computes the bounds of each row on the GPU, and FlashInfer fetches them to plan a forward, behind the one that runs: so
the next one is launched only when the GPU has nothing to do. The host knows the same numbers; given those, FlashInfer plans at
once, and the launch is over before the GPU needs it.

FlashInfer hands a plan over in one pinned buffer, which must have been read before the next plan is written. It has: SGLang
plans one forward ahead, when the one before the running one is answered; the running one began by reading its plan.
"""

import sys
from typing import Any

import numpy as np
import torch


def plan_on_the_host(updater: Any) -> None:
    """Plan prefills from lengths on the host. `updater` is SGLang's class that plans them."""
    update, begin = updater.update_single_wrapper, updater.call_begin_forward

    def update_single_wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._prefixes = kwargs.get("extend_prefix_lens_cpu")
        return update(self, *args, **kwargs)

    def call_begin_forward(self: Any, ragged: Any, paged: Any, *args: Any, **kwargs: Any) -> Any:
        # Other updates, of layers with a sliding window, plan for lengths that the host does not know.
        prefixes: list[int] | None = getattr(self, "_prefixes", None)
        lengths: torch.Tensor | None = kwargs.get("seq_lens_cpu")
        use_ragged, speculated = args[8], args[9]
        plain = speculated is None and kwargs.get("custom_kv_indices") is None
        if plain and prefixes is not None and lengths is not None and len(lengths) == len(prefixes):
            rows = torch.as_tensor(prefixes, dtype=torch.int64)
            lengths = lengths.to(torch.int64)
            bounds = bounds_of(lengths - rows)
            ragged = HostPlan(ragged, bounds, bounds)
            paged = HostPlan(paged, bounds, bounds_of(rows if use_ragged else lengths))
        return begin(self, ragged, paged, *args, **kwargs)

    updater.update_single_wrapper = update_single_wrapper
    updater.call_begin_forward = call_begin_forward


def bounds_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where each row begins, and the end: int32 [rows + 1]."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(torch.int32)


class HostPlan:
    """One of FlashInfer's wrappers, to which bounds on the host are given in place of those on the GPU."""

    def __init__(self, wrapper: Any, rows: torch.Tensor, keys: torch.Tensor) -> None:
        self._wrapper = wrapper
        self._rows = rows
        self._keys = keys

    def begin_forward(self, _rows: Any, _keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan. A paged wrapper's further arguments begin with the pages and how full the last of each row is: they hold one
        token each."""
        if args and isinstance(args[0], torch.Tensor):
            pages, _, *rest = args
            args = (pages, torch.ones(len(self._rows) - 1, dtype=torch.int32), *rest)
        return self._wrapper.begin_forward(self._rows, self._keys, *args, **kwargs)


def place_items_on_the_host(backend: Any) -> None:
    """Compute where in its item each token of packed sequences stands on the host, and send it to the GPU in one piece.

    `backend` is SGLang's class that does it on the GPU, sequence by sequence, and waits for the result.
    """
    original = backend._process_multi_item_scoring
    params: Any = sys.modules[backend.__module__].MultiItemScoringParams

    def on_the_gpu(self: Any, batch: Any) -> Any:
        found = original(self, batch)
        batch.positions.clamp_(min=0)  # as in `placed`
        return found

    def process(self: Any, batch: Any) -> Any:
        indices, lengths = batch.multi_item_delimiter_indices, batch.extend_seq_lens_cpu
        prefixes = batch.extend_prefix_lens_cpu
        if indices is None or lengths is None or prefixes is None or len(lengths) != len(indices) or any(prefixes):
            return on_the_gpu(self, batch)
        if not all(map(len, indices)) or sum(lengths) != batch.positions.shape[0]:
            return on_the_gpu(self, batch)
        queries, items, longest, positions = placed([index.numpy() for index in indices], list(lengths))
        device = batch.positions.device

        def sent(values: Any) -> Any:
            tensor = torch.as_tensor(values)
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        batch.positions.copy_(sent(positions))
        return params(
            prefix_len_ptr=sent(queries),
            token_pos_in_items_ptr=sent(items.reshape(-1)),
            token_pos_in_items_len=items.shape[1],
            max_item_len_ptr=sent(longest),
        )

    backend._process_multi_item_scoring = process


def placed(
    delimiters: list[np.ndarray[Any, np.dtype[np.int64]]], lengths: list[int]
) -> tuple[
    np.ndarray[Any, np.dtype[np.uint32]],
    np.ndarray[Any, np.dtype[np.uint16]],
    np.ndarray[Any, np.dtype[np.uint16]],
    np.ndarray[Any, np.dtype[np.int64]],
]:
    """Where the tokens of packed sequences stand, as FlashInfer wants it.

    Returns the query's length of each sequence, uint32; from the first delimiter on how far each token is from the delimiter
    before it, uint16 [sequences, longest such part], 0 beyond the end; the largest of those of each sequence, uint16; and the
    position of every token of all sequences, int64, which begins again after the query for each item. A delimiter has the
    position before that: without a query it would be -1, for which rotary embeddings have no entry, and is 0.
    """
    firsts = np.array([int(places[0]) for places in delimiters])
    items = np.zeros((len(lengths), int((np.array(lengths) - firsts).max())), np.uint16)
    longest = np.zeros(len(lengths), np.uint16)
    positions = np.empty(sum(lengths), np.int64)
    start = 0
    for i, (places, length) in enumerate(zip(delimiters, lengths, strict=True)):
        first = int(firsts[i])
        ends = np.append(places[1:], length) - places
        within = np.arange(length - first) - np.repeat(places - first, ends)
        items[i, : length - first] = within
        longest[i] = within.max()
        positions[start : start + first] = np.arange(first)
        positions[start + first : start + length] = np.maximum(first + within - 1, 0)
        start += length
    return firsts.astype(np.uint32), items, longest, positions
