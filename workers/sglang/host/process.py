"""How each process of the engine begins: what must be in place before SGLang's own code runs there. No SGLang here.

The functions at the end are what the engine's processes are started with. Unpickling one of them imports this file first, and
only then SGLang's function that it is to call; so what this file does on import comes before SGLang is imported there.
"""

import contextlib
import gc
import importlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from enginepool.workers import cpu_bridge
from enginepool.workers.cpu_bridge import pinned_memory
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate.mixed import room_in
from enginepool.workers.sglang.host.sentence_modules import Pooling
from enginepool.workers.sglang.host.settings import LOADER
from enginepool.workers.sglang.operations.table import OPERATIONS
from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.patches.adapter_layers import refuse_layers_without_room
from enginepool.workers.sglang.patches.attention_output import write_where_graphs_read
from enginepool.workers.sglang.patches.connectors import leave_signals_alone, wait_for_redis_no_longer
from enginepool.workers.sglang.patches.new_weights import note_media_cache, separate_prefixes, tell_that_it_went_on
from enginepool.workers.sglang.patches.not_finite import accept_no_marked_token, mark_logits_that_are_not_finite
from enginepool.workers.sglang.patches.packed_forwards import (
    attend_as_each_forward_says,
    keep_kinds_apart,
    run_packed_as_graphs,
)
from enginepool.workers.sglang.patches.pausing import (
    answer_in_order,
    drop_what_is_prepared_in_a_pause,
    finish_the_step_before_a_pause,
)
from enginepool.workers.sglang.patches.profiles import end_no_engine_for_a_trace
from enginepool.workers.sglang.patches.request_limits import end_slow_searches, forget_grammars
from enginepool.workers.sglang.patches.row_forwards import keep_rows_apart
from enginepool.workers.sglang.patches.row_messages import send_shared_fields_once
from enginepool.workers.sglang.patches.row_results import free_rows_together
from enginepool.workers.sglang.patches.scheduler import (
    answer_at_once,
    answer_before_the_next_launch,
    gather_labels_without_waiting,
    gather_logits_by_nccl,
    keep_experts_of_each_forward,
    keep_experts_unpinned,
    note_scheduler,
    open_session_for_tickets,
    pass_tickets_of_refused_updates,
    report_every_forward,
    report_no_load,
)
from enginepool.workers.sglang.score.cross_encoder import use_all_positions

#: Set for the engine's processes when they need the bridge.
BRIDGE_VARIABLE = "ENGINEPOOL_CPU_BRIDGE"
#: Python looks for garbage when so many objects more were made than freed, by default 700. A batch of rows makes thousands, and
#: none of them is garbage: they are freed with their last reference. To look at them took a twentieth of a scheduler's time.
LIVING_OBJECTS = 10_000
#: Names the folder in which the engine's processes leave their role and their last error.
NOTES_VARIABLE = "ENGINEPOOL_ENGINE_NOTES"

if os.environ.get(BRIDGE_VARIABLE):
    cpu_bridge.install()
if os.environ.get(NOTES_VARIABLE):
    # This is a process of the engine, and imports SGLang next. `_collect_garbage` undoes it.
    gc.disable()


@contextlib.contextmanager
def no_garbage_collection() -> Generator[None]:
    """For the time of an import. SGLang and torch make a million objects and hardly any garbage: collections that look at them
    all take a fifth of the seconds."""
    gc.disable()
    try:
        yield
    finally:
        _collect_garbage()


def _collect_garbage() -> None:
    """From now on, seldom, and not among what was imported. A threshold that the user gives SGLang comes later, and counts."""
    gc.freeze()
    gc.set_threshold(LIVING_OBJECTS)
    gc.enable()


