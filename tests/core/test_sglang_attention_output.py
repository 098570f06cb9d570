"""Where FlashInfer writes attention's output, on classes that stand for FlashInfer's and SGLang's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginepool.workers.sglang.patches.attention_output import write_where_graphs_read


class Wrapper:
    """Stands for one of FlashInfer's: its output is the query times two."""

    def __init__(self, is_cuda_graph_enabled: bool = False) -> None:
        self.is_cuda_graph_enabled = is_cuda_graph_enabled

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return self.run(query, "the cache", k_scale=1.0)

    def run(self, query: torch.Tensor, _cache: str, *, k_scale: float, out: torch.Tensor | None = None) -> torch.Tensor:
        assert k_scale == 1.0
        return torch.mul(query, 2, out=torch.zeros_like(query) if out is None else out)


class Attention:
    """Stands for SGLang's class of FlashInfer's attention: a query is of two heads of three numbers."""

    def __init__(self, in_a_graph: bool = False) -> None:
        self.wrapper = Wrapper(in_a_graph)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        if layer == "broken":
            raise RuntimeError("no kernel")
        return self.wrapper.forward(q.view(-1, 2, 3)).view(-1, 6)


write_where_graphs_read(Attention, Wrapper)


@pytest.mark.parametrize(
    ("room", "written"),
    [
        (torch.full((5, 6), 7.0), True),
        (torch.full((8, 6), 7.0)[:5], True),
        (torch.full((5, 7), 7.0), False),
        (torch.full((5, 12), 7.0)[:, ::2], False),
        (torch.full((5, 6), 7.0, dtype=torch.float64), False),
        (None, False),
    ],
    ids=["its size", "a graph of more tokens", "another size", "with holes", "another type", "no graph"],
)
def test_attention_writes_into_the_room_that_a_graph_reads_if_it_fits(room: torch.Tensor | None, written: bool) -> None:
    query = torch.arange(30.0).view(5, 6)
    found = Attention().forward_extend(query, None, None, "a layer", SimpleNamespace(_attn_output=room))
    assert torch.equal(found, query * 2)
    if room is not None:
        assert (found.data_ptr() == room.data_ptr()) is written
        assert torch.equal(room, query * 2 if written else torch.full_like(room, 7))


def test_attention_that_is_part_of_a_graph_keeps_its_zeros() -> None:
    """The graph runs with fewer tokens than it was captured with, and what follows reads all of them."""
    query, room = torch.ones(5, 6), torch.full((5, 6), 7.0)
    found = Attention(in_a_graph=True).forward_extend(query, None, None, "a layer", SimpleNamespace(_attn_output=room))
    assert torch.equal(found, query * 2)
    assert torch.equal(room, torch.full((5, 6), 7.0))


def test_attention_writes_nowhere_else_afterwards() -> None:
    query, room = torch.ones(5, 6), torch.full((5, 6), 7.0)
    with pytest.raises(RuntimeError, match="no kernel"):
        Attention().forward_extend(query, None, None, "broken", SimpleNamespace(_attn_output=room))
    assert Wrapper().forward(query).data_ptr() != room.data_ptr()
    assert torch.equal(room, torch.full((5, 6), 7.0))
