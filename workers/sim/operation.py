"""How the sim engine answers an operation of rows: the interface. An operation is one file and one entry in `table.py`."""

import zlib
from typing import NamedTuple, Protocol

from enginepool.workers.engine import Outputs, RowPart
from enginepool.workers.sim.options import SimOptions


class Weights(NamedTuple):
    """What the answers of a sim engine depend on, besides the request."""

    seed: int = 0
    version: int = 0
    digest: str = ""

    def with_adapter(self, name: str) -> "Weights":
        """With a LoRA adapter of this name: its CRC-32 is added to the seed."""
        return self._replace(seed=self.seed + zlib.crc32(name.encode()))


class SimOperation(Protocol):
    """One operation."""

    #: as in `operations` of `Capabilities`, and of the parts of a batch
    name: str

    def serves(self, options: SimOptions) -> bool:
        """Whether an engine with these options has it."""
        ...

    def sizes(self, options: SimOptions) -> dict[str, int]:
        """Fields of `Capabilities` that say how large its outputs are."""
        ...

    def outputs(self, part: RowPart, options: SimOptions, weights: Weights, *, hidden: bool) -> Outputs:
        """The answer to a part. `hidden`: with hidden states, which the engine has."""
        ...
