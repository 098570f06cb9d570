"""Weights inside the engine's own processes: the loader that SGLang calls for an update, and what it can tell of the model.

SGLang hands the loader one empty tensor, whose name is a *ticket*: JSON that says what to do and where the bytes lie, one for
each rank. (Bytes of a tensor would have to come back from the GPU, behind a forward.) The answer goes to a file that the ticket
names: an exception here would end the engine. No SGLang here.

New weights begin and end with a flush of SGLang's caches, in the same call: the engine stands still meanwhile, and a call of
its own takes longer than a flush. Where the first one is refused, for the scheduler has work in hand, nothing has changed.
`new_weights` says what is flushed where requests were paused.
"""

import importlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.transfer.digest import Digest, make_ready
from enginepool.transfer.shared_memory import visible_gpus
from enginepool.workers.sglang.host.process import own_load
from enginepool.workers.sglang.patches.new_weights import forget_old_weights, go_on, ready_for_new_weights
from enginepool.workers.sglang.patches.scheduler import has_graphs
from enginepool.workers.sglang.weights.adapters import AdapterLayers
from enginepool.workers.sglang.weights.broadcast_receive import GroupMember, received
from enginepool.workers.sglang.weights.completeness import incomplete_load
from enginepool.workers.sglang.weights.lent_memory import LentMemory
from enginepool.workers.sglang.weights.load_plan import LoadPlan, addresses, rebound, refuse_rebinding
from enginepool.workers.sglang.weights.load_watch import Unplannable, Unrepeatable
from enginepool.workers.sglang.weights.model_inspection import digests, part_findings, part_of, why_not_comparable
from enginepool.workers.sglang.weights.prepared_load import PreparedLoad, manifest_of, open_regions, sealed
from enginepool.workers.sglang.weights.saved_state import rearranged, save_later
from enginepool.workers.sglang.weights.ticket_answers import first_line, write_answer
from enginepool.workers.weights.checkpoint import checkpoint_files, checkpoint_tensors

torch: Any = importlib.import_module("torch")

#: seconds that one ticket to prepare a load keeps a scheduler from its forwards, about
PREPARE_S = 0.001

Pairs = Callable[[], Iterable[tuple[str, Any]]]


def load(model: Any, named_tensors: list[tuple[str, Any]], refused: str = "") -> None:
    """The `custom_weight_loader`. `refused`: why SGLang takes no updates of this model, or ""."""
    ticket: dict[str, Any] = msgspec.json.decode(named_tensors[0][0])
    weights = _weights.get(id(model)) or _weights.setdefault(id(model), ModelWeights(model))
    weights.touched, weights.refused, weights.running = False, refused, ticket.get("running", "")
    try:
        with weights.adapters.away():
            answer: dict[str, Any] = getattr(weights, f"do_{ticket['do']}")(ticket) or {}
        if ticket.get("goes_on"):
            go_on()
    except Exception as error:
        answer = {"error": first_line(error), "touched": weights.touched, "kind": type(error).__name__}
    write_answer(f"{ticket['answer']}.{os.getpid()}" if ticket.get("several") else ticket["answer"], answer)


class EngineBusy(Exception):
    """The scheduler has work in hand."""


class NotPrepared(Exception):
    """The prepared load is not there, or the model has changed since."""


