"""Weights that are broadcast straight into the engine's own processes, tensor by tensor as they arrive. No SGLang here."""

import importlib
import threading
from collections.abc import Iterator
from typing import Any

from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.transfer.digest import Digest, make_ready
from enginepool.transfer.process_group import QUEUED, CollectiveError
from enginepool.workers.sglang.weights.ticket_answers import answer_later

torch: Any = importlib.import_module("torch")

#: a bucket that takes longer is not waited for
BUCKET_S = 60.0


class GroupMember:
    """This process's side of a process group. It joins on a thread, while the engine serves."""

    def __init__(self) -> None:
        self.group: Any = None
        #: of the latest group
        self._ticket: dict[str, Any] | None = None
        self._lock = threading.Lock()

    def join(self, ticket: dict[str, Any]) -> None:
        """Begin to join. The ticket's second answer says when it is done."""
        self._ticket = ticket
        answer_later(ticket, self._join)

    def _join(self, ticket: dict[str, Any]) -> dict[str, Any]:
        from enginepool.transfer.collective import join

        name, device = ticket["group"], f"cuda:{torch.cuda.current_device()}" if ticket["backend"] == "nccl" else "cpu"
        with self._lock:
            group, self.group = self.group, None
        try:
            if group is not None and group.name != name:
                group.abort()
                group = None
            if device != "cpu":
                make_ready(device)
            group = group or join(
                ticket["address"], name, ticket["world"], ticket["rank"], backend=ticket["backend"], device=device
            )
        except CollectiveError as error:
            return {"error": str(error)}
        with self._lock:
            latest = self._ticket is ticket
            self.group = group if latest else self.group
        if latest:
            return {}
        group.abort()
        return {"error": f"group {name}: the engine has joined another group"}


def received(group: Any, manifest: list[Tensor], bucket_bytes: int, digest: Digest, own: bool) -> Iterator[tuple[str, Any]]:
    """Each tensor as soon as it is whole; the next bucket is on its way meanwhile.

    On a GPU a broadcast into a bucket's memory waits for the copies out of it that were begun before, and what is yielded
    may still be on its way: copies out of it wait by themselves. `own`: what is yielded is here, in memory of its own, that
    may be copied out of at any time and by any thread; on the host if the device has no room for all.
    """
    nbytes = layout(manifest).nbytes
    device = group.device
    size = min(bucket_bytes, nbytes)
    room = device == "cpu" or torch.cuda.mem_get_info()[0] > nbytes + size
    ring = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    cuts = list(buckets(manifest, bucket_bytes))
    ways: list[Any] = []
    torn: dict[int, Any] = {}

    def begin(k: int) -> None:
        if k < len(cuts):
            ways.append(group.begin(ring[k % 2][: cuts[k].nbytes]))

    begin(0)
    begin(1)
    for k, bucket in enumerate(cuts):
        (ways[k].wait if own else ways[k].order)(BUCKET_S)
        arrived = ring[k % 2][: bucket.nbytes]
        digest.add(arrived, bucket.at)
        for piece in bucket.pieces:
            tensor = manifest[piece.tensor]
            part = arrived[piece.bucket_at : piece.bucket_at + piece.nbytes]
            if piece.nbytes < tensor.nbytes:
                if piece.tensor not in torn:
                    torn[piece.tensor] = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
                torn[piece.tensor][piece.tensor_at : piece.tensor_at + piece.nbytes].copy_(part)
                if piece.tensor_at + piece.nbytes < tensor.nbytes:
                    continue
                part = torn.pop(piece.tensor)
            if own:
                part = part.clone() if room else part.to("cpu", copy=True)
                if device != "cpu":
                    torch.cuda.current_stream().synchronize()
            yield tensor.name, part.view(getattr(torch, tensor.dtype)).view(tensor.shape)
        begin(k + 2)
        if k >= QUEUED:
            ways[k - QUEUED].wait(BUCKET_S)
    for way in ways[-QUEUED:]:
        way.wait(BUCKET_S)
