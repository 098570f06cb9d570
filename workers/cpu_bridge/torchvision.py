"""Stands in for the package `torchvision` where it is not installed: every name can be imported, and a call says why it cannot
work. What is done to the frames of a video works.

SGLang imports functions for images at its start, also for a model that takes text alone. What the package index has for a
machine without CUDA is a build for CUDA, which cannot be imported, and then neither can transformers; so a CPU environment is
better without it.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

NAME = "torchvision"
#: the version that it reports
VERSION = "0.28.0"
_FUNCTIONAL = ("torchvision.transforms.functional", "torchvision.transforms.v2.functional")


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


def _resize(image: Any, size: Sequence[int], interpolation: Any = None, antialias: bool = True) -> Any:
    """Tensors, the last two dimensions of which are height and width; bilinear, unless bicubic is asked for."""
    if (*image.shape[-2:],) == (*size,):
        return image
    mode = "bicubic" if getattr(interpolation, "__name__", "") == "BICUBIC" else "bilinear"
    functional: Any = importlib.import_module("torch.nn.functional")
    pixels = image.reshape(-1, *image.shape[-3:]).float()
    found = functional.interpolate(pixels, size=(*size,), mode=mode, antialias=antialias)
    found = found.reshape(*image.shape[:-2], *size)
    return found if image.is_floating_point() else found.round().clamp(0, 255).to(image.dtype)


def _normalize(image: Any, mean: Any, std: Any, inplace: bool = False) -> Any:
    torch: Any = importlib.import_module("torch")
    mean, std = (torch.as_tensor(one, dtype=image.dtype).view(-1, 1, 1) for one in (mean, std))
    return (image - mean) / std


def _in_color(image: Any) -> Any:
    return image.expand(*image.shape[:-3], 3, *image.shape[-2:])


_OF_FRAMES: dict[str, Any] = {"resize": _resize, "normalize": _normalize, "grayscale_to_rgb": _in_color}


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
        works: dict[str, Any] = _OF_FRAMES if name in _FUNCTIONAL else {}

        def found(attribute: str) -> Any:
            if f"{name}.{attribute}" in _FUNCTIONAL:
                return importlib.import_module(f"{name}.{attribute}")
            return works.get(attribute) or _made(f"{name}.{attribute}", attribute)

        vars(module).update(__getattr__=found, __version__=VERSION)


def install() -> None:
    """Put it in place. transformers takes it for the real one: older versions have no image processors to register without."""
    sys.meta_path.append(_Finder())
