"""What an engine of several ranks does otherwise than SGLang: its ranks exchange logits by NCCL, and by nothing else."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from enginepool.workers.sglang.patches.scheduler import gather_logits_by_nccl
from tests.engine.forked import run_code


class Gatherer:
    """In place of SGLang's, which says by `enabled` whether it will try memory with a multicast address."""

    def __init__(self, max_tokens: int, *, enabled: bool = True, skip_entry_sync: bool = False) -> None:
        self.given = (max_tokens, enabled, skip_entry_sync)


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A class of a module of its own, as SGLang's logits processor is."""
    module = ModuleType("some_logits_processor")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return type("LogitsProcessor", (), {"__module__": module.__name__})


def test_logits_are_always_gathered_by_nccl(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gatherer, "__init__", Gatherer.__init__)
    module: Any = sys.modules[processor.__module__]
    module.triton_symm_mem_ag = SimpleNamespace(MultimemAllGatherer=Gatherer)
    gather_logits_by_nccl(processor)
    assert Gatherer(128, enabled=True, skip_entry_sync=True).given == (128, False, True)
    assert Gatherer(128).given == (128, False, False)


def test_a_version_that_gathers_otherwise_is_left_alone(processor: Any) -> None:
    gather_logits_by_nccl(processor)
    module: Any = sys.modules[processor.__module__]
    module.triton_symm_mem_ag = SimpleNamespace()
    gather_logits_by_nccl(processor)
    assert not vars(module.triton_symm_mem_ag)


@pytest.mark.engine
def test_the_installed_sglang_is_told_so() -> None:
    """In a process of its own: what is changed there stays."""
    code = """
from sglang.srt.layers import logits_processor
from enginepool.workers.sglang.patches.scheduler import gather_logits_by_nccl
gatherer = logits_processor.triton_symm_mem_ag.MultimemAllGatherer
try:
    gatherer(max_tokens=1)
except (AssertionError, RuntimeError) as error:
    print("unchanged:", type(error).__name__)
gather_logits_by_nccl(logits_processor.LogitsProcessor)
gatherer(max_tokens=1)
print("changed")
"""
    status, said = run_code(code)
    assert status == 0, said
    # As it is, it looks for its group of ranks; and then it has no use for one.
    unchanged, changed = said.splitlines()
    assert unchanged.startswith("unchanged: ") and changed == "changed"
