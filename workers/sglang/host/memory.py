"""Parts of an SGLang engine's memory that are released and taken back. No SGLang here."""

from typing import Any

from enginepool.protocol.messages.control import MemoryTag
from enginepool.workers.engine import EngineError
from enginepool.workers.engine_weights import LOST_WEIGHTS
from enginepool.workers.sglang.host.settings import Running
from enginepool.workers.sglang.weights.updates import SglangWeights, UnlessOver


class EngineMemory:
    """The memory of one SGLang engine.

    Args:
        tokenizer_manager: SGLang's, which talks to the schedulers.
        requests: SGLang's module of request classes.
        device: where the engine runs.
    """

    def __init__(
        self, tokenizer_manager: Any, requests: Any, running: Running, device: str, weights: SglangWeights,
        unless_over: UnlessOver,
    ) -> None:  # fmt: skip
        self._tm, self._requests, self._weights, self._unless_over = tokenizer_manager, requests, weights, unless_over
        saver = bool(running.settings.get("enable_memory_saver"))
        self._why_not = (
            "engine option enable_memory_saver is false: SGLang would release nothing; set it to true"
            if device == "cuda" and not saver
            else ""
        )
        #: a copy of the weights in the host's memory takes their place meanwhile
        self._loses_weights = saver and not running.settings.get("enable_weights_cpu_backup")

    def check(self) -> None:
        """Raises EngineError: nothing of it can be released."""
        if self._why_not:
            raise EngineError(self._why_not)

    async def release(self, tags: list[MemoryTag]) -> bool:
        """Release these parts; the engine is idle. Returns whether its weights are lost. Raises EngineDied."""
        await self._unless_over(self._tm.release_memory_occupation(self._requests.ReleaseMemoryOccupationReqInput(tags=tags)))
        if "weights" not in tags:
            return False
        self._weights.asleep = True
        if self._loses_weights:
            self._weights.version, self._weights.digest = 0, LOST_WEIGHTS
        return self._loses_weights

    async def take_back(self, tags: list[MemoryTag]) -> None:
        """Take these parts back. Raises EngineDied."""
        await self._unless_over(self._tm.resume_memory_occupation(self._requests.ResumeMemoryOccupationReqInput(tags=tags)))
        if "weights" in tags:
            self._weights.asleep = False
