"""Memory that a publisher lends, verified in the engine's processes while the engine serves. No SGLang here."""

import importlib
import threading
from typing import Any

import msgspec

from enginepool.protocol.layout import layout
from enginepool.transfer.digest import make_ready
from enginepool.transfer.shared_memory import verified
from enginepool.workers.sglang.weights.prepared_load import OpenedMemory, manifest_of, open_regions, sealed
from enginepool.workers.sglang.weights.ticket_answers import first_line, write_answer

torch: Any = importlib.import_module("torch")


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
        """Refer to the memory no more."""
        with self._lock:
            self._ticket = self._opened = None

    def verify(self, ticket: dict[str, Any]) -> None:
        """Begin to open regions and to read every byte, on a thread that writes the ticket's later answer."""
        self._ticket = ticket
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._verify, args=(ticket, device), name="verify", daemon=True).start()

    def _verify(self, ticket: dict[str, Any], device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins on the first one
            manifest = manifest_of(ticket["manifest"])
            opened = open_regions(ticket["regions"], layout(manifest).nbytes)
            if not sealed(opened, ticket["regions"]):
                raise ValueError("the memory does not end with its seal")
            [space] = opened.parts
            make_ready(space.device)  # it may be another one than the model's
            digest, findings = verified(space, manifest, ticket["targets"])
            answer: dict[str, Any] = {"digest": digest, "findings": msgspec.to_builtins(findings)}
            with self._lock:
                if self._ticket is ticket:
                    self._opened = ticket["regions"], opened
        except Exception as error:
            answer = {"error": first_line(error)}
        write_answer(ticket["later"], answer)
