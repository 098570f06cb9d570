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
from bench.weights.parts import StandIns, left_out
from bench.weights.raw import broadcast
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.collective import join
from enginepool.transfer.digest import Digest
from enginepool.transfer.process_group import ProcessGroup
from enginepool.transfer.shared_memory import Memory, make_space
from enginepool.workers.stager import receiving
from enginepool.workers.stager.memory import be_small
from enginepool.workers.stager.receiving import Reception

torch: Any = importlib.import_module("torch")


class NoLook:
    """A look at nothing: nothing is ever wrong."""

    def __init__(self, space: Any, manifest: list[Tensor], bounds: list[int], targets: list[str], arrivals: list[Any]) -> None:
        pass

    def begin(self) -> "NoLook":
        """Look at nothing."""
        return self

    def add(self, first: int, until: int) -> None:
        """Look at nothing."""

    def result(self) -> tuple[str, list[Finding]]:
        """The digest of no bytes at all."""
        return Digest().text(), []


STAND_INS: StandIns = {"look": (receiving, "WeightScan", NoLook)}


class Receiver:
    """One receiving rank."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._group: ProcessGroup | None = None
        self._space: Memory | None = None
        #: into that space, by bucket size and what is left out
        self._receptions: dict[tuple[int, bool], Reception] = {}

    def do_join(self, address: str, name: str, world: int, rank: int, backend: str) -> dict[str, object]:
        """Be in the group."""
        self._group = join(address, name, world, rank, backend=backend, device=self._device, copies=True, stays=True)
        return {}

    def do_receive(self, nbytes: int, bucket_bytes: int, times: int) -> dict[str, object]:
        """Receive so many bytes so many times."""
        assert self._group is not None
        space = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return {"seconds": broadcast(self._group, space, bucket_bytes, times)}

    def do_take_in(self, manifest: list[Tensor], bucket_bytes: int, times: int, without: list[str]) -> dict[str, object]:
        """Receive these tensors so many times as a stager does, looking at every byte: the digests of the bytes, and when
        each was known, by `time.monotonic`. `without`: names of STAND_INS."""
        assert self._group is not None
        digests: list[str] = []
        ends: list[float] = []
        with left_out(without, STAND_INS):
            reception = self._reception(msgspec.convert(manifest, list[Tensor]), (bucket_bytes, bool(without)))
        for _ in range(times):
            digests.append(reception.receive(self._group)[0])
            ends.append(time.monotonic())
        return {"digests": digests, "ends": ends}

    def _reception(self, tensors: list[Tensor], key: tuple[int, bool]) -> Reception:
        nbytes = layout(tensors).nbytes
        if self._space is None or self._space.nbytes < nbytes:
            self._receptions.clear()
            self._space = make_space(nbytes, self._device)
        kept = self._receptions.get(key)
        if kept is None or kept.made_for[0] != tensors:
            if self._device == "cpu":
                be_small()
            kept = self._receptions[key] = Reception(self._space.tensors, tensors, key[0], self._device)
        return kept

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
