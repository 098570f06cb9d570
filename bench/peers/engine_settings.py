"""Prints what a worker of the pool starts its engine with, as one JSON object. SGLang is not imported.

python -m bench.peers.engine_settings '{"model": ..., "device": ..., "options": {...}}'
"""

import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from typing import Any

import msgspec

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate.settings import generation_kwargs
from enginepool.workers.sglang.host.settings import engine_kwargs


class AnySetting(Collection[str]):
    """Stands for the settings of the installed SGLang, which names a missing one when it is started."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def worker_kwargs(wanted: EngineSettings, known: Collection[str]) -> dict[str, Any]:
    """What a worker that scores, or one that generates, starts its engine with."""
    if not wanted.generates:
        return engine_kwargs(wanted, known)
    return generation_kwargs(wanted, known, grammars=wanted.device == "cuda" and find_spec("xgrammar") is not None)


if __name__ == "__main__":
    wanted = msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings)
    sys.stdout.write(msgspec.json.encode(worker_kwargs(wanted, AnySetting())).decode() + "\n")
