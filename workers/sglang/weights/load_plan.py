"""What a model's `load_weights` copies where: learned once from tensors without memory, proven, and replayed for every update.

`load_weights` looks up names, cuts and fuses, in Python, for each of hundreds of tensors; the copies that come of it are always
the same. It is called with tensors on torch's `meta` device under a mode that notes each copy from one of them into the model's
memory, and carries none out. Anything but views, copies and constant fills is not understood, nor is a load that makes some of
the model's tensors anew, from others of its weights; such a model is loaded plainly. Runs in the engine's processes; no SGLang
here.
"""

import importlib
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from enginepool.protocol.manifest import Tensor

torch: Any = importlib.import_module("torch")
_Mode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
_aten: Any = torch.ops.aten
log = logging.getLogger("enginepool")

#: bytes that the proof changes at a time, at least one tensor
_PROOF_BYTES = 128 << 20
_COLUMNS = 1024


class Unplannable(Exception):
    """Updates of this model cannot be replayed. The message is one line."""


class Unrepeatable(Unplannable):
    """The model's load does not know one of the tensors, or knows it no more. The message is one line."""


class Copy(NamedTuple):
    """Elements of a checkpoint's tensor, and the memory of the model that they go to; `size` () and `fill`: a constant."""

    target: Any
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    fill: Any = None

    def source(self, tensor: Any) -> Any:
        """The elements in `tensor`, which is contiguous."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def cut(self, begins: Sequence[int]) -> "Iterator[tuple[int, Copy]]":
        """This copy out of a tensor that lies in parts: (part, a copy out of that part alone), once for each element.

        Args:
            begins: the first element of each part, in their order; that of the first one is 0.
        """
        if self.fill is not None or not self.target.numel():
            yield 0, self
            return
        reach = [(size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)]
        part = bisect_right(begins, self.offset) - 1
        if part + 1 == len(begins) or self.offset + sum(reach) < begins[part + 1]:
            yield part, self._replace(offset=self.offset - begins[part])
            return
        dim = max(range(len(reach)), key=lambda dim: self.stride[dim] if self.size[dim] > 1 else 0)
        count, stride, left = self.size[dim], self.stride[dim], begins[part + 1] - self.offset
        # Rows that end before the next part begins; and the one in which it begins, unless it begins between two.
        before = min(count, max(0, (left - 1 - sum(reach) + reach[dim]) // stride + 1))
        after = before if before == count or before * stride >= left else before + 1
        for begin, end in ((0, before), (after, count)):
            if begin < end:
                yield from self._rows(dim, begin, end - begin).cut(begins)
        if before < after:
            row = self._rows(dim, before, 1)
            size, strides = ((*of[:dim], *of[dim + 1 :]) for of in (self.size, self.stride))
            yield from Copy(row.target.squeeze(dim), size, strides, row.offset).cut(begins)

    def _rows(self, dim: int, begin: int, count: int) -> "Copy":
        size = (*self.size[:dim], count, *self.size[dim + 1 :])
        return Copy(self.target.narrow(dim, begin, count), size, self.stride, self.offset + begin * self.stride[dim])


class _Watch(_Mode):
    """Notes copies from known meta tensors into real ones. `weights`: the storages of the model's own."""

    def __init__(self, weights: set[int]) -> None:
        _Mode.__init__(self)
        self.copies: dict[str, list[Copy]] = {}
        self._weights = weights
        self._known: dict[int, tuple[str, Any]] = {}
        #: a number that stands for the one in a tensor of one element, and that tensor, until it is filled in somewhere
        self._number: tuple[float, Any] | None = None
        self.latest = ""

    def feed(self, tensors: Iterable[Tensor]) -> Iterator[tuple[str, Any]]:
        for tensor in tensors:
            self.expect_no_number()
            made = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
            self._known[made.untyped_storage()._cdata] = (tensor.name, made)
            self.latest = tensor.name
            self.copies[tensor.name] = []
            yield tensor.name, made

    def expect_no_number(self) -> None:
        """Raises Unplannable: the load has read a number, and did something else with it than to fill it in."""
        if self._number is not None:
            raise Unplannable(f"{self.latest}: its load computes with a number")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        real = [tensor for tensor in tensors if not tensor.is_meta]
        if func is _aten.copy_.default and real and real[0] is args[0]:
            self._note(args[0], args[1])
            return args[0]
        if func is _aten._local_scalar_dense.default and not real:
            self.expect_no_number()
            # One that no load has of its own; read as a number and filled in is how SGLang copies a single element.
            self._number = 0.7390851332151607 + len(self.copies), args[0]
            return self._number[0]
        if func is _aten.fill_.Scalar and real and self._number is not None:
            number, source = self._number
            if args[1] == number and args[0].numel() == 1:
                self._number = None
                self._note(args[0], source.view(args[0].shape))
                return args[0]
        if func in (_aten.fill_.Scalar, _aten.zero_.default) and real:
            self.expect_no_number()
            self.copies[self.latest].append(Copy(args[0], fill=args[1] if len(args) > 1 else 0))
            return args[0]
        if real and (len(real) < len(tensors) or func._schema.is_mutable):
            raise Unplannable(f"{self.latest}: its load does more than copy: {func}")
        if not func.is_view and any(tensor.untyped_storage()._cdata in self._weights for tensor in real):
            raise Unplannable(f"{self.latest}: its load computes with weights of the model: {func}")
        return func(*args, **kwargs)

    def _note(self, target: Any, source: Any) -> None:
        known = self._known.get(source.untyped_storage()._cdata) if source.is_meta else None
        if known is None or source.dtype != known[1].dtype or source.shape != target.shape:
            raise Unplannable(f"{self.latest}: its load computes what it copies")
        self.copies[known[0]].append(Copy(target, tuple(source.shape), source.stride(), source.storage_offset()))


