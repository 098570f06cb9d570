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


@contextlib.contextmanager
def cuda_answered_by_a_child() -> Generator[int]:
    """For the time of an import; yields the number of GPUs. What keeps one of these functions asks CUDA itself from then on.

    Raises ValueError: the GPUs differ, and what an import learns of one is not true of the others.
    """
    torch: Any = importlib.import_module("torch")
    devices = [SimpleNamespace(**found) for found in _devices(torch.cuda)]
    if len({(device.name, device.major, device.minor) for device in devices}) > 1:
        raise ValueError(f"the GPUs differ: {', '.join(device.name for device in devices)}")
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: bool(devices),
        "device_count": lambda: len(devices),
        "current_device": lambda: 0,
        "get_device_properties": lambda *device: devices[_index(torch, *device)],
    }
    asked = {name: getattr(torch.cuda, name) for name in answers}
    importing = True

    def stand_in(answer: Callable[..., Any], ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (answer if importing else ask)(*args, **kwargs)

        return call

    for name, answer in answers.items():
        setattr(torch.cuda, name, stand_in(answer, asked[name]))
    try:
        yield len(devices)
    finally:
        importing = False
        for name, ask in asked.items():
            setattr(torch.cuda, name, ask)


def _index(torch: Any, device: Any = None) -> int:
    if device is None or isinstance(device, int):
        return device or 0
    return torch.device(device).index or 0


def _devices(cuda: Any) -> list[dict[str, Any]]:
    """The properties of each GPU, as torch has them."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            found = [cuda.get_device_properties(index) for index in range(cuda.device_count())] if cuda.is_available() else []
            answer = [{name: getattr(one, name) for name in dir(one) if not name.startswith("_")} for one in found]
            with open(write, "wb") as file:
                file.write(msgspec.json.encode(answer, enc_hook=str))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return msgspec.json.decode(answer, type=list[dict[str, Any]])
