"""The profiler of an SGLang engine: traces of its schedulers. No SGLang here."""

from typing import Any

from enginepool.workers.engine import EngineError
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.patches.profiles import UNWRITTEN
from enginepool.workers.sglang.weights.updates import UnlessOver


class SglangProfiler:
    """One profile at a time.

    Args:
        tokenizer_manager: SGLang's, which talks to the schedulers.
        requests: SGLang's module of request classes.
        device: where the engine runs.
    """

    def __init__(self, tokenizer_manager: Any, requests: Any, device: str, unless_over: UnlessOver) -> None:
        self._tm, self._requests, self._unless_over = tokenizer_manager, requests, unless_over
        self._activities = ["CPU"] if device == "cpu" else ["CPU", "GPU"]
        #: SGLang ends it by itself after so many forwards
        self._ends = False

    async def start(self, folder: str, steps: int) -> None:
        """Write traces into `folder`: of so many forwards, or with 0 until `stop`. Raises EngineError, EngineDied."""
        asked = self._requests.ProfileReq(output_dir=folder, num_steps=steps or None, activities=self._activities)
        try:
            await self._unless_over(self._tm.start_profile(asked))
        except RuntimeError as error:
            raise EngineError(f"SGLang did not start its profiler: {one_line(error)}") from None
        self._ends = steps > 0

    async def stop(self) -> None:
        """The traces are whole once this returns. Raises EngineError, EngineDied."""
        try:
            await self._unless_over(self._tm.stop_profile())
        except RuntimeError as error:
            if str(error).startswith(UNWRITTEN):
                raise EngineError(str(error)) from None
            if not self._ends:
                raise EngineError(f"SGLang did not stop its profiler: {one_line(error)}") from None
