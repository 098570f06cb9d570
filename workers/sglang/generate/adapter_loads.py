"""LoRA adapters that SGLang loads and unloads while it serves. No SGLang here."""

import asyncio
from collections.abc import Mapping
from typing import Any

from enginepool.protocol.adapters import LOADS_ADAPTERS
from enginepool.workers.adapter_files import check_limits
from enginepool.workers.engine import EngineError
from enginepool.workers.sglang.host.processes import replicas_of


def adapter_features(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Whether this engine loads adapters while it serves, from SGLang's resolved `settings`: SGLang has made room for them, and
    the engine has no replicas, which SGLang loads none into."""
    return (LOADS_ADAPTERS,) if settings.get("enable_lora") and replicas_of(settings) == 1 else ()


#: SGLang releases an adapter right after a sequence that used it has ended
RELEASE_S = 1.0


class AdapterLoads:
    """Has SGLang load and unload. Its calls never return once the engine is gone.

    Args:
        tm: SGLang's tokenizer manager.
        requests: SGLang's module of request classes.
        settings: SGLang's, resolved.
    """

    def __init__(self, tm: Any, requests: Any, settings: Mapping[str, Any]) -> None:
        self._tm, self._requests = tm, requests
        #: how many SGLang holds; None: any number
        self._most: int | None = settings.get("max_loaded_loras")
        self._limits = settings.get("max_lora_rank"), settings.get("lora_target_modules")

    async def load(self, name: str, path: str) -> None:
        """Raises CheckpointError: it needs more room than SGLang has; EngineError: SGLang refused it, and has nothing of it."""
        await asyncio.to_thread(check_limits, path, *self._limits)
        known = self._tm.lora_registry
        loaded = known.get_all_adapters()
        if self._most is not None and len(loaded) >= self._most:
            # SGLang would unload another one, which requests may name.
            raise EngineError(f"max_loaded_loras = {self._most}, and as many are loaded: {', '.join(sorted(loaded))}")
        answer = await self._tm.load_lora_adapter(self._requests.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path))
        if not answer.success:
            # Some of its processes may have it.
            await self._tm.unload_lora_adapter(self._requests.UnloadLoRAAdapterReqInput(lora_name=name))
            raise EngineError(f"SGLang did not load it: {_said(answer)}")

    async def unload(self, name: str) -> None:
        """Raises EngineError: SGLang refused."""
        await self._release(name)
        answer = await self._tm.unload_lora_adapter(self._requests.UnloadLoRAAdapterReqInput(lora_name=name))
        if not answer.success:
            raise EngineError(f"SGLang did not unload it: {_said(answer)}")

    async def _release(self, name: str) -> None:
        """Have SGLang forget users that are gone, for whose end it would wait. Older versions, such as 0.5.20, keep counting a
        request that is dropped from the queue, or refused after its adapter was looked up."""
        known = self._tm.lora_registry
        if (adapter := known.get_all_adapters().get(name)) is None:
            return
        counter = known._counters[adapter.lora_id]
        try:
            async with asyncio.timeout(RELEASE_S):
                await counter.wait_for_zero()
        except TimeoutError:
            used = sum(state.obj.lora_path == name for state in self._tm.rid_to_state.values())
            await counter.decrement(max(counter.value() - used, 0))


def _said(answer: Any) -> str:
    return " ".join(str(answer.error_message).split())[:300]
