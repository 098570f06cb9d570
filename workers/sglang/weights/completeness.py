"""Whether a model was loaded completely: what its own load read from the checkpoint, and what it wrote into the model.

An engine with an incomplete model answers with wrong scores and no error. So the first load runs under a dispatch mode that
carries every operation out and notes two things: which elements of the model's parameters were written, and which checkpoint
tensors the written values came from. `incomplete` decides. Runs in the engine's processes; no SGLang here.
"""

import concurrent.futures
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

torch: Any = importlib.import_module("torch")
_Mode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
_aten: Any = torch.ops.aten

#: Parameters that a checkpoint may lack, by the end of their names, and why the model is still complete without them.
NOT_IN_CHECKPOINTS: Mapping[str, str] = {
    "score.bias": "SGLang adds it to the head of Qwen2 and Qwen3; `process.start_biases_at_zero` sets it to zero",
    "embeddings.position_ids": "BERT and its kind never read it: the engine says the positions",
}
#: how the names of head tensors begin, behind any prefix of the model
_HEADS = ("score", "classifier", "classification_head", "v_head", "value_head", "reward_head", "lm_head")
#: parts of architecture names
_SCORING = ("Classification", "Reward")


@dataclass(frozen=True, slots=True)
class Filled:
    """One parameter: elements that the load wrote, of how many. `quantized`: its module's quantization method made it."""

    name: str
    written: int
    elements: int
    quantized: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What a load did.

    asked: the architectures of the checkpoint's configuration; loaded: the class of the model; tied: the configuration says
    that the output layer is the embedding; parameters: all of the model; unread: checkpoint tensors that went nowhere,
    of layers that are here.
    """

    asked: Sequence[str]
    loaded: str
    tied: bool
    parameters: Sequence[Filled]
    unread: Sequence[str]


def incomplete(load: Load) -> str:
    """Why the model must not be served, in one line; "": it is complete. Pure."""
    architecture = load.asked[0] if load.asked else load.loaded
    scores = _scores(architecture)
    if scores and load.loaded.startswith("Transformers"):
        return (
            f"SGLang has no {architecture} of its own, and its Transformers backend ({load.loaded}) loads it without its head;"
            " serve an architecture that SGLang supports"
        )
    if scores != _scores(load.loaded):
        return f"the configuration asks for {architecture}, but SGLang loaded {load.loaded}, which is for another task"
    missing = [one for one in load.parameters if not _complete(one)]
    if missing:
        first = missing[0]
        more = f" (and {len(missing) - 1} more parameters)" if len(missing) > 1 else ""
        if not first.written:
            return f"the model is incomplete: no tensor of the checkpoint fills {first.name}{more}"
        return (
            f"the model is incomplete: the checkpoint fills {first.written} of {first.elements} elements of {first.name}{more}"
        )
    heads = [name for name in load.unread if _head_of(name, scores=scores, tied=load.tied)]
    if heads:
        more = f" (and {len(heads) - 1} more)" if len(heads) > 1 else ""
        return f"head tensor {heads[0]} of the checkpoint{more} goes nowhere: {load.loaded} does not load it"
    return ""


def _scores(architecture: str) -> bool:
    return any(word in architecture for word in _SCORING)


def _complete(one: Filled) -> bool:
    if one.written >= one.elements or one.name.endswith(tuple(NOT_IN_CHECKPOINTS)):
        return True
    # Scales and zero points have defaults, and packed weights may have padding.
    return one.quantized and (one.written > 0 or not one.name.endswith("weight"))


def _head_of(name: str, *, scores: bool, tied: bool) -> bool:
    """Whether the model needs this tensor for its answers. A model that scores with a head of its own needs no `lm_head`, and
    a tied one has its embedding."""
    words = name.split(".")
    return any(word in _HEADS and not (word == "lm_head" and (scores or tied)) for word in words)


class LoadWatch:
    """Notes what `load_weights` of a model reads and writes.

    Args:
        model: its tensors are already in place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        #: by storage of a parameter: (offset, size, stride) of each write
        self._writes: dict[int, set[tuple[Any, ...]]] = {_storage(parameter): set() for _, parameter in _parameters(model)}
        #: by storage: checkpoint tensors whose values are in it
        self._sources: dict[int, frozenset[str]] = {}
        self._given: dict[str, None] = {}
        self._read: set[str] = set()

    def feed(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The checkpoint's tensors, on their way into `load_weights`."""
        for name, tensor in tensors:
            self._given[name] = None
            self._made(_storage(tensor), frozenset((name,)))
            yield name, tensor

    def run(self, load: Callable[[], Any]) -> Any:
        """What `load` gives, which is watched in all its threads."""
        submit = concurrent.futures.ThreadPoolExecutor.submit

        def watched(executor: Any, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with _Watching(self):
                    return call(*args, **kwargs)

            return submit(executor, run, *args, **kwargs)

        executors: Any = concurrent.futures.ThreadPoolExecutor
        executors.submit = watched
        try:
            with _Watching(self):
                return load()
        finally:
            executors.submit = submit

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outcome: Any) -> None:
        """One operation that was carried out."""
        taken = {_storage(one) for one in _tensors((*args, *kwargs.values()))}
        sources = frozenset[str]().union(*(self._sources.get(storage, ()) for storage in taken))
        if not hasattr(func, "_schema"):
            return  # no operation on tensors, such as a kernel that is wrapped whole
        if func is _aten._local_scalar_dense.default:
            self._read |= sources  # a number now: where it goes cannot be seen
        if not func._schema.is_mutable:
            for storage in {_storage(made) for made in _tensors((outcome,))} - taken:
                self._made(storage, sources)
            return
        for target in _written(func, args, kwargs):
            storage = _storage(target)
            writes = self._writes.get(storage)
            if writes is None:
                self._sources[storage] = sources | self._sources.get(storage, frozenset())
                continue
            writes.add((target.storage_offset(), tuple(target.shape), target.stride()))
            self._read |= sources

    def _made(self, storage: int, sources: frozenset[str]) -> None:
        """It is new, and may be known from a parameter that had it and has other memory by now."""
        self._writes.pop(storage, None)
        self._sources[storage] = sources

    def load(self, asked: Sequence[str], tied: bool) -> Load:
        """What was done, when it is done."""
        filled: list[Filled] = []
        for name, parameter in _parameters(self._model):
            quantized = _quantized(self._model, name)
            storage = _storage(parameter)
            writes = self._writes.get(storage)
            elements = parameter.numel()
            if writes is None:  # the load gave it other memory, with what it holds
                self._read |= self._sources.get(storage, frozenset())
                filled.append(Filled(name, elements, elements, quantized))
                continue
            begin = parameter.storage_offset()
            written = sum(_count(size) for offset, size, _ in writes if begin <= offset < begin + max(1, elements))
            filled.append(Filled(name, min(written, elements), elements, quantized))
        unread = [name for name in self._given if name not in self._read and not _elsewhere(self._model, name)]
        return Load(tuple(asked), type(self._model).__name__, tied, tuple(filled), tuple(unread))


class _Watching(_Mode):
    """The mode of one thread."""

    def __init__(self, watch: LoadWatch) -> None:
        _Mode.__init__(self)
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outcome = func(*args, **kwargs)
        self._watch.note(func, args, kwargs, outcome)
        return outcome


def _parameters(model: Any) -> list[tuple[str, Any]]:
    lazy: Any = torch.nn.parameter.UninitializedParameter
    return [(name, one) for name, one in model.named_parameters() if not isinstance(one, lazy) and one.numel()]


def _elsewhere(model: Any, name: str) -> bool:
    """Whether another stage of the pipeline has the layer of this tensor."""
    try:
        return type(model.get_submodule(name.rpartition(".")[0])).__name__ == "PPMissingLayer"
    except AttributeError:
        return False


def _quantized(model: Any, name: str) -> bool:
    module: Any = model.get_submodule(name.rpartition(".")[0])
    return quantization(module) != ""


def quantization(module: Any) -> str:
    """The name of the method by which a module's weights are quantized, or ""."""
    method = getattr(module, "quant_method", None)
    name = "" if method is None else type(method).__name__
    return "" if name.startswith("Unquantized") else name


def _count(size: Sequence[int]) -> int:
    count = 1
    for length in size:
        count *= length
    return count


def _storage(tensor: Any) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)  # pyright: ignore[reportUnknownArgumentType]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors((value,))


