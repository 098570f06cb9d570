"""Has torch take memory that SGLang asks to be pinned from anywhere: without a CUDA device there is none that can be pinned.

SGLang pins what its LoRA layers copy to a device, also where the device is the CPU itself; torch refuses that. No other code of
SGLang's on a CPU pins memory.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

#: functions of torch that SGLang calls with `pin_memory`
_MAKE = ("arange", "empty", "tensor", "zeros")


def install() -> None:
    """Change torch, in this process."""
    torch: Any = importlib.import_module("torch")
    torch.Tensor.pin_memory = _as_it_is
    for name in _MAKE:
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _as_it_is(tensor: Any, *_: Any) -> Any:
    return tensor


def _without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
