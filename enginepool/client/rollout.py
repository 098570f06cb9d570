"""A rollout: groups of samples with their rewards, each as soon as it is finished.

A prompt is one stream of `n` samples. A sample is rewarded as soon as it ends, while the others go on. Nothing waits for other
prompts.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, Self, TypeAlias, cast

import numpy as np

from enginepool.client.arguments import check_int
from enginepool.client.generate import GenerateCalls
from enginepool.client.generations import Generation, Generations
from enginepool.client.media import media_of
from enginepool.client.rewards import Rewarder, prompt_of
from enginepool.client.rollout_group import Draft, RolloutGroup
from enginepool.client.sample_stream import SampleStream
from enginepool.client.token_stream import ChunkIterator
from enginepool.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    EnginepoolError,
    Interrupted,
    Poisoned,
    RequestCancelled,
    TooLarge,
)
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import MAX_CREDIT

log = logging.getLogger("enginepool")

#: Errors of one request, which say nothing about the others.
_OF_ONE: Final = (BadRequest, TooLarge, DeadlineExceeded, Poisoned, EngineFailed)
#: texts, token ids, or rows of a data set
Prompts: TypeAlias = Iterable[Any] | AsyncIterable[Any]


class Rollout:
    """What `Pool.rollout` returns: `async for group in rollout`. Its requests are sent when the first group is asked for.

    Leaving the loop, by `break` or by an exception, takes all its requests back; so does `cancel`, or the end of
    `async with rollout:`.
    """

    def __init__(
        self,
        pool: GenerateCalls,
        prompts: Prompts,
        n: int,
        reward: Rewarder,
        by_group: bool,
        check: Callable[[], Awaitable[None]],
        committed: Callable[[], Awaitable[int]],
        max_staleness: int | None,
        max_in_flight: int,
        options: dict[str, Any],
    ) -> None:
        """Not for callers: use `Pool.rollout`."""
        self._pool, self._prompts, self._n, self._reward = pool, prompts, n, reward
        #: rewards are requests to a group of the pool, whose errors may concern all of them
        self._by_group = by_group
        self._check, self._committed, self._max_staleness = check, committed, max_staleness
        self._options = options
        self._room = asyncio.Semaphore(max_in_flight)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ready: deque[Draft] = deque()
        #: prompts whose groups were not taken
        self._open = 0
        #: the newest weights that this rollout knows of
        self._newest = 0
        self._begun = self._fed = False
        self._failure: BaseException | None = None
        self._heard = asyncio.Event()
        #: an error of one prompt was logged
        self._told = False

    def __aiter__(self) -> "ChunkIterator[RolloutGroup]":
        return ChunkIterator(self, asyncio.get_running_loop())

    async def next_group(self) -> RolloutGroup | None:
        """The next finished group; None: there are no more.

        Raises:
            EnginepoolError: what concerns all prompts, such as a pool that is down. All requests are taken back.
        """
        draft = await self._next()
        return None if draft is None else draft.finished()

    async def _next(self) -> Draft | None:
        """The next finished group, as a draft: a caller that is cancelled can give it back."""
        if not self._begun:
            self._begun = True
            self._spawn(self._feed())
        while True:
            while not self._ready and self._failure is None and not (self._fed and not self._open):
                self._heard.clear()
                await self._heard.wait()
            if not self._ready:
                if self._failure is not None:
                    raise self._failure
                return None
            if self._max_staleness is not None and self._failure is None:
                await self._look()
            if not self._ready:  # it was cancelled meanwhile
                continue
            draft = self._ready.popleft()
            if not self._drop_stale(draft):
                self._open -= 1
                if draft.has_room:
                    draft.has_room = False
                    self._room.release()
                return draft
            if self._failure is None:
                self._spawn(self._finish(draft))

    #: as the iterators of a pool are called
    next_chunk = next_group

    async def take(self, count: int) -> list[RolloutGroup]:
        """The next `count` finished groups, such as those of one training step. There are fewer at the end, and before an
        error, which the next call raises. Other groups go on meanwhile. A call that is cancelled takes none."""
        check_int("count", count, 0, MAX_ID)
        drafts: list[Draft] = []
        try:
            while True:
                while len(drafts) < count and (draft := await self._next()) is not None:
                    drafts.append(draft)
                if not await self._give_back_stale(drafts):
                    break
        except asyncio.CancelledError:
            self._open += len(drafts)
            self._ready.extendleft(reversed(drafts))
            self._heard.set()
            raise
        except Exception:  # the next call raises it
            if not drafts:
                raise
        return [draft.finished() for draft in drafts]

    async def _give_back_stale(self, drafts: list[Draft]) -> bool:
        """Whether some of several groups were too old once the last of them was finished: these are generated again."""
        if self._max_staleness is None or len(drafts) < 2 or self._failure is not None:
            return False
        self._open += len(drafts)
        try:
            await self._look()
        finally:
            self._open -= len(drafts)
            self._heard.set()  # another caller may wait for a group that does not come
        stale = [draft for draft in drafts if self._drop_stale(draft)]
        for draft in stale:
            drafts.remove(draft)
            if self._failure is None:  # else the rollout has ended meanwhile
                self._open += 1
                self._spawn(self._finish(draft))
        return bool(stale)

    async def result(self) -> list[RolloutGroup]:
        """All groups that were not taken, once they are finished."""
        return [group async for group in self]

    def cancel(self) -> None:
        """Take all requests back. Groups that were not taken are dropped. Idempotent."""
        self._fail(RequestCancelled("the rollout was left before its end"))
        self._ready.clear()

    async def aclose(self) -> None:
        """As `cancel`."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.cancel()

    # --- its tasks -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
        else:  # also by something that was awaited, such as the iterable of prompts: then no one else ends this rollout
            error = None if task.cancelling() else RequestCancelled("prompts: what they were awaited from was cancelled")
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None or (self._fed and not self._open):
            return
        self._failure, self._begun = error, True
        for task in self._tasks:
            task.cancel()
        self._heard.set()

    async def _feed(self) -> None:
        """Begin with each prompt as soon as there is room for it."""
        await self._check()
        rows = _each(self._prompts)
        index = 0
        while True:
            await self._room.acquire()
            try:
                row = await anext(rows)
            except StopAsyncIteration:
                break
            self._open += 1
            self._spawn(self._finish(Draft(index, row)))
            index += 1
        self._fed = True
        self._heard.set()

    async def _finish(self, draft: Draft) -> None:
        """Generate the samples that a group does not have yet, and wait for their rewards."""
        while missing := draft.missing(self._n):
            if draft.attempts and self._max_staleness is not None:
                await self._look()
            await self._generate(draft, missing)
            self._drop_stale(draft)
        await asyncio.gather(*draft.rewards.values())
        self._ready.append(draft)
        self._heard.set()

    async def _generate(self, draft: Draft, numbers: list[int]) -> None:
        """Samples of these numbers. One that was interrupted is missing afterwards."""
        options: Any = {**self._options, **media_of(draft.row), "n": len(numbers), "credit": MAX_CREDIT}
        if options.get("sampling_seed") is not None:
            options["sampling_seed"] += draft.attempts * self._n
        draft.attempts += 1
        try:
            prompt = prompt_of(draft.row)
            if options.pop("routed_experts", False):
                del options["credit"]
                whole = await self._pool.generate(prompt, routed_experts=True, **options)
            else:
                whole = await self._stream(draft, numbers, self._pool.sample_stream(prompt, options))
        except Interrupted as error:
            whole = cast("Generations", error.generations)
        except _OF_ONE as error:
            self._note(draft, error)
            draft.failed.update(number for number in numbers if number not in draft.samples)
            return
        for number, sample in zip(numbers, whole[0] if whole else (), strict=False):
            if sample.finish_reason != "interrupted":
                self._sampled(draft, number, sample)
        draft.dropped += sum(number not in draft.samples for number in numbers)

    async def _stream(self, draft: Draft, numbers: list[int], stream: SampleStream) -> Generations | None:
        """Take the samples of a stream as they end. None: all that had not ended are too old, and the stream was left."""
        async with stream:
            while (ended := await stream.next_samples()) is not None:
                for number, sample in ended:
                    self._sampled(draft, numbers[number], sample)
                self._newest = max(self._newest, stream.version)
                first = stream.first_versions()
                if first and all(version is not None and self._is_old(version) for version in first):
                    return None
            return await stream.result()

    def _sampled(self, draft: Draft, number: int, sample: Generation) -> None:
        """A sample has ended, or more is known of it."""
        self._newest = max(self._newest, *(version for version, _ in sample.spans), 0)
        if number not in draft.rewards and not self._is_stale(sample):
            draft.rewards[number] = self._spawn(self._rewarded(draft, sample))
        draft.samples[number] = sample

    async def _rewarded(self, draft: Draft, sample: Generation) -> float:
        try:
            return await self._reward(draft.row, sample)
        except Exception as error:
            if self._by_group and isinstance(error, EnginepoolError) and not isinstance(error, _OF_ONE):
                raise
            self._note(draft, error)
        except (asyncio.CancelledError, SystemExit) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Something that the function awaits was cancelled, or the program that it runs has ended.
            self._note(draft, RuntimeError(f"reward: the function raised {error!r}"))
        return np.nan

    def _note(self, draft: Draft, error: Exception) -> None:
        """An error of one prompt. The first one is logged, too: a loop that never reads `errors` would train on NaN."""
        if not self._told:
            self._told = True
            what = error if isinstance(error, EnginepoolError) else repr(error)
            log.warning("rollout: prompt %d: %s; `errors` of each group has what failed for it", draft.index, what)
        draft.errors.append(error)

    # --- the age of samples ----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Ask for the committed weights. A new run begins versions again, and none of its samples is as new as those before."""
        known = self._newest
        committed = await self._committed()
        self._newest = committed if committed < known else max(self._newest, committed)

    def _is_stale(self, sample: Generation) -> bool:
        return bool(sample.spans) and self._is_old(sample.spans[0][0])

    def _is_old(self, version: int) -> bool:
        return self._max_staleness is not None and self._newest - version > self._max_staleness

    def _drop_stale(self, draft: Draft) -> bool:
        """Whether samples of a group are too old, and were dropped."""
        stale = [number for number, sample in draft.samples.items() if self._is_stale(sample)]
        for number in stale:
            draft.drop(number)
        return bool(stale)


async def _each(prompts: Prompts) -> AsyncIterator[Any]:
    if isinstance(prompts, AsyncIterable):
        async for row in prompts:
            yield row
    else:
        for row in prompts:
            yield row
