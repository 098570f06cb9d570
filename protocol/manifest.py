"""What tensors an update brings: names, dtypes, shapes, in the order in which they are sent.

On the wire a manifest is the JSON text of an array of [name, dtype, shape]; names are those of the checkpoint, dtypes the bare
names of torch (`bfloat16`), shapes arrays of integers.
"""

import re
from collections.abc import Sequence
from math import inf, prod

import msgspec

from enginepool.protocol.basis import MAX_FINDINGS
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages.weight_reports import Finding

#: bytes of one element
SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

#: By dtype: the least magnitude that becomes infinity when a wider number is rounded to it.
_OVERFLOWS = {"float32": (2 - 2**-24) * 2.0**127, "bfloat16": (2 - 2**-8) * 2.0**127, "float16": 65520.0}


class Tensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One tensor: [name, dtype, shape]."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * SIZES[self.dtype]


Manifest = Sequence[Tensor]

#: What FSDP, activation checkpointing and torch.compile put into names; and DistributedDataParallel before them.
WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_DATA_PARALLEL = re.compile(r"^(?:module\.)+")
#: All of a name up to `experts` where one tensor is all of them, and what follows there in the name of a single one.
_FUSED, _SINGLE = re.compile(r"(?:.*\.)?experts(?=$|\.\D)"), re.compile(r"\.\d")
#: in the names of a PEFT model
_ADAPTER = re.compile(r"^(?:module\.)*base_model\.model\.|\.lora_\w+(?:\.|$)|\.base_layer\.")
#: names in an error
_SHOWN = 3

_decoder = msgspec.json.Decoder(list[Tensor])


def encode_manifest(manifest: Manifest) -> bytes:
    """The text of the `manifest` frame."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes | memoryview) -> list[Tensor]:
    """The tensors of a `manifest` frame.

    Raises:
        WireError: `bad_request`: no such JSON, no tensor, a name twice, an unknown dtype, a negative side.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError("bad_request", f"manifest: {error}", field="manifest") from None
    if not manifest:
        raise WireError("bad_request", "manifest: empty; an update brings at least one tensor", field="manifest", limit="1")
    seen: set[str] = set()
    for tensor in manifest:
        where = f"manifest[{tensor.name}]"
        if tensor.name in seen:
            raise WireError("bad_request", f"{where}: named twice", field=where)
        seen.add(tensor.name)
        if tensor.dtype not in SIZES:
            raise WireError("bad_request", f"{where}: dtype {tensor.dtype!r} is none of {', '.join(SIZES)}", field=where)
        if any(side < 0 for side in tensor.shape):
            raise WireError("bad_request", f"{where}: shape {list(tensor.shape)} has a negative side", field=where)
    return manifest


def difference(
    offered: Manifest,
    model: Manifest,
    optional: frozenset[str] = frozenset(),
    *,
    partial: bool = False,
    hints: bool = True,
) -> tuple[str, str] | None:
    """Why `offered` does not fit the tensors that a worker's own load of its model took: the first name at fault, and one line
    with the first few. None: it fits.

    `optional` are names that the model knows and may do without (tied or skipped ones). A dtype may differ from the
    checkpoint's among floating ones: engines convert while they load. `hints`: also what a trainer's publisher can do about it.
    """
    mine = {tensor.name: tensor for tensor in model}
    unknown = [t.name for t in offered if t.name not in mine and t.name not in optional]
    if unknown:
        way_out = _way_out(unknown[:_SHOWN], {*mine, *optional}) if hints else ""
        return unknown[0], f"unknown names: {_some(unknown)}{way_out}"
    for tensor in offered:
        own = mine.get(tensor.name)
        if own is None:
            continue
        if tensor.shape != own.shape:
            return tensor.name, f"{tensor.name}: shape {list(tensor.shape)}; the model has {list(own.shape)}"
        if tensor.dtype != own.dtype and not (_plain_float(tensor.dtype) and _plain_float(own.dtype)):
            return tensor.name, f"{tensor.name}: dtype {tensor.dtype}; the model has {own.dtype}"
    if not partial:
        offers = {tensor.name for tensor in offered}
        missing = [name for name in mine if name not in offers and name not in optional]
        if missing:
            return missing[0], f"missing names: {_some(missing)}{' (partial = true allows it)' if hints else ''}"
    return None


def overflow(dtype: str, target: str) -> float:
    """The least finite magnitude of a number of `dtype` that becomes infinity in an engine that holds it as `target`; infinity:
    there is none. "": it is held as it is."""
    limit = _OVERFLOWS.get(target, inf)
    return limit if _plain_float(dtype) and limit < _OVERFLOWS.get(dtype, inf) else inf


def worst(findings: list[Finding], most: int = MAX_FINDINGS) -> list[Finding]:
    """At most `most` of the findings, so that they fit frame 0. Zeros are left out first."""
    return findings if len(findings) <= most else sorted(findings, key=lambda finding: finding.kind == "zero")[:most]


def _plain_float(dtype: str) -> bool:
    return dtype in ("float64", "float32", "float16", "bfloat16")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _way_out(unknown: list[str], known: set[str]) -> str:
    """What is said after names that a publisher's `rename` would make known ones, or ""."""
    if any(_ADAPTER.search(name) for name in unknown):
        return (
            " (a PEFT model: call merge_adapter() before, and let the publisher's `rename` give None for lora_ names and take "
            "base_model.model. and .base_layer off the others)"
        )
    plain = [_DATA_PARALLEL.sub("", WRAPPERS.sub("", name)) for name in unknown]
    if not known.isdisjoint(plain):
        return " (a wrapper's prefix: the publisher's `rename` takes it off)"
    fused = [found[0] for name in plain if (found := _FUSED.match(name))]
    if any(_SINGLE.match(name, len(experts)) for experts in fused for name in known if name.startswith(experts)):
        return " (fused experts: the publisher's `rename` takes them apart)"
    return ""
