"""A trainer as a process of its own, to be killed: publishes a version and stops where it is told to.

`python -m tests.process.trainer ADDRESS VERSION WHERE [TRANSFER [IN_FLIGHT [COPYING]]]`; WHERE: `transfer`, in the middle of
its bytes; `staged`, when all are sent and nothing is committed; `hold`, while generations end; `load`, while engines take them;
COPYING: on what ranks copy. Says `there` on stdout when it is so far, and waits for its end.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from enginepool import Pool, WeightPublisher
from enginepool.trainer import buffers
from tests.process.weights import MANIFEST, some_weights


def main() -> None:
    """Never ends by itself."""
    address, version, where, *rest = sys.argv[1:]
    transfer: Any = rest[0] if rest else "staged"
    in_flight: Any = rest[1] if rest[1:] else "drain"
    if rest[2:]:
        buffers.COPYING = tuple(rest[2:])

    def there() -> None:
        sys.stdout.write("there\n")
        sys.stdout.flush()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in some_weights(int(version)).items():
            yield name, tensor
            if where == "transfer":
                there()
                threading.Event().wait()

    async def run() -> None:
        async with Pool.connect(address) as pool:
            publisher = WeightPublisher(pool, device="cpu", bucket_bytes=4096, lease=4.0)
            handle = await publisher.start(source, int(version), manifest=MANIFEST, transfer=transfer, in_flight=in_flight)
            if transfer != "direct":  # whose bytes are sent in the hold
                await handle.sent()
            if where in ("hold", "load") or transfer == "direct":
                finish = asyncio.create_task(handle.finish())
                while handle.phase != where:
                    assert not finish.done()
                    await asyncio.sleep(0.002)
            there()
            await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
