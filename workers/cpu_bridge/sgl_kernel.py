"""Stands in for the package `sgl_kernel` on a CPU: every name can be imported, and a call says why it cannot work.

`install` loads this file as `sgl_kernel` when the real package is missing. Which names SGLang imports at its start differs from
release to release, so there is no list of them here. Submodules do not exist: where SGLang looks for one on a CPU, it looks for
kernels that may be absent, and takes another path without them.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function of that name, which raises NotImplementedError when it is called."""
    # Python asks a module for such names of its own accord, and means it: one with a `__path__` is a package.
    if name.startswith("__"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but the package sgl_kernel for CPUs is not installed")

    call.__name__ = call.__qualname__ = name
    return call
