"""`sglang.Engine` alone, with SGLang's own updates: what a trainer has without the pool.

python -m bench.peers.bare_updates '{"model": ..., "device": ..., "options": {...}}'
"""

import sys
import time
from typing import Any

import msgspec

from bench.peers.bare_engine import start_engine
from bench.score.load import own_voice
from bench.score.workloads import Shape
from bench.weights.obeying import obey
from enginepool.workers.engine_settings import EngineSettings

_LOOK_S = 0.01


class Bare:
    """One engine; each `do_` is an order."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def do_join(self, address: str, name: str, world: int, rank: int, backend: str) -> dict[str, object]:
        """Be in the trainer's group."""
        host, _, port = address.rpartition(":")
        done, why = self._engine.init_weights_update_group(host, int(port), rank, world, name, backend)
        if not done:
            raise RuntimeError(why)
        return {}

    def do_update(self, group: str, calls: list[list[Any]], flat: bool) -> dict[str, object]:
        """Take an update in so many calls; the caches are flushed after the last. Seconds until its answer."""
        began = time.perf_counter()
        for i, (names, dtypes, shapes) in enumerate(calls):
            last = i == len(calls) - 1
            format_ = "flattened_bucket" if flat else None
            done, why, *_ = self._engine.update_weights_from_distributed(names, dtypes, shapes, group, last, format_)
            if not done:
                raise RuntimeError(why)
        return {"seconds": time.perf_counter() - began}

    def do_score(self, shape: dict[str, Any]) -> dict[str, object]:
        """The scores of one request."""
        request_shape = msgspec.convert(shape, Shape)
        query, items = request_shape.request(0).listed()
        result = self._engine.score(query, items, label_token_ids=list(request_shape.labels))
        while not self._engine.flush_cache().success:  # an update ends an engine that has not let go of a request
            time.sleep(_LOOK_S)
        return {"scores": result.scores}

    def do_end(self) -> dict[str, object]:
        """Give the device back."""
        self._engine.shutdown()
        return {}


def main() -> None:
    """Start the engine, then take orders."""
    voice = own_voice()
    engine, kwargs = start_engine(msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings))
    obey(voice, Bare(engine), {name: repr(value) for name, value in kwargs.items()})


if __name__ == "__main__":
    main()