class _Swallow(_Mode):
    """Runs a load to its end on tensors without memory, whatever it computes, and writes nothing to real ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        meta = any(tensor.is_meta for tensor in tensors)
        if func is _aten._local_scalar_dense.default and meta:
            return 1.0
        if func._schema.is_mutable and tensors and not tensors[0].is_meta:
            return args[0]
        if meta:
            args, kwargs = _on_meta(args), {name: _on_meta((value,))[0] for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _on_meta(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor) and not value.is_meta
        else value
        for value in values
    )


def rebound(model: Any, tensors: Sequence[Tensor]) -> str:
    """The name of a tensor of the model that its load gives other memory, or "": none, or the load cannot be tried.

    Nothing in the model changes.
    """
    before = _kept(model)
    pairs = ((tensor.name, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")) for tensor in tensors)
    try:
        with torch.no_grad(), _Swallow():
            model.load_weights(pairs)
    except Exception:
        log.debug("a load that cannot be tried without memory", exc_info=True)
    return _put_back(model, before)


def addresses(model: Any) -> dict[tuple[int, str], int]:
    """Where each tensor lies that a module keeps."""
    return {place: 0 if data.is_meta else data.data_ptr() for place, (_, _, data) in _kept(model).items()}


def refuse_rebinding(tensor: str) -> str:
    """Why a model whose load gives `tensor` other memory takes no updates where CUDA graphs run it, or "". Pure."""
    if not tensor:
        return ""
    return (
        f"its load gives {tensor} other memory, and the engine's CUDA graphs would go on reading the old one;"
        " set disable_cuda_graph = true in the group's options"
    )


class LoadPlan:
    """Where each tensor goes.

    Args:
        tensors: those of the model's checkpoint, and others that it may take.

    Raises:
        Unplannable: its load does more than copy.
        Unrepeatable: it does not take these tensors.
    """

    def __init__(self, model: Any, tensors: Sequence[Tensor]) -> None:
        watch = _Watch({tensor.untyped_storage()._cdata for tensor in _memory(model)})
        before = _kept(model)
        try:
            with torch.no_grad(), watch:
                model.load_weights(watch.feed(tensors))
                watch.expect_no_number()
        except Unplannable:
            raise
        except KeyError as error:
            raise Unrepeatable(f"{watch.latest}: its load does not know {error}") from error
        except Exception as error:
            raise Unplannable(f"{watch.latest}: {type(error).__name__}: {error}") from error
        finally:
            anew = _put_back(model, before)
        if anew:
            raise Unplannable(f"its load makes {anew} anew")
        self._model = model
        self.copies = watch.copies
        self._addresses = self._look()
        #: each tensor of the model, and where the model has it from
        self._places = [
            (kept, name, tensor, tensor.data_ptr())
            for module in model.modules()
            for kept in (module._parameters, module._buffers)
            for name, tensor in kept.items()
            if tensor is not None and not tensor.is_meta
        ]

    def _look(self) -> list[int]:
        return [tensor.data_ptr() for tensor in _memory(self._model)]

    def holds(self, names: Iterable[str], *, looked: bool = False) -> bool:
        """Whether it says of all these names where they go, and the model still lies where it lay. `looked`: that was so a
        moment ago, and `stays` tells the rest."""
        return all(name in self.copies for name in names) and (self.stays() if looked else self._addresses == self._look())

    def stays(self) -> bool:
        """Whether the tensors of the model lie where they lay. Of modules that came since it knows nothing, as `holds` does; a
        tenth of its time."""
        return all(kept.get(name) is tensor and tensor.data_ptr() == at for kept, name, tensor, at in self._places)

    def replay(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy contiguous tensors to where `load_weights` would have."""
        with torch.no_grad():
            for name, tensor in tensors:
                for copy in self.copies[name]:
                    if copy.fill is None:
                        copy.target.copy_(copy.source(tensor), non_blocking=True)
                    else:
                        copy.target.fill_(copy.fill)

    def read(self, name: str, shape: Sequence[int], dtype: Any = None) -> tuple[Any, Any]:
        """(the tensor `name` as the model holds it, which of its elements it holds: all, or the part of this rank)."""
        copies = [copy for copy in self.copies[name] if copy.fill is None]
        first = copies[0].target
        tensor = torch.zeros(tuple(shape), dtype=dtype or first.dtype, device=first.device)
        here = torch.zeros(tuple(shape), dtype=torch.bool, device=first.device)
        for copy in copies:
            copy.source(tensor).copy_(copy.target)
            copy.source(here).fill_(True)
        return tensor, here

    def prove(self, tensors: Sequence[Tensor]) -> None:
        """Load every tensor with all its bits turned over, by the model's own `load_weights`; see that each bit is where the
        plan says, and that after turning them back nothing in the model has changed. The engine must be idle.

        Raises:
            Unplannable: the plan is wrong, and the model is as before.
            RuntimeError: the model is not as before.
        """
        before = _marks(self._model)
        wrong = ""
        for group in _groups([tensor for tensor in tensors if self.copies[tensor.name]]):
            try:
                saved = [(copy.target, copy.target.clone()) for tensor in group for copy in self.copies[tensor.name]]
                turned = [(tensor.name, _turned(self.read(tensor.name, tensor.shape)[0])) for tensor in group]
            except RuntimeError as error:
                wrong = str(error).splitlines()[0]
                break
            try:
                self._model.load_weights(iter(turned))
                wrong = self._misplaced(turned)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            for target, original in saved:
                target.copy_(original)
            if wrong:
                break
        if before != _marks(self._model):
            raise RuntimeError(f"the model is not as before: {wrong or 'its load writes elsewhere'}")
        if wrong:
            raise Unplannable(wrong)

    def _misplaced(self, tensors: Sequence[tuple[str, Any]]) -> str:
        for name, tensor in tensors:
            for copy in self.copies[name]:
                if copy.fill is None and not torch.equal(_bits(copy.target), _bits(copy.source(tensor))):
                    return f"{name}: a replay would give other weights than load_weights"
        return ""


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(one.nbytes for one in group) + tensor.nbytes > _PROOF_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _bits(tensor: Any) -> Any:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])


