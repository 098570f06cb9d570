"""Words that more than one command takes as an option's value."""

from enum import StrEnum
from typing import Annotated

import typer


class EngineName(StrEnum):
    """What a worker runs."""

    sglang = "sglang"
    sim = "sim"


class Device(StrEnum):
    """Where the engine runs."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class RoleName(StrEnum):
    """What the peer with a key may do; each but worker includes the one before."""

    client = "client"
    publisher = "publisher"
    admin = "admin"
    worker = "worker"


class TruncationName(StrEnum):
    """What becomes of rows that are longer than the model takes."""

    error = "error"
    left = "left"
    right = "right"


Truncation = Annotated[
    TruncationName | None,
    typer.Option(help="Of rows that are longer than the model takes: refuse them, or cut them on a side."),
]
