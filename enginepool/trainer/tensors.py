"""What a trainer gives to a publisher, as named tensors in a fixed order: modules, state dicts, iterators, sharded or not.

The names that travel are those of the checkpoint, so wrappers' prefixes are taken off, tied tensors are sent once, and `rename`
may do the rest. What comes is described first (`SendPlan.manifest`), without a byte being gathered, and then given tensor by
tensor (`SendPlan.tensors`), each gathered when its turn comes.
"""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from enginepool.client.arguments import kind, utf8
from enginepool.errors import BadRequest
from enginepool.protocol.errors import WireError
from enginepool.protocol.manifest import SIZES, WRAPPERS, Tensor, decode_manifest, encode_manifest

torch: Any = importlib.import_module("torch")

#: torch.nn.Module, mapping of names to tensors, iterable of (name, tensor), or a callable that returns one.
Source: TypeAlias = Any
#: (name, tensor) -> the name that travels, None for a tensor that does not, or pairs where one tensor becomes several.
Rename: TypeAlias = Callable[[str, Any], "str | Iterable[tuple[str, Any]] | None"]
#: (name, tensor) -> the whole tensor, on any device, the same on every rank or on rank 0 alone.
Gather: TypeAlias = Callable[[str, Any], Any]
#: Descriptions as a caller may write them: (name, dtype, shape) or `Tensor`.
Described: TypeAlias = Sequence["Tensor | tuple[str, Any, Sequence[int]]"]

_FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class SendPlan:
    """What an update sends: its description, and its tensors in the same order. `tensors` may be called once.

    `sharded`: a digest of those that a collective of all ranks makes whole, which has to be the same on each; 0: unknown.
    """

    manifest: list[Tensor]
    tensors: Callable[[], Iterator[tuple[str, Any]]]
    sharded: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.manifest)