class LogNotes(logging.Handler):
    """Keeps the last error that a process of the engine logged where it can be found when the process is gone.

    The file is named by the process id. Its first line is the role, its second the error.
    """

    def __init__(self, path: Path, role: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path
        self._role = role
        self._write(role)

    def emit(self, record: logging.LogRecord) -> None:
        """Of a traceback, the first line behind its frames is the error itself; CUDA's errors have advice in further ones."""
        lines = [line.rstrip() for line in record.getMessage().splitlines() if line.strip()]
        if lines and self._path.parent.is_dir():
            frames = [i for i, line in enumerate(lines[:-1]) if line[0].isspace()]
            error = lines[frames[-1] + 1 if frames else 0]
            self._write(f"{self._role}\n{error.strip()}")

    def _write(self, note: str) -> None:
        """No error: a disk may be full, and an error that is raised while another is logged would end the engine."""
        with contextlib.suppress(OSError, ValueError):
            self._path.write_text(note + "\n", encoding="utf-8")


def keep_notes(role: str) -> None:
    """Leave this process's role, and from now on its last error."""
    folder = os.environ.get(NOTES_VARIABLE)
    if folder:
        logging.getLogger("sglang").addHandler(LogNotes(Path(folder) / str(os.getpid()), role))


def share_no_progress_bars() -> None:
    """tqdm, which shows how a model loads, shares a lock between processes. It is a file in /dev/shm, which stays when the
    process that would remove it is killed with the engine."""
    tqdm: Any = importlib.import_module("tqdm")
    tqdm.tqdm.set_lock(threading.RLock())


def start_biases_at_zero() -> None:
    """Have every linear layer's bias begin at zero instead of at random.

    SGLang gives the head of Qwen2/Qwen3ForSequenceClassification a bias that checkpoints lack, and leaves it as drawn: rewards
    would be off by a random amount. A bias that the checkpoint has is loaded over this.
    """
    nn: Any = importlib.import_module("torch.nn")
    draw = nn.Linear.reset_parameters

    def reset_parameters(layer: Any) -> None:
        draw(layer)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    nn.Linear.reset_parameters = reset_parameters


#: (class, key, value): what SGLang reads of configurations that transformers 5 no longer writes, having one value for all
_LEFT_OUT = (
    ("BertConfig", "position_embedding_type", "absolute"),
    ("RobertaConfig", "position_embedding_type", "absolute"),
    ("XLMRobertaConfig", "position_embedding_type", "absolute"),
    ("Gemma2Config", "hidden_act", "gelu_pytorch_tanh"),
)


def complete_configurations(transformers: Any) -> None:
    """Give configurations the keys that SGLang reads and checkpoints saved by transformers 5 lack. A configuration that has the
    key keeps its value."""
    for name, key, value in _LEFT_OUT:
        config = getattr(transformers, name)
        if not hasattr(config, key):
            setattr(config, key, value)


#: (name, dtype, shape) of the tensors that this process's model was loaded from, in their order
_own_load: list[tuple[str, str, tuple[int, ...]]] = []


def own_load() -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors that the model of this process was loaded from; empty when it was not by a checkpoint's files."""
    return list(_own_load)


def note_own_load(loader: Any) -> None:
    """Keep what the model's own load takes: that is what a weight update consists of. `loader` is SGLang's default one.

    The load is watched as well: `completeness.incomplete_load` tells what it left out.
    """
    weights_of = loader._get_all_weights

    def get_all_weights(self: Any, model_config: Any, model: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        if model_config.is_draft_model:
            # It proposes tokens; weight updates are for the model that checks them.
            return weights_of(self, model_config, model, *args, **kwargs)
        _own_load.clear()

        def noted() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights_of(self, model_config, model, *args, **kwargs):
                _own_load.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
                yield name, tensor

        completeness: Any = importlib.import_module("enginepool.workers.sglang.weights.completeness")  # it needs torch
        return completeness.watch_load(model, model_config.hf_config, noted)

    loader._get_all_weights = get_all_weights


def change_connectors() -> None:
    """In each process that may read a model in Redis, or write one."""
    leave_signals_alone(importlib.import_module(modules.CONNECTORS), os.environ.get(NOTES_VARIABLE))
    wait_for_redis_no_longer(_class(modules.REDIS, "RedisConnector"))


def run_scheduler(
    run: Callable[..., Any], attention: str, rows: EngineSettings | None, pooling: Pooling, settings: Any, ports: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Entry of a scheduler process: `run` is SGLang's own.

    `attention` names SGLang's module of FlashInfer's attention, where that is used: only here is it imported before the start.
    `rows`: the settings of an engine that runs rows next to sequences; else None. `pooling`: as `pooling_of` has it.
    """
    keep_notes("scheduler")
    share_no_progress_bars()
    start_biases_at_zero()
    change_connectors()
    if os.environ.get(BRIDGE_VARIABLE) and (settings.enable_lora or settings.lora_paths):
        pinned_memory.install()
    scheduler, pooler = _class(modules.SCHEDULER, "Scheduler"), _class(modules.POOLER, "CrossEncodingPooler")
    sequences = _class(modules.LOGITS, "LogitsProcessor")
    for name in ("BatchTokenizedGenerateReqInput", "BatchTokenizedEmbeddingReqInput"):
        send_shared_fields_once(_class(modules.REQUESTS, name))  # from one rank to the others
    report_every_forward(_class(modules.TIMES, "SchedulerReqTimeStats"))
    gather_labels_without_waiting(_class(modules.LOGPROBS, "OutputLogprobProcessor"), sequences)
    free_rows_together(_class(modules.PREFILL_RESULTS, "SchedulerBatchResultProcessor"))
    gather_logits_by_nccl(sequences)
    _bound_requests(settings)
    answer_before_the_next_launch(scheduler)
    if rows is not None:
        _run_rows(scheduler, rows)
    complete_configurations(importlib.import_module("transformers"))
    use_all_positions(_class(modules.MODEL, "ModelConfig"))
    for operation in OPERATIONS:
        operation.change_scheduler(pooler, pooling)
    report_no_load(scheduler, settings.dp_size)
    profiler = _class(modules.PROFILER, "SchedulerProfilerManager")
    end_no_engine_for_a_trace(profiler, _class(modules.REQUESTS, "ProfileReqOutput"))
    note_scheduler(scheduler)
    finish_the_step_before_a_pause(scheduler)
    drop_what_is_prepared_in_a_pause(scheduler)
    separate_prefixes(scheduler)
    note_media_cache(_class(modules.MEDIA_CACHE, "MultiModalStaticCache"))
    answer_in_order(_class(modules.CHANNELS, "SchedulerIpcChannels"))
    _change_weights()
    if attention:
        changes: Any = importlib.import_module("enginepool.workers.sglang.patches.attention")  # it needs torch
        module: Any = importlib.import_module(attention)
        changes.plan_on_the_host(module.FlashInferIndicesUpdaterPrefill)
        changes.place_items_on_the_host(module.FlashInferAttnBackend)
        if settings.enable_mis:
            keep_kinds_apart(scheduler)
            attend_as_each_forward_says(module.FlashInferAttnBackend)
            run_packed_as_graphs(_class(modules.GRAPHS, "PrefillCudaGraphRunner"))
        kernels: Any = importlib.import_module("flashinfer")
        wrappers = (kernels.BatchPrefillWithPagedKVCacheWrapper, kernels.BatchPrefillWithRaggedKVCacheWrapper)
        write_where_graphs_read(module.FlashInferAttnBackend, *wrappers)
    keep_experts_of_each_forward(_class(modules.CAPTURER, "BaseTopkCapturer"))
    if os.environ.get(BRIDGE_VARIABLE):
        keep_experts_unpinned(_class(modules.CAPTURER, "BaseHostCache"))
    _collect_garbage()
    return run(settings, answer_at_once(ports), *args, **kwargs)


def _run_rows(scheduler: Any, settings: EngineSettings) -> None:
    """Next to sequences."""
    batch, adder = _class(modules.BATCH, "ScheduleBatch"), _class(modules.POLICY, "PrefillAdder")
    evict = _class(modules.CACHE, "evict_from_tree_cache")
    keep_rows_apart(scheduler, batch, adder, lambda self: room_in(settings, self).kept, evict)


def _bound_requests(settings: Any) -> None:
    """What one request, or one adapter, would do to all the others."""
    if settings.tp_size * settings.pp_size == 1:
        end_slow_searches(importlib.import_module(modules.BATCH))
    forget_grammars(_class(modules.GRAMMAR_BACKENDS, "BaseGrammarBackend"))
    if settings.enable_lora or settings.lora_paths:
        refuse_layers_without_room(_class(modules.ADAPTER_MANAGER, "LoRAManager"))
    runner, sampler = _class(modules.RUNNER, "ModelRunner"), _class(modules.SAMPLER, "Sampler")
    mark_logits_that_are_not_finite(runner, sampler, _class(modules.RELAY, "FutureMap"))
    accept_no_marked_token(_class(modules.BATCH, "Req"))


def _change_weights() -> None:
    """What the scheduler does with weights: its own, and those of updates."""
    updater = _class(modules.MODEL_UPDATER, "WeightUpdater")
    note_own_load(_class(modules.LOADER, "DefaultModelLoader"))
    open_session_for_tickets(_class(modules.UPDATER, "SchedulerWeightUpdaterManager"), LOADER)
    pass_tickets_of_refused_updates(updater, LOADER)
    tell_that_it_went_on(updater)


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def run_detokenizer(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Entry of the detokenizer process: `run` is SGLang's own."""
    keep_notes("detokenizer")
    change_connectors()
    _collect_garbage()
    return run(*args, **kwargs)


def run_other(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Entry of a process that starts schedulers, or becomes one: `run` is SGLang's own."""
    keep_notes("data parallel controller")
    return run(*args, **kwargs)
