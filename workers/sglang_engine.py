"""The real engine: `sglang.Engine` in this process. The only file that imports SGLang.

One engine in a process, on the main thread's loop: stopping it kills every process that this one started in the meantime.
"""

import asyncio
import contextlib
import importlib
import math
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginepool.protocol.messages import Capabilities
from enginepool.protocol.updates import Finding
from enginepool.workers import cpu_bridge
from enginepool.workers.engine import (
    BatchScores,
    EngineDied,
    EngineError,
    EngineUnusable,
    ModelTensors,
    NewWeights,
    PartScores,
    Report,
    ScoreBatch,
    ScorePart,
    Scores,
    TakeTimes,
)
from enginepool.workers.packed import MAX_ITEM, join
from enginepool.workers.sglang_cached import CachedQueries
from enginepool.workers.sglang_checks import checked_rows, refuse_oversize
from enginepool.workers.sglang_end import EngineEnd
from enginepool.workers.sglang_forwards import Entries
from enginepool.workers.sglang_host import EngineHost
from enginepool.workers.sglang_packed import (
    DELIMITER,
    packed_head_scores,
    packed_heads,
    packed_label_scores,
    packed_labels,
    wrong_for_packing,
)
from enginepool.workers.sglang_process import BRIDGE_VARIABLE, run_detokenizer, run_scheduler
from enginepool.workers.sglang_readout import forward_count, head_scores, hidden_rows, label_scores, refuse_aborted
from enginepool.workers.sglang_requests import Parts, head_request, label_request
from enginepool.workers.sglang_settings import Running, SettingsError, Wanted, budgets, engine_kwargs
from enginepool.workers.sglang_updates import EngineWeights

#: Architectures without a next token whose head scores; the others are embedding models.
_SCORING_HEADS = ("Classification", "Reward")
_WARM_ROWS = 2
_WORDS = 1 << 15
_WARM_LENGTH = 8
#: Seconds of a forward of several requests on a GPU. A request of high priority waits for the one that runs and for one more.
FORWARD_S = 0.025
_PACE_LENGTH = 512
_PACE_RUNS = 3


