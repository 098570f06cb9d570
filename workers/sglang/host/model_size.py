"""How large a model's weights are, before an engine loads them: in its folder, in the model hub's cache, or as the hub says.
And whether they are quantized: then the engine takes weights only at its start."""

import contextlib
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

#: the most that lies between the tensors of a space
_GAPS = 1 << 20
#: the hub has so many seconds to answer; the engine waits meanwhile
_HUB_S = 10.0


class UnknownSize(Exception):
    """It is not known before the engine has loaded the model. The message is one line: why."""


def model_bytes(model: str, revision: str | None = None) -> int:
    """Bytes of the weights that the engine will load, about. May ask the model hub, and block for `_HUB_S`.

    Raises UnknownSize.
    """
    folder = Path(model).expanduser()
    return _in_folder(folder) if folder.is_dir() else _of_hub(model, revision)


def quantized(options: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether an engine with these options quantizes, or has quantized weights. `config`: the model's config.json."""
    return any(settings.get(key) for settings, key in ((options, "quantization"), (config, "quantization_config")))


def model_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The model's config.json; empty where it cannot be read. May ask the model hub."""
    try:
        config: Any = json.loads(model_file(model, "config.json", revision).read_bytes())
    except Exception:  # as in `_of_hub`: the engine will say the same when it loads the model
        return {}
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def model_file(model: str, name: str, revision: str | None = None) -> Path:
    """Where a file of the model is; in a folder it may be missing. Of the model hub it is downloaded: raises what the hub's
    client raises."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / name
    hub: Any = importlib.import_module("huggingface_hub")
    return Path(hub.hf_hub_download(model, name, revision=revision, etag_timeout=_HUB_S))


def _in_folder(folder: Path) -> int:
    try:
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    except OSError as error:
        raise UnknownSize(f"{folder}: {error.strerror}") from None
    return _room(folder, sizes)


def _of_hub(model: str, revision: str | None) -> int:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        errors: Any = importlib.import_module("huggingface_hub.errors")
        # Local files are used as they are, by the engine too, and the hub is not asked.
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            kept = hub.snapshot_download(model, revision=revision, local_files_only=True)
            if _whole(Path(kept)):
                return _in_folder(Path(kept))
        files = hub.HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_HUB_S).siblings
        sizes = [file.size for file in files or () if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename]
    except Exception as error:  # of the hub or its client; the engine will say the same when it loads the model
        raise UnknownSize(f"{model}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from None
    return _room(model, sizes)


def _whole(folder: Path) -> bool:
    """Whether all files with weights have been downloaded; of several, an index names all."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in json.loads(index.read_bytes())["weight_map"].values())


def _room(model: object, sizes: Sequence[int | None]) -> int:
    if not sizes or None in sizes:
        raise UnknownSize(f"{model}: no safetensors files whose size is known")
    return sum(size or 0 for size in sizes) + _GAPS
