"""The kernel computes the digest that is specified: interpreted with numpy, compiled for a GPU, and on one; else torch does."""

import importlib
import logging
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.layout import digest_text
from enginepool.transfer import digest as digests
from enginepool.transfer.checksum import word_sums
from enginepool.transfer.digest import Digest, make_ready
from tests.core.interpreted import NO_TRITON, allow_runtime_bounds, run_interpreted

torch: Any = importlib.import_module("torch")
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
    """In a process of its own, see `run_interpreted`."""
    allow_runtime_bounds()
    sums = importlib.import_module("enginepool.transfer.digest_kernel").sums
    for kind, size in cases():
        words = words_of(kind, size)
        # Not at the beginning of their memory, as buckets are.
        memory = torch.from_numpy(np.concatenate([words_of("drawn", 64), words]))
        assert digest_text(*sums(memory[64:]).tolist()) == specified(words), (kind, size)
    sys.stdout.write(f"{len(cases())} are equal")


def test_the_interpreted_kernel_gives_the_specified_sums() -> None:
    done = run_interpreted("tests.core.test_digest_kernel", 200)
    assert (done.returncode, done.stdout) == (0, f"{len(cases())} are equal"), done.stderr


SIGNATURES = {
    "_sum": {"words": "*i32", "groups": "i32", "sums": "*i64"},
    "_look": {"words": "*i32", "rows": "*i32", "sums": "*i64", "levels": "*i32"},
}


@pytest.mark.parametrize("kernel", SIGNATURES)
def test_a_kernel_compiles_for_a_gpu_that_is_not_there(kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton: Any = pytest.importorskip("triton", reason=NO_TRITON)
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # newer versions warn where it is not set; no float is here
    signature = SIGNATURES[kernel]
    pointers = [place for place, kind in enumerate(signature.values()) if kind[0] == "*"]
    aligned = {(place,): [["tt.divisibility", 16]] for place in pointers}
    function = getattr(importlib.import_module("enginepool.transfer.digest_kernel"), kernel)
    source = compiler.ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned)
    compiled = triton.compile(source, target=backends.GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert compiled.asm["ptx"].count("ld.global.v4.b32") == 4, "words are not read 16 bytes at a time, four times at once"


def kernels_with(fault: str) -> ModuleType:
    """Kernels that compute what the reference does, but for this."""

    def right(words: Any) -> Any:
        modulo = np.array([own % 2**64 for own in word_sums(words.numpy())], np.uint64)
        return torch.from_numpy(modulo.view(np.int64))

    def sums(words: Any) -> Any:
        return right(words) * (fault != "wrong sums")

    def look(words: Any, rows: Any, sums: Any, levels: Any) -> None:
        sums += right(words) * (fault != "wrong sums next to tensors")

    def rows(manifest: Any, bounds: Any, targets: Any) -> tuple[Any, list[int]]:
        return torch.zeros((0, 8), dtype=torch.int32), [0]

    def level(most: float, limit: float) -> float:
        return most

    module = ModuleType("enginepool.transfer.digest_kernel")
    vars(module).update(sums=sums, look=look, rows=rows, level=level)
    return module


@pytest.mark.parametrize("fault", ["missing", "wrong sums", "wrong sums next to tensors", "wrong levels"])
def test_without_a_kernel_that_is_right_the_host_does_it_and_one_line_says_so(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = None if fault == "missing" else kernels_with(fault)
    monkeypatch.setitem(sys.modules, "enginepool.transfer.digest_kernel", module)
    with caplog.at_level(logging.WARNING, "enginepool"):
        assert digests._tried(torch.device("cpu")) is None  # type: ignore[reportPrivateUsage]
    why = {"missing": "ModuleNotFoundError", "wrong levels": "it finds other tensors than torch"}.get(
        fault, "it gives other sums"
    )
    assert len(caplog.messages) == 1 and "no Triton kernel on cpu" in caplog.messages[0] and why in caplog.messages[0]
    words = words_of("drawn", 5 * PROGRAM)
    assert digests.digest_of(torch.from_numpy(words).view(torch.uint8)) == specified(words)


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
