"""Weights inside the engine's own processes: the loader that SGLang calls for an update, and what it can tell of the model.

SGLang hands the loader one tiny tensor, a *ticket*: JSON that says what to do and where the bytes lie, one for each rank. The
answer goes to a file that the ticket names: an exception here would end the engine. No SGLang here.
"""

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from enginepool.digest import Digest, Findings, views
from enginepool.protocol.layout import ALIGNMENT, buckets, layout
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.updates import Space
from enginepool.spaces import examined, open_space, sealed, visible_gpus
from enginepool.workers.checkpoint import checkpoint_files, checkpoint_tensors
from enginepool.workers.sglang_plan import Plan, Unplannable
from enginepool.workers.sglang_process import own_load

torch: Any = importlib.import_module("torch")

#: a bucket that takes longer never comes
BUCKET_S = 60.0

Pairs = Callable[[], Iterable[tuple[str, Any]]]


def load(model: Any, named_tensors: list[tuple[str, Any]]) -> None:
    """The `custom_weight_loader`."""
    ticket: dict[str, Any] = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    weights = _weights.setdefault(id(model), ModelWeights(model))
    weights.touched = False
    try:
        answer: dict[str, Any] = getattr(weights, f"do_{ticket['do']}")(ticket) or {}
    except Exception as error:
        answer = {"error": _line(error), "touched": weights.touched}
    _leave(ticket["answer"], answer)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _leave(path: str, answer: dict[str, Any]) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(msgspec.msgpack.encode(answer))
    os.replace(f"{path}.part", path)


