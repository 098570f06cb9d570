"""Environment variables of NCCL while a process group is made."""

import contextlib
import os
import threading
from collections.abc import Generator

#: By default torch ends the process, also a trainer, when NCCL reports a lost peer. It also polls rank 0's store every second
#: whether to write a report, and logs an error each time while a stager outlives its trainer.
_CALM = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
#: A trainer of two pools, or of two groups, may make two process groups at once: the last one restores the settings.
_settings = threading.Lock()
_making: list[int] = []
_before: dict[str, str | None] = {}
#: SGLang sets these for its engines, and all ranks of a group must agree.
_LIKE_ENGINES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


@contextlib.contextmanager
def nccl_environment(backend: str) -> Generator[None]:
    """The settings of NCCL, which reads them when a group is made; restored afterwards, if `backend` is `nccl`."""
    if backend != "nccl":
        yield
        return
    with _settings:
        for key, value in _LIKE_ENGINES.items():
            os.environ.setdefault(key, value)
        if not _making:
            _before.update({key: os.environ.get(key) for key in _CALM})
        _making.append(1)
        os.environ.update(_CALM)
    try:
        yield
    finally:
        with _settings:
            _making.pop()
            for key, value in () if _making else _before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value
