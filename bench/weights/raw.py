"""The bytes of an update, broadcast and nothing else: the limit that transfers are held against.

    python -m bench.weights.raw {cuda,cpu}

A receiver of it; the trainer is the sender.
"""

import importlib
import sys
import time
from typing import Any

from bench.score.load import own_voice
from bench.weights.obeying import obey
from enginepool.collective import Group, join

torch: Any = importlib.import_module("torch")

#: for a bucket that is not lost
BUCKET_S = 60.0


def broadcast(group: Group, space: Any, bucket_bytes: int, times: int) -> list[float]:
    """Seconds of each of so many broadcasts of the whole space, from its first byte to the last one being here."""
    start = torch.zeros(256, dtype=torch.uint8, device=space.device)
    took: list[float] = []
    for _ in range(times):
        group.broadcast(start)
        _synchronise(space)
        began = time.perf_counter()
        ways = [group.begin(part) for part in space.split(bucket_bytes)]
        for way in ways:
            way.wait(BUCKET_S)
        _synchronise(space)
        took.append(time.perf_counter() - began)
    return took


def _synchronise(space: Any) -> None:
    if space.is_cuda:
        torch.cuda.synchronize()


class Receiver:
    """One receiving rank."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: Group | None = None

    def do_join(self, address: str, name: str, world: int, rank: int, backend: str) -> dict[str, object]:
        """Be in the group."""
        self._group = join(address, name, world, rank, backend=backend, device=self._device)
        return {}

    def do_receive(self, nbytes: int, bucket_bytes: int, times: int) -> dict[str, object]:
        """Receive so many bytes so many times."""
        assert self._group is not None
        space = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return {"seconds": broadcast(self._group, space, bucket_bytes, times)}

    def do_leave(self) -> dict[str, object]:
        """Leave the group, and give the memory back."""
        if self._group is not None:
            self._group.abort()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        return {}


def main() -> None:
    """Take orders."""
    voice = own_voice()
    device = "cuda:0" if sys.argv[1] == "cuda" else "cpu"
    torch.empty(1, device=device)  # the device is opened before anybody waits for it
    obey(voice, Receiver(device), {})


if __name__ == "__main__":
    main()
