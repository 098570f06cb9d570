"""Who keeps the engine of a worker paused: it goes on once none of them does."""

import asyncio

from enginepool.workers.engine import Engine, PauseMode


class EnginePauses:
    """The pauses of one engine, by who wants them: new weights, and a command, may each want one at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._modes: dict[str, PauseMode] = {}
        self._turn = asyncio.Lock()

    async def pause(self, who: str, mode: PauseMode, *, confirmed: bool = True) -> None:
        """As `Engine.pause`, until `resume` of the same name. `retract` after `in_place` retracts what is paused."""
        async with self._turn:
            self._engine.check_pause(mode)
            if not self._modes or (mode == "retract" and mode not in self._modes.values()):
                await self._engine.pause(mode, confirmed=confirmed)
            self._modes[who] = mode

    async def resume(self, who: str) -> None:
        """It does not want the engine paused any more. Idempotent."""
        async with self._turn:
            if self._modes.pop(who, None) is not None and not self._modes:
                await self._engine.resume()
