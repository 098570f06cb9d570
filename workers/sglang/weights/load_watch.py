"""Runs a model's `load_weights` on tensors without memory: to note its copies, or only to see what it replaces.

The tensors are on torch's `meta` device. A load that does more than views, copies and constant fills is `Unplannable`. Runs in
the engine's processes; no SGLang here.
"""

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from enginepool.protocol.manifest import Tensor

torch: Any = importlib.import_module("torch")
_Mode: Any = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
_aten: Any = torch.ops.aten


class Unplannable(Exception):
    """Updates of this model cannot be replayed. The message is one line."""


class Unrepeatable(Unplannable):
    """The model's load does not know one of the tensors. The message is one line."""


class Copy(NamedTuple):
    """A copy of elements of a checkpoint's tensor into memory of the model; or of the constant `fill`."""

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


class CopyWatch(_Mode):
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
            # SGLang copies a single element by reading it as a number and filling it in. No load has this number itself.
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


class DryRun(_Mode):
    """Runs a load to its end on tensors without memory, and writes nothing to real ones."""

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
