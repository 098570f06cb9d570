"""A receiver of broadcasts: of bytes and nothing else, or taking in an update as a stager does, without a pool.

python -m bench.peers.receiver {cuda,cpu}
"""

import importlib
import sys
import time
from typing import Any

import msgspec

from bench.score.load import own_voice
from bench.weights.obeying import obey
from bench.weights.raw import broadcast
from enginepool.collective import Group, join
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.workers.stager.receiving import Reception, be_small

torch: Any = importlib.import_module("torch")


class Receiver:
    """One receiving rank."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: Group | None = None
        self._reception: Reception | None = None

    def do_join(self, address: str, name: str, world: int, rank: int, backend: str) -> dict[str, object]:
        """Be in the group."""
        self._group = join(address, name, world, rank, backend=backend, device=self._device)
        return {}

    def do_receive(self, nbytes: int, bucket_bytes: int, times: int) -> dict[str, object]:
        """Receive so many bytes so many times."""
        assert self._group is not None
        space = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return {"seconds": broadcast(self._group, space, bucket_bytes, times)}

    def do_take_in(self, manifest: list[Tensor], bucket_bytes: int, times: int) -> dict[str, object]:
        """Receive these tensors so many times as a stager does, looking at every byte: the digests of what came, and when
        each was known, by `time.monotonic`."""
        assert self._group is not None
        tensors = msgspec.convert(manifest, list[Tensor])
        made_for = (tensors, bucket_bytes, self._device)
        if self._device == "cpu":
            be_small()
        if self._reception is None or self._reception.made_for != made_for:
            space = torch.empty(layout(tensors).nbytes, dtype=torch.uint8, device=self._device)
            self._reception = Reception([space], tensors, bucket_bytes, self._device)
        digests: list[str] = []
        ends: list[float] = []
        for _ in range(times):
            digests.append(self._reception.receive(self._group)[0])
            ends.append(time.monotonic())
        return {"digests": digests, "ends": ends}

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
