"""What an engine is built from, and how. Of the worker's own process, the only file that imports SGLang."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from enginepool.host.model_folder import holds_model
from enginepool.protocol.redis_url import parse_redis
from enginepool.workers import cpu_bridge
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.redis_model import refuse_incomplete
from enginepool.workers.saving import form_of
from enginepool.workers.sglang.generate.settings import generation_kwargs
from enginepool.workers.sglang.generate.video import bound_frames
from enginepool.workers.sglang.host.model_size import model_config
from enginepool.workers.sglang.host.process import BRIDGE_VARIABLE, change_connectors, run_detokenizer, run_other, run_scheduler
from enginepool.workers.sglang.host.sentence_modules import Pooling, pooling_of
from enginepool.workers.sglang.host.settings import SettingsError, engine_kwargs, refuse_impossible, refuse_shared_storage
from enginepool.workers.sglang.operations.table import OPERATIONS
from enginepool.workers.sglang.patches import modules
from enginepool.workers.sglang.patches.packed_forwards import keep_graphs
from enginepool.workers.sglang.patches.row_messages import send_shared_fields_once
from enginepool.workers.sglang.patches.signature_check import refuse_unknown
from enginepool.workers.sglang.score.cross_encoder import use_all_positions
from enginepool.workers.sglang.score.packing_support import refuse_wrong_sharing, with_packing
from enginepool.workers.weights.checkpoint import CheckpointError, refuse_damaged

#: SGLang computes the vocabulary for log-probabilities of responses at so many tokens at a time. At 512 that takes no more
#: memory than the last tokens of the rows in flight take in any forward; SGLang's own 2048 would take four times as much.
PIECE_VARIABLE, PIECE_ROWS = "SGLANG_LOGPROB_CHUNK_SIZE", 512
#: SGLang sets it from an option, which is too late for a process that has imported it.
COMPILE_VARIABLE = "SGLANG_ENABLE_TORCH_COMPILE"
#: Read at import by the module of DeepSeek V4. SGLang clears it, for every model, where its kernels cannot be used.
GEMM_VARIABLE = "SGLANG_OPT_FP8_WO_A_GEMM"
#: further functions that SGLang starts processes with, by their names in the engine's module
_MORE_ENTRIES = ("run_data_parallel_controller_process", "run_scheduler_process_with_init_pipe")
#: A module that imports SGLang at once.
PROCESSOR = "enginepool.workers.sglang.generate.logit_processor"


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine that is ready to be built.

    build: starts its processes, blocks for as long as that takes and returns the `sglang.Engine`; settings: with
    its device; requests: SGLang's module of request classes; version: SGLang's; processor: our logit processor, as SGLang takes
    it.
    """

    build: Callable[[], Any]
    settings: EngineSettings
    requests: Any
    version: str
    processor: str


