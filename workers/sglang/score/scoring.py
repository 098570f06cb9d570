"""A batch through SGLang: parts checked, one message to the scheduler, its answers read as scores. No SGLang here."""

import contextlib
from functools import partial
from typing import Any

import numpy as np

from enginepool.protocol.messages import Capabilities
from enginepool.workers.engine import EngineError, PartScores, ScoreBatch, ScorePart, Scores
from enginepool.workers.packed import join
from enginepool.workers.sglang.embed import embedding_rows
from enginepool.workers.sglang.host.lifetime import one_line
from enginepool.workers.sglang.host.requests import Parts, head_request, label_request
from enginepool.workers.sglang.host.settings import Running
from enginepool.workers.sglang.score.checks import checked_rows, refuse_oversize
from enginepool.workers.sglang.score.forward_counter import Entries
from enginepool.workers.sglang.score.outputs import (
    forward_count,
    head_scores,
    hidden_rows,
    label_scores,
    refuse_aborted,
    unless_not_finite,
)
from enginepool.workers.sglang.score.packed import (
    DELIMITER,
    packed_head_scores,
    packed_heads,
    packed_label_scores,
    packed_labels,
)
from enginepool.workers.sglang.score.prefix_cache import CachedQueries


class EngineScoring:
    """Scores batches on one engine. Its calls never return once the engine is gone: await them by `EngineEnd.unless_over`.

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
        #: +1 when the engine runs larger priorities first, as the pool does.
        self._priority_sign = -1 if running.settings.get("schedule_low_priority_values_first") else 1
        #: None where no query is computed ahead of its rows.
        self.cached: CachedQueries | None = None
        if capabilities.cached_query:
            # Half of the engine's memory: what batches leave behind is kept there too, and what they need is taken from it.
            self.cached = CachedQueries(capabilities.cached_query, running.kv_tokens // 2, capabilities.page)

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return self._tm.model_config.hf_config

    async def score(self, batch: ScoreBatch) -> tuple[tuple[PartScores | EngineError, ...], int, int]:
        """Each part's outcome, how many forwards the rows took, and tokens of them that were cached.

        A part that is wrong gets its own error; the others run. Raises EngineError when the whole batch is refused.
        """
        if batch.operation not in self.capabilities.operations:
            raise EngineError(f"{batch.operation}: this engine runs {', '.join(self.capabilities.operations)}")
        if batch.hidden and not self.capabilities.hidden:
            raise EngineError("this model gives no pooled hidden states")
        outcome: dict[int, PartScores | EngineError] = {}
        runnable: Parts = []
        places: list[int] = []
        for place, part in enumerate(batch.parts):
            try:
                runnable.append((part, checked_rows(part, self.capabilities)))
                places.append(place)
            except EngineError as error:
                outcome[place] = error
        forwards = cached = 0
        if runnable:
            refuse_oversize(runnable, self.capabilities)
            scored, forwards, cached = await self.compute(runnable, batch.priority, batch.hidden)
            parts = [part for part, _ in runnable]
            checked = map(partial(unless_not_finite, embedding=batch.operation == "embed"), parts, scored)
            outcome.update(zip(places, checked, strict=True))
        return tuple(outcome[place] for place in range(len(batch.parts))), forwards, cached

    async def compute(self, parts: Parts, priority: int, hidden: bool) -> tuple[list[PartScores], int, int]:
        """Scores of each part, how many forwards their rows took, and tokens of them that were cached. Raises EngineError."""
        if self.capabilities.packed:
            return await self._compute_packed([part for part, _ in parts], priority, hidden)
        causal = self._tm.is_generation
        types = self._requests
        wanted = [part for part, _ in parts]
        if self.cached is not None:
            await self.cached.ensure(wanted, priority, partial(self._send_ahead, priority * self._priority_sign))
        priority *= self._priority_sign
        answers, forwards, cached = await self._ask(
            label_request(types, parts, priority) if causal else head_request(types, parts, priority, hidden)
        )
        if self.cached is not None:
            self.cached.look(wanted, cached)
        scored: list[PartScores] = []
        start = 0
        for part, rows in parts:
            mine = answers[start : start + len(rows)]
            start += len(rows)
            if causal:
                scored.append(PartScores(label_scores(mine, part)))
                continue
            outputs = [answer["embedding"] for answer in mine]
            if self.capabilities.kind == "embedding":
                scored.append(PartScores(embedding_rows(outputs, part)))
                continue
            scores = head_scores(outputs, part, self.capabilities.activation)
            scored.append(PartScores(scores, _pooled(mine) if hidden else None))
        return scored, forwards, sum(cached)

    async def _send_ahead(self, priority: int, queries: list[list[int]]) -> None:
        """Compute queries whose rows follow: one more row each, whose score is not read. Raises EngineError."""
        causal = self._tm.is_generation
        part = ScorePart(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.uint32), labels=(0,) if causal else ())
        parts: Parts = [(part, queries)]
        types = self._requests
        await self._ask(label_request(types, parts, priority) if causal else head_request(types, parts, priority, False))

    async def _compute_packed(self, parts: list[ScorePart], priority: int, hidden: bool) -> tuple[list[PartScores], int, int]:
        """The same by sequences: each is one request to SGLang, and all of them are one forward."""
        joined = join(parts, self.capabilities.context, min(DELIMITER, self.capabilities.vocab - 1))
        priority *= self._priority_sign
        if self._tm.is_generation:
            answers, forwards, _ = await self._ask(packed_labels(self._requests, joined, priority))
            return packed_label_scores(joined, answers, parts), forwards, 0
        answers, forwards, _ = await self._ask(packed_heads(self._requests, joined, priority, hidden))
        return packed_head_scores(joined, answers, parts, hidden), forwards, 0

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


def _pooled(answers: list[dict[str, Any]]) -> Scores:
    if any("pooled_hidden_state" not in answer for answer in answers):
        raise EngineError("the engine returned no pooled hidden states")
    return hidden_rows([answer["pooled_hidden_state"] for answer in answers])