class ModelWeights:
    """One model in this process. Each `do_` is what a ticket can ask for; it returns the answer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        #: whether the ticket at hand has changed weights
        self.touched = False
        self._plan: Plan | None = None
        #: why updates are loaded plainly
        self._plain = "not looked at yet"
        #: what the model holds, as far as names and order go
        self._manifest: list[Tensor] = []
        self._group: Any = None
        #: the ticket of the latest examination; the space that it has opened, by what the ticket says of it
        self._examining: dict[str, Any] | None = None
        self._opened: tuple[dict[str, Any], Any] | None = None
        self._lock = threading.Lock()

    # --- what there is --------------------------------------------------------------------------------------------------

    def do_describe(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """What the model's own load took. Called once, before the engine serves."""
        own = [Tensor(*one) for one in own_load()]
        if why := self._refused(own):
            return {"refused": why}
        self._manifest = own
        optional: set[str] = set()
        config = getattr(self._model, "config", None)
        tied = Tensor("lm_head.weight", "", ())
        embedding = next((tensor for tensor in own if tensor.name.endswith("embed_tokens.weight")), None)
        if getattr(config, "tie_word_embeddings", False) and embedding is not None:
            optional.add(tied.name)
            tied = Tensor(tied.name, embedding.dtype, embedding.shape)
        try:
            known = {tensor.name for tensor in own}
            plan = Plan(self._model, [*own, tied] if optional - known else own)
            plan.prove(own)
            optional |= {name for name, copies in plan.copies.items() if not copies}
            self._plan, self._plain = plan, ""
        except Unplannable as error:
            self._plain = str(error)
        return {
            "tensors": [list(tensor) for tensor in msgspec.to_builtins(own)],
            "optional": sorted(optional),
            "gpus": visible_gpus(),
            "plain": self._plain,
        }

    def _refused(self, own: list[Tensor]) -> str:
        if not own:
            return "its weights were not loaded from a checkpoint's tensors, so nobody knows what an update consists of"
        for module in self._model.modules():
            method = getattr(module, "quant_method", None)
            if method is not None and not type(method).__name__.startswith("Unquantized"):
                return f"its weights are quantised ({type(method).__name__}); they are made anew from a checkpoint alone"
            if getattr(module, "use_intel_amx_backend", False):
                return "its weights are packed for AMX"
        return ""

    # --- new weights ----------------------------------------------------------------------------------------------------

    def do_take(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Take all tensors out of a space."""
        manifest = _manifest(ticket)
        began = time.perf_counter()
        opened = self._opened
        space = opened[1] if opened is not None and opened[0] == ticket["space"] else _open(ticket["space"])
        if space.numel() < layout(manifest).nbytes:
            raise ValueError(f"a space of {space.numel()} bytes for {layout(manifest).nbytes}")
        tensors = views(space, manifest)
        self._load(manifest, lambda: zip((tensor.name for tensor in manifest), tensors, strict=True))
        if not sealed(space, msgspec.convert(ticket["space"], Space).seal):
            raise ValueError("the memory that the weights came from was given to something else meanwhile")
        return {"seconds": time.perf_counter() - began, "plain": self._plain}

    def do_examine(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Begin to open a space and to look at every byte of it; the other answer says what was found: the engine serves
        meanwhile."""
        self.do_forget(ticket)
        self._examining = ticket
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._examine, args=(ticket, device), name="examine", daemon=True).start()
        return {}

    def _examine(self, ticket: dict[str, Any], device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins on the first one
            space = _open(ticket["space"])
            digest, findings = examined(space, _manifest(ticket))
            answer: dict[str, Any] = {"digest": digest, "findings": msgspec.to_builtins(findings)}
            with self._lock:
                if self._examining is ticket:
                    self._opened = ticket["space"], space
        except Exception as error:
            answer = {"error": _line(error)}
        _leave(ticket["later"], answer)

    def do_forget(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Close what was examined."""
        with self._lock:
            self._examining = self._opened = None
        return {}

    def do_checkpoint(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Read all tensors of a checkpoint directory."""
        safetensors: Any = importlib.import_module("safetensors")
        files = checkpoint_files(ticket["path"])

        def pairs() -> Iterator[tuple[str, Any]]:
            for file in files:
                with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 (no dict)
                        yield name, opened.get_tensor(name)

        self._load(_manifest(ticket) or checkpoint_tensors(ticket["path"]), pairs)
        return {}

    def do_receive(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Take all tensors as they are broadcast."""
        manifest = _manifest(ticket)
        if self._group is None or self._group.name != ticket["group"]:
            raise ValueError(f"not in group {ticket['group']}")
        digest = Digest()
        self.touched = True
        self._load(manifest, lambda: self._received(manifest, ticket["bucket_bytes"], digest))
        return {"digest": digest.text()}

    def _load(self, manifest: list[Tensor], pairs: Pairs) -> None:
        _synchronise()
        self.touched = True
        names = [tensor.name for tensor in manifest]
        if self._plan is not None and self._plan.holds(names):
            self._plan.replay(pairs())
        else:
            self._model.load_weights(iter(pairs()))
        _synchronise()
        if {tensor.name for tensor in self._manifest} <= set(names):
            self._manifest = manifest

    def _received(self, manifest: list[Tensor], bucket_bytes: int, digest: Digest) -> Iterator[tuple[str, Any]]:
        """Each tensor as soon as it is whole; the next bucket is on its way meanwhile.

        On a GPU a broadcast into a bucket's memory waits for the copies out of it that were begun before.
        """
        nbytes = layout(manifest).nbytes
        device = self._group.device
        size = min(bucket_bytes, nbytes)
        ring = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
        cuts = list(buckets(manifest, bucket_bytes))
        ways: list[Any] = []
        torn: dict[int, Any] = {}

        def begin(k: int) -> None:
            if k < len(cuts):
                ways.append(self._group.begin(ring[k % 2][: cuts[k].nbytes]))

        begin(0)
        for k, bucket in enumerate(cuts):
            ways[k].wait(BUCKET_S)
            begin(k + 1)
            came = ring[k % 2][: bucket.nbytes]
            digest.add(came, bucket.at)
            for piece in bucket.pieces:
                tensor = manifest[piece.tensor]
                part = came[piece.bucket_at : piece.bucket_at + piece.nbytes]
                if piece.nbytes < tensor.nbytes:
                    if piece.tensor not in torn:
                        torn[piece.tensor] = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
                    torn[piece.tensor][piece.tensor_at : piece.tensor_at + piece.nbytes].copy_(part)
                    if piece.tensor_at + piece.nbytes < tensor.nbytes:
                        continue
                    part = torn.pop(piece.tensor)
                yield tensor.name, part.view(getattr(torch, tensor.dtype)).view(tensor.shape)

    # --- a process group ------------------------------------------------------------------------------------------------

    def do_join(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Begin to join a group; the other answer says when it is done: the engine serves meanwhile."""
        device = f"cuda:{torch.cuda.current_device()}" if ticket["backend"] == "nccl" else "cpu"
        thread = threading.Thread(target=self._join, args=(ticket, device), name="join", daemon=True)
        thread.start()
        return {}

    def _join(self, ticket: dict[str, Any], device: str) -> None:
        from enginepool.collective import CollectiveError, join

        answer: dict[str, Any] = {}
        group, self._group = self._group, None
        try:
            if group is not None and group.name != ticket["group"]:
                group.abort()
                group = None
            if device != "cpu":
                torch.cuda.set_device(device)  # a thread begins on the first one
            self._group = group or join(
                ticket["address"], ticket["group"], ticket["world"], ticket["rank"], backend=ticket["backend"], device=device
            )
        except (CollectiveError, RuntimeError, ValueError) as error:
            answer = {"error": str(error)}
        _leave(ticket["later"], answer)

    # --- questions ------------------------------------------------------------------------------------------------------

    def do_digest(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """The digest of the weights in the model, as if they lay in the space of the last update, tensor by tensor.

        Each comes with the name of the part that is here: ranks that hold the same part name it alike, and parts that differ
        add up to the whole.
        """
        digests: list[tuple[str, Digest]] = []
        at = 0
        for name, tensor in self._digested():
            data = tensor.detach().contiguous().view(-1).view(torch.uint8)
            size = -(-data.numel() // ALIGNMENT) * ALIGNMENT
            padded = torch.zeros(size, dtype=torch.uint8, device=data.device)
            padded[: data.numel()].copy_(data)
            digest = Digest()
            digest.add(padded, at)
            digests.append((name, digest))
            at += size
        return {"digests": [(name, digest.text()) for name, digest in digests]}

    def _digested(self) -> Iterator[tuple[str, Any]]:
        if self._plan is None:
            for name, parameter in sorted(self._model.named_parameters()):
                yield f"{name} of process {os.getpid()}", parameter
            return
        for tensor in self._manifest:
            copies = [copy for copy in self._plan.copies[tensor.name] if copy.fill is None]
            dtype = getattr(torch, tensor.dtype)
            read = self._plan.read(tensor.name, tensor.shape, dtype)[0] if copies else torch.zeros(tensor.shape, dtype=dtype)
            yield f"{tensor.name} {[copy[1:4] for copy in copies]}", read

    def do_validate(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """What is wrong with the weights in the model."""
        findings = Findings()
        if self._plan is None:
            named = dict(self._model.named_parameters())
            findings.add(list(named), [parameter.detach() for parameter in named.values()])
        else:
            for name, copies in self._plan.copies.items():
                targets = [copy.target for copy in copies if copy.fill is None][:1]
                findings.add([name] * len(targets), targets)
        return {"findings": msgspec.to_builtins(findings.found())}

    def do_tensor(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """One tensor by its checkpoint name; with several ranks each has a part."""
        name = ticket["name"]
        if self._plan is None:
            parameter = dict(self._model.named_parameters()).get(name)
            if parameter is None:
                raise KeyError(f"no parameter {name!r}; checkpoint names are not known here: {self._plain}")
            tensor, here = parameter.detach(), torch.ones(parameter.shape, dtype=torch.bool)
        else:
            shapes = {tensor.name: tensor.shape for tensor in self._manifest}
            if name not in shapes or not self._plan.copies[name]:
                raise KeyError(f"no weight {name!r}")
            tensor, here = self._plan.read(name, shapes[name])
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": tensor.float().cpu().contiguous().numpy().tobytes(),
            "here": here.cpu().contiguous().numpy().tobytes(),
        }


_weights: dict[int, ModelWeights] = {}


def _manifest(ticket: dict[str, Any]) -> list[Tensor]:
    return [Tensor(name, dtype, tuple(shape)) for name, dtype, shape in ticket["manifest"]]


def _open(space: dict[str, Any]) -> Any:
    """The bytes of a space, in this process."""
    return open_space(msgspec.convert(space, Space))


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
