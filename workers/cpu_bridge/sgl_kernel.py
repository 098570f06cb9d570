"""Stands in for the package `sgl_kernel` on a CPU: its names can be imported; calling one says why it cannot work.

Never imported under this name: `install` loads it as `sgl_kernel` when the real package is missing.
"""

from collections.abc import Callable
from typing import NoReturn

#: What SGLang imports at start-up on a CPU.
NAMES = (
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but the package sgl_kernel for CPUs is not installed")

    call.__name__ = name
    return call


globals().update({name: _absent(name) for name in NAMES})
