"""What a coordinator finds when it starts: committed weights and adapters of groups, and earlier workers. Pure."""

import msgspec

from enginepool.protocol.adapters import engine_name


class EarlierWorker(msgspec.Struct, frozen=True):
    """A worker process that an earlier coordinator started. `lives`: it runs in a slot of the pool; otherwise it has ended."""

    group: str
    index: int
    incarnation: str
    lives: bool = True


class GroupWeights(msgspec.Struct, frozen=True):
    """The committed weights of a group, as the journal keeps them.

    `digest`: "" for those of the checkpoint that engines start with. `snapshot`: the file that holds them, `path`: the
    checkpoint that they came from, where there is one. `run`: grows with each new run; versions grow within one. `restart`:
    engines take them only at their start, on `path`. `staged`: these or earlier ones came by a staged update, for which workers
    that start keep memory. `publisher`: who published them, as in the history.
    """

    version: int = 0
    digest: str = ""
    snapshot: str = ""
    path: str = ""
    run: int = 0
    restart: bool = False
    staged: bool = False
    publisher: str = ""


class AdapterVersion(msgspec.Struct, frozen=True):
    """A committed version of a LoRA adapter, as the journal keeps it. `path`: its folder; `nbytes`: of tensors that the
    coordinator stored there; 0: it is a folder of its publisher's."""

    name: str
    version: int
    digest: str
    path: str
    nbytes: int = 0

    @property
    def source(self) -> str:
        """What its publisher loaded: a folder, or tensors with this digest."""
        return self.digest if self.nbytes else self.path

    @property
    def engine_name(self) -> str:
        """What engines call it."""
        return engine_name(self.name, self.version)
