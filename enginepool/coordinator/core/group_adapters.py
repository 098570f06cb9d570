"""The LoRA adapters of a group that were loaded while its engines run, and what each worker has of them. Pure."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.protocol.messages import TaskId

T = TypeVar("T", bound=Hashable)


class WorkerAdapters:
    """What the engine of a worker has of them, as far as the worker said so."""

    __slots__ = ("again_at", "loaded", "missing", "task", "unasked", "until", "wanted")

    def __init__(self) -> None:
        #: by the engine's names
        self.loaded: set[str] = set()
        #: of them, those that this coordinator did not have it load: what is in them is not known
        self.unasked: set[str] = set()
        #: the task that it has now, and when that must be done: it loads this version, or unloads what has this name
        self.task: TaskId | None = None
        self.until = 0.0
        self.wanted: AdapterVersion | str = ""
        #: why it could not load a committed one, or ""; when it is asked again
        self.missing = ""
        self.again_at = 0.0

    def say(self, loaded: Collection[str]) -> None:
        """The worker says what its engine has. What it is about to unload does not count."""
        unloads = {self.wanted} if self.task is not None and isinstance(self.wanted, str) else set[str]()
        self.unasked = {name for name in loaded if not self.has(name) or name in self.unasked} - unloads
        self.loaded = {*loaded} - unloads

    def has(self, name: str) -> bool:
        """Whether its engine has loaded what it calls so, or is about to."""
        loads = self.task is not None and not isinstance(self.wanted, str) and self.wanted.engine_name == name
        return loads or name in self.loaded


class GroupAdapters(Generic[T]):
    """The adapters of one group. `T`: a request."""

    def __init__(self) -> None:
        self.committed: dict[str, AdapterVersion] = {}
        #: those that its engines were started with
        self.configured: tuple[str, ...] = ()
        #: workers may have versions that are not wanted, until these are used no more and unloaded, or lack one that is
        self.stale = False
        #: live requests that name an adapter, by its name
        self.requests: dict[str, dict[T, None]] = {}
        self._names: dict[T, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may name."""
        return tuple(sorted({*self.configured, *self.committed}))

    def engine_name(self, name: str) -> str:
        """What engines call the adapter that requests call `name`."""
        known = self.committed.get(name)
        return name if known is None else known.engine_name

    def version(self, name: str) -> int:
        """The committed version of an adapter; 0: engines were started with it."""
        known = self.committed.get(name)
        return 0 if known is None else known.version

    def lacked(self, loaded: Collection[str]) -> AdapterVersion | None:
        """A committed adapter that is not among those that are `loaded`."""
        return next((one for one in self.committed.values() if one.engine_name not in loaded), None)

    def add(self, request: T, name: str) -> None:
        """A request that names an adapter is live."""
        self.requests.setdefault(name, {})[request] = None
        self._names[request] = name

    def discard(self, request: T) -> None:
        """A request has its answer."""
        name = self._names.pop(request, None)
        if name is not None:
            del self.requests[name][request]
            if not self.requests[name]:
                del self.requests[name]
