"""The bytes of an update, broadcast and nothing else: the limit that transfers are held against."""

import importlib
import time
from typing import Any

from enginepool.transfer.process_group import ProcessGroup

torch: Any = importlib.import_module("torch")

#: for a bucket that is not lost
BUCKET_S = 60.0


def broadcast(group: ProcessGroup, space: Any, bucket_bytes: int, times: int) -> list[float]:
    """Seconds of each of so many broadcasts of the whole space, from its first byte to the last one being here."""
    start = torch.zeros(256, dtype=torch.uint8, device=space.device)
    took: list[float] = []
    for _ in range(times):
        group.broadcast(start)
        _synchronize(space)
        began = time.perf_counter()
        ways = [group.begin(part) for part in space.split(bucket_bytes)]
        for way in ways:
            way.wait(BUCKET_S)
        _synchronize(space)
        took.append(time.perf_counter() - began)
    return took


def _synchronize(space: Any) -> None:
    if space.is_cuda:
        torch.cuda.synchronize()