def prepare(settings: EngineSettings) -> PreparedEngine:
    """Import SGLang, which takes seconds, and settle what the engine is started with.

    Raises:
        SettingsError: there is no SGLang or one that is not supported, no such folder, no model in it, a safetensors file is
            truncated, weights that were saved need another `load_format`, no such device, or a setting is refused.
        EngineError: a model in Redis is not complete; and what its client raises.
    """
    model = os.path.expanduser(settings.model)
    folder = Path(model)
    if settings.model.startswith(("/", ".", "~")) and not folder.is_dir():
        raise SettingsError("there is no such folder")
    if folder.is_dir() and not holds_model(folder):
        raise SettingsError("that folder has no config.json")
    # SGLang would look for tensors by the names of a checkpoint, and end with the first that it does not find.
    if (needed := form_of(folder)) and (form := settings.options.get("load_format", "auto")) != needed:
        raise SettingsError(f"engine option load_format={form!r} is refused: this folder was saved by a pool, as {needed!r}")
    if (remote := parse_redis(model)) is not None:
        refuse_incomplete(remote, rows=not settings.generates)
    if folder.is_dir() and settings.options.get("load_format", "auto") in ("auto", "safetensors"):
        try:
            refuse_damaged(folder)
        except CheckpointError as error:
            raise SettingsError(str(error)) from None
    try:
        device = _set_environment(settings.device, compiles=bool(settings.options.get("enable_torch_compile")))
        module: Any = importlib.import_module(modules.ENGINE)
        requests: Any = importlib.import_module(modules.REQUESTS)
        version: str = importlib.import_module(modules.VERSION).__version__
    except ImportError as error:
        raise SettingsError(f"SGLang cannot be imported here ({error}); install enginepool[sglang]") from error
    refuse_shared_storage(settings.options)
    # SGLang takes no name with a colon, and by default it is the model's.
    options = settings.options if remote is None else {"served_model_name": remote.name} | settings.options
    settings = msgspec.structs.replace(settings, model=model, device=device, options=options)
    refuse_impossible(settings)
    known = _setting_names(module.ServerArgs)
    revision = settings.options.get("revision")
    generates = importlib.import_module(modules.MODEL).is_generation_model
    settings = with_packing(settings, lambda: model_config(model, revision), known if _has_flashinfer() else (), generates)
    pooling = _pooling(settings, generates)
    config = folder / "config.json"
    if config.is_file():
        # Known before minutes of loading; a model from elsewhere is asked once it is there.
        refuse_wrong_sharing(settings, msgspec.json.decode(config.read_bytes()))
    if settings.generates:
        kwargs = generation_kwargs(settings, known, grammars=_grammars_on(device))
    else:
        kwargs = engine_kwargs(settings, known)
    if settings.packs:
        _keep_graphs(module.ServerArgs)
    if device == "cpu" and (kwargs.get("page_size") or 1) > 1 and not _pages_on_cpu():
        raise SettingsError(f"engine option page_size={kwargs['page_size']} is refused: SGLang {version} has no pages on a CPU")
    flashinfer = device == "cuda" and kwargs.get("attention_backend") == "flashinfer"
    refuse_unknown(version, flashinfer=flashinfer)
    _change_classes()
    rows = settings if settings.mixed else None
    engine_class = _with_our_entries(module.Engine, modules.FLASHINFER if flashinfer else "", rows, pooling)
    processor: Any = importlib.import_module(PROCESSOR).PoolLogitProcessor
    return PreparedEngine(partial(engine_class, **kwargs), settings, requests, version, processor.to_str())


def import_ahead(device: str, *, compiles: bool) -> None:
    """Import what an engine with this device and all its processes import: for a process that forks them."""
    device = _set_environment(device, compiles=compiles)
    importlib.import_module(modules.ENGINE)
    if device == "cuda" and modules.DEEPSEEK_V4 not in sys.modules:
        kernels: Any = importlib.import_module(modules.DEEP_GEMM)
        if not kernels.DEEPGEMM_SCALE_UE8M0:
            os.environ.setdefault(GEMM_VARIABLE, "0")
    for name in (modules.SCHEDULER, modules.DETOKENIZER, modules.REGISTRY, PROCESSOR):
        importlib.import_module(name)


def _set_environment(device: str, *, compiles: bool) -> str:
    """The environment in which SGLang is imported; returns the device."""
    os.environ.setdefault(PIECE_VARIABLE, str(PIECE_ROWS))
    os.environ.setdefault(COMPILE_VARIABLE, "1" if compiles else "0")
    device = _resolved(device)
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        # Threads that spin while they wait for work hold the cores that other processes of the engine need.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if not compiles:
            # A few of SGLang's functions are compiled when they are first called: a forward would wait ten seconds for it.
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ[BRIDGE_VARIABLE] = "1"
        cpu_bridge.install()
    return device


def _resolved(device: str) -> str:
    torch: Any = importlib.import_module("torch")
    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise SettingsError("the device is cuda, and torch finds no CUDA GPU here")
    if device != "auto":
        return device
    return "cuda" if found else "cpu"