def whole(name: str, tensor: Any) -> Any:
    """The usual `Gather`: DTensors (FSDP2, tensor parallel) become whole, a collective of their mesh; others are whole."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def make_plan(
    source: Source,
    *,
    manifest: Described | None = None,
    rename: Rename | None = None,
    gather: Gather | None = None,
    dtype: Any = None,
) -> SendPlan:
    """What `source` sends.

    Args:
        source: see `Source`. An iterable without a `manifest` is read to its end at once, and its tensors kept; a callable
            without one is called twice.
        manifest: of the tensors that come out, in their order; it spares those costs, and is needed where `gather` gives
            another shape than a tensor had.
        rename, gather: see `Rename`, `Gather`.
        dtype: floating tensors are converted to it, before they are gathered.

    Raises:
        BadRequest: something in `source` is no tensor, a name comes twice, a dtype cannot travel.
    """
    sharded = _Sharded(gather is None, dtype)
    gather = gather or whole
    if callable(source) and not isinstance(source, torch.nn.Module):
        read = cast("Callable[[], Iterable[tuple[str, Any]]]", source)
        if manifest is None:
            described = _described(sharded.seen(read()), rename, dtype)
            return SendPlan(described, lambda: _given(read(), rename, gather, dtype), sharded.digest)
        return SendPlan(_written(manifest), lambda: _given(read(), rename, gather, dtype))
    if isinstance(source, Iterator) and manifest is not None:
        stream = cast("Iterator[tuple[str, Any]]", source)
        return SendPlan(_written(manifest), lambda: _given(stream, rename, gather, dtype))
    pairs = list(sharded.seen(_kept(_pairs(source))))
    if manifest is not None:
        return SendPlan(_written(manifest), lambda: _given(pairs, rename, gather, dtype), sharded.digest)
    return SendPlan(_described(pairs, rename, dtype), lambda: _given(pairs, rename, gather, dtype), sharded.digest)


# --- what is there -----------------------------------------------------------------------------------------------------


def _pairs(source: Source) -> Iterable[tuple[str, Any]]:
    if isinstance(source, torch.nn.Module):
        state = [(name, value) for name, value in source.state_dict().items() if not name.endswith("_extra_state")]
        tied: Any = getattr(source, "_tied_weights_keys", None) or ()
        return _plain_names(_untied(state, set(tied)))
    if isinstance(source, Mapping):
        mapping = cast("Mapping[str, Any]", source)
        for name in cast("Mapping[object, Any]", source):
            if not isinstance(name, str):
                raise BadRequest(f"source: its key {name!r} is {kind(name)}; a tensor's name", field="source")
        return _plain_names(_untied(list(mapping.items()), set()))
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return cast("Iterable[tuple[str, Any]]", source)
    raise BadRequest(
        f"source: {kind(source)}; a torch.nn.Module, a mapping, (name, tensor) pairs, or a callable that gives them",
        field="source",
    )


def _untied(pairs: list[tuple[str, Any]], tied: set[str]) -> list[tuple[str, Any]]:
    """Without the second name of the same memory: the checkpoint has one. `tied` are names that the model calls the second."""
    first: dict[tuple[Any, ...], str] = {}
    for name, value in sorted(pairs, key=lambda pair: pair[0] in tied):
        place = _place(value)
        if place is not None:
            first.setdefault(place, name)
    return [(name, value) for name, value in pairs if first.get(_place(value) or (), name) == name]


def _place(value: Any) -> tuple[Any, ...] | None:
    """Where a tensor's bytes are, and how it sees them. None: nowhere, or unknown.

    The storage and not the address: a rank's shard may be empty, and all ranks must get the same result.
    """
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, torch.Tensor) or local.layout != torch.strided or (local is value and not local.numel()):
        return None
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), local.dtype, tuple(local.shape), local.stride()


def _plain_names(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    named = [(WRAPPERS.sub("", name), value) for name, value in pairs]
    if named and all(name.startswith("module.") for name, _ in named):  # DistributedDataParallel
        return [(name.removeprefix("module."), value) for name, value in named]
    return named


def _checked(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for number, pair in enumerate(pairs):
        match pair:
            case str(name), value:
                if not isinstance(value, torch.Tensor):
                    raise BadRequest(f"source[{name}]: {kind(value)}; a tensor", field=f"source[{name}]")
                if value.layout != torch.strided:
                    text = f"source[{name}]: a tensor of layout {value.layout}; a dense one"
                    raise BadRequest(text, field=f"source[{name}]")
                yield name, value
            case _:
                raise BadRequest(f"source: its entry {number} is {kind(pair)}; (name, tensor)", field="source")


class HeldTensors:
    """Tensors that a source has given and that are still needed: memory that it gives again must be what it was.

    A source that uses one buffer for all its tensors would send the last tensor under every name, without an error.
    """

    def __init__(self) -> None:
        #: by where it is: name, and how often it had been written to
        self._at: dict[int, tuple[str, int]] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Raises BadRequest: it lies where one lies that was changed since it was given."""
        at, writes = _memory(tensor)
        if not at:
            return
        before = self._at.setdefault(at, (name, writes))
        if before[1] != writes:
            raise BadRequest(
                f"source: {name} lies in the memory of {before[0]}, which is not sent yet and has changed; use memory for each",
                field=f"source[{before[0]}]",
            )

    def drop(self, tensor: Any) -> None:
        """Forget where the tensor lies: its memory may change again."""
        self._at.pop(_memory(tensor)[0], None)


def _memory(tensor: Any) -> tuple[int, int]:
    """Where a tensor is, and how often it was written to; (0, 0): unknown."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return (local.data_ptr(), local._version) if local.numel() else (0, 0)
    except RuntimeError:  # it is made in inference mode, or has no memory
        return 0, 0


def _kept(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Pairs that are read to the end before any is used."""
    held = HeldTensors()
    for name, tensor in _checked(pairs):
        held.add(name, tensor)
        yield name, tensor


