"""Whether the ranks of a group copy buckets out of each other's memory (`peer_copy.py`); decided before the group forms.

Each rank writes a probe into the group's store: its host, and a sealed region in the kind of memory that its buckets lie in.
The next rank opens that region and reads the seal. This proves more than asking CUDA whether two GPUs can reach each other.
Either all ranks copy or none, and rank 0 decides. A rank without a probe belongs to another program, or is late: no rank waits
for it.
"""

import importlib
import socket
from datetime import timedelta
from typing import Any

import msgspec

from enginepool.host import host_identity
from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer.shared_memory import make_space, open_space, sealed, set_seal

torch: Any = importlib.import_module("torch")

#: Seconds for all ranks to write their probes, and again to read them; or this part of the time for the group to form, if that
#: is shorter: a group of torch may have to form after it.
PROBES_S, PART = 20.0, 1 / 3
#: Keys: in the store, that its rank 0 chooses the transport of each group; in the store of a group, which one.
CHOOSES, TRANSPORT = "enginepool.chooses", "enginepool.transport"
_COPIES, _TORCH = "copies", "torch"


class PeerProbe(msgspec.Struct):
    """What a rank writes for the next rank.

    Attributes:
        host: its `host_identity`.
        probe: a sealed region of its memory.
        stays: buckets stay in its memory, which is a `MemoryRegion`, until the update ends.
        address, token: of rank 0: HOST:PORT where it listens, and the secret of the group.
    """

    host: str
    probe: MemoryRegion
    stays: bool = True
    address: str = ""
    token: str = ""


def set_transport(store: Any, transport: str = _TORCH) -> None:
    """On rank 0: choose how the bytes of this group travel."""
    if transport == _TORCH:
        store.set(_probe_key(0), "")  # rank 1 waits for it
    store.set(TRANSPORT, transport)


def agree_at_0(store: Any, world: int, device: Any, listener: socket.socket, token: str) -> bool:
    """On rank 0: whether all ranks copy, which all ranks are told.

    Args:
        store: of this group alone.
        listener: where the other ranks connect if they copy.
        token: secret of the group.
    """
    made = _make_probe(device)
    if made is None:
        set_transport(store)
        return False
    host, port = listener.getsockname()[:2]
    _write_probe(store, 0, PeerProbe(host_identity(), made[1], address=f"{host}:{port}", token=token))
    reaches = [_reaches_key(rank) for rank in range(1, world)]
    able = _arrived(store, reaches) and all(store.get(key) == b"1" for key in reaches)
    set_transport(store, _COPIES if able else _TORCH)
    return able


def decline(store: Any, rank: int) -> None:
    """On another rank that cannot copy: then no rank does."""
    store.set(_probe_key(rank), "")
    store.set(_reaches_key(rank), "0")


def agree(store: Any, rank: int, device: Any, *, stays: bool) -> PeerProbe | None:
    """On another rank that can copy: the probe of rank 0 if all ranks copy, else None.

    Raises:
        RuntimeError: rank 0 has not decided within the store's time limit.
    """
    made = _make_probe(device)
    if made is None:
        decline(store, rank)
        return None
    mine = PeerProbe(host_identity(), made[1], stays=stays)
    _write_probe(store, rank, mine)
    before = _read_probe(store, rank - 1) if _arrived(store, [_probe_key(rank - 1)]) else None
    reaches = before is not None and before.host == mine.host and before.stays and _can_read(before.probe)
    store.set(_reaches_key(rank), str(int(reaches)))
    # The region exists until all ranks have read it.
    return _read_probe(store, 0) if store.get(TRANSPORT) == _COPIES.encode() else None


def _probe_key(rank: int) -> str:
    return f"enginepool.probe-{rank}"


def _reaches_key(rank: int) -> str:
    return f"enginepool.reaches-{rank}"


def _write_probe(store: Any, rank: int, probe: PeerProbe) -> None:
    store.set(_probe_key(rank), msgspec.json.encode(probe).decode())


def _read_probe(store: Any, rank: int) -> PeerProbe | None:
    """The probe of a rank that has written one; None: it declined."""
    text: bytes = store.get(_probe_key(rank))
    return msgspec.json.decode(text, type=PeerProbe) if text else None


def _arrived(store: Any, keys: list[str]) -> bool:
    """Whether all keys are set in time."""
    try:
        store.wait(keys, min(timedelta(seconds=PROBES_S), store.timeout * PART))
    except RuntimeError:
        return False
    return True


def _make_probe(device: Any) -> "tuple[Any, MemoryRegion] | None":
    """(memory, how others open it), sealed; None if memory cannot be shared."""
    try:
        memory = make_space(ALIGNMENT, device)
        seal = set_seal(memory.tensors[0])
        return memory, msgspec.structs.replace(memory.regions()[0], seal=seal)
    except (OSError, RuntimeError):
        return None


def _can_read(probe: MemoryRegion) -> bool:
    """Whether this process can read the memory of another rank."""
    try:
        return sealed(open_space(probe, across=True), probe.seal)
    except (OSError, RuntimeError):
        return False
