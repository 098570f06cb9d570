"""`sglang.Engine.async_score` alone: engine and load in one process, with the settings that a worker of the pool gives it.

    python -m bench.peers.bare_engine '{"model": ..., "device": ..., "options": {...}}'

Speaks as `bench.score.load` does; its hello holds the engine's settings.
"""

import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import uvloop

from bench.peers.engine_settings import worker_kwargs
from bench.score.callers import Answer
from bench.score.load import own_voice, serve
from bench.score.workloads import Shape
from enginepool.workers import cpu_bridge
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.process import BRIDGE_VARIABLE, run_detokenizer


class EngineCaller:
    """The engine as the load sees it. It takes no priority."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def prepare(self, shape: Shape, number: int) -> object:
        return shape, *shape.request(number).listed()

    async def call(self, request: Any, priority: int) -> Answer:
        shape, query, items = cast("tuple[Shape, list[int] | str, list[list[int] | str]]", request)
        labels = list(shape.labels) or None
        result = await self._engine.async_score(query, items, label_token_ids=labels, return_pooled_hidden_states=shape.hidden)
        if (result.pooled_hidden_states is not None) != shape.hidden:
            raise ValueError("hidden states came, or did not come, against what was asked")
        return Answer(result.scores, result.prompt_tokens)

    async def counters(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        self._engine.shutdown()


def start_engine(wanted: EngineSettings, enter: Callable[..., Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """The engine and its settings. On a CPU its processes need the same bridge as those of a worker.

    enter: entry of the scheduler's process, which runs its first argument with the others.
    """
    if wanted.device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ[BRIDGE_VARIABLE] = "1"
        cpu_bridge.install()
    module: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    fields = getattr(module.ServerArgs, "__struct_fields__", None) or module.ServerArgs.__dataclass_fields__
    kwargs = worker_kwargs(wanted, {name for name in fields if not name.startswith("_")})
    engine = module.Engine
    if wanted.device == "cpu":
        # Reading these functions imports the bridge in the engine's processes, before SGLang.
        entries = ("run_scheduler_process_func", "run_detokenizer_process_func")
        bridged = {name: staticmethod(partial(run_detokenizer, getattr(engine, name))) for name in entries}
        engine = type("BridgedEngine", (engine,), bridged)
    if enter is not None:
        entry = partial(enter, engine.run_scheduler_process_func)
        engine = type("RepairedEngine", (engine,), {"run_scheduler_process_func": staticmethod(entry)})
    return engine(**kwargs), kwargs


async def main() -> None:
    """Start the engine, then run the phases on stdin."""
    voice = own_voice()
    wanted = msgspec.convert(msgspec.json.decode(sys.argv[1]), EngineSettings)
    engine, kwargs = start_engine(wanted)
    gc.collect()
    await serve(EngineCaller(engine), voice, {name: repr(value) for name, value in kwargs.items()})
    await asyncio.sleep(0)


if __name__ == "__main__":
    uvloop.run(main())
