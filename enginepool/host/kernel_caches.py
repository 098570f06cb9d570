"""Where the libraries of an engine keep the kernels that they have compiled, so that the next engine need not compile them."""

import os
from pathlib import Path

#: The variables that name these places, with the folder below `kernel_cache` of a group. They are those that SGLang 0.5.23
#: takes below its own `SGLANG_CACHE_DIR` by itself.
VARIABLES = {
    "SGLANG_CACHE_DIR": ".",
    "FLASHINFER_WORKSPACE_BASE": ".",  # FlashInfer takes .cache/flashinfer below it
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "SGLANG_JIT_CACHE_DIR": "jit",
    "CUDA_CACHE_PATH": "nv",
}
#: where FlashInfer, Triton and SGLang keep them if no variable says otherwise
DEFAULT_PLACES = ("~/.cache/flashinfer", "~/.triton/cache", "~/.cache/sglang")


def cache_variables(folder: str) -> dict[str, str]:
    """The environment variables with which all kernels are kept below `folder`."""
    whole = Path(folder).expanduser()
    return {name: str(whole / below) for name, below in VARIABLES.items()}


def make_cache(folder: str) -> None:
    """Make the folder, unless it exists: an engine ends where it cannot. Raises OSError, which names the setting."""
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"kernel_cache = {folder!r}") from None


def size_of(folder: Path) -> int:
    """Bytes of the files below `folder`; 0: there is no such folder."""
    return sum(
        os.lstat(path).st_size
        for where, _, names in os.walk(folder)
        for name in names
        if os.path.lexists(path := os.path.join(where, name))
    )
