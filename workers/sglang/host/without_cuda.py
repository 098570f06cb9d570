"""Imports that ask for the GPUs of this host get answers without CUDA, which a forked process could not use after its parent.

SGLang and its kernels ask when they are imported, for the architecture above all. A child of this process finds the answers.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Generator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import msgspec


class _Gpu(msgspec.Struct):
    """The properties of a GPU as torch has them, and as Triton has them; {}: it cannot ask either."""

    torch: dict[str, Any]
    triton: dict[str, Any]


@contextlib.contextmanager
def cuda_answered_by_a_child() -> Generator[int]:
    """For the time of an import; yields the number of GPUs. What keeps one of these functions asks CUDA itself from then on.

    Raises ValueError: the GPUs differ, and what an import learns of one is not true of the others; or the child has failed.
    """
    torch: Any = importlib.import_module("torch")
    gpus = _gpus(torch.cuda)
    devices = [SimpleNamespace(**gpu.torch) for gpu in gpus]
    if len({(device.name, device.major, device.minor) for device in devices}) > 1:
        raise ValueError(f"the GPUs differ: {', '.join(device.name for device in devices)}")
    importing = True

    def stand_in(answer: Callable[..., Any], ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (answer if importing else ask)(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, answer: Callable[..., Any]) -> None:
            ask = getattr(owner, name)
            setattr(owner, name, stand_in(answer, ask))
            stack.callback(setattr, owner, name, ask)

        replace(torch.cuda, "is_available", lambda: bool(devices))
        replace(torch.cuda, "device_count", lambda: len(devices))
        replace(torch.cuda, "current_device", lambda: 0)
        replace(torch.cuda, "get_device_properties", lambda *device: devices[_index(torch, *device)])
        if gpus:  # what `torch.get_device_module` asks
            replace(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
        if gpus and all(gpu.triton for gpu in gpus):
            replace(_triton(), "get_device_properties", [gpu.triton for gpu in gpus].__getitem__)
        try:
            yield len(devices)
        finally:
            importing = False


def _triton() -> Any:
    """What of Triton asks the driver of CUDA."""
    return importlib.import_module("triton.runtime").driver.active.utils


def _of_triton(index: int) -> dict[str, Any]:
    try:
        return dict(_triton().get_device_properties(index))
    except Exception:
        # There is no Triton, it has no driver, or it cannot compile its own. Then its function stays as it is.
        return {}


def _index(torch: Any, device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


def _gpus(cuda: Any) -> list[_Gpu]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            found = [cuda.get_device_properties(index) for index in range(cuda.device_count())] if cuda.is_available() else []
            answer = [
                _Gpu({name: getattr(one, name) for name in dir(one) if not name.startswith("_")}, _of_triton(index))
                for index, one in enumerate(found)
            ]
            with open(write, "wb") as file:
                file.write(msgspec.json.encode(answer, enc_hook=str))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    if not answer:
        raise ValueError("torch cannot tell which GPUs there are")
    return msgspec.json.decode(answer, type=list[_Gpu])
