"""A receiver of broadcasts as a process of its own: what a stager is to a publisher, and no more.

Takes orders from its connection: {"address", "name", "world", "rank"} joins a group and says `joined`; {"manifest",
"bucket_bytes"} receives an update, keeps its bytes, and says `staged` with their digest; {"manifest", "space"} opens what a
publisher lends, and does the same; {"sums"} says the sum of each tensor.
"""

from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from enginepool.protocol.layout import buckets, layout
from enginepool.protocol.manifest import decode_manifest
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer.collective import join
from enginepool.transfer.digest import digest_of, views
from enginepool.transfer.process_group import CollectiveError, ProcessGroup
from enginepool.transfer.shared_memory import open_space, verified

TIMEOUT_S = 30.0


def main(orders: Connection) -> None:
    """Carry out orders until the tests end this process, or their end of the connection is closed."""
    group: ProcessGroup | None = None
    space: Any = None
    manifest: Any = []

    def say(**what: Any) -> None:
        orders.send(what)

    say(ready=True)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        try:
            if "address" in order:
                group = join(
                    order["address"], order["name"], order["world"], order["rank"], backend="gloo", timeout_s=TIMEOUT_S
                )
                say(joined=order["name"])
            elif "space" in order:
                manifest = decode_manifest(order["manifest"].encode())
                opened = open_space(msgspec.convert(order["space"], MemoryRegion))
                space = opened[: layout(manifest).nbytes].clone()
                say(staged=verified(opened, manifest)[0])
            elif "manifest" in order:
                assert group is not None
                manifest = decode_manifest(order["manifest"].encode())
                space = torch.empty(layout(manifest).nbytes, dtype=torch.uint8)
                for bucket in buckets(manifest, order["bucket_bytes"]):
                    group.broadcast(space[bucket.at : bucket.at + bucket.nbytes], TIMEOUT_S)
                say(staged=digest_of(space))
            else:
                tensors = zip(manifest, views(space, manifest), strict=True)
                say(sums={described.name: float(tensor.double().sum()) for described, tensor in tensors})
        except (CollectiveError, OSError, RuntimeError) as error:
            say(failed=str(error))
