"""Pauses of an SGLang engine that generates, and which of them it can have. No SGLang here."""

from collections.abc import Mapping
from typing import Any

from enginepool.workers.engine import EngineError, PauseMode
from enginepool.workers.sglang.generate.new_tokens import SchedulerMessages

#: SGLang's resolved settings with which a pause is refused -> why
_REFUSED = {
    "speculative_algorithm": "its draft model has a KV cache of its own",
    "dllm_algorithm": "its blocks are computed in several steps",
    "hicache_storage_backend": "its storage keeps KV across a flush",
    "enable_lmcache": "its storage keeps KV across a flush",
}


class EnginePausing:
    """Pauses one engine.

    Args:
        tokenizer_manager: SGLang's, which talks to the schedulers.
        requests: SGLang's module of request classes.
        settings: SGLang's, resolved.
        messages: those of the schedulers.
    """

    def __init__(self, tokenizer_manager: Any, requests: Any, settings: Mapping[str, Any], messages: SchedulerMessages) -> None:
        self._tm = tokenizer_manager
        self._requests = requests
        self._settings = settings
        self._messages = messages

    def check(self, mode: PauseMode) -> None:
        """Raise EngineError: it cannot be paused so."""
        for name, why in _REFUSED.items():
            if value := self._settings.get(name):
                raise EngineError(f"pause {mode}: not with {name}={value!r}: {why}")
        for name in ("dp_size", "pp_size"):
            if (size := self._settings.get(name) or 1) > 1:
                raise EngineError(f"pause {mode}: not with {name}={size}: its schedulers do not stop at the same step")

    async def pause(self, mode: PauseMode) -> None:
        """Have all schedulers pause: they have, once they answer what is asked after this. Raises EngineError."""
        self.check(mode)
        await self._tm.pause_generation(self._requests.PauseGenerationReqInput(mode=mode))

    async def resume(self) -> None:
        """Go on, and hand on what was computed meanwhile; nothing where it is not paused."""
        await self._messages.release()
        await self._tm.continue_generation(self._requests.ContinueGenerationReqInput(torch_empty_cache=False))


def pausing_of(generation: Any) -> EnginePausing:
    """Those of an `EngineGeneration`. Raises EngineError: there is none, or not yet."""
    if generation is None:
        raise EngineError("pause: this engine does not generate")
    return generation.pausing
