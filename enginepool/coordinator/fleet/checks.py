"""Checks of a worker's capabilities and of its answers: are they possible, and do they match its group and its batch?

Each check returns the error in one line, or "". A worker that fails a check is lost, because its other messages cannot be
trusted.
"""

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.request import RunningBatch
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.operations.base import ID_FRAMES
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.protocol.capabilities import MAX_ADAPTER_NAME, MAX_ADAPTERS, MAX_BUDGET, MOST_FORWARD_MS, MOST_HALVINGS, halved
from enginepool.protocol.messages import Capabilities

#: Sizes that a worker can embed in, and characters of its operations, of its features, or of what it says of its engine. Each
#: status report and some errors have all of them.
MAX_NAMES = 1024
#: Layers, experts of a token, and ranks of an engine.
MAX_EXPERTS = 1 << 16
#: Tokens of a context. The lengths of prompts with media, which only a worker knows, are at most that, and the sum over all
#: prompts is in answers and in status reports, which have room for 64 bits.
MAX_CONTEXT = 1 << 31
#: Forwards of one batch. The sum over all batches is in each status report, which has room for 64 bits.
MAX_FORWARDS = 2**31


def impossible(can: Capabilities) -> str:
    """Why no engine has these capabilities, or ""."""
    if not (
        0 < can.batch_tokens <= can.inflight_tokens
        and 0 < can.batch_rows <= can.inflight_rows
        and 0 < can.page <= can.inflight_tokens
        and max(can.inflight_tokens, can.inflight_rows, can.sequences, can.sequence_tokens) <= MAX_BUDGET
        and 0 <= min(can.pace, can.packed_pace) <= max(can.pace, can.packed_pace) <= MAX_BUDGET
        and 0 <= min(can.fixed_ms, can.packed_fixed_ms) <= max(can.fixed_ms, can.packed_fixed_ms) <= MOST_FORWARD_MS
        and 0 < can.context <= MAX_CONTEXT
        and can.vocab > 0
        and can.labels >= 0
        and can.hidden >= 0
        and (0 < min(can.experts) <= max(can.experts) <= MAX_EXPERTS or can.experts == (0, 0))
        and can.max_item >= 0
        and 0 < can.forward_ms <= MOST_FORWARD_MS
        and can.reserved >= 0
        and 0 <= can.halvings <= MOST_HALVINGS
        and can.cached_query >= 0
        and _possible_sequences(can)
        and 0 < sum(map(len, can.operations)) <= MAX_NAMES
        and sum(map(len, can.features)) + len(can.features) <= MAX_NAMES
        and len(can.engine) + len(can.device) + len(can.dtype) <= MAX_NAMES
        and 0 < min(can.parallel) <= max(can.parallel) <= MAX_EXPERTS
        and len(can.dimensions) <= MAX_NAMES
        and len(can.adapters) <= MAX_ADAPTERS
        and all(0 < len(name) <= MAX_ADAPTER_NAME for name in can.adapters)
        and not any(operation.impossible(can) for operation in OPERATIONS.values())
        and (can.separator is None or 0 <= can.separator < can.vocab)
        and (not can.cached_query or can.batch_tokens <= can.cached_tokens <= can.inflight_tokens)
    ):
        return f"ready with impossible capabilities: {can}"
    return ""


def _possible_sequences(can: Capabilities) -> bool:
    """Whether a worker has budgets of its own for sequences, if it generates and runs rows, and not otherwise."""
    own = can.sequences, can.sequence_tokens, can.sequence_context
    if "generate" not in can.operations or len(can.operations) == 1:
        return own == (0, 0, 0)
    return min(own) > 0 and not can.packs and can.sequence_context <= min(can.sequence_tokens, MAX_CONTEXT)


#: capabilities in which workers of a group may differ; they share all others
_OWN = (
    "model", "engine", "device", "dtype", "parallel", "pace", "packed_pace", "fixed_ms", "packed_fixed_ms", "forward_ms",
    "halvings", "reserved",
)  # fmt: skip
#: in the order in which they are compared: whether it packs is why its budgets are others
_SHARED = ("kind", "vocab", "max_item", *(field for field in Capabilities.__struct_fields__ if field not in _OWN))


def differs(first: Capabilities, can: Capabilities) -> str:
    """Why a worker with capabilities `can` does not belong to a group that has a worker with `first`, or ""."""
    for key in _SHARED:
        if getattr(first, key) != getattr(can, key):
            return f"ready with {key} = {getattr(can, key)!r}; the group's other workers have {getattr(first, key)!r}"
    return ""


def stranger(worker: Worker, can: Capabilities) -> str:
    """Why a worker with these capabilities, which are halved at least as often as its group, does not belong there, or ""."""
    if wrong := impossible(can):
        return wrong
    first = worker.group.capabilities
    return "" if first is None or alone(worker) else differs(halved(first, can.halvings - first.halvings), can)


def alone(worker: Worker) -> bool:
    """Whether no other worker of its group is or was ready."""
    return not any(other is not worker and other.capabilities is not None for other in worker.group.workers.values())


def misfit(batch: RunningBatch, e: ev.BatchDone) -> str:
    """Why `e` is no valid answer to `batch`, or ""."""
    can = batch.worker.capabilities
    assert can is not None
    if not 0 <= e.forwards <= MAX_FORWARDS:
        return f"answered forwards = {e.forwards}; 0..{MAX_FORWARDS}"
    if batch.slices[0][0].generation is not None:
        return "answered a generation as a batch of rows"
    if len(e.outcomes) != len(batch.slices):
        return f"answered {len(e.outcomes)} parts for a batch of {len(batch.slices)}"
    for (request, start, end), outcome in zip(batch.slices, e.outcomes, strict=True):
        if outcome.code:
            continue
        rows = end - start
        want = request.work.operation.outputs(request.work, can)
        specs = outcome.specs
        if len(specs) == len(want):
            for spec, (name, columns) in zip(specs, want):  # noqa: B905 (as many; `strict` takes longer)
                if spec.name != name or spec.dtype != _dtype(name) or spec.shape != (rows, columns):
                    break
            else:
                continue
        got = [f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in specs]
        asked = [f"{name} {_dtype(name)} {[rows, columns]}" for name, columns in want]
        return f"answered {', '.join(got) or 'no frames'} where {', '.join(asked)} was asked"
    return ""


def _dtype(name: str) -> str:
    return "int32" if name in ID_FRAMES else "float32"


def usual(batch: RunningBatch, e: ev.BatchDone) -> bool:
    """Whether the cost model can learn from the time of this answer: one forward computed the whole weight of the batch.

    It cannot learn from it in these cases:

    - the engine needed several forwards, or refused a part;
    - the engine computed a query once that the weight counts in every row;
    - a suspect ran alone: the suspect may have been lost with its workers because it is slow.
    """
    can = batch.worker.capabilities
    assert can is not None
    if e.forwards != 1 or batch.trial or any(outcome.code for outcome in e.outcomes):
        return False
    return not can.cached_query or all(request.work.shared < can.cached_query for request, _, _ in batch.slices)
