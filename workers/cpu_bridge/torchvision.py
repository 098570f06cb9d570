"""Stands in for the package `torchvision` where it is not installed: every name can be imported, and a call says why it cannot
work.

SGLang imports functions for images at its start, also for a model that takes text alone. What the package index has for a
machine without CUDA is a build for CUDA, which cannot be imported, and then neither can transformers; so a CPU environment is
better without it.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

NAME = "torchvision"
#: the version that it reports
VERSION = "0.28.0"


class _Absent(type):
    """A class of any name: SGLang takes constants of some, and makes subclasses of others."""

    def __getattr__(cls, name: str) -> "_Absent":
        return _made(f"{cls.__qualname__}.{name}", name)

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__qualname__} was called, but the package torchvision is not installed")


def _made(qualified: str, name: str) -> _Absent:
    # Python asks for such names of its own accord, and means them.
    if name.startswith("__"):
        raise AttributeError(f"{qualified}: torchvision is not installed")
    return _Absent(name, (), {"__qualname__": qualified})


class _Finder(MetaPathFinder, Loader):
    """Finds torchvision and each of its submodules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__

        def found(attribute: str) -> _Absent:
            return _made(f"{name}.{attribute}", attribute)

        vars(module).update(__getattr__=found, __version__=VERSION)


def install() -> None:
    """Put it in place. transformers takes it for the real one: older versions have no image processors to register without."""
    sys.meta_path.append(_Finder())
