"""Each model family of MODELS.md on a real engine: scores equal those of `transformers` before and after an update, and the old
weights bring the old bits back. The table of that page is what the engines report."""

import importlib
import multiprocessing
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.protocol.messages import Part
from enginepool.workers.engine import BatchOutcome, EngineUnusable, RowBatch, RowPart
from enginepool.workers.sglang.score.packing_support import wrong_for_packing
from tests.engine.families import CLS, FAMILIES, SEP, VOCAB, Family, checkpoint, computed
from tests.engine.hosted import HostedEngine
from tests.engine.test_sglang_scores import assert_close
from tests.engine.test_sglang_weights import Given

torch: Any = importlib.import_module("torch")
save_file: Any = importlib.import_module("safetensors.torch").save_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

MODELS = Path(__file__).parents[2] / "MODELS.md"
LABELS = (5, 6, 7)
REFUSED = {
    "Mistral reward": r"SGLang has no MistralForSequenceClassification of its own",
    "Qwen3-MoE reward": r"SGLang has no Qwen3MoeForSequenceClassification of its own",
}
SERVED = [name for name in FAMILIES if name not in REFUSED]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def rows() -> list[list[int]]:
    """Pairs, as a cross-encoder has them; to the others they are ids like any."""
    draw = np.random.default_rng(1)
    return [[CLS, *draw.integers(5, VOCAB, 5), SEP, *draw.integers(5, VOCAB, size), SEP] for size in (1, 7, 20, 40)]


def part(family: Family) -> RowPart:
    items = [[int(token) for token in row] for row in rows()]
    lengths = np.array([len(row) for row in items], np.uint32)
    asked = Part([], [*LABELS] if family.kind == "causal" else [])
    return RowPart(np.empty(0, np.int32), np.array([*chain.from_iterable(items)], np.int32), lengths, asked=asked)


def scored(engine: HostedEngine, family: Family) -> Any:
    [outcome] = engine.score(RowBatch((part(family),)))
    assert isinstance(outcome, BatchOutcome), outcome
    [found] = outcome.parts
    assert isinstance(found, dict), found
    return found["scores"]


@pytest.fixture(scope="module")
def library() -> Iterator[ProcessPoolExecutor]:
    """A process in which `transformers` computes: some of its models end a process that has imported torchvision by a crash."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as library:
        yield library


def direct(library: ProcessPoolExecutor, name: str, folder: Path, seed: int = 0) -> list[Any]:
    """Write a checkpoint; what `transformers` gives with it."""
    return library.submit(computed, name, folder, seed, part(FAMILIES[name]).prompts(), LABELS).result()


def table() -> dict[str, tuple[str, str]]:
    """By family: what MODELS.md says of packed scoring and of updates."""
    found = re.findall(r"^\| ([^|]+?) \| `[^|]+` \| ([^|]+?) \| ([^|]+?) \|$", MODELS.read_text("utf-8"), re.MULTILINE)
    return {name: (packed, update) for name, packed, update in found}


def test_the_page_has_each_family_that_is_tested() -> None:
    assert set(table()) == set(FAMILIES)


@pytest.mark.parametrize("name", SERVED)
def test_scores_are_those_of_transformers_before_and_after_an_update(
    name: str, tmp_path: Path, library: ProcessPoolExecutor
) -> None:
    family = FAMILIES[name]
    before, after = direct(library, name, tmp_path / "model"), direct(library, name, tmp_path / "other", seed=1)
    engine = HostedEngine(str(tmp_path / "model"), options=dict(family.options)).wait_until_started()
    try:
        first = scored(engine, family)
        assert_close(first, before)
        config = msgspec.json.decode((tmp_path / "model" / "config.json").read_bytes())
        plain = any("are loaded plainly" in detail for detail in engine.details)
        assert table()[name] == ("no" if wrong_for_packing(config) else "yes", "plain" if plain else "planned")
        for version, folder, expected in ((1, "other", after), (2, "model", first)):
            given = Given(tmp_path, checkpoint(tmp_path / folder))
            engine.call("do", "load_weights", given.weights, version, given.digest)
            found = scored(engine, family)
            assert_close(found, expected)
        assert found.tobytes() == first.tobytes(), "the old weights, bit for bit"
        engine.close()
    finally:
        engine.end()


@pytest.mark.every_version
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_whose_head_sglang_does_not_load_is_refused_with_the_reason(
    name: str, tmp_path: Path, library: ProcessPoolExecutor
) -> None:
    direct(library, name, tmp_path)
    assert table()[name] == ("refused", "refused")
    engine = HostedEngine(str(tmp_path))
    with pytest.raises(EngineUnusable, match=REFUSED[name]):
        engine.wait_until_started()
    engine.end()


@pytest.mark.every_version
def test_a_checkpoint_without_its_untied_head_is_refused_and_dummy_weights_are_not(
    tmp_path: Path, library: ProcessPoolExecutor
) -> None:
    direct(library, "Llama", tmp_path)
    tensors = checkpoint(tmp_path)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = HostedEngine(str(tmp_path))
    with pytest.raises(EngineUnusable, match=r"incomplete: no tensor of the checkpoint fills lm_head\.weight$"):
        engine.wait_until_started()
    engine.end()
    engine = HostedEngine(str(tmp_path), options={"load_format": "dummy"}).wait_until_started()
    scored(engine, FAMILIES["Llama"])
    engine.close()


@pytest.mark.parametrize("name", ["Llama", "Llama, tied"])
def test_a_model_that_predicts_tokens_is_served_through_the_transformers_backend(
    name: str, tmp_path: Path, library: ProcessPoolExecutor
) -> None:
    expected = direct(library, name, tmp_path)
    engine = HostedEngine(str(tmp_path), options={"model_impl": "transformers"}).wait_until_started()
    assert_close(scored(engine, FAMILIES[name]), expected)
    engine.close()