class ModelWeights:
    """One model in this process. Each `do_` is what a ticket can ask for; it returns the answer."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.adapters = AdapterLayers(model)
        #: whether the ticket at hand has changed weights
        self.touched = False
        #: why SGLang takes no updates of this model, or ""
        self.refused = ""
        #: how requests were paused that are in the engine during the ticket at hand; "": there are none
        self.running = ""
        self._plan: LoadPlan | None = None
        #: why updates are loaded plainly
        self._plain = "not looked at yet"
        #: what the model holds, as far as names and order go
        self._manifest: list[Tensor] = []
        self._member = GroupMember()
        #: the model's addresses were checked when the group was joined, while the engine served: that takes a millisecond
        self._looked = False
        self._prepared: PreparedLoad | None = None
        self._lent = LentMemory()

    # --- what there is --------------------------------------------------------------------------------------------------

    def do_describe(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """What the model's own load took. Called once, before the engine serves."""
        for parameter in itertools.islice(self._model.parameters(), 1):
            make_ready(parameter.device)  # seconds, that no update's clock should see
        own = [Tensor(*one) for one in own_load()]
        if why := incomplete_load():
            return {"unusable": why}
        if why := ticket.get("refused") or self._refused(own):
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
            plan = self._planned(own, [tied] if optional - {tensor.name for tensor in own} else [], optional)
            plan.prove(own)
            optional |= {name for name, copies in plan.copies.items() if not copies}
            self._plan, self._plain = plan, ""
        except Unrepeatable as error:
            return {"refused": f"what it was loaded from cannot be loaded again: {error}"}
        except Unplannable as error:
            self._plain = str(error)
            if why := refuse_rebinding(rebound(self._model, own) if has_graphs() else ""):
                return {"refused": why}
        return {
            "tensors": [list(tensor) for tensor in msgspec.to_builtins(own)],
            "optional": sorted(optional),
            "gpus": visible_gpus(),
            "held": self._held(own),
            "plain": self._plain,
        }

    def _planned(self, own: list[Tensor], others: list[Tensor], optional: set[str]) -> LoadPlan:
        """A plan for `own` and, if the model's load knows them, `others`; what it does not know is not `optional`."""
        if others:
            try:
                return LoadPlan(self._model, [*own, *others])
            except Unrepeatable:
                optional -= {tensor.name for tensor in others}
        return LoadPlan(self._model, own)

    def _held(self, own: list[Tensor]) -> dict[str, str]:
        """By name, the dtype in which the model holds a tensor: that of the plan's copies, or the narrowest of the model."""
        if self._plan is not None:
            firsts = {
                name: next((copy for copy in copies if copy.fill is None), None) for name, copies in self._plan.copies.items()
            }
            return {name: _dtype(copy.target) for name, copy in firsts.items() if copy is not None}
        floats = [parameter for parameter in self._model.parameters() if parameter.is_floating_point()]
        smallest = min(floats, key=lambda parameter: torch.finfo(parameter.dtype).max, default=None)
        return {} if smallest is None else dict.fromkeys((one.name for one in own), _dtype(smallest))

    def _refused(self, own: list[Tensor]) -> str:
        if self.refused:
            return f"SGLang refuses: {self.refused}"
        if not own:
            return "its weights were not loaded from a checkpoint's tensors, so it is unknown what an update consists of"
        why = rearranged(self._model)
        return f"{why}, and loading them again in place is not possible" if why else ""

    # --- new weights ----------------------------------------------------------------------------------------------------

    def do_prepare(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Prepare to load all tensors from regions, or go on with that: for a moment, while the engine serves."""
        if self._plan is None:
            raise ValueError(f"updates are loaded plainly: {self._plain}")
        name, regions, before = ticket["name"], ticket.get("regions"), self._prepared
        try:
            if regions is not None and (before is None or not before.serves(name, regions, ticket["manifest"])):
                # The one before is there until this one is: memory that both use stays open.
                self._prepared = PreparedLoad(name, self._plan, regions, ticket["manifest"], self._lent.opened(regions))
                if before is not None:
                    before.close()
            if self._prepared is None or self._prepared.name != name:
                raise NotPrepared(f"{name} was released meanwhile")
            self._prepared.go_on(PREPARE_S)
        except (ValueError, OSError, RuntimeError):
            self._release_prepared()
            raise
        return {"done": self._prepared.done, "seconds": self._prepared.seconds}

    def do_release(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Forget the prepared or verified load, and release its memory."""
        self._release_prepared()
        self._lent.close()
        return {}

    def do_verify(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Begin to open a space and to read every byte of it; the other answer says what was found: the engine serves
        meanwhile."""
        self.do_release(ticket)
        self._lent.verify(ticket)
        return {}

    def _release_prepared(self) -> None:
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = None

    def do_load(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Load what was prepared under that name, or all tensors from the regions."""
        if "regions" not in ticket:
            return self._load_prepared(ticket["name"])
        manifest = manifest_of(ticket["manifest"])
        opened = self._lent.opened(ticket["regions"])
        if opened is None:
            opened = open_regions(ticket["regions"], layout(manifest).nbytes)
        times = self._load(manifest, lambda: opened.tensors(manifest))
        _still(sealed(opened, ticket["regions"]))
        return times

    def _load_prepared(self, name: int) -> dict[str, Any]:
        prepared = self._prepared
        if prepared is None or not prepared.done or prepared.name != name or self._plan is None or not self._plan.stays():
            raise NotPrepared(f"{name} is not prepared here")
        times = self._exchange(prepared.manifest, prepared.copies.replay)
        _still(prepared.sealed)
        return times

    def do_checkpoint(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Read all tensors of a checkpoint directory."""
        safetensors: Any = importlib.import_module("safetensors")
        files = checkpoint_files(ticket["path"])

        def pairs() -> Iterator[tuple[str, Any]]:
            for file in files:
                with safetensors.safe_open(str(file), framework="pt", device="cpu") as opened:
                    for name in opened.keys():  # noqa: SIM118 (no dict)
                        yield name, opened.get_tensor(name)

        return self._load(manifest_of(ticket["manifest"]) or checkpoint_tensors(ticket["path"]), pairs)

    def do_receive(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Take all tensors as they are broadcast."""
        manifest = manifest_of(ticket["manifest"])
        group = self._member.group
        if group is None or group.name != ticket["group"]:
            raise ValueError(f"not in group {ticket['group']}")
        digest = Digest()

        def came(own: bool) -> Iterator[tuple[str, Any]]:
            return received(group, manifest, ticket["bucket_bytes"], digest, own)

        times = self._load(manifest, lambda: came(False), lambda: came(True), looked=self._looked)
        return times | {"digest": digest.text()}

    def _load(
        self, manifest: list[Tensor], pairs: Pairs, lasting: Pairs | None = None, *, looked: bool = False
    ) -> dict[str, Any]:
        """Load `pairs` by the plan, or `lasting` ones by the model's own load, which may keep tensors for later."""
        plan = self._plan
        if plan is not None and plan.holds((tensor.name for tensor in manifest), looked=looked):
            return self._exchange(manifest, lambda: plan.replay(pairs()))
        return self._exchange(manifest, lambda: self._load_plainly((lasting or pairs)()))

    def _load_plainly(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Raises RuntimeError: the engine must end."""
        graphs = has_graphs()
        before = addresses(self._model) if graphs else {}
        self._model.load_weights(iter(pairs))
        after = addresses(self._model) if graphs else {}
        moved = next((place[1] for place, at in before.items() if after.get(place) != at), "")
        if why := refuse_rebinding(moved):
            raise RuntimeError(why)

    def _exchange(self, manifest: list[Tensor], load: Callable[[], Any]) -> dict[str, Any]:
        """What the engine stands still for. Raises Busy, or ValueError where SGLang takes no updates: nothing has changed."""
        if self.refused:
            raise ValueError(self.refused)
        began = time.perf_counter()
        if not ready_for_new_weights(self.running):
            raise EngineBusy("requests are running")
        flushed = time.perf_counter()
        _synchronize()
        self.touched = True
        load()
        _synchronize()
        loaded = time.perf_counter()
        if not forget_old_weights(self.running):
            raise RuntimeError("it has new weights and caches of the old ones")
        if {tensor.name for tensor in self._manifest} <= {tensor.name for tensor in manifest}:
            self._manifest = manifest
        ended = time.perf_counter()
        return {"load_s": loaded - flushed, "flush_s": flushed - began + ended - loaded}

    # --- a process group ------------------------------------------------------------------------------------------------

    def do_join(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Begin to join a group; the other answer says when it is done: the engine serves meanwhile."""
        self._looked = self._plan is not None and self._plan.holds(())
        self._member.join(ticket)
        return {}

    # --- questions ------------------------------------------------------------------------------------------------------

    def do_confirm(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """All that was asked before is done."""
        return {}

    def do_save(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Begin to write the weights into files; the other answer says when they are whole: the engine serves meanwhile."""
        save_later(self._model, ticket)
        return {}

    def do_digest(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """The digest of the weights in the model, tensor by tensor; and why it is not that of what was sent."""
        why, absent = f"the load of this model computes: {self._plain}", list[str]()
        if self._plan is not None:
            why, absent = why_not_comparable(self._plan, self._manifest)
        return {"digests": digests(self._model, self._plan, self._manifest), "why": why, "absent": absent}

    def do_validate(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """What is wrong with the parts of the weights that are in this model."""
        return part_findings(self._model, self._plan)

    def do_tensor(self, ticket: dict[str, Any]) -> dict[str, Any]:
        """Elements of a tensor by its checkpoint name; with several ranks each has a part, or all of it, or none."""
        try:
            tensor, here = part_of(ticket["name"], self._model, self._plan, self._manifest)
        except KeyError as error:
            return {"error": f"{error.args[0]}{'' if self._plan else f': {self._plain}'}", "kind": "Absent"}
        chunk = slice(ticket["offset"], ticket["offset"] + ticket["count"])
        return {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "data": tensor.reshape(-1)[chunk].float().cpu().contiguous().numpy().tobytes(),
            "here": here.reshape(-1)[chunk].cpu().contiguous().numpy().tobytes(),
        }


_weights: dict[int, ModelWeights] = {}


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _still(sealed: bool) -> None:
    """Raises ValueError: the memory was changed while it was copied."""
    if not sealed:
        raise ValueError("the memory that the weights came from was given to something else meanwhile")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
