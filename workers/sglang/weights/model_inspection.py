"""What the model in one of the engine's processes holds: its digest, what is wrong with it, one tensor. No SGLang here.

With a plan, tensors are those of the checkpoint, by their names there; without one they are the model's own parameters.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.transfer.digest import Digest, DigestBatch, Findings
from enginepool.workers.sglang.weights.load_plan import LoadPlan, digest_of_tensor

torch: Any = importlib.import_module("torch")


def digests(model: Any, plan: LoadPlan | None, manifest: Sequence[Tensor]) -> list[tuple[str, str]]:
    """The digest of each tensor, as if all lay in the space of the last update.

    Each comes with the name of the part that is here: ranks that hold the same part name it alike, and parts that differ add up
    to the whole.
    """
    found: list[tuple[str, Digest]] = []
    at = 0
    for name, tensor in _parts(model, plan, manifest):
        found.append((name, digest_of_tensor(tensor, at)))
        at += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return [(name, digest.text()) for name, digest in found]


def why_not_comparable(plan: LoadPlan, manifest: Sequence[Tensor]) -> tuple[str, list[str]]:
    """(why the model holds other bytes than those that were sent, or ""; names of tensors of which nothing is here)."""
    absent: list[str] = []
    for tensor in manifest:
        held = next((copy.target.dtype for copy in plan.copies[tensor.name] if copy.fill is None), None)
        if held is None:
            absent.append(tensor.name)
        elif torch.promote_types(getattr(torch, tensor.dtype), held) != held:
            return (
                f"{tensor.name} was sent as {tensor.dtype}, and the engine holds it as {str(held).removeprefix('torch.')}",
                [],
            )
    return "", absent


def _parts(model: Any, plan: LoadPlan | None, manifest: Sequence[Tensor]) -> Iterator[tuple[str, Any]]:
    if plan is None:
        for name, parameter in sorted(model.named_parameters()):
            yield f"{name} of process {os.getpid()}", parameter
        return
    for tensor in manifest:
        copies = [copy for copy in plan.copies[tensor.name] if copy.fill is None]
        dtype = getattr(torch, tensor.dtype)
        read = plan.read(tensor.name, tensor.shape, dtype)[0] if copies else torch.zeros(tensor.shape, dtype=dtype)
        yield f"{tensor.name} {[copy[1:4] for copy in copies]}", read


def findings(model: Any, plan: LoadPlan | None) -> list[Finding]:
    """What is wrong with it: of whole tensors, also where their parts are in several places."""
    if plan is None:
        parts = [(name, (), parameter.detach()) for name, parameter in model.named_parameters()]
    else:
        copies = ((name, copy) for name, copies in plan.copies.items() for copy in copies if copy.fill is None)
        parts = [(name, copy[1:4], copy.target) for name, copy in copies]
    looked = Findings()
    looked.add(DigestBatch([str(i) for i in range(len(parts))], [target for _, _, target in parts]))
    #: by tensor and kind: the count in each part, once for a part that was copied to several places
    counts: dict[tuple[str, str], dict[tuple[Any, ...], int]] = {}
    for finding in looked.found():
        name, part, _ = parts[int(finding.name)]
        of_parts = counts.setdefault((name, finding.kind), {})
        of_parts[part] = max(of_parts.get(part, 0), finding.count)
    sizes: dict[str, dict[tuple[Any, ...], int]] = {name: {} for name, kind in counts if kind == "zero"}
    for name, part, target in parts:
        if name in sizes:
            sizes[name][part] = target.numel()
    return [
        Finding(name, kind, sum(of_parts.values()))  # type: ignore[arg-type]
        for (name, kind), of_parts in counts.items()
        if kind != "zero" or sum(of_parts.values()) == sum(sizes[name].values())
    ]


def part_of(name: str, model: Any, plan: LoadPlan | None, manifest: Sequence[Tensor]) -> tuple[Any, Any]:
    """(the tensor of that name, which of its elements are here). Raises KeyError."""
    if plan is None:
        parameter = dict(model.named_parameters()).get(name)
        if parameter is None:
            raise KeyError(f"no parameter {name!r}; checkpoint names are not known here")
        return parameter.detach(), torch.ones(parameter.shape, dtype=torch.bool)
    shapes = {tensor.name: tensor.shape for tensor in manifest}
    if name not in shapes or not plan.copies[name]:
        raise KeyError(f"no weight {name!r}")
    return plan.read(name, shapes[name])
