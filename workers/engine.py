"""What an engine is to a worker: the interface that `sglang` and `sim` implement.

The worker's loop owns an engine for the whole life of the process: `start` once, then any number of overlapping `score` and
`tokenize` calls on one asyncio loop, then `close` once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from enginepool.protocol.messages import Capabilities, MediumKind, MediumSource, Part, Sampling
from enginepool.protocol.messages.control import MemoryTag
from enginepool.workers.engine_weights import EngineWeights
from enginepool.workers.prefix_report import PrefixReport
from enginepool.workers.texts import TextIds, TextTask

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]


class EngineError(Exception):
    """The engine refused or failed on this work and lives on. The message is one line for the caller."""


class RequestRefused(EngineError):
    """The engine cannot do what the request asks. The message begins with the parameter, if it is one of them: `regex: …`."""


class NotComparable(EngineError):
    """The engine holds the weights in another form than they were sent in, so that their digest tells nothing."""


class OnlyAtStart(EngineError):
    """The engine takes weights only when it starts: its load cannot be done again in place. The message says why."""


class EngineDied(Exception):
    """The engine is gone or hangs; the process that hosts it must end. The message is one line for the operator."""


class EngineUnusable(EngineDied):
    """The engine can never start like this: no such model, settings that it refuses. Starting again cannot help."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows of one request. Row i is `query` + item `i` (`asked.item_first` swaps them).

    query: int32, one query for all rows when `query_lengths` is None, else the concatenation of one query for each row.
    items: int32, the concatenation of all items; item_lengths: uint32 [rows].
    asked: what the operation is to do with the rows, as the coordinator says it.
    labels: int32 [rows, labels], where each row has its own.
    """

    query: Ids
    items: Ids
    item_lengths: Lengths
    query_lengths: Lengths | None = None
    asked: Part = field(default_factory=lambda: Part([]))
    labels: Ids | None = None

    @property
    def tokens(self) -> int:
        """Of all rows."""
        queries = self.query.size if self.query_lengths is not None else self.query.size * self.item_lengths.size
        return queries + self.items.size

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, query and item together."""
        items: list[int] = self.item_lengths.tolist()
        if self.query_lengths is None:
            size = self.query.size
            return [size + item for item in items]
        queries: list[int] = self.query_lengths.tolist()
        return [query + item for query, item in zip(queries, items, strict=True)]

    @property
    def shared(self) -> int:
        """Tokens of the one query that several rows begin with; 0: there is none."""
        several = self.item_lengths.size > 1 and self.query_lengths is None and not self.asked.item_first
        return self.query.size if several else 0

    def prompts(self) -> list[list[int]]:
        """Each row's token ids, query and item joined."""
        ends = np.cumsum(self.item_lengths).tolist()
        items = self.items.tolist()
        query = self.query.tolist()
        query_ends = None if self.query_lengths is None else np.cumsum(self.query_lengths).tolist()
        item_first = self.asked.item_first
        rows: list[list[int]] = []
        start = query_start = 0
        for i, end in enumerate(ends):
            item = items[start:end]
            start = end
            if query_ends is None:
                head = query
            else:
                head = query[query_start : query_ends[i]]
                query_start = query_ends[i]
            rows.append(item + head if item_first else head + item)
        return rows


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Parts of one operation that must run as exactly one forward pass. `priority`: larger runs first, in every engine.
    `hidden`: pooled hidden states are answered as well. `packed`: the rows are joined into sequences."""

    parts: tuple[RowPart, ...]
    priority: int = 0
    hidden: bool = False
    operation: str = "score"
    packed: bool = False


class TaskMedium(NamedTuple):
    """An image, a video or audio of a prompt. An engine is given its bytes: `source` is `bytes` there."""

    kind: MediumKind
    source: MediumSource
    data: bytes


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A prompt to continue. prompt: int32 [tokens]; n: sequences; priority: larger runs first, where the engine has to choose.

    sampling: `max_new_tokens` counts from the end of the prompt; sequence i is drawn with `sampling_seed` + i.
    logprobs: each token has the logarithm of its probability. at: position of the first token in the
    output. top_logprobs: and so many of the most probable tokens have one, in its place.
    prompt_logprobs: of so many of the first tokens of the prompt, or 0; with `top_logprobs` as well.
    media: those of the prompt, which has a placeholder for each; those of one kind in their order.
    adapter: the LoRA adapter; "": none.
    hidden_states: each token has the hidden state from which it was chosen.
    routed_experts: each sequence ends with the experts to which each layer routed each token.
    """

    prompt: Ids
    sampling: Sampling
    n: int = 1
    logprobs: bool = False
    priority: int = 0
    at: int = 0
    top_logprobs: int = 0
    prompt_logprobs: int = 0
    media: tuple[TaskMedium, ...] = ()
    adapter: str = ""
    hidden_states: bool = False
    routed_experts: bool = False


class NewTokens(NamedTuple):
    """Tokens that continue a sequence of a task. `logprobs`: one for each token, or none.

    reason: "" while the sequence goes on; "stop", with the token id or the text in `matched`, or "length" with its last tokens.
    cached: once, with the first tokens of the task: how many tokens of its prompt the engine had in its prefix cache.
    prompt: with it, for a prompt with media: how many tokens the prompt has in the engine.
    prompt_logprobs: with them, if asked for: as many as asked for; the first one is NaN.
    top_ids, top_logprobs: for each token as many as asked for, the most probable first.
    prompt_top_ids, prompt_top_logprobs: the same of the tokens in `prompt_logprobs`; -1 and NaN for the first one.
    hidden_states: float32 [tokens, size], if asked for.
    routed_experts: int16 [prompt + output - 1, layers, k], with the end of a sequence, if asked for.
    """

    sequence: int
    tokens: Sequence[int]
    logprobs: Sequence[float] = ()
    reason: Literal["", "stop", "length"] = ""
    matched: int | str | None = None
    cached: int | None = None
    prompt_logprobs: Sequence[float] = ()
    top_ids: Sequence[Sequence[int]] = ()
    top_logprobs: Sequence[Sequence[float]] = ()
    prompt_top_ids: Sequence[Sequence[int]] = ()
    prompt_top_logprobs: Sequence[Sequence[float]] = ()
    prompt: int | None = None
    hidden_states: Floats | None = None
    routed_experts: npt.NDArray[np.int16] | None = None


