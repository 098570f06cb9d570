"""A batch through SGLang: parts checked, one message to the scheduler, its answers read. No SGLang here."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, Outputs, RowBatch, RowPart
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.settings import Running
from enginepool.workers.sglang.operations.base import RowOperation
from enginepool.workers.sglang.operations.table import OPERATIONS
from enginepool.workers.sglang.score.checks import check_rows, refuse_oversize
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.outputs import (
    forward_count,
    hidden_rows,
    pooled_entries,
    refuse_aborted,
    unless_not_finite,
)
from enginepool.workers.sglang.score.prefix_cache import CachedQueries
from enginepool.workers.sglang.score.prompts import Prompts, packed_prompts, plain_prompts

#: Token id that SGLang itself puts between items. Positions are sent with the ids, and no item attends to a delimiter.
DELIMITER = 9999


class EngineScoring:
    """Runs batches of rows on one engine. Its calls never return once the engine is gone: await them by
    `EngineEnd.unless_over`.

    Args:
        tokenizer_manager: SGLang's, which talks to the scheduler.
        requests: SGLang's module of request classes.
        entries: reads in which forward each row ran.
        capabilities: what the engine can do, as far as its settings tell; the warm-up completes it.
        running: what the engine runs with.
    """

    def __init__(
        self, tokenizer_manager: Any, requests: Any, entries: Entries, capabilities: Capabilities, running: Running
    ) -> None:
        self._tm = tokenizer_manager
        self._requests = requests
        self._entries = entries
        self.capabilities = capabilities
        #: by name, those that this engine has
        served = (one for one in OPERATIONS if one.kind == capabilities.kind)
        self.operations = {one.name: one for one in served if one.name in capabilities.operations}
        #: +1 when the engine runs larger priorities first, as the pool does.
        self._priority_sign = -1 if running.settings.get("schedule_low_priority_values_first") else 1
        # Half of the engine's memory: what batches leave behind is kept there too, and what they need is taken from it.
        self.cached = CachedQueries(capabilities.cached_query, running.kv_tokens // 2, capabilities.page)

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return self._tm.model_config.hf_config

    def forget(self) -> None:
        """The engine has dropped all queries that it had computed."""
        self.cached.clear()

    async def score(self, batch: RowBatch) -> tuple[tuple[Outputs | EngineError, ...], int, int]:
        """Each part's outcome, how many forwards the rows took, and tokens of them that were cached.

        A part that is wrong gets its own error; the others run. Raises EngineError when the whole batch is refused.
        """
        operation = self.operations.get(batch.operation)
        if operation is None:
            raise EngineError(f"{batch.operation}: this engine runs {', '.join(self.operations)}")
        if batch.hidden and not self.capabilities.hidden:
            raise EngineError("this model gives no pooled hidden states")
        if batch.packed and not operation.packs:
            raise EngineError(f"{batch.operation}: its rows are not packed")
        outcome: dict[int, Outputs | EngineError] = {}
        runnable: dict[int, RowPart] = {}
        for place, part in enumerate(batch.parts):
            try:
                check_rows(part, self.capabilities, packed=batch.packed)
                operation.check(part, self.capabilities)
                runnable[place] = part
            except EngineError as error:
                outcome[place] = error
        forwards = cached = 0
        if runnable:
            parts = list(runnable.values())
            refuse_oversize(parts, self.capabilities, packed=batch.packed)
            found, forwards, cached = await self.compute(
                operation, parts, batch.priority, hidden=batch.hidden, packed=batch.packed
            )
            outcome.update(zip(runnable, map(unless_not_finite, parts, found), strict=True))
        return tuple(outcome[place] for place in range(len(batch.parts))), forwards, cached

    async def compute(
        self,
        operation: RowOperation,
        parts: Sequence[RowPart],
        priority: int = 0,
        *,
        hidden: bool = False,
        packed: bool = False,
    ) -> tuple[list[Outputs], int, int]:
        """Outputs of each part, how many forwards their rows took, and tokens of them that were cached. Raises EngineError."""
        sent = priority * self._priority_sign
        await self.cached.ensure(parts, priority, partial(self._send_ahead, operation, sent))
        if packed:
            prompts = packed_prompts(parts, self.capabilities.context, min(DELIMITER, self.capabilities.vocab - 1))
        else:
            prompts = plain_prompts(parts)
        answers, forwards, cached = await self._ask(operation.request(self._requests, prompts, sent, hidden))
        self.cached.look(parts, cached)
        entries = prompts.take_apart([operation.entries(answer, prompts.packed) for answer in answers], len(parts))
        found = [operation.outputs(mine, part, self.capabilities) for part, mine in zip(parts, entries, strict=True)]
        if hidden:
            pooled = prompts.take_apart([pooled_entries(answer, prompts.packed) for answer in answers], len(parts))
            for outputs, mine in zip(found, pooled, strict=True):
                outputs["hidden"] = hidden_rows(mine)
        return found, forwards, sum(cached)

    async def _send_ahead(self, operation: RowOperation, priority: int, queries: list[list[int]]) -> None:
        """Compute queries whose rows follow: one more row each, whose answer is not read. Raises EngineError."""
        prompts = Prompts(queries, [operation.trial().labels for _ in queries], [])
        await self._ask(operation.request(self._requests, prompts, priority, False))

    async def _ask(self, request: Any) -> tuple[list[dict[str, Any]], int, list[int]]:
        """SGLang's answers to one request object, in its order, how many forwards they took, and each one's cached tokens.

        Raises EngineError.
        """
        rows: list[str] = list(request.rid)
        self._entries.expect(rows)
        try:
            # To its end: an aborted generator holds a lock that every weight update waits for.
            async with contextlib.aclosing(self._tm.generate_request(request, None)) as results:
                answers: list[dict[str, Any]] = [answer async for answer in results][-1]
        except Exception as error:
            raise EngineError(f"the engine refused the batch: {one_line(error)}") from error
        finally:
            entered = self._entries.pop(rows)
        refuse_aborted(answers)
        return answers, forward_count([entry.time for entry in entered]), [entry.cached for entry in entered]
