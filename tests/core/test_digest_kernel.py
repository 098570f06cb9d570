"""The kernel computes the digest that is specified: interpreted with numpy, compiled for a GPU, and on one; else torch does."""

import importlib
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from enginepool import digest as digests
from enginepool.digest import Digest, make_ready
from enginepool.protocol.layout import digest_text

torch: Any = importlib.import_module("torch")
NO_TRITON = "triton is not installed; it comes with torch for CUDA"
#: words of one program of the kernel, and sizes about it
PROGRAM = 32_768
EDGES = (64, PROGRAM, PROGRAM + 64)


def words_of(kind: str, size: int, seed: int = 1) -> Any:
    draw = np.random.default_rng(seed)
    least, most = -(2**31), 2**31 - 1
    if kind == "drawn":
        return draw.integers(least, most + 1, size).astype(np.int32)
    if kind == "extremes":
        return np.where(draw.random(size) < 0.5, least, most).astype(np.int32)
    return np.full(size, {"least": least, "most": most, "zero": 0}[kind], np.int32)


def specified(words: Any) -> str:
    wide = [int(word) for word in words]
    return digest_text(sum(wide), sum(word * (i + 1) for i, word in enumerate(wide)))


def cases() -> list[tuple[str, int]]:
    sizes = [("drawn", 64 * random.Random(seed).randint(1, 3000)) for seed in range(6)]
    return sizes + [(kind, size) for kind in ("drawn", "extremes", "least", "most", "zero") for size in EDGES]


def interpret() -> None:
    """In a process of its own: whether kernels are interpreted is decided when triton is imported."""
    sums = importlib.import_module("enginepool.digest_kernel").sums
    for kind, size in cases():
        words = words_of(kind, size)
        # Beside the beginning of their memory, as buckets are.
        memory = torch.from_numpy(np.concatenate([words_of("drawn", 64), words]))
        assert digest_text(*sums(memory[64:]).tolist()) == specified(words), (kind, size)
    sys.stdout.write(f"{len(cases())} are equal")


def test_the_interpreted_kernel_gives_the_specified_sums() -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"{len(cases())} are equal"), done.stderr


def test_the_kernel_compiles_for_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton: Any = pytest.importorskip("triton", reason=NO_TRITON)
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # newer versions warn where nobody says; no float is here
    signature = {"words": "*i32", "groups": "i32", "sums": "*i64"}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 2)}
    source = compiler.ASTSource(
        fn=importlib.import_module("enginepool.digest_kernel")._sum, signature=signature, constexprs={}, attrs=aligned
    )
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.global.v4.b32" in compiled.asm["ptx"], "words are not read 16 bytes at a time"


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_without_a_kernel_that_is_right_torch_does_it_and_one_line_says_so(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = None
    if fault == "wrong":
        module = ModuleType("enginepool.digest_kernel")
        vars(module)["sums"] = lambda words: torch.zeros(2, dtype=torch.int64)  # type: ignore[reportUnknownLambdaType]
    monkeypatch.setitem(sys.modules, "enginepool.digest_kernel", module)
    with caplog.at_level(logging.WARNING, "enginepool"):
        sums = digests._tried(torch.device("cpu"))  # type: ignore[reportPrivateUsage]
    words = torch.from_numpy(words_of("drawn", 5 * PROGRAM))
    assert digest_text(*sums(words).tolist()) == specified(words.tolist())
    assert len(caplog.messages) == 1 and "no Triton kernel on cpu" in caplog.messages[0]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "size"), [("drawn", 7 * PROGRAM + 448), ("extremes", PROGRAM), ("most", 40 * PROGRAM + 64)])
def test_on_a_gpu_the_compiled_kernel_gives_the_specified_digest_however_it_is_cut(
    kind: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    make_ready("cuda:0")
    assert not caplog.messages, "torch computes the digests"
    words = words_of(kind, size)
    space = torch.from_numpy(words).to("cuda:0").view(torch.uint8)
    for bucket_bytes in (100 * 256, 1 << 20):
        digest = Digest()
        for at in range(0, space.numel(), bucket_bytes):
            digest.add(space[at : at + bucket_bytes], at)
        assert digest.text() == specified(words)


if __name__ == "__main__":
    interpret()
