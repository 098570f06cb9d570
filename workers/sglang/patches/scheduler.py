"""Changes to SGLang's scheduler for scoring, in the scheduler's own process. No SGLang here: its classes are arguments.

A score is a prefill and nothing else. SGLang prepares and launches the next forward while one runs, which is what decoding
needs; here it would have an answer wait for the launch of its successor.
"""

import copy
import importlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: An answer that is at most this far away is awaited before the next forward is launched, which takes ten times that.
NEARLY_DONE_S = 0.001


#: the scheduler of this process, once it is made
_schedulers: list[Any] = []


def note_scheduler(scheduler: Any) -> None:
    """Keep the scheduler that this process makes, for `flush_caches`. `scheduler` is SGLang's class."""
    init = scheduler.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _schedulers[:] = [self]

    scheduler.__init__ = initialize


def noted_scheduler() -> Any:
    """The scheduler of this process."""
    [scheduler] = _schedulers
    return scheduler


def has_graphs() -> bool:
    """Whether forwards of this process run as CUDA graphs, which keep the addresses of the weights of their capture."""
    scheduler = noted_scheduler()
    runner = scheduler.tp_worker.model_runner
    # Where a phase has no graphs, its runner is none, or SGLang's eager one.
    found = (getattr(runner, f"{phase}_cuda_graph_runner", None) for phase in ("prefill", "decode"))
    return any(graph is not None and type(graph).__name__ != "EagerRunner" for graph in found)


def flush_caches() -> bool:
    """Have SGLang empty its caches; False: it has work in hand, and nothing was done. Called on the scheduler's own thread.

    Memory that torch keeps for the next forward stays: to give it back to the device and to get it again takes milliseconds in
    which a weight update holds the engine.
    """
    scheduler = noted_scheduler()
    flush = scheduler.flush_cache
    return bool(flush(empty_cache=False) if "empty_cache" in inspect.signature(flush).parameters else flush())


def keep_experts_of_each_forward(capturer: Any) -> None:
    """Have the routed experts of a forward copied on the device. `capturer` is SGLang's class that notes them.

    While forwards overlap, they are copied to the host during the next forward. Older versions copy from the buffer into which
    that one writes its own.
    """
    end = capturer.on_forward_end

    def on_forward_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = end(self, *args, **kwargs)
        if output is not None:
            output.topk, output.out_cache_loc = output.topk.clone(), output.out_cache_loc.clone()
        return output

    capturer.on_forward_end = on_forward_end


def keep_experts_unpinned(cache: Any) -> None:
    """On a CPU, have routed experts kept in memory that is not pinned for CUDA. `cache` is SGLang's class that keeps them."""

    def initialize(self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, *args: Any, **kwargs: Any) -> None:
        torch: Any = importlib.import_module("torch")
        self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
        self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name

    cache.__init__ = initialize


def open_session_for_tickets(updater: Any, loader: str) -> None:
    """Have calls of our own loader accepted outside a weight-update session. `updater` is SGLang's class that receives the
    requests of weight updates; `loader` is the name of our loader.

    Since 0.5.21 SGLang refuses `update_weights_from_tensor` outside `begin_weight_update` and `end_weight_update`. Our tickets
    need neither: most of them only ask a question, while the engine serves. `begin` and `end` restore and repeat what
    quantization made of weights, and a model with such weights takes no updates here (`weights.ModelWeights._refused`). They
    also take SGLang's writer lock, for which a question would wait until the engine is empty. So each ticket gets a session of
    its own, inside the one call, and the model is neither restored nor processed.
    """
    if not hasattr(updater, "begin_weight_update"):
        return  # 0.5.17 to 0.5.20 have no sessions
    module: Any = sys.modules[updater.__module__]
    update = updater.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, request: Any) -> Any:
        if request.load_format != loader:
            return update(self, request)
        session, self._session = self._session, module._WeightUpdateSession(selector="target")
        try:
            return update(self, request)
        finally:
            self._session = session

    updater.update_weights_from_tensor = update_weights_from_tensor