class _Sharded:
    """The digest of the DTensors among pairs that pass, where they are gathered by `whole`: name, shape, order, and the dtype
    in which they are gathered."""

    def __init__(self, by_whole: bool, dtype: Any) -> None:
        self._by_whole, self._dtype = by_whole, dtype
        self._words = hashlib.blake2b(digest_size=7)

    def seen(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for pair in pairs:
            match pair:
                case str(name), value if self._by_whole and hasattr(value, "full_tensor"):
                    dtype = _wire_dtype(value.dtype, self._dtype)
                    self._words.update(f"{name} {tuple(value.shape)} {dtype}\n".encode(errors="replace"))
                case _:
                    pass
            yield pair

    @property
    def digest(self) -> int:
        return int.from_bytes(self._words.digest()) if self._by_whole else 0


# --- what it becomes ---------------------------------------------------------------------------------------------------


def _wire_dtype(own: Any, wanted: Any) -> Any:
    return wanted if wanted is not None and _dtype_name(own) in _FLOATS else own


def _renamed(name: str, tensor: Any, rename: Rename | None) -> Iterable[tuple[str, Any]]:
    if rename is None:
        return ((name, tensor),)
    told = rename(name, tensor)
    if told is None:
        return ()
    return ((told, tensor),) if isinstance(told, str) else _renamed_pairs(name, told)


def _renamed_pairs(name: str, told: Any) -> Iterator[tuple[str, Any]]:
    where = f"rename({name!r}, tensor)"
    if not isinstance(told, Iterable) or isinstance(told, torch.Tensor):
        allowed = "a name, None to leave the tensor out, or (name, tensor) pairs"
        raise BadRequest(f"{where}: returned {kind(cast(Any, told))}; {allowed}", field="rename")
    for number, pair in enumerate(cast("Iterable[Any]", told)):
        match pair:
            case str(own), torch.Tensor() as part:
                yield own, part
            case _:
                raise BadRequest(f"{where}: its entry {number} is {kind(pair)}; (name, tensor)", field="rename")


def _given(pairs: Iterable[tuple[str, Any]], rename: Rename | None, gather: Gather, dtype: Any) -> Iterator[tuple[str, Any]]:
    for name, tensor in _checked(pairs):
        tensor = tensor.detach()
        wanted = _wire_dtype(tensor.dtype, dtype)
        tensor = gather(name, tensor if wanted is tensor.dtype else tensor.to(wanted))
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            where = f"source[{name}]"
            raise BadRequest(f"{where}: a tensor on the device meta, which has no values", field=where)
        yield from _renamed(name, tensor, rename)


def _described(pairs: Iterable[tuple[str, Any]], rename: Rename | None, dtype: Any) -> list[Tensor]:
    """What comes of these tensors. A hook is shown tensors without memory, which is enough to rename them, or to cut them."""
    found: list[tuple[str, Any, Sequence[int]]] = []
    for name, tensor in _checked(pairs):
        kind, shape = _wire_dtype(tensor.dtype, dtype), tuple(tensor.shape)
        if rename is None:
            found.append((name, kind, shape))
        else:
            meta = torch.empty(shape, dtype=kind, device="meta")
            found += [(own, part.dtype, tuple(part.shape)) for own, part in _renamed(name, meta, rename)]
    return _written(found)


def _written(manifest: Described) -> list[Tensor]:
    """The manifest as it travels, held to what the coordinator would say about it."""
    if not isinstance(cast("object", manifest), Iterable):
        raise BadRequest(f"manifest: {kind(manifest)}; (name, dtype, shape) of each tensor", field="manifest")
    tensors: list[Tensor] = []
    for number, entry in enumerate(manifest):
        try:
            name, dtype, shape = entry if not isinstance(entry, Tensor) else (entry.name, entry.dtype, entry.shape)
            tensors.append(Tensor(name, _dtype_name(dtype), tuple(map(int, shape))))
        except (TypeError, ValueError):
            raise BadRequest(f"manifest: its entry {number}: not (name, dtype, shape)", field="manifest") from None
    for tensor in tensors:
        if isinstance(cast("object", tensor.name), str):
            utf8("source", tensor.name)
        if tensor.dtype not in SIZES:
            where = f"source[{tensor.name}]"
            raise BadRequest(f"{where}: dtype {tensor.dtype} cannot be sent", field=where, limit=", ".join(SIZES))
    try:
        return decode_manifest(encode_manifest(tensors))
    except WireError as error:
        field = error.field.replace("manifest", "source", 1)
        raise BadRequest(error.message.replace("manifest", "source", 1), field=field, limit=error.limit) from None


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def fits(name: str, tensor: Any, described: Tensor) -> str:
    """Why a tensor is not the one that was described, or ""."""
    if name != described.name:
        return f"expected {described.name} as announced, got {name}"
    if tuple(tensor.shape) != described.shape:
        return f"{name}: expected the announced shape {list(described.shape)}, got {list(tensor.shape)}"
    if _dtype_name(tensor.dtype) != described.dtype:
        return f"{name}: expected the announced dtype {described.dtype}, got {_dtype_name(tensor.dtype)}"
    return ""
