"""What a model's `load_weights` copies where: learned once from tensors without memory, proven, and replayed for every update.

`load_weights` looks up names, cuts and fuses, in Python, for each of hundreds of tensors. The copies that follow are always the
same. To learn them, it is called with tensors on torch's `meta` device, under a mode that notes each copy from one of them into
the model's memory and carries none out. Views, copies and constant fills can be replayed. A model whose load does anything
else, or replaces tensors of the model, is loaded by its own `load_weights` in each update. Runs in the engine's processes; no
SGLang here.
"""

import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor
from enginepool.transfer.digest import Digest
from enginepool.workers.sglang.weights.load_watch import CopyWatch, DryRun, Unplannable, Unrepeatable

torch: Any = importlib.import_module("torch")
log = logging.getLogger("enginepool")

#: bytes that the proof changes at a time, at least one tensor
_PROOF_BYTES = 128 << 20


def rebound(model: Any, tensors: Sequence[Tensor]) -> str:
    """The name of a tensor of the model that its load gives other memory, or "": none, or the load cannot be tried.

    Nothing in the model changes.
    """
    before = _kept(model)
    pairs = ((tensor.name, torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")) for tensor in tensors)
    try:
        with torch.no_grad(), DryRun():
            model.load_weights(pairs)
    except Exception:  # it is the model's code, which may raise anything where a tensor has no memory
        log.debug("a load that cannot be tried without memory", exc_info=True)
    return _put_back(model, before)


def addresses(model: Any) -> dict[tuple[int, str], int]:
    """The address of each tensor that a module keeps."""
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
        watch = CopyWatch({tensor.untyped_storage()._cdata for tensor in _memory(model)})
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
            replaced = _put_back(model, before)
        if replaced:
            raise Unplannable(f"its load replaces {replaced}")
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
        """Whether the plan has all these names, and the model's tensors have the addresses that they had. `looked`: the
        addresses were compared a moment ago, so that `stays` is enough."""
        return all(name in self.copies for name in names) and (self.stays() if looked else self._addresses == self._look())

    def stays(self) -> bool:
        """Whether the tensors of the model have the addresses that they had. Unlike `holds`, it does not see modules that were
        added since. It takes a tenth of the time."""
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
        """Load every tensor with all its bits inverted, by the model's own `load_weights`. Check that each bit is where the
        plan says. Copy the old values back, and check that nothing in the model has changed. The engine must be idle.

        Raises:
            Unplannable: the plan is wrong, and the model is as before.
            RuntimeError: the model is not as before.
        """
        before = self._digests()
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
        if before != self._digests():
            raise RuntimeError(f"the model is not as before: {wrong or 'its load writes elsewhere'}")
        if wrong:
            raise Unplannable(wrong)

    def _digests(self) -> list[str]:
        return [digest_of_tensor(tensor).text() for tensor in _memory(self._model)]

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
    """Every tensor that a module keeps, also as a plain attribute: the dict that has it, the tensor, and its memory."""
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
    """Give modules their old tensors back, in the old memory and shape. The name of one that had been replaced, or ""."""
    replaced = ""
    for place, (kept, _, _) in _kept(model).items():
        if place not in before:
            _, replaced = place
            del kept[replaced]
    for (_, name), (kept, tensor, data) in before.items():
        if kept.get(name) is not tensor:
            kept[name], replaced = tensor, name
        if tensor.shape != data.shape or (not tensor.is_meta and tensor.data_ptr() != data.data_ptr()):
            tensor.data, replaced = data, name
    return replaced


def digest_of_tensor(tensor: Any, at: int = 0) -> Digest:
    """The digest of a tensor's bytes, as if they lay in a space from byte `at` on, with zeros behind them."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()  # the digest is that of words
    whole = data.numel() // ALIGNMENT * ALIGNMENT
    digest = Digest()
    if whole:
        digest.add(data[:whole], at)
    if whole < data.numel():
        rest = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - whole].copy_(data[whole:])
        digest.add(rest, at + whole)
    return digest
