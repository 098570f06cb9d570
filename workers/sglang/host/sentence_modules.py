"""What an embedding model does behind its transformer, as sentence-transformers writes it into the model's folder.

SGLang pools by the class of a model: the first token of each BERT, also of those that were trained with the mean of all tokens.
And it leaves out what it does not find in the hub's cache. So the folder is asked. No SGLang here.
"""

import importlib
import json
from typing import Any, Literal

from enginepool.workers.sglang.host.model_size import model_file
from enginepool.workers.sglang.host.settings import SettingsError

#: Of which tokens the embedding of a row is made; "": the folder does not say.
Pooling = Literal["", "cls", "mean", "last"]
_LIST = "modules.json"
#: as sentence-transformers names them, in files of older and newer versions
_POOLINGS: dict[str, Pooling] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last_token": "last"
}  # fmt: skip
#: models for which SGLang computes dense layers behind the pooling, and those layers
_WITH_DENSE = ("EmbeddingGemmaModel", "Gemma3TextModel")
#: models whose class says nothing of how they were trained to pool, or leaves dense layers out
_BY_FOLDER = ("BertModel", "XLMRobertaModel", *_WITH_DENSE)
_DENSE, _PLAIN = "sentence_transformers.models.Dense", (None, "torch.nn.modules.linear.Identity")


def pooling_of(model: str, revision: str | None, architecture: str) -> Pooling:
    """How the rows of an embedding model are pooled. May ask the model hub.

    Raises:
        SettingsError: the model does what SGLang would not do, or a file that says so cannot be read.
    """
    try:
        modules: Any = json.loads(model_file(model, _LIST, revision).read_bytes())
    except Exception as error:  # there is no such file; or the hub cannot be asked, whose client raises what it likes
        unknown = type(error).__name__ == "LocalEntryNotFoundError" and not _known_absent(model, revision)
        if unknown and architecture in _BY_FOLDER:
            why = "the hub cannot be asked for it now, and its cache does not have it"
            raise SettingsError(f"{_LIST}: {why}; it says how this model pools: download the whole model first") from None
        return ""
    found: Pooling = ""
    try:
        for module in modules[1:]:  # the first one is the transformer
            kind, path = str(module["type"]), str(module["path"])
            name = kind.rpartition(".")[2]
            if name == "Pooling":
                found = _pooling(f"{path}/config.json", _read(model, f"{path}/config.json", revision))
            elif kind == _DENSE and architecture in _WITH_DENSE:
                _check_dense(model, path, revision)
            elif name != "Normalize":
                raise SettingsError(f"{_LIST}: SGLang does not compute the module {kind!r:.80} of this model")
    except (LookupError, TypeError, AttributeError) as error:
        raise SettingsError(f"{_LIST}: not a list of modules ({type(error).__name__}: {error})") from None
    return found


def _known_absent(model: str, revision: str | None) -> bool:
    """Whether the hub has said, at some time, that there is no such file."""
    hub: Any = importlib.import_module("huggingface_hub")
    return hub.try_to_load_from_cache(model, _LIST, revision=revision) is hub._CACHED_NO_EXIST


def _read(model: str, name: str, revision: str | None) -> Any:
    try:
        return json.loads(model_file(model, name, revision).read_bytes())
    except Exception as error:
        raise SettingsError(f"{name}: cannot be read ({type(error).__name__}), and {_LIST} names it") from error


def _pooling(file: str, config: Any) -> Pooling:
    given: Any = config.get("pooling_mode") or [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value
    ]
    names = [given] if isinstance(given, str) else [str(name).removeprefix("pooling_mode_") for name in given]
    found: set[Pooling | None] = {_POOLINGS.get(name) for name in names}
    pooling = found.pop() if len(found) == 1 else None
    if pooling is None:
        raise SettingsError(f"{file}: pooling is {' and '.join(names) or 'none'}; SGLang pools by cls, mean, or lasttoken")
    if pooling == "mean" and config.get("include_prompt") is False:
        raise SettingsError(f"{file}: include_prompt is false, but SGLang pools the tokens of an instruction, too")
    return pooling


def _check_dense(model: str, path: str, revision: str | None) -> None:
    """SGLang leaves out a layer that it cannot make. It takes files of the hub from its cache, where they are after this."""
    config = _read(model, f"{path}/config.json", revision)
    if (activation := config.get("activation_function")) not in _PLAIN:
        raise SettingsError(f"{path}/config.json: SGLang does not compute activation_function {activation!r:.80}")
    weights = f"{path}/model.safetensors"
    try:
        present = model_file(model, weights, revision).is_file()
    except Exception:  # as in `pooling_of`
        present = False
    if not present:
        raise SettingsError(f"{weights}: cannot be read, and {_LIST} names it")
