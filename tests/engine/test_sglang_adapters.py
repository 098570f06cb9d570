"""LoRA adapters on the real engine: what each generates is what the model generates with that adapter merged by hand."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.adapters import CONFIG_FILE, TENSORS_FILE
from enginepool.workers.adapter_files import read_adapter
from enginepool.workers.engine import EngineDied, EngineError, GenerationTask
from enginepool.workers.weights.checkpoint import CheckpointError, safetensors_entries
from tests.engine.adapters import make_adapter, safetensors, with_adapter
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_generate import CONTEXT, ENDLESS, PROMPTS, Continued, assert_greedy, one, refusal, run, task
from tests.engine.test_sglang_scores import declared
from tests.engine.test_sglang_weights import Given, Subject

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
#: name: rank, alpha
SIZES = {"one": (4, 8.0), "two": (8, 4.0), "three": (2, 2.0)}
#: of one batch, with the model alone, which counts as one
AT_ONCE = 3


@pytest.fixture(scope="module")
def folders(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(models.causal, root / name, seed=seed, rank=rank, alpha=alpha)
        for seed, (name, (rank, alpha)) in enumerate(SIZES.items())
    }


@pytest.fixture(scope="module")
def adapting(models: Models, folders: dict[str, Path]) -> Iterator[HostedEngine]:
    options: dict[str, Any] = {
        "lora_paths": {name: str(path) for name, path in folders.items()},
        "max_loras_per_batch": AT_ONCE,
        "max_loaded_loras": len(SIZES) + 2,
        "context_length": CONTEXT,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(str(models.causal), operations=("generate",), options=options)
        yield engine.wait_until_started()
        engine.end()


def asked(adapter: str, prompt: Sequence[int] = PROMPTS[0], n: int = 1, **sampling: Any) -> GenerationTask:
    return replace(task(prompt, n, logprobs=True, ignore_eos=True, **sampling), adapter=adapter)


@pytest.mark.every_version
def test_each_adapter_generates_as_the_model_that_it_was_merged_into(
    adapting: HostedEngine, reference: Reference, models: Models, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert declared(adapting).adapters == ("one", "three", "two")
    own = Subject(adapting, models.causal, tmp_path).own
    # More of them than a batch may have: some wait, and none fails.
    tasks = [asked(adapter, prompt, n=2) for prompt in PROMPTS for adapter in ("", *folders)]
    for this, sequences in zip(tasks, run(adapting, *tasks), strict=True):
        with reference.holding(with_adapter(own, folders.get(this.adapter))):
            for sequence in sequences:
                assert_greedy(reference, this.prompt.tolist(), sequence)


@pytest.mark.every_version
def test_the_model_below_its_adapters_is_saved(adapting: HostedEngine, tmp_path: Path) -> None:
    assert adapting.call("do", "save", str(tmp_path)) == "sharded_state"
    [file] = tmp_path.iterdir()
    assert file.name == "model-rank-0-part-0.safetensors"
    names = {name for name, _ in safetensors_entries(file)[0]}
    assert "model.layers.0.self_attn.qkv_proj.weight" in names and not any("base_layer" in name for name in names)


def test_the_model_alone_and_its_adapters_share_a_running_batch(adapting: HostedEngine) -> None:
    order: list[int] = adapting.call("order", [asked(adapter, max_new_tokens=20) for adapter in ("", "one", "two")])
    turns = "".join(map(str, order))
    assert turns.count("012") > 10, turns


@pytest.mark.every_version
def test_what_one_adapter_has_computed_of_a_prompt_is_of_no_use_to_another(
    adapting: HostedEngine, reference: Reference, models: Models, folders: dict[str, Path], tmp_path: Path
) -> None:
    prompt = [*range(150, 190)]
    cached = [one(adapting, asked(adapter, prompt)).cached for adapter in ("one", "two", "", "one")]
    assert cached[:3] == [[0]] * 3
    assert cached[3][0] > 30


def test_a_sequence_goes_on_with_its_adapter_from_its_tokens(adapting: HostedEngine) -> None:
    whole = one(adapting, asked("two", max_new_tokens=20))
    rest = one(adapting, asked("two", [*PROMPTS[0], *whole.tokens[:7]], max_new_tokens=13))
    assert rest.tokens == whole.tokens[7:]


@pytest.mark.every_version
def test_an_adapter_that_the_engine_does_not_have_is_refused(adapting: HostedEngine) -> None:
    assert refusal(adapting, asked("four")) == "adapter: 'four'; this engine has one, three, two"
    assert refusal(adapting, asked("/etc")).startswith("adapter: '/etc'; ")
    assert len(one(adapting, asked("one")).tokens) == 12


@pytest.mark.every_version
def test_new_weights_go_into_the_model_below_its_adapters(
    adapting: HostedEngine, reference: Reference, models: Models, folders: dict[str, Path], tmp_path: Path
) -> None:
    subject = Subject(adapting, models.causal, tmp_path)
    assert adapting.call("do", "model_tensors").optional == frozenset()
    assert adapting.call("do", "plain") == ""
    own = Given(tmp_path, subject.own)
    for version, given in ((1, subject.drawn(1)), (2, own)):
        subject.prepare_load(given.weights)
        subject.load_weights(given.weights, version, given.digest)
        assert adapting.call("do", "inspect", "digest") == (given.digest, [])
        for adapter in ("", "one", "two"):
            found = one(adapting, asked(adapter))
            with reference.holding(with_adapter(given.tensors, folders.get(adapter))):
                assert_greedy(reference, PROMPTS[0], found)


@pytest.mark.every_version
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_sequences_go_on_with_their_adapters_when_new_weights_come_below_them(
    adapting: HostedEngine, reference: Reference, models: Models, folders: dict[str, Path], tmp_path: Path, mode: str
) -> None:
    subject = Subject(adapting, models.causal, tmp_path)
    own, new = Given(tmp_path, subject.own), subject.drawn(30)
    tasks = [asked(adapter, max_new_tokens=ENDLESS) for adapter in ("", "one", "two")]
    emitted, [counts] = adapting.call("pause", tuple(tasks), 5, mode, ((new.weights, 30, new.digest, mode),))
    subject.load_weights(own.weights, 31, own.digest)
    for this, step, count in zip(tasks, map(Continued, emitted), counts, strict=True):
        assert 5 <= count <= len(step.tokens) - 5
        weights = [with_adapter(given.tensors, folders.get(this.adapter)) for given in (own, new)]
        spans = list(zip(weights, (step.tokens[:count], step.tokens[count:]), strict=True))
        below, expected = (reference.across if mode == "in_place" else reference.afresh)(this.prompt.tolist(), spans)
        assert below.max() < 1e-4
        np.testing.assert_allclose(step.logprobs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.every_version
def test_adapters_are_loaded_replaced_and_unloaded_while_the_engine_serves(
    adapting: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    """A version of an adapter is an adapter of its own to the engine."""
    own, shapes = Subject(adapting, models.causal, tmp_path).own, shapes_of(adapting)
    made = {
        f"f@{seed}": make_adapter(models.causal, tmp_path / f"f{seed}", seed=seed, rank=4, alpha=6.0) for seed in range(21, 25)
    }
    first, second, third, last = made
    for path in made.values():
        assert read_adapter(str(path), [str(tmp_path)], "adapter_roots", shapes)[0] == str(path)
    prompt = [*range(150, 190)]
    before, after = asked(first, prompt, max_new_tokens=40), asked(second, prompt)
    adapting.call("do", "load_adapter", first, str(made[first]))
    [emitted] = adapting.call("swap", (before,), second, str(made[second]))
    sequences = {first: Continued(emitted), second: one(adapting, after)}
    assert sequences[first].cached == sequences[second].cached == [0], "neither has what another version computed"
    for name, sequence in sequences.items():
        with reference.holding(with_adapter(own, made[name])):
            assert_greedy(reference, prompt, sequence)

    with pytest.raises(EngineError, match="max_loaded_loras = 5, and as many are loaded: f@21, f@22, one, three, two"):
        adapting.call("do", "load_adapter", third, str(made[third]))
    adapting.call("do", "unload_adapter", first)
    assert refusal(adapting, before).startswith("adapter: 'f@21'; this engine has ")
    wide = make_adapter(models.causal, tmp_path / "wide", seed=1, rank=16, alpha=1.0)
    with pytest.raises(EngineError, match=r"SGLang did not load it: .*rank 16"):
        adapting.call("do", "load_adapter", third, str(wide))
    adapting.call("do", "load_adapter", third, str(made[third]))
    with reference.holding(with_adapter(own, made[third])):
        assert_greedy(reference, prompt, one(adapting, asked(third, prompt)))
    for name in (second, third):
        adapting.call("do", "unload_adapter", name)
    adapting.call("do", "load_adapter", last, str(made[last]))
    adapting.call("do", "unload_adapter", last)


@pytest.mark.every_version
@pytest.mark.timeout(120)
def test_an_adapter_is_unloaded_after_sequences_that_were_dropped_before_they_ran(
    adapting: HostedEngine, models: Models, tmp_path: Path
) -> None:
    path = make_adapter(models.causal, tmp_path / "f", seed=25, rank=4, alpha=6.0)
    adapting.call("do", "load_adapter", "f@25", str(path))
    assert refusal(adapting, asked("f@25", stop_regex=["("])).startswith("stop_regex[0]: missing )")
    tasks = tuple(asked(adapter, max_new_tokens=200) for adapter in ("f@25", "one"))
    assert adapting.call("cancel_in_pause", tasks, "retract")[0], "it waited in the queue"
    adapting.call("do", "unload_adapter", "f@25")
    assert len(one(adapting, asked("one")).tokens) == 12


def test_an_adapter_whose_tensors_fit_no_layer_reaches_no_engine(
    adapting: HostedEngine, models: Models, tmp_path: Path
) -> None:
    """SGLang would die of it when a sequence first uses it."""
    shapes = shapes_of(adapting)
    tensors = safetensors.load_file(make_adapter(models.causal, tmp_path / "a", seed=1, rank=2, alpha=1.0) / TENSORS_FILE)
    name = next(iter(tensors))
    for changed, says in (
        ({**tensors, name: tensors[name][:, :-1].copy()}, "lora_A and lora_B are"),
        ({**tensors, name: tensors[name][:-1].copy()}, "for r = 2"),
        ({other: array for other, array in tensors.items() if other != name}, "expected"),
        ({**tensors, name.replace("layers.0", "layers.99"): tensors[name]}, "the model has no such layer"),
    ):
        safetensors.save_file(changed, tmp_path / "a" / TENSORS_FILE)
        with pytest.raises(CheckpointError, match=says):
            read_adapter(str(tmp_path / "a"), [str(tmp_path)], "adapter_roots", shapes)


@pytest.mark.every_version
def test_an_adapter_of_some_modules_is_served_exactly_or_refused_before_an_engine_has_it(
    adapting: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    """SGLang stacks q, k and v, and gate and up, and fills in only some that are missing."""
    own, shapes, prompt = Subject(adapting, models.causal, tmp_path).own, shapes_of(adapting), [*range(150, 190)]
    # The last one has k of layer 0 alone.
    served = (("q_proj", "v_proj"), ("gate_proj",), ("down_proj",), ("q_proj", "v_proj", "layers.0.self_attn.k_proj"))
    for number, targets in enumerate(served):
        path = make_adapter(models.causal, tmp_path / f"{number}", seed=number, rank=4, alpha=6.0, targets=targets)
        assert read_adapter(str(path), [str(tmp_path)], "adapter_roots", shapes)[0] == str(path)
        adapting.call("do", "load_adapter", f"part@{number}", str(path))
        with reference.holding(with_adapter(own, path)):
            assert_greedy(reference, prompt, one(adapting, asked(f"part@{number}", prompt)))
        adapting.call("do", "unload_adapter", f"part@{number}")
    refused = (("v_proj",), ("k_proj", "v_proj"), ("q_proj", "k_proj"), ("up_proj",), ("layers.1.self_attn.q_proj",))
    for number, targets in enumerate(refused):
        path = make_adapter(models.causal, tmp_path / f"no{number}", seed=number, rank=4, alpha=6.0, targets=targets)
        with pytest.raises(CheckpointError, match=r"layers\.[01]\.\w+\.\w+_proj: SGLang serves it only together with"):
            read_adapter(str(path), [str(tmp_path)], "adapter_roots", shapes)
    with pytest.raises(EngineError, match=r"SGLang did not load it: Cannot find target module name for \S+v_proj"):
        adapting.call("do", "load_adapter", "no", str(tmp_path / "no0"))
    assert len(one(adapting, asked("one")).tokens) == 12


def shapes_of(engine: HostedEngine) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in engine.call("do", "model_tensors").tensors}


def test_an_adapter_that_is_not_there_or_has_no_place_is_named_at_the_start(models: Models, tmp_path: Path) -> None:
    make_adapter(models.causal, tmp_path / "part", seed=1, rank=2, alpha=1.0, targets=("v_proj",))
    make_adapter(models.causal, tmp_path / "other", seed=1, rank=2, alpha=1.0, targets=("q_proj", "v_proj"))
    file = tmp_path / "other" / CONFIG_FILE
    config = json.loads(file.read_bytes())
    file.write_text(json.dumps(config | {"use_rslora": True}))
    cases = (
        ("nothing", "nothing"),
        ("part", r"Cannot find target module name for \S+v_proj"),
        ("other", "use_rslora is True, which SGLang does not serve; lora_alpha = 1.41421 without it is the same"),
    )
    for name, says in cases:
        options = {"lora_paths": {"one": str(tmp_path / name)}}
        engine = HostedEngine(str(models.causal), operations=("generate",), options=options)
        with pytest.raises(EngineDied, match=says):
            engine.wait_until_started()
        engine.end()