def _has_flashinfer() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def _keep_graphs(server_args: Any) -> None:
    """Where this version of SGLang switches CUDA graphs off for multi-item scoring: a method of its settings in older ones."""
    if hasattr(server_args, "_handle_multi_item_scoring"):
        keep_graphs(server_args, "_handle_multi_item_scoring")
    else:
        keep_graphs(importlib.import_module(modules.RESOLUTION), "handle_multi_item_scoring")


def _grammars_on(device: str) -> bool:
    """Whether SGLang's default grammar backend is installed, and can restrict tokens on this device. Its older versions cannot
    on a CPU: their scheduler would die of the first grammar."""
    if importlib.util.find_spec("xgrammar") is None:
        return False
    if device != "cpu":
        return True
    torch, grammar = importlib.import_module("torch"), importlib.import_module(modules.GRAMMAR).XGrammarGrammar
    try:
        grammar.apply_vocab_mask(None, torch.zeros(1, 32), grammar.allocate_vocab_mask(None, 32, 1, device))
    except (RuntimeError, TypeError):
        return False
    return True


def _pages_on_cpu() -> bool:
    """Whether SGLang gives out pages of several tokens on a CPU. Its older versions have Triton kernels alone for that."""
    return hasattr(importlib.import_module(modules.PAGES), "alloc_decode_naive")


def _change_classes() -> None:
    """Those that SGLang uses in this process."""
    use_all_positions(importlib.import_module(modules.MODEL).ModelConfig)
    requests: Any = importlib.import_module(modules.REQUESTS)
    send_shared_fields_once(requests.BatchTokenizedGenerateReqInput)
    send_shared_fields_once(requests.BatchTokenizedEmbeddingReqInput)
    bound_frames(importlib.import_module(modules.VIDEO).VideoDecoderWrapper)
    change_connectors()


def _pooling(settings: EngineSettings, generates: Callable[[list[str], bool], bool]) -> Pooling:
    """How the rows of a model that embeds are pooled; "" of another model. `generates`: SGLang's `is_generation_model`."""
    revision = settings.options.get("revision")
    config = {} if settings.generates else model_config(settings.model, revision)
    [first, *_] = names = list(config.get("architectures") or ["?"])
    # SGLang itself sets the option for a decoder that looks ahead.
    embeds = bool(settings.options.get("is_embedding") or config.get("use_bidirectional_attention"))
    embedding = any(one.kind == "embedding" and one.serves(generates(names, embeds), first) for one in OPERATIONS)
    if not embedding:
        return ""
    # A trainer seldom writes into a checkpoint how the model pools.
    own = pooling_of(settings.model, revision, first)
    return own or (pooling_of(settings.origin, revision, first) if settings.origin else "")


def _with_our_entries(engine: Any, attention: str, rows: EngineSettings | None, pooling: Pooling) -> Any:
    """SGLang's engine class, whose processes begin in `process`; `attention` is the module that is changed there, `rows`
    are the settings of an engine that runs rows next to sequences, `pooling` is that of `run_scheduler`."""
    entries = {
        "run_scheduler_process_func": staticmethod(
            partial(run_scheduler, engine.run_scheduler_process_func, attention, rows, pooling)
        ),
        "run_detokenizer_process_func": staticmethod(partial(run_detokenizer, engine.run_detokenizer_process_func)),
    }
    module: Any = importlib.import_module(modules.ENGINE)
    for name in _MORE_ENTRIES:
        if run := getattr(module, name, None):
            setattr(module, name, partial(run_other, run))
    return type("PoolEngine", (engine,), entries)


def _setting_names(server_args: Any) -> set[str]:
    """Names that this version's ServerArgs takes: a msgspec struct in newer versions, a dataclass in older ones."""
    names = getattr(server_args, "__struct_fields__", None) or getattr(server_args, "__dataclass_fields__", ())
    return {name for name in names if not name.startswith("_")}
