"""What can happen to the adapters of a group: inputs of `Machine.handle`, as those in `events.py`. Pure."""

from collections.abc import Sequence

from enginepool.coordinator.core.events import Buffer, Event, Link
from enginepool.protocol.messages.adapters import LoadAdapter, UnloadAdapter


class AdapterAsked(Event):
    """A client loads an adapter, or unloads one. `outboxes`: as in `Submit`."""

    link: Link
    message: LoadAdapter | UnloadAdapter
    frames: Sequence[Buffer] = ()
    outboxes: int = 0


class AdapterStored(Event):
    """An adapter that came as tensors lies in `path`, and would survive a crash; or why it could not be written. `misfit`: why
    it was not: it is not what its publisher said."""

    change: tuple[int, int]
    path: str
    error: str = ""
    misfit: str = ""


class AdaptersWritten(Event):
    """The journal has taken what `WriteAdapters` said, and would survive a crash; or why it could not."""

    change: tuple[int, int]
    error: str = ""
