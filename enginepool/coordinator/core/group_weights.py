"""What a coordinator finds when it starts: the committed weights of each group, and live worker processes. Pure."""

import msgspec


class LiveProcess(msgspec.Struct, frozen=True):
    """A worker process of an earlier coordinator that the supervisor found alive."""

    group: str
    index: int
    incarnation: str


class GroupWeights(msgspec.Struct, frozen=True):
    """The committed weights of a group, as the journal keeps them.

    `digest`: "" for those of the checkpoint that engines start with. `snapshot`: the file that holds them, `path`: the
    checkpoint that they came from, where there is one. `run`: grows with each new run; versions grow within one. `restart`:
    engines take them only at their start, on `path`.
    """

    version: int = 0
    digest: str = ""
    snapshot: str = ""
    path: str = ""
    run: int = 0
    restart: bool = False
