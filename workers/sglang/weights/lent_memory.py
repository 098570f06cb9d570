"""Memory that a publisher lends, verified in the engine's processes while the engine serves. No SGLang here."""

import threading
from typing import Any

import msgspec

from enginepool.protocol.layout import layout
from enginepool.transfer.digest import make_ready
from enginepool.transfer.shared_memory import verified
from enginepool.workers.sglang.weights.prepared_load import OpenedMemory, manifest_of, open_regions, sealed
from enginepool.workers.sglang.weights.ticket_answers import answer_later


class LentMemory:
    """The regions that the latest `verify` ticket names, open from their verification until `close`."""

    def __init__(self) -> None:
        #: the latest ticket
        self._ticket: dict[str, Any] | None = None
        #: what it says of the regions, and their bytes
        self._opened: tuple[list[dict[str, Any]], OpenedMemory] | None = None
        self._lock = threading.Lock()

    def opened(self, regions: list[dict[str, Any]]) -> OpenedMemory | None:
        """The bytes of regions that were verified and are still open, or None."""
        opened = self._opened
        return opened[1] if opened is not None and opened[0] == regions else None

    def close(self) -> None:
        """Release the memory."""
        with self._lock:
            self._ticket = self._opened = None

    def verify(self, ticket: dict[str, Any]) -> None:
        """Begin to open regions and to read every byte. The ticket's second answer has the digest and the findings."""
        self._ticket = ticket
        answer_later(ticket, self._verify)

    def _verify(self, ticket: dict[str, Any]) -> dict[str, Any]:
        manifest = manifest_of(ticket["manifest"])
        opened = open_regions(ticket["regions"], layout(manifest).nbytes)
        if not sealed(opened, ticket["regions"]):
            raise ValueError("the memory does not end with its seal")
        [space] = opened.parts
        make_ready(space.device)  # it may be another one than the model's
        digest, findings = verified(space, manifest, ticket["targets"])
        with self._lock:
            if self._ticket is ticket:
                self._opened = ticket["regions"], opened
        return {"digest": digest, "findings": msgspec.to_builtins(findings)}
