"""Who keeps the engine of a worker paused: it goes on once none of them does."""

import asyncio

from enginepool.workers.engine import Engine, PauseMode


class EnginePauses:
    """The pauses of one engine, by who wants them: new weights, and a command, may each want one at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._modes: dict[str, PauseMode] = {}
        #: a load may have let it compute
        self._ahead = False
        self._turn = asyncio.Lock()

    async def pause(self, who: str, mode: PauseMode, *, confirmed: bool = True) -> PauseMode:
        """As `Engine.pause`, until `resume` of the same name. `retract` after `in_place` retracts what is paused. Returns how
        the engine is paused then."""
        async with self._turn:
            self._engine.check_pause(mode)
            retracted = "retract" in self._modes.values()
            mode = "retract" if retracted else mode
            if not self._modes or self._ahead or (mode == "retract" and not retracted):
                # It must stand still for others after the load, too.
                confirmed = confirmed or bool(self._modes)
                await self._engine.pause(mode, confirmed=confirmed)
                self._ahead = not confirmed
                self._modes = dict.fromkeys(self._modes, mode)
            self._modes[who] = mode
            return mode

    async def retract(self, who: str) -> None:
        """If it keeps the engine paused `in_place`, from now on with `retract`."""
        async with self._turn:
            if self._modes.get(who) == "in_place":
                await self._engine.pause("retract")
                self._modes = dict.fromkeys(self._modes, "retract")

    async def resume(self, who: str) -> None:
        """It does not want the engine paused any more. Idempotent."""
        async with self._turn:
            if self._modes.pop(who, None) is not None and not self._modes:
                self._ahead = False
                await self._engine.resume()
