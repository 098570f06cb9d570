"""Prints what a plain worker of the pool starts its engine with, as one JSON object. SGLang is not imported.

python -m bench.peers.engine_settings '{"model": ..., "device": ..., "options": {...}}'
"""

import sys
from collections.abc import Collection, Iterator

import msgspec

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import engine_kwargs


class AnySetting(Collection[str]):
    """Stands for the settings of the installed SGLang, which names a missing one when it is started."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


if __name__ == "__main__":
    wanted = msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings)
    sys.stdout.write(msgspec.json.encode(engine_kwargs(wanted, AnySetting())).decode() + "\n")