def pass_tickets_of_refused_updates(model_updater: Any, ours: str) -> None:
    """Have a ticket reach our loader also where SGLang takes no updates of the model, with SGLang's reason. `model_updater` is
    SGLang's class that calls loaders; `ours` is the name of our loader.

    SGLang refuses updates of a model that keeps values computed from its weights. Most tickets are questions: without an answer
    to `describe` the worker would not know whether the model was loaded completely. Our loader refuses the tickets that change
    weights.
    """
    update = model_updater.update_weights_from_tensor
    module, _, name = ours.rpartition(".")

    def update_weights_from_tensor(self: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        success, message = update(self, named_tensors, load_format=load_format)
        if success or load_format != ours:
            return success, message
        load: Any = getattr(importlib.import_module(module), name)  # it needs torch
        load(self.get_model(), named_tensors, refused=message)
        return True, "Success"

    model_updater.update_weights_from_tensor = update_weights_from_tensor


def _no_writer(*_: Any, **__: Any) -> None:
    pass


def report_no_load(scheduler: Any, replicas: int) -> None:
    """Have the scheduler keep for itself how much it has to do. `scheduler` is SGLang's class.

    SGLang writes that into shared memory before it answers a forward and again when it becomes idle, for a router between
    replicas of one engine, and composes a line about each forward for a log whose level drops it. No process of a pool reads
    either: batches wait for it. The shared memory is a file in /dev/shm, which outlives the engine.
    """
    init = scheduler.__init__
    if replicas == 1:
        module: Any = sys.modules[scheduler.__module__]
        module.create_load_snapshot_writer = _no_writer

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if not logging.getLogger(scheduler.__module__).isEnabledFor(logging.INFO):
            self.metrics_reporter.is_stats_logging_rank = False

    scheduler.__init__ = initialize


def report_every_forward(stats: Any) -> None:
    """Have the scheduler say of every row when its forward began, as `entered`. `stats` is SGLang's class of a row's times.

    SGLang says it of generate requests alone, and only with metrics on, which cost more than a tenth of a small forward.
    """
    state_of = stats.__getstate__

    def getstate(times: Any) -> dict[str, Any]:
        state: dict[str, Any] = state_of(times) if times.enable_metrics else {}
        return state | {"entered": times.forward_entry_time}

    stats.__getstate__ = getstate


def gather_labels_without_waiting(processor: Any, packed_processor: Any) -> None:
    """Have label log-probabilities picked from a forward's output without waiting for that forward, or for the next one.

    SGLang makes the indices on the GPU straight from lists, which holds its scheduler until the forward is over: answers of
    the forward before wait for it, and the GPU then waits for the next batch to be prepared. Newer versions do not wait, and
    copy the indices and the result of each row alone. Of packed sequences SGLang fetches the result when it answers, behind
    the forward that it has launched meanwhile. The arguments are classes of the modules in which it does the one and the other.
    """
    torch: Any = importlib.import_module("torch")
    module: Any = sys.modules[processor.__module__]
    packed_module: Any = sys.modules[packed_processor.__module__]

    def pick(logprobs: Any, rows: list[int], tokens: list[int]) -> Any:
        # From pinned memory the copy is one more piece of work behind the forward.
        index = torch.tensor([rows, tokens], dtype=torch.long, pin_memory=logprobs.is_cuda)
        index = index.to(logprobs.device, non_blocking=True)
        return logprobs[index[0], index[1]]

    def gather(logprobs: Any, wanted: list[list[int] | None]) -> tuple[list[Any], list[list[int]]]:
        lengths = [len(ids or ()) for ids in wanted]
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        # Fetched now, and in one piece; the scheduler reads it when the forward is known to be over.
        found = pick(logprobs, rows, [token for ids in wanted for token in ids or ()]).to("cpu", non_blocking=True)
        return list(found.split(lengths)), [list(ids or ()) for ids in wanted]

    one_by_one = module.get_token_ids_logprobs

    def gather_unless_waiting(logprobs: Any, wanted: list[list[int] | None], no_copy_to_cpu: bool = False) -> Any:
        return gather(logprobs, wanted) if no_copy_to_cpu else one_by_one(logprobs, wanted)

    module.get_token_ids_logprobs_batch_optimized = gather
    module.get_token_ids_logprobs = gather_unless_waiting
    packed_module.get_token_ids_logprobs_raw = gather_of_sequences(pick, packed_module.get_token_ids_logprobs_raw)


def gather_logits_by_nccl(processor: Any) -> None:
    """Have the ranks of an engine exchange their parts of the vocabulary by NCCL alone. `processor` is SGLang's class of a
    logits processor.

    SGLang first tries memory with an NVLink multicast address, at the first forward and on every host. Where there is no
    multicast, to make such memory has ended schedulers (by SIGFPE: sglang #40485); where several engines start at a time, it
    has stopped them without a limit (#36110). A score needs one row of logits for each request, for which NCCL will do.
    """
    memory = getattr(sys.modules[processor.__module__], "triton_symm_mem_ag", None)
    gatherer = getattr(memory, "MultimemAllGatherer", None)
    if gatherer is None:
        return  # a version without it
    init = gatherer.__init__

    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **(kwargs | {"enabled": False}))

    gatherer.__init__ = initialize