def _turned(tensor: Any) -> Any:
    return _bits(tensor).bitwise_not().view(tensor.dtype).view(tensor.shape)


def _memory(model: Any) -> list[Any]:
    return [tensor for _, tensor in (*model.named_parameters(), *model.named_buffers()) if not tensor.is_meta]


def _kept(model: Any) -> dict[tuple[int, str], tuple[dict[str, Any], Any, Any]]:
    """Every tensor that a module keeps, attributes among them: where, which one, and its memory."""
    places: list[dict[str, Any]] = []
    for module in model.modules():
        places += [module._parameters, module._buffers, vars(module)]
    return {
        (id(kept), name): (kept, tensor, tensor.detach())
        for kept in places
        for name, tensor in kept.items()
        if isinstance(tensor, torch.Tensor)
    }


def _put_back(model: Any, before: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]]) -> str:
    """Have modules keep the tensors of before, in the memory and shape of before. The name of one that was another, or ""."""
    anew = ""
    for place, (kept, _, _) in _kept(model).items():
        if place not in before:
            _, anew = place
            del kept[anew]
    for (_, name), (kept, tensor, data) in before.items():
        if kept.get(name) is not tensor:
            kept[name], anew = tensor, name
        if tensor.shape != data.shape or (not tensor.is_meta and tensor.data_ptr() != data.data_ptr()):
            tensor.data, anew = data, name
    return anew


def _marks(model: Any) -> list[list[int]]:
    """For each piece of the model's memory, sums over rows and over columns of its words, which tell almost any change."""
    marks: list[Any] = []
    for tensor in _memory(model):
        data = (
            tensor.detach().contiguous().view(-1).view(torch.uint8)
            if tensor.dim()
            else tensor.detach().view(1).view(torch.uint8)
        )
        whole = data.numel() // 4 * 4
        words = data[:whole].view(torch.int32)
        square = words.numel() // _COLUMNS * _COLUMNS
        rows = words[:square].view(-1, _COLUMNS)
        parts = [rows.sum(0, dtype=torch.int32), rows.sum(1, dtype=torch.int32), words[square:], data[whole:].to(torch.int32)]
        row = torch.cat(parts)
        weights = torch.arange(1, row.numel() + 1, device=row.device)
        marks.append(torch.stack([row.sum(), (row * weights).sum()]))
    return torch.stack(marks).tolist() if marks else []
