"""A training step that needs the memory of the card: a small model with Adam, as wide as there is room."""

import importlib
import time
from typing import Any

torch: Any = importlib.import_module("torch")

#: a layer's width, and tokens of the batch
WIDTH, BATCH = 4096, 1024
#: float32 numbers of each weight: itself, its gradient, and two of Adam
NUMBERS = 4


def card_memory(device: Any) -> dict[str, float]:
    """MiB of the card that all processes use, and that are free, once this process has returned what it does not need; 0 on a
    CPU."""
    if torch.device(device).type == "cpu":
        return {"mib": 0.0, "free_mib": 0.0}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {"mib": (total - free) / (1 << 20), "free_mib": free / (1 << 20)}


def train(device: Any, share: float) -> dict[str, float]:
    """Forward, backward and an optimizer's step of a model that takes this share of the memory that is free: seconds, and MiB
    that were allocated at most. All is given back. Raises torch.OutOfMemoryError."""
    began = time.perf_counter()
    on_card = torch.device(device).type != "cpu"
    width, batch = (WIDTH, BATCH) if on_card else (64, 8)
    layer_bytes = 4 * NUMBERS * (width * width + width) + 4 * 3 * batch * width
    layers = 2
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        layers = max(1, int(share * torch.cuda.mem_get_info()[0] / layer_bytes))
    before = torch.cuda.memory_allocated() if on_card else 0
    model: Any = torch.nn.Sequential(
        *(layer for _ in range(layers) for layer in (torch.nn.Linear(width, width, device=device), torch.nn.ReLU()))
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.randn(batch, width, device=device)).square().mean().backward()
    optimizer.step()
    peak = (torch.cuda.max_memory_allocated() - before) / (1 << 20) if on_card else 0.0
    del model, optimizer
    card_memory(device)
    return {"seconds": time.perf_counter() - began, "peak_mib": peak}