class SglangEngine:
    """One SGLang engine behind the worker's engine interface.

    Args:
        model: a folder with a checkpoint, or a name on the model hub.
        options: further settings of `sglang.ServerArgs`; those with which a batch could be cut are refused at start.
        device: `auto` takes CUDA where there is some, else the CPU.
        dtype: `auto` is the checkpoint's own on a GPU and float32 on a CPU.
        max_batch_tokens, max_batch_rows: bounds of one batch; without them they follow from the engine's settings.
        forwards_in_flight: batches of full size that may be at this worker at once.
        packed: join rows of one query into sequences, by SGLang's multi-item scoring, and take nothing else.
        cached_query_tokens: compute a query of so many tokens or more, which rows share, once and ahead of them; none: never.
        nccl_port: the one TCP port that SGLang opens; left out, it looks for a free one.
    """

    def __init__(
        self,
        model: str,
        *,
        options: Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        max_batch_tokens: int | None = None,
        max_batch_rows: int | None = None,
        forwards_in_flight: int = 2,
        packed: bool = False,
        cached_query_tokens: int | None = None,
        nccl_port: int | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._wishes: dict[str, Any] = {
            "dtype": dtype,
            "options": dict(options or {}),
            "max_batch_tokens": max_batch_tokens,
            "max_batch_rows": max_batch_rows,
            "forwards_in_flight": forwards_in_flight,
            "packed": packed,
            "cached_query_tokens": cached_query_tokens,
            "nccl_port": nccl_port,
        }
        self._wanted: Wanted | None = None
        self._host: EngineHost | None = None
        self._tm: Any = None
        self._requests: Any = None
        self._entries: Entries | None = None
        self._cached: CachedQueries | None = None
        self._capabilities: Capabilities | None = None
        #: +1 when the engine runs larger priorities first, as the pool does.
        self._priority_sign = 1
        self._end = EngineEnd()
        self._weights: EngineWeights | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        #: One thread: the tokenizer's state may not be borrowed twice.
        self._tokenising = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")

    # --- start -----------------------------------------------------------------------------------------------------

    async def start(self, report: Report) -> Capabilities:
        """Load the model, warm it up and say what it can do. Raises EngineDied with the reason when it cannot.

        EngineUnusable when no later start with the same settings could either.
        """
        loop = asyncio.get_running_loop()
        try:
            # A scheduler that fails tells its parent by SIGQUIT, whose default action is to die without a word.
            loop.add_signal_handler(signal.SIGQUIT, self._on_sigquit)
        except (ValueError, RuntimeError) as error:
            raise EngineDied("the engine must be started on the main thread: it learns of its end by a signal") from error
        report("loading", self._model)

        def lost(reason: str) -> None:
            loop.call_soon_threadsafe(self._end.lose, reason)

        self._host = EngineHost(self._build, lost)
        try:
            engine = await self._end.unless_over(asyncio.wrap_future(self._host.start()))
            self._tm = engine.tokenizer_manager
            self._entries = Entries(self._tm, self._requests.unwrap_from_pickle)
            self._receive()
            capabilities = await self._end.unless_over(self._measure(engine))
            self._capabilities = capabilities
            report("compiling", "the first forward")
            self._capabilities = capabilities = await self._warm_up(capabilities)
            ranks = self._wishes["options"].get("tp_size") or 1
            self._weights = EngineWeights(self._tm, self._requests, ranks, self._end.unless_over)
            await self._weights.describe()
            if self._weights.plain:
                report("compiling", f"weight updates of this model are loaded plainly: {self._weights.plain}")
            await self._tm.freeze_gc()  # no collection in the engine's processes walks through what start-up left
        except EngineDied:
            await self.close()
            raise
        except Exception as error:
            # What a process of the engine logged explains more than that the process is gone; our own refusals need no more.
            ours = isinstance(error, SettingsError | EngineError)
            reason = _one_line(error) if ours else self._host.last_error() or _one_line(error)
            await self.close()
            kind = EngineUnusable if isinstance(error, SettingsError) else EngineDied
            raise kind(f"{self._model}: {reason}") from error
        return capabilities

    def _build(self) -> Any:
        """On the host's thread: import SGLang and start its processes."""
        if self._model.startswith(("/", ".", "~")) and not Path(self._model).expanduser().is_dir():
            raise SettingsError("there is no such folder")
        try:
            device = self._resolve_device()
            if device == "cpu":
                os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
                # Threads that spin while they wait for work hold the cores that other processes of the engine need.
                os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
                os.environ[BRIDGE_VARIABLE] = "1"
                cpu_bridge.install()
            module: Any = importlib.import_module("sglang.srt.entrypoints.engine")
            self._requests = importlib.import_module("sglang.srt.managers.io_struct")
        except ImportError as error:
            raise SettingsError(f"SGLang cannot be imported here ({error}); install enginepool[sglang]") from error
        self._wanted = Wanted(model=os.path.expanduser(self._model), device=device, **self._wishes)
        config = Path(self._wanted.model) / "config.json"
        if self._wanted.packed and config.is_file():
            # Known before minutes of loading; a model from elsewhere is asked once it is there.
            _refuse_wrong_packing(msgspec.json.decode(config.read_bytes()))
        kwargs = engine_kwargs(self._wanted, _setting_names(module.ServerArgs))
        classes = [
            getattr(importlib.import_module(f"sglang.srt.{name}"), class_)
            for name, class_ in (
                ("managers.scheduler", "Scheduler"),
                ("observability.req_time_stats", "SchedulerReqTimeStats"),
                ("layers.logprob_processor", "OutputLogprobProcessor"),
                ("layers.logits_processor", "LogitsProcessor"),
                ("model_loader.loader", "DefaultModelLoader"),
            )
        ]
        flashinfer = device == "cuda" and kwargs.get("attention_backend") == "flashinfer"
        attention = "sglang.srt.layers.attention.flashinfer_backend" if flashinfer else ""
        entries = {
            name: staticmethod(partial(entry, getattr(module.Engine, name), *extra))
            for name, entry, extra in (
                ("run_scheduler_process_func", run_scheduler, (*classes, attention)),
                ("run_detokenizer_process_func", run_detokenizer, ()),
            )
        }
        if self._host is None or self._host.stopping:
            raise EngineDied("closed before it was started")
        return type("PoolEngine", (module.Engine,), entries)(**kwargs)

    def _resolve_device(self) -> str:
        torch: Any = importlib.import_module("torch")
        if self._device != "auto":
            return self._device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _receive(self) -> None:
        """Read SGLang's answers on this loop.

        In place of SGLang's own way to start this, which takes SIGTERM and SIGQUIT away from the worker and, should
        reading fail, kills the process before it can say why.
        """
        tm = self._tm

        async def receive() -> None:
            try:
                await tm.handle_loop()
            except Exception as error:
                self._end.lose(f"the engine's answers cannot be read: {_one_line(error)}")

        tm.auto_create_handle_loop = lambda: None
        tm.event_loop = asyncio.get_running_loop()
        self._receiver = asyncio.create_task(receive())

    async def _measure(self, engine: Any) -> Capabilities:
        """Capabilities from what the engine really runs with; `labels` and `hidden` are measured by the warm-up."""
        tm, wanted = self._tm, self._wanted
        assert wanted is not None
        state: dict[str, Any] = (await tm.get_internal_state())[0]
        info: dict[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
        running = Running(
            settings=state,
            kv_tokens=info["max_total_num_tokens"],
            max_running=state["effective_max_running_requests_per_dp"],
            # One less than each bound: both ends of SGLang refuse a row that reaches theirs.
            longest=min(tm.max_req_input_len, tm.context_len - tm.num_reserved_tokens) - 1,
        )
        if wanted.packed:
            _refuse_wrong_packing(tm.model_config.hf_config.to_dict())
        bounds = budgets(wanted, running)
        if bounds.cached_query:
            # Half of the engine's memory: what batches leave behind is kept there too, and what they need is taken from it.
            self._cached = CachedQueries(bounds.cached_query, running.kv_tokens // 2, bounds.page)
        if state.get("schedule_low_priority_values_first"):
            self._priority_sign = -1
        architectures: list[str] = getattr(tm.model_config.hf_config, "architectures", None) or ["?"]
        if not tm.is_generation and not any(head in architectures[0] for head in _SCORING_HEADS):
            raise SettingsError(f"{architectures[0]} makes embeddings: it has no head that scores")
        version = importlib.import_module("sglang.version").__version__
        return Capabilities(
            kind="causal" if tm.is_generation else "classifier",
            vocab=tm.model_config.vocab_size,
            context=bounds.context,
            batch_tokens=bounds.batch_tokens,
            batch_rows=bounds.batch_rows,
            inflight_tokens=bounds.inflight_tokens,
            inflight_rows=bounds.inflight_rows,
            page=bounds.page,
            model=self._model,
            engine=f"sglang {version}",
            device=wanted.device,
            text=tm.tokenizer is not None,
            max_item=min(MAX_ITEM, bounds.context) if wanted.packed else 0,
            cached_query=bounds.cached_query,
            cached_tokens=bounds.cached_tokens,
        )

    async def _warm_up(self, capabilities: Capabilities) -> Capabilities:
        """Run real batches: kernels are compiled, one forward each is checked, the head's shape is seen."""
        self._capabilities = capabilities
        labels, hidden = 0, 0
        length = min(_WARM_LENGTH, capabilities.context, capabilities.batch_tokens)
        rows = min(_WARM_ROWS, capabilities.batch_rows, max(1, capabilities.batch_tokens // max(length, capabilities.page)))
        parts = _made_up(capabilities, rows, length)
        [scored, *_], forwards, _ = await self._end.unless_over(self._compute(parts, 0, hidden=False))
        if capabilities.kind == "classifier":
            labels = scored.scores.shape[1]
            with contextlib.suppress(EngineError):  # some heads give no hidden states; then `hidden` stays 0
                [scored, *_], _, _ = await self._end.unless_over(self._compute(parts, 0, hidden=True))
                hidden = 0 if scored.hidden is None else scored.hidden.shape[1]
        if capabilities.device != "cpu":
            # The most that may ever run as one forward: kernels are chosen by shape, and memory is taken now or never.
            rows = min(capabilities.inflight_rows, capabilities.inflight_tokens // capabilities.context)
            parts = _made_up(capabilities, max(1, rows), capabilities.context)
            _, forwards, _ = await self._end.unless_over(self._compute(parts, 0, hidden=False))
        if capabilities.packed and forwards == 1:
            # The same for the rows: at the end of each the whole vocabulary is computed.
            _, forwards, _ = await self._end.unless_over(self._compute(_short_rows(capabilities), 0, hidden=False))
        if self._cached is not None and forwards == 1:
            parts = [(part := _long_query(capabilities), part.prompts())]
            _, forwards, _ = await self._end.unless_over(self._compute(parts, 0, hidden=False))
            if self._cached.missed or not self._cached.computed:
                raise SettingsError("the engine finds no query again that it has computed; unset cached_query_tokens")
        if forwards != 1:
            raise SettingsError(f"the engine took {forwards} forwards for one batch inside its budget")
        pace = await self._measure_pace(capabilities) if capabilities.device != "cpu" else 0
        return msgspec.structs.replace(capabilities, labels=labels, hidden=hidden, pace=pace)

    async def _measure_pace(self, capabilities: Capabilities) -> int:
        """Tokens of a forward that takes FORWARD_S where others follow it, from the quickest of some pairs of full batches."""
        length = min(_PACE_LENGTH, capabilities.context)
        rows = max(1, min(capabilities.batch_rows, capabilities.batch_tokens // length))
        quickest = math.inf
        for run in range(_PACE_RUNS):
            # Rows that were never seen: what an engine keeps, it does not compute again.
            seen = 1 + 2 * run
            pair = [self._compute(_made_up(capabilities, rows, length, seed), 0, hidden=False) for seed in (seen, seen + 1)]
            began = time.perf_counter()
            await self._end.unless_over(asyncio.gather(*pair))
            quickest = min(quickest, time.perf_counter() - began)
        return max(1, min(capabilities.batch_tokens, int(2 * rows * length * FORWARD_S / quickest)))

    # --- work ------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that are loaded now; 0: those of the checkpoint that it started with."""
        return 0 if self._weights is None else self._weights.version

    @property
    def digest(self) -> str:
        """The digest of the weights that are loaded now; "" for those that it started with."""
        return "" if self._weights is None else self._weights.digest

    @property
    def ranks(self) -> int:
        """Schedulers that hold weights: one for each GPU of the engine."""
        return 1 if self._weights is None else self._weights.ranks

    def model_tensors(self) -> ModelTensors:
        """What the engine's own load took. Raises EngineError when this engine takes no updates."""
        return self._updates().model_tensors()

    async def join(self, name: str, address: str, world: int, rank: int, backend: str) -> None:
        """Join a process group while the engine serves. Raises EngineError."""
        await self._updates().join(name, address, world, rank, backend)

    async def take(self, weights: NewWeights, version: int, digest: str) -> TakeTimes:
        """Run on these weights from now on; the engine is empty. Raises EngineError: the old ones stay; EngineDied."""
        try:
            return await self._updates().take(weights, version, digest)
        finally:
            if self._cached is not None:
                self._cached.clear()

    async def inspect(self, what: str) -> tuple[str, list[Finding]]:
        """(digest, findings) of what is in the schedulers. Raises EngineError."""
        return await self._updates().inspect(what)

    async def tensor(self, name: str) -> tuple[Scores, str]:
        """One weight by its checkpoint name. Raises EngineError."""
        return await self._updates().tensor(name)

    def _updates(self) -> EngineWeights:
        self._loaded()
        assert self._weights is not None
        return self._weights

    async def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, with the special tokens that the model's tokenizer adds. Raises EngineError."""
        tokenizer = self._loaded().tokenizer
        if tokenizer is None:
            raise EngineError("this engine was started without a tokenizer")

        def encode() -> list[list[int]]:
            return [list(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]] if texts else []

        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenising, encode)
        except (ValueError, TypeError) as error:
            raise EngineError(f"the tokenizer refused the text: {_one_line(error)}") from error

    async def score(self, batch: ScoreBatch) -> BatchScores:
        """Run one batch. A part that is wrong gets its own error; the others run.

        Raises EngineError when the whole batch is refused, EngineDied when the engine is lost.
        """
        self._loaded()
        capabilities = self._capabilities
        assert capabilities is not None
        if batch.hidden and not capabilities.hidden:
            raise EngineError("this model gives no pooled hidden states")
        outcome: dict[int, PartScores | EngineError] = {}
        runnable: Parts = []
        places: list[int] = []
        for place, part in enumerate(batch.parts):
            try:
                runnable.append((part, checked_rows(part, capabilities)))
                places.append(place)
            except EngineError as error:
                outcome[place] = error
        forwards = cached = 0
        if runnable:
            refuse_oversize(runnable, capabilities)
            scored, forwards, cached = await self._end.unless_over(self._compute(runnable, batch.priority, batch.hidden))
            outcome.update(zip(places, scored, strict=True))
        return BatchScores(tuple(outcome[i] for i in range(len(batch.parts))), forwards, self.version, cached)

    async def _compute(self, parts: Parts, priority: int, hidden: bool) -> tuple[list[PartScores], int, int]:
        """Scores of each part, how many forwards their rows took, and tokens of them that were cached. Raises EngineError."""
        if self._capabilities is not None and self._capabilities.packed:
            return await self._compute_packed([part for part, _ in parts], self._capabilities, priority, hidden)
        causal = self._tm.is_generation
        types = self._requests
        wanted = [part for part, _ in parts]
        if self._cached is not None:
            await self._cached.ensure(wanted, priority, partial(self._send_ahead, priority * self._priority_sign))
        priority *= self._priority_sign
        answers, forwards, cached = await self._ask(
            label_request(types, parts, priority) if causal else head_request(types, parts, priority, hidden)
        )
        if self._cached is not None:
            self._cached.look(wanted, cached)
        scored: list[PartScores] = []
        start = 0
        for part, rows in parts:
            mine = answers[start : start + len(rows)]
            start += len(rows)
            if causal:
                scored.append(PartScores(label_scores(mine, part.labels, part.softmax)))
                continue
            scores = head_scores([answer["embedding"] for answer in mine], part.softmax)
            scored.append(PartScores(scores, _pooled(mine) if hidden else None))
        return scored, forwards, sum(cached)

    async def _send_ahead(self, priority: int, queries: list[list[int]]) -> None:
        """Compute queries whose rows follow: one more row each, whose score nobody reads. Raises EngineError."""
        causal = self._tm.is_generation
        part = ScorePart(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.uint32), labels=(0,) if causal else ())
        parts: Parts = [(part, queries)]
        types = self._requests
        await self._ask(label_request(types, parts, priority) if causal else head_request(types, parts, priority, False))

    async def _compute_packed(
        self, parts: list[ScorePart], capabilities: Capabilities, priority: int, hidden: bool
    ) -> tuple[list[PartScores], int, int]:
        """The same by sequences: each is one request to SGLang, and all of them are one forward."""
        joined = join(parts, capabilities.context, min(DELIMITER, capabilities.vocab - 1))
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
        assert self._entries is not None
        rows: list[str] = list(request.rid)
        self._entries.expect(rows)
        try:
            # To its end: an abandoned generator holds a lock that every weight update waits for.
            async with contextlib.aclosing(self._tm.generate_request(request, None)) as results:
                answers: list[dict[str, Any]] = [answer async for answer in results][-1]
        except Exception as error:
            raise EngineError(f"the engine refused the batch: {_one_line(error)}") from error
        finally:
            entered = self._entries.take(rows)
        refuse_aborted(answers)
        return answers, forward_count([entry.time for entry in entered]), [entry.cached for entry in entered]

    # --- end -------------------------------------------------------------------------------------------------------

    async def died(self) -> str:
        """Wait until the engine is lost; return the reason."""
        return await self._end.lost()

    async def close(self) -> None:
        """Stop the engine and every process that it started. Never hangs for longer than 20 s. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._end.close()
        if self._host is not None:
            await asyncio.to_thread(self._host.stop)
        if self._weights is not None:
            self._weights.close()
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait([self._receiver])
        self._tokenising.shutdown(wait=False)
        with contextlib.suppress(ValueError, RuntimeError):  # not on the main thread: then there is none to remove
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)  # a scheduler that was dying may still send one

    def _on_sigquit(self) -> None:
        error = self._host.last_error() if self._host else ""
        self._end.lose(error or "one of the engine's processes failed and said so by SIGQUIT")

    def _loaded(self) -> Any:
        self._end.check()
        if self._capabilities is None:
            raise EngineError("the engine is not started")
        return self._tm


def _made_up(capabilities: Capabilities, rows: int, length: int, seed: int = 0) -> Parts:
    """`rows` different rows of `length` tokens in all; packed, as many sequences of that length, one after the other."""
    labels = (0,) if capabilities.kind == "causal" else ()
    ids = np.arange(rows * length, dtype=np.int32) % capabilities.vocab
    if not capabilities.packed:
        # Low ids are words everywhere; among the high ones are places for images that there are none of.
        words = min(capabilities.vocab, _WORDS)
        ids = np.random.default_rng(seed).integers(0, words, rows * length, dtype=np.int32)
        part = ScorePart(np.empty(0, np.int32), ids, np.full(rows, length, np.uint32), labels=labels)
        return [(part, part.prompts())]
    # Queries that differ, so that none joins another; a context that holds no row at all has been refused by now.
    item = max(1, length - 3)
    return [(ScorePart(ids[i : i + 1], ids[:item], np.full(1, item, np.uint32), labels=labels), []) for i in range(rows)]


def _long_query(capabilities: Capabilities) -> ScorePart:
    """Two rows of the shortest query that is computed ahead of them."""
    ids = np.arange(capabilities.cached_query, dtype=np.int32)[::-1] % capabilities.vocab
    labels = (0,) if capabilities.kind == "causal" else ()
    return ScorePart(ids, np.array([0, 1], np.int32), np.ones(2, np.uint32), labels=labels)


def _short_rows(capabilities: Capabilities) -> Parts:
    """As many packed rows of one token as may be in flight."""
    rows = max(1, min(capabilities.inflight_rows, capabilities.inflight_tokens // (4 + capabilities.page)))
    labels = (0,) if capabilities.kind == "causal" else ()
    return [(ScorePart(np.zeros(1, np.int32), np.zeros(rows, np.int32), np.ones(rows, np.uint32), labels=labels), [])]


def _pooled(answers: list[dict[str, Any]]) -> Scores:
    if any("pooled_hidden_state" not in answer for answer in answers):
        raise EngineError("the engine returned no pooled hidden states")
    return hidden_rows([answer["pooled_hidden_state"] for answer in answers])


def _refuse_wrong_packing(config: Mapping[str, Any]) -> None:
    if why := wrong_for_packing(config):
        raise SettingsError(f"this model cannot be scored packed: {why}; let packed_workers of the group be 0")


def _setting_names(server_args: Any) -> set[str]:
    """Names that this version's ServerArgs takes: a msgspec struct in newer versions, a dataclass in older ones."""
    names = getattr(server_args, "__struct_fields__", None) or getattr(server_args, "__dataclass_fields__", ())
    return {name for name in names if not name.startswith("_")}


def _one_line(error: BaseException) -> str:
    """What went wrong, for the operator: the last line of the message says it in tracebacks, the first one elsewhere."""
    text = str(getattr(error, "detail", None) or error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    return line if isinstance(error, ValueError | EngineError) else f"{type(error).__name__}: {line}"
