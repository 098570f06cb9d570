"""What the model in one of the engine's processes holds: its digest, what is wrong with it, one tensor. No SGLang here.

With a plan, tensors are those of the checkpoint, by their names there; without one they are the model's own parameters.
"""

import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor
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


def part_findings(model: Any, plan: LoadPlan | None) -> dict[str, Any]:
    """What is wrong with the parts of tensors that are here, as `rank_answers.whole_findings` takes it.

    `wrong`: (tensor, kind, part, count), once for a part that was copied to several places. `filled`: by tensor, its parts here
    that are not zero in any of their places. Parts have the same names in all ranks.
    """
    if plan is None:
        own = f"of process {os.getpid()}"
        parts = [(name, own, parameter.detach()) for name, parameter in model.named_parameters()]
    else:
        copies = ((name, copy) for name, copies in plan.copies.items() for copy in copies if copy.fill is None)
        parts = [(name, str(copy[1:4]), copy.target) for name, copy in copies]
    looked = Findings()
    looked.add(DigestBatch([str(i) for i in range(len(parts))], [target for _, _, target in parts]))
    counts: dict[tuple[str, str, str], int] = {}
    for finding in looked.found():
        name, part, _ = parts[int(finding.name)]
        counts[name, finding.kind, part] = max(counts.get((name, finding.kind, part), 0), finding.count)
    filled: dict[str, list[str]] = {}
    for name, part, target in parts:
        if target.numel() and (name, "zero", part) not in counts:
            filled.setdefault(name, []).append(part)
    return {"wrong": [(*key, count) for key, count in counts.items()], "filled": filled}


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
