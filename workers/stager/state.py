"""What a stager knows: the update that it receives, and the committed weights that it keeps."""

import asyncio
from typing import TYPE_CHECKING

from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import Staged
from enginepool.workers.stager.messages import Reserve

if TYPE_CHECKING:
    from enginepool.workers.stager.memory import Memory


class StagedUpdate:
    """What a stager knows of the update that it prepares for or receives, for the worker that asked for it."""

    def __init__(self, message: Reserve, memory: "Memory", worker: asyncio.StreamWriter | None = None) -> None:
        self.id = message.update
        self.wanted = message
        self.memory = memory
        self.worker = worker
        self.received: Staged | None = None
        #: the worker waits for `joined`
        self.joining = False
        self.forgotten = False

    def complete(self, digest: str) -> bool:
        """Whether the received bytes are the weights with this digest."""
        received = self.received
        return received is not None and not received.code and received.digest == digest


class KeptUpdate:
    """Committed weights."""

    def __init__(self, version: int, digest: str, manifest: list[Tensor], memory: "Memory") -> None:
        self.version = version
        self.digest = digest
        self.manifest = manifest
        self.memory = memory
