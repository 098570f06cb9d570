"""What an engine that packs is started with, and the options of SGLang with which none can. Pure."""

from collections.abc import Mapping
from typing import Any

#: What an engine that packs is started with: what multi-item scoring needs (`patches/packed_forwards.py`).
PACKED: dict[str, Any] = {
    "enable_mis": True,
    "attention_backend": "flashinfer",
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
}
_FLASHINFER = "multi-item scoring has its attention mask in FlashInfer alone"
#: name -> (the values with which rows can be packed, why others are refused)
_UNPACKED: dict[str, tuple[tuple[Any, ...], str]] = {
    "enable_mis": ((True, None), "it is what packs"),
    "attention_backend": (("flashinfer", None), _FLASHINFER),
    "prefill_attention_backend": (("flashinfer", None), _FLASHINFER),
    "decode_attention_backend": (("flashinfer", None), _FLASHINFER),
    "disable_radix_cache": ((True, None), "a sequence of many items is not the prefix of another"),
    "chunked_prefill_size": ((-1, None), "a sequence would be cut between items"),
}


def refused_for_packing(options: Mapping[str, Any]) -> str:
    """With which of these options of SGLang an engine cannot pack, and why; "" if it can."""
    for name, (right, reason) in _UNPACKED.items():
        if options.get(name) not in right:
            return f"engine option {name}={options[name]!r}: {reason}"
    return ""
