"""Engines that only generate, of several replicas or stages, on a CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from enginepool.workers.engine import EngineDied, EngineError, OnlyAtStart
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_generate import CONTEXT, LONG, OLDEST, PROMPTS, assert_greedy, run, task
from tests.engine.test_sglang_scores import declared

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["dp_size", "pp_size"])
def parallel(request: pytest.FixtureRequest, models: Models) -> Iterator[HostedEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        # As if the machine had a node for each rank. The oldest version counts those of one replica and stage.
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0" if OLDEST else "0|0")
        options = {request.param: 2, "context_length": CONTEXT}
        engine = HostedEngine(str(models.causal), operations=("generate",), options=options, nccl_port=28123)
        yield engine.wait_until_started()
        engine.end()


def test_it_generates_as_one_engine_does_and_takes_what_all_replicas_have_room_for(
    parallel: HostedEngine, reference: Reference, request: pytest.FixtureRequest
) -> None:
    replicas = 2 if request.node.callspec.params["parallel"] == "dp_size" else 1
    can = declared(parallel)
    assert (can.inflight_rows, can.inflight_tokens) == (replicas * 64, replicas * 8192)
    assert can.context + can.reserved == CONTEXT, "no sequence is spread over replicas"
    tasks = [task(prompt, n=2, logprobs=True, ignore_eos=True) for prompt in PROMPTS]
    for prompt, sequences in zip(PROMPTS, run(parallel, *tasks), strict=True):
        for sequence in sequences:
            assert sequence.chunks == [1] * 12
            assert_greedy(reference, prompt, sequence)


def test_what_is_cancelled_leaves_every_replica_and_they_forget_their_prefixes(parallel: HostedEngine) -> None:
    for _ in range(2):
        emitted, left = parallel.call("stop", LONG, 40)
        assert 40 <= emitted < 3 * 1000 and left == 0
    parallel.call("do", "flush")


def test_a_high_priority_takes_a_slot_of_the_replica_that_it_goes_to(parallel: HostedEngine) -> None:
    low = task(n=declared(parallel).inflight_rows, ignore_eos=True, max_new_tokens=60)
    high = replace(task(PROMPTS[1], ignore_eos=True), priority=100)
    assert parallel.call("ends", [low], high) == [1, 0]


def test_weight_updates_are_refused_by_name(parallel: HostedEngine, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["parallel"]
    with pytest.raises(OnlyAtStart, match=f"takes weights only at its start: engine option {name}=2: weight updates do not"):
        parallel.call("do", "model_tensors")


def test_its_weights_are_not_saved_where_no_engine_could_read_them(parallel: HostedEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not saved: this engine has replicas or stages"):
        parallel.call("do", "save", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_engine_of_which_one_process_is_gone_is_lost(parallel: HostedEngine) -> None:
    """The last one: it ends the engine."""
    with pytest.raises(EngineDied, match="the engine's scheduler"):
        parallel.call("die_generating", LONG)
    parallel.close()