class _FirstLoad:
    """Stands in for `load_weights` of a model until its first call, which is watched and judged."""

    def __init__(self, model: Any, config: Any) -> None:
        self.reason = ""
        self.watch = LoadWatch(model)
        self._model: Any = model
        self._config = config
        self._load = model.load_weights
        self._over = False
        model.load_weights = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._over:
            return self._load(*args, **kwargs)
        self.end()
        outcome = self.watch.run(lambda: self._load(*args, **kwargs))
        asked = getattr(self._config, "architectures", None) or ()
        parts = (self._config, getattr(self._config, "text_config", None))
        tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
        self.reason = incomplete(self.watch.load(asked, tied))
        return outcome

    def end(self) -> None:
        """Later loads are not watched."""
        self._over = True
        if self._model.__dict__.get("load_weights") is self:
            del self._model.load_weights


#: that of the model of this process
_first: list[_FirstLoad] = []


def watch_load(model: Any, config: Any, weights: Callable[[], Iterator[tuple[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """The tensors of `weights`; the next call of `model.load_weights`, which takes them, is watched and judged.

    `config` is the checkpoint's configuration.
    """
    _first[:] = [_FirstLoad(model, config)]
    return _first[0].watch.feed(weights())


def incomplete_load() -> str:
    """Why the model of this process must not be served, or ""; also "" where its load was not watched (no checkpoint)."""
    for first in _first:
        first.end()
        return first.reason
    return ""
