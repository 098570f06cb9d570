"""Commands of the coordinator, one after the other, most of them between two batches.

An engine is kept paused while generations that are wanted stand still in it, and never empty: a paused group gives it no work,
and where a `resume` is lost with its link, which ends the generations, it goes on by itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar, get_args

from enginepool.protocol.messages.control import Command, Commanded, MemoryTag
from enginepool.workers.between_batches import BetweenBatches
from enginepool.workers.engine import Engine, EngineDied, EngineError, PauseMode
from enginepool.workers.engine_pauses import EnginePauses
from enginepool.workers.events import CommandDone, EngineLost, WorkerEvent
from enginepool.workers.failures import one_line
from enginepool.workers.generation import GenerationRunner
from enginepool.workers.profiling import Profiling
from enginepool.workers.saving import WeightSaving

T = TypeVar("T")
#: an engine that takes longer hangs: it may copy all of its weights to the host's memory and back
MEMORY_S = 120.0
#: the name under which the engine is paused
PAUSED_BY = "command"


class CommandRunner:
    """Performs `RunCommand`.

    Args:
        feed: takes what happens.
        between: the door of the engine.
        generations: those that run in it.
        rows: the door for batches of rows alone.
        pauses: those of the engine.
        profiling: its profiles.
        saving: of its weights.
    """

    def __init__(
        self, engine: Engine, feed: Callable[[WorkerEvent], None], between: BetweenBatches, generations: GenerationRunner,
        rows: BetweenBatches, pauses: EnginePauses, profiling: Profiling, saving: WeightSaving,
    ) -> None:  # fmt: skip
        self._engine, self._feed, self._between, self._generations = engine, feed, between, generations
        self._rows, self._pauses, self._profiling, self._saving = rows, pauses, profiling, saving
        #: one command after the other, in the order in which they came
        self._turn = asyncio.Lock()
        #: the parts of the engine's memory that are released
        self._asleep: frozenset[MemoryTag] = frozenset()
        generations.none_wanted = self.cancelled

    async def run(self, command: Command) -> None:
        """Run one command; `CommandDone` follows, unless the engine is lost."""
        answer, asleep, lost_weights = Commanded(command.task), None, False
        try:
            if command.command == "save":  # which may take minutes; nothing but sleep waits for it
                answer.message = await self._save(command)
            else:
                async with self._turn:
                    before = self._asleep
                    lost_weights = await self._run(command, answer)
                    asleep = None if self._asleep == before else sorted(self._asleep)
        except EngineDied as error:
            self._feed(EngineLost(time.monotonic(), str(error)))
            return
        except Exception as error:  # engines raise what they like, and each command has an answer: this one's is the error
            answer.code, answer.message = "engine_error", str(error) if isinstance(error, EngineError) else one_line(error)
        self._feed(CommandDone(time.monotonic(), answer, asleep, lost_weights))

    async def _save(self, command: Command) -> str:
        async with self._turn:
            if "weights" in self._asleep:
                raise EngineError("the engine's weights are asleep: wake them first")
            saved = asyncio.ensure_future(self._saving.run(command))
            await asyncio.sleep(0)  # it has begun
        return await saved

    async def _run(self, command: Command, answer: Commanded) -> bool:
        """Whether the weights are lost by it. `answer` gets a remark, where there is one."""
        tags = frozenset[MemoryTag](command.tags or get_args(MemoryTag))
        if command.command in ("pause", "resume", "sleep") and command.mode == "abort":
            await self._go_on()
        if command.command == "flush":
            if "kv_cache" not in self._asleep:  # what sleeps keeps no prefixes
                await self._when_empty("flush", self._engine.flush)
        elif command.command == "pause" and command.mode != "abort":
            await self._pause(command.mode)
        elif command.command == "pause":
            await self._when_empty("pause", _nothing)
        elif command.command == "sleep" and (fresh := sorted(tags - self._asleep)):
            await self._saving.over()
            # An engine that is told to release what it has released ends. So does one that takes back what it has.
            lost = await self._when_empty("sleep", partial(self._in_time, self._engine.sleep, fresh))
            self._asleep |= tags
            return lost
        elif command.command == "wake" and (found := sorted(tags & self._asleep)):
            await self._when_empty("wake", partial(self._in_time, self._engine.wake, found))
            self._asleep -= tags
        elif command.command == "start_profile":
            answer.message = await self._profiling.start(command)
        elif command.command == "stop_profile":
            answer.message = await self._profiling.stop(command)
        return False

    async def _pause(self, mode: PauseMode) -> None:
        """Batches of rows finish, and the generations stand still."""
        self._engine.check_pause(mode)
        async with self._rows.alone():
            if self._generations.wanted:
                await self._generations.defer_cancels()
                if await self._pauses.pause(PAUSED_BY, mode) == "retract":
                    self._generations.cancel_deferred()  # they wait in the engine, which drops them at once
                await asyncio.sleep(0)  # what they emitted is sent before the answer
        await self.cancelled()

    async def cancelled(self) -> None:
        """Generations were cancelled, or have ended: a paused engine in which none is wanted goes on, and they leave it."""
        if not self._generations.wanted:
            await self._go_on()

    async def free_stopped(self) -> None:
        """Those that were cancelled leave a paused engine, which computes the KV of the others again."""
        async with self._turn:
            if self._generations.defers:
                await self._pauses.retract(PAUSED_BY)
                self._generations.cancel_deferred()
        # Not in turn: one that leaves only when the engine goes on would hold back the `resume`.
        await self._generations.cancelled_left()

    async def _go_on(self) -> None:
        self._generations.cancel_deferred()
        await self._pauses.resume(PAUSED_BY)

    async def _in_time(self, change: Callable[[list[MemoryTag]], Awaitable[T]], tags: list[MemoryTag]) -> T:
        """No batch would show that the engine hangs: it is given none meanwhile. Raises EngineDied."""
        try:
            async with asyncio.timeout(MEMORY_S):
                return await change(tags)
        except TimeoutError:
            raise EngineDied(f"the engine hangs: it did not release or take back memory within {MEMORY_S:g} s") from None

    async def _when_empty(self, name: str, run: Callable[[], Awaitable[T]]) -> T:
        if wanted := self._generations.wanted:
            # Waiting would hold back all work that comes, until the longest of them has ended.
            raise EngineError(f"{wanted} generations run, and an engine can {name} only while nothing runs in it")
        async with self._between.alone():
            return await run()


async def _nothing() -> None:
    """The engine was empty: that is all that there is to know."""