def gather_of_sequences(pick: Callable[[Any, list[int], list[int]], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement for `get_token_ids_logprobs_raw` where it serves packed sequences."""

    def gather(
        logprobs: Any,
        wanted: Sequence[list[int] | None],
        stage: Any,
        extend_logprob_pruned_lens_cpu: Sequence[int] | None = None,
        no_copy_to_cpu: bool = False,
    ) -> tuple[list[Any], list[list[Any]]]:
        counts = extend_logprob_pruned_lens_cpu
        if counts is None or not no_copy_to_cpu or not all(wanted) or min(counts, default=0) < 1:
            return original(logprobs, wanted, stage, counts, no_copy_to_cpu)
        rows: list[int] = []
        tokens: list[int] = []
        sizes: list[int] = []
        start = 0
        for ids, count in zip(wanted, counts, strict=True):
            labels = list(ids or ())
            rows += [row for row in range(start, start + count) for _ in labels]
            tokens += labels * count
            sizes.append(count * len(labels))
            start += count
        # Fetched now, behind this forward; the scheduler reads it when the forward is known to be over.
        found = pick(logprobs, rows, tokens).to("cpu", non_blocking=True)
        parts = found.split(sizes)
        values = [part.view(count, -1) for part, count in zip(parts, counts, strict=True)]
        return values, [[ids] * count for ids, count in zip(wanted, counts, strict=True)]

    return gather


def answer_at_once(ports: Any) -> Any:
    """`ports` with which the scheduler answers the host itself: there is no text to make of a score."""
    ports = copy.copy(ports)
    ports.detokenizer_ipc_name = ports.tokenizer_ipc_name
    return ports


def answer_before_the_next_launch(scheduler: Any) -> None:
    """Have a forward that is over, or nearly, answered before the next one is launched; and have what arrives while one runs
    launched behind it, instead of after its answer. `scheduler` is SGLang's class.

    The launch of a small model's forward takes longer than the forward, so that an answer would come a whole forward late. A
    long forward is another matter: there the GPU would wait for the launch.
    """
    run, overlaps_not = scheduler.event_loop_overlap, scheduler.is_disable_overlap_for_batch

    def answer_first(self: Any, batch: Any, *args: Any, **kwargs: Any) -> bool:
        return overlaps_not(self, batch, *args, **kwargs) or (bool(batch) and scores_only(self) and soon(pending(self)))

    def event_loop(self: Any) -> Any:
        self.request_receiver = Receiver(self, self.request_receiver)
        return run(self)

    scheduler.is_disable_overlap_for_batch = answer_first
    scheduler.event_loop_overlap = event_loop


class Receiver:
    """SGLang's receiver, which also looks for requests while a forward runs and nothing else is to be done."""

    def __init__(self, scheduler: Any, receiver: Any) -> None:
        self._scheduler = scheduler
        self._receiver = receiver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def recv_requests(self, *args: Any, **kwargs: Any) -> Any:
        """What has arrived; nothing only when the forward is over, too."""
        found = self._receiver.recv_requests(*args, **kwargs)
        scheduler = self._scheduler
        if not found and not scheduler.waiting_queue and scores_only(scheduler):
            forward = pending(scheduler)
            while not found and forward is not None and not forward.query():
                found = self._receiver.recv_requests()
        return found


def scores_only(scheduler: Any) -> bool:
    """Whether all that runs are scores, on one device: ranks that share a forward must all decide alike."""
    settings, last, running = scheduler.server_args, scheduler.last_batch, scheduler.running_batch
    if settings.tp_size * settings.pp_size * settings.dp_size != 1 or not last or not last.forward_mode.is_extend():
        return False
    return not scheduler.is_generation or (last.is_prefill_only and (running.is_empty() or running.is_prefill_only))


def pending(scheduler: Any) -> Any:
    """The event at the end of the forward whose answer is due next; None when none is, or it has no such event."""
    return scheduler.result_queue[0][1].copy_done if scheduler.result_queue else None


def soon(forward: Any, clock: Callable[[], float] = time.perf_counter) -> bool:
    """Whether the forward is over now, or will be in a moment; waits that long."""
    if forward is None:
        return False
    end = clock() + NEARLY_DONE_S
    while not (done := forward.query()) and clock() < end:
        pass
    return bool(done)