#: What a pause does with running sequences. in_place: they keep their KV. retract: the engine takes them back into its own
#: queue, and their KV is freed and computed again when they go on.
PauseMode = Literal["in_place", "retract"]
#: Called by `generate` with new tokens, at most once for each sequence and step of the engine.
Emit = Callable[[NewTokens], None]
#: The frames that answer a part, by name: float32 or, of token ids, int32, with a row for each of its rows. The operation says
#: which they are.
Outputs = dict[str, Floats | Ids]


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The outcome of a batch: one entry for each part, in order; `forwards` of its rows as measured inside the engine;
    `cached`: tokens of the rows that the engine had computed before."""

    parts: tuple[Outputs | EngineError, ...]
    forwards: int
    version: int
    cached: int = 0


#: Called by `start` with (stage, one line of detail); stages are those of `protocol.messages.Stage`.
Report = Callable[[str, str], None]


class EngineProfiler(Protocol):
    """Records what an engine computes while it serves, for its developers."""

    async def start(self, folder: str, steps: int) -> None:
        """Begin to record for files in `folder`: so many forwards, or with 0 until `stop`. Nothing is recorded yet. Raises
        EngineError: nothing is then, either; EngineDied."""
        ...

    async def stop(self) -> None:
        """End it, or nothing where its forwards are over: the files are whole. Raises EngineError, EngineDied."""
        ...


class Engine(Protocol):
    """One model on one device set, in this process."""

    async def start(self, report: Report, halvings: int = 0) -> Capabilities:
        """Load the model, warm it up and say what it can do, with budgets that are halved so many times. Raises EngineDied with
        the reason when it cannot."""
        ...

    @property
    def weights(self) -> EngineWeights:
        """Its weights. Raises EngineError before it is started."""
        ...

    @property
    def profiler(self) -> EngineProfiler:
        """Its profiler. Raises EngineError before it is started."""
        ...

    async def tokenize(self, task: TextTask) -> TextIds:
        """Token ids of each pair of texts, with the special tokens that the model's tokenizer adds: those of the concatenation;
        for a cross-encoder, unless `raw`, those of the pair. Raises WireError `bad_request`, or EngineError."""
        ...

    async def decode(self, rows: list[list[int]], *, skip_special_tokens: bool, long: bool = False) -> list[str]:
        """The text of each row of token ids, which are in the vocabulary. `long`: it may take seconds, and others must not wait
        for it. Raises EngineError."""
        ...

    async def score(self, batch: RowBatch) -> BatchOutcome:
        """Run one batch. Raises EngineError when the whole batch is refused, EngineDied when the engine is lost."""
        ...

    async def generate(self, task: GenerationTask, emit: Emit) -> None:
        """Continue a prompt until each of its sequences has ended; tokens go to `emit` as they come.

        When this call is cancelled, the engine drops the task within one step, and the call ends once it has. Raises
        EngineError when the task is refused or failed, EngineDied when the engine is lost.
        """
        ...

    def check_pause(self, mode: PauseMode) -> None:
        """Raise EngineError, with the reason in one line, where this engine cannot be paused so."""
        ...

    async def pause(self, mode: PauseMode, *, confirmed: bool = True) -> None:
        """Stop between two steps. Once this returns, all tokens that were computed have gone to `emit`, and nothing is computed
        until `resume`, across any number of `load_weights`.

        `confirmed=False`: it may return sooner. What the engine is asked next begins when it has stopped, and is answered
        after all tokens that were computed have gone to `emit`: a load, for which the engine stands still, waits for no answer
        before it. Nor need it wait for `resume`: from the load on the engine may compute, and what it computes goes to `emit`
        after `resume`.

        Prompts that are given meanwhile wait. A `generate` that is cancelled meanwhile may end only with the first step after
        `resume`; where its sequences wait, at once. A paused engine may be paused again: `retract` after `in_place` frees the
        KV. Raises EngineError as `check_pause`, and nothing has changed; EngineDied.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`; nothing where the engine is not paused."""
        ...

    def report_prefixes(self, report: PrefixReport) -> None:
        """Tell `report` from now on which blocks of prompts are in the engine's prefix cache, if it knows. Called before
        `start`."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in the folder `path`, which was checked, under `name`, which it has none of, while it serves.
        Raises CheckpointError: it needs more room than this engine has; EngineError. Nothing has changed then."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no task uses. Raises EngineError."""
        ...

    async def flush(self) -> None:
        """Forget all prefixes that were computed before. Called while no batch is inside. Raises EngineError."""
        ...

    async def sleep(self, tags: list[MemoryTag]) -> bool:
        """Release these parts of its memory, none of which is released. Called while no batch is inside; none comes before all
        is taken back. Returns whether its weights are lost by that. Raises EngineError: nothing is released; EngineDied."""
        ...

    async def wake(self, tags: list[MemoryTag]) -> None:
        """Take back these parts of its memory, which are all released. Raises EngineDied."""
        ...

    async def died(self) -> str:
        """Wait until the engine is lost; return the reason."""
        ...

    async def close(self) -> None:
        """Stop the engine and every process that it started. Never hangs for longer than 20 s. Idempotent."""
        ...
