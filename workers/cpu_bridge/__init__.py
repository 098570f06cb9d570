"""Lets SGLang run on a machine without CUDA whose installed packages assume it, without touching what is installed.

Two packages stand in the way, and each is left alone where it works:

- `sgl_kernel`: what the package index has is for CUDA alone. SGLang imports names of it at start-up, for speculative decoding
  and cache compaction, and calls none of them on this path.
- `torchvision`: what the package index has was built for CUDA too. Its compiled operators do not load with a CPU build of
  torch, and then it cannot be imported, because it describes two operators that do not exist. So a CPU environment does not
  have it. SGLang needs one import of it and no operator.

`install` must run in each process before SGLang or transformers is imported.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from enginepool.workers.cpu_bridge import torchvision

#: Without its compiled part, torchvision has no operators, but it describes these.
_TORCHVISION_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: Operators of `sgl_kernel` that SGLang's files of one model family, Qwen3.5, take when they are imported; the image processor
#: of all Qwen-VL models imports these files. No others: SGLang asks whether some exist.
_KERNEL_OPERATORS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
#: Keeps the operators alive: they go when their library does.
_libraries: list[Any] = []


def install() -> None:
    """Put what is missing in place. Idempotent. Raises ImportError when torch itself is missing."""
    _bridge_sgl_kernel()
    _bridge_torchvision()


def _bridge_sgl_kernel() -> None:
    if "sgl_kernel" in sys.modules:
        return
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError, RuntimeError):  # absent, or built for CUDA libraries that this machine does not have
        for name in [name for name in sys.modules if name == "sgl_kernel" or name.startswith("sgl_kernel.")]:
            del sys.modules[name]
    else:
        return
    spec = importlib.util.spec_from_file_location("sgl_kernel", Path(__file__).with_name("sgl_kernel.py"))
    if spec is None or spec.loader is None:
        raise ImportError("enginepool.workers.cpu_bridge: its file sgl_kernel.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["sgl_kernel"] = module
    operators: Any = importlib.import_module("torch").ops.sgl_kernel
    for name in _KERNEL_OPERATORS:
        setattr(operators, name, getattr(module, name))


def _bridge_torchvision() -> None:
    if _libraries or "torchvision" in sys.modules:
        return
    torch: Any = importlib.import_module("torch")
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        torchvision.install()
        return
    if spec.submodule_search_locations is None:
        return
    for folder in spec.submodule_search_locations:
        for compiled in (*Path(folder).glob("_C.so"), *Path(folder).glob("_C.*.so"), *Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(str(compiled))
            except OSError:
                continue
            return
    library = torch.library.Library("torchvision", "DEF")
    for operator in _TORCHVISION_OPERATORS:
        library.define(operator + _SIGNATURE)
    _libraries.append(library)
