"""Kernels that are interpreted with numpy, in a process of its own: triton decides that when it is imported."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NO_TRITON = "triton is not installed; it comes with torch for CUDA"


def run_interpreted(module: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run this module of the tests as a program whose kernels are interpreted; it calls `allow_runtime_bounds` first."""
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", module]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


def allow_runtime_bounds() -> None:
    """Let a `range` of the interpreter end at a tensor, as a compiled one does.

    Triton 3.6 takes `int` of an array of one number for that, which NumPy 2.4 refuses to give. Here it is asked for its item.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch: Any = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda number: number.handle.data.item()  # type: ignore[reportUnknownLambdaType]

    interpreter._patch_lang_tensor = patched
