"""An engine that publishes KV events reports each block that it stores, and each that it evicts."""

import os
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.prefix_blocks import BLOCK, blocks_of
from enginepool.workers.engine import EngineDied
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models
from tests.engine.test_sglang_generate import Continued, one, task

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PATIENCE_S = 20.0
#: a cache of 16 blocks
OPTIONS: dict[str, Any] = {"kv_events_config": '{"publisher": "zmq"}', "max_total_tokens": 16 * BLOCK}


def generate(engine: HostedEngine, prompt: list[int]) -> Continued:
    return one(engine, task(prompt, max_new_tokens=BLOCK, ignore_eos=True))


def blocks(*tokens: list[int]) -> list[int]:
    return blocks_of(np.concatenate([np.array(some, np.int32) for some in tokens]).tobytes())


def heard(engine: HostedEngine, prompt: list[int]) -> list[int]:
    """The output for a prompt, once its blocks were reported. SGLang's socket loses what it publishes to a reader that is late;
    then the prompt is computed again."""
    for _ in range(3):
        output = generate(engine, prompt).tokens
        if engine.call("reported", blocks(prompt, output), [], PATIENCE_S):
            return output
        engine.call("flush")
    pytest.fail("the engine reported none of its blocks")


@pytest.mark.every_version
def test_what_an_engine_has_evicted_is_reported(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    engine = HostedEngine(str(models.causal), operations=("generate",), options=OPTIONS)
    if "ENGINEPOOL_TEST_OLDEST" in os.environ:
        with pytest.raises(EngineDied, match=r"page_size=64 is refused: SGLang 0\.5\.17 has no pages on a CPU"):
            engine.wait_until_started()
        return
    engine.wait_until_started()
    first, others = [*range(200)], [[*range(start, start + 250)] for start in (1, 2, 3)]
    output = heard(engine, first)
    had = blocks(first, output)
    assert len(had) == 4
    assert generate(engine, [*first, *output, 7]).cached == [4 * BLOCK], "what was reported is there"
    for prompt in others:
        generate(engine, prompt)
    assert engine.call("reported", blocks(others[-1]), had, PATIENCE_S)
    assert generate(engine, first).cached == [0], "what was evicted is not"
    engine.call("flush")
    assert engine.call("reported", [], [*blocks(first), *(block for prompt in others for block in blocks(prompt))], PATIENCE_S)
    engine.end()
