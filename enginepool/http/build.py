"""SGLang's serving classes for a model, made in this process. They keep their settings in globals: one model per process."""

import asyncio
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginepool.errors import ConfigError
from enginepool.workers import cpu_bridge

#: what a process that serves needs besides SGLang's own requirements
_NEEDED = ("sglang", "fastapi", "jsonschema")
INSTALL = 'pip install "enginepool[openai]"'
#: SGLang's settings here: what touches no GPU, and the parsers that it finds in the model's template.
_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "log_level": "error",
    "enable_cache_report": True,
    "tool_call_parser": "auto",
    "reasoning_parser": "auto",
}
#: Settings of SGLang that a caller may give: what becomes of messages before, and of tokens after an engine.
SETTINGS = frozenset(
    {
        "chat_template", "completion_template", "default_chat_template_kwargs", "enable_cache_report", "hf_chat_template_name",
        "json_model_override_args", "reasoning_parser", "revision", "sampling_defaults", "served_model_name",
        "stream_response_default_include_usage", "tokenizer_backend", "tokenizer_mode", "tokenizer_path", "tool_call_parser",
        "trust_remote_code",
    }
)  # fmt: skip

#: (model, settings) that this process serves, and SGLang's form of them
_served: tuple[str, dict[str, Any]] | None = None
_server_args: Any = None
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class Serving:
    """What answers requests.

    manager: the `PoolTokenizerManager`; chat, completion: SGLang's serving classes; protocol: its module of request classes.
    """

    manager: Any
    chat: Any
    completion: Any
    protocol: Any


def missing() -> str:
    """What is not installed here, in one line; "" where all is."""
    lacking = [name for name in (*_NEEDED, "openai") if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)}: not installed here; {INSTALL}" if lacking else ""


def check_settings(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that are not for this."""
    if model is not None and not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model: {type(model).__name__}; a folder or a name of the model hub, or None for that of the group")
    for name in settings:
        if name not in SETTINGS:
            raise ConfigError(
                f"openai() has no argument {name!r}; SGLang's settings that it takes are {', '.join(sorted(SETTINGS))}"
            )


def build(model: str, settings: Mapping[str, Any]) -> Serving:
    """Import SGLang, which takes seconds, and load tokenizer and template of `model`: a folder, or a name of the model hub.

    Raises:
        ConfigError: SGLang cannot be imported or refuses a setting, there is no such model, or this process serves another one.
    """
    global _served
    with _one_at_a_time:
        if _served not in (None, (model, settings)):
            raise ConfigError(
                f"this process serves {_served[0]} with {_served[1]}, and SGLang's serving classes keep one model per process; "
                f"use another process for {model} with {dict(settings)}"
            )
        folder = Path(model).expanduser()
        if model.startswith(("/", ".", "~")) and not (folder / "config.json").is_file():
            raise ConfigError(f"{model}: no config.json there; give model=, a folder on this host or a name of the model hub")
        loops: Any = asyncio
        policy = loops.get_event_loop_policy()
        try:
            engine = _import()
        except ImportError as error:
            raise ConfigError(f"SGLang cannot be imported here ({one_line(error)}); {INSTALL}") from error
        try:
            serving = _serve(engine, str(folder) if folder.is_dir() else model, settings)
        except Exception as error:  # SGLang and transformers raise many kinds
            raise ConfigError(f"{model}: SGLang cannot serve it: {one_line(error)}") from error
        finally:
            loops.set_event_loop_policy(policy)  # SGLang sets another one when it is imported
        _served = (model, dict(settings))
        return serving


def _import() -> Any:
    """SGLang's module of the engine, which knows how a tokenizer manager is made. Raises ImportError."""
    logger = logging.getLogger("sglang")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)  # it says much about engines, of which none is here
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        cpu_bridge.install()
    return importlib.import_module("sglang.srt.entrypoints.engine")


def _serve(engine: Any, model: str, settings: Mapping[str, Any]) -> Serving:
    global _server_args
    if _server_args is None or _served is None:
        _server_args = engine.ServerArgs(model_path=model, **{**_DEFAULTS, **settings})
        importlib.import_module("sglang.srt.runtime_context").publish(_server_args, role="tokenizer")
    ours: Any = importlib.import_module("enginepool.http.manager")
    manager, templates = engine.init_tokenizer_manager(_server_args, None, ours.PoolTokenizerManager)
    chat: Any = importlib.import_module("sglang.srt.entrypoints.openai.serving_chat")
    completion: Any = importlib.import_module("sglang.srt.entrypoints.openai.serving_completions")
    protocol: Any = importlib.import_module("sglang.srt.entrypoints.openai.protocol")
    talks = chat.OpenAIServingChat(manager, templates)
    if (tokens := getattr(talks, "_process_logprobs_tokens", None)) is not None:
        # The oldest versions give all tokens of a chunk the most probable ones of its first token.
        talks._process_logprobs_tokens = lambda found, use_token_index=True: tokens(found, True)  # pyright: ignore[reportUnknownLambdaType]
    if thinks := talks._reasoning_detector:
        manager.think_end = manager.tokenizer.encode(thinks.think_end_token, add_special_tokens=False)
    return Serving(manager, talks, completion.OpenAIServingCompletion(manager, templates), protocol)


def one_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return f"{' '.join(str(error).split()):.300}"
