"""Whether the ranks of a group copy buckets out of each other's memory (`peer_copy.py`), as they find out before it forms.

Each rank leaves a card in the store where they meet: its host, and a sealed piece of memory such as its buckets lie in. The
next one opens that and looks for the seal, which tells more than a question whether two GPUs can reach each other. All copy,
or none does. Rank 0 says which; what does not leave a card is another program's, or late, and is not waited for.
"""

import importlib
import socket
from datetime import timedelta
from typing import Any

import msgspec

from enginepool.host import host_identity
from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.updates import MemoryRegion
from enginepool.transfer.shared_memory import make_space, open_space, sealed, set_seal

torch: Any = importlib.import_module("torch")

#: Ranks have this long to leave their cards, and to read each other's; or that part of the time for the group to form, if it
#: is shorter: a group of torch has to form after it.
CARDS_S, PART = 20.0, 1 / 3
#: in the store: that its rank 0 says of each group how bytes go; in that of a group: how
SAYS, WAY = "enginepool.says", "enginepool.way"
_COPIES, _TORCH = "copies", "torch"


class PeerProbe(msgspec.Struct):
    """What a rank leaves.

    host: as `host_identity` says it. probe: a sealed piece of its memory. stays: buckets stay in its memory, which is a space,
    until the update is over. address, token: rank 0's: where it listens, and what one has to say there.
    """

    host: str
    probe: MemoryRegion
    stays: bool = True
    address: str = ""
    token: str = ""


def tell_way(store: Any, way: str = _TORCH) -> None:
    """Rank 0: how the bytes of this group go."""
    if way == _TORCH:
        store.set(_card_key(0), "")  # else rank 1 would wait for it
    store.set(WAY, way)


def agree_at_0(store: Any, world: int, device: Any, listener: socket.socket, token: str) -> bool:
    """Rank 0: whether all copy, which all are told.

    Args:
        store: that of the group alone.
        listener: where the other ranks connect to if they do.
    """
    probe = _probe(device)
    if probe is None:
        tell_way(store)
        return False
    host, port = listener.getsockname()[:2]
    _leave(store, 0, PeerProbe(host_identity(), probe[1], address=f"{host}:{port}", token=token))
    reaches = [_reaches_key(rank) for rank in range(1, world)]
    able = _came(store, reaches) and all(store.get(key) == b"1" for key in reaches)
    tell_way(store, _COPIES if able else _TORCH)
    return able


def decline(store: Any, rank: int) -> None:
    """Another rank that does not copy: nobody does then, or waits for its card."""
    store.set(_card_key(rank), "")
    store.set(_reaches_key(rank), "0")


def agree(store: Any, rank: int, device: Any, *, stays: bool) -> PeerProbe | None:
    """Another rank that would copy: rank 0's card if all do, else None.

    Raises:
        RuntimeError: rank 0 does not say it within the store's own time.
    """
    probe = _probe(device)
    if probe is None:
        decline(store, rank)
        return None
    mine = PeerProbe(host_identity(), probe[1], stays=stays)
    _leave(store, rank, mine)
    before = _card(store, rank - 1) if _came(store, [_card_key(rank - 1)]) else None
    reaches = before is not None and before.host == mine.host and before.stays and _finds(before.probe)
    store.set(_reaches_key(rank), str(int(reaches)))
    # The piece of memory is there until everybody has looked.
    return _card(store, 0) if store.get(WAY) == _COPIES.encode() else None


def _card_key(rank: int) -> str:
    return f"enginepool.card-{rank}"


def _reaches_key(rank: int) -> str:
    return f"enginepool.reaches-{rank}"


def _leave(store: Any, rank: int, card: PeerProbe) -> None:
    store.set(_card_key(rank), msgspec.json.encode(card).decode())


def _card(store: Any, rank: int) -> PeerProbe | None:
    """The card of a rank that has left one; None: it is blank."""
    text: bytes = store.get(_card_key(rank))
    return msgspec.json.decode(text, type=PeerProbe) if text else None


def _came(store: Any, keys: list[str]) -> bool:
    """Whether all of them are there in time."""
    try:
        store.wait(keys, min(timedelta(seconds=CARDS_S), store.timeout * PART))
    except RuntimeError:
        return False
    return True


def _probe(device: Any) -> "tuple[Any, MemoryRegion] | None":
    """(memory, how others open it), sealed; None where memory cannot be shared."""
    try:
        memory = make_space(ALIGNMENT, device)
        seal = set_seal(memory.tensors[0])
        return memory, msgspec.structs.replace(memory.regions()[0], seal=seal)
    except (OSError, RuntimeError):
        return None


def _finds(probe: MemoryRegion) -> bool:
    """Whether another rank's memory can be read from here."""
    try:
        return sealed(open_space(probe, across=True), probe.seal)
    except (OSError, RuntimeError):
        return False
