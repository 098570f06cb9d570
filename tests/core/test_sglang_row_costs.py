"""What is changed in SGLang so that a row costs it less, on classes that stand for SGLang's."""

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from enginepool.workers.sglang.patches.row_messages import send_shared_fields_once
from enginepool.workers.sglang.patches.row_results import free_rows_together
from enginepool.workers.sglang.patches.scheduler import gather_labels_without_waiting


class Processor:
    """Its module, which is this one, has the functions that pick labels."""


@pytest.fixture
def picking(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for SGLang's module."""
    names = "get_token_ids_logprobs", "get_token_ids_logprobs_batch_optimized", "get_token_ids_logprobs_raw"
    module = sys.modules[__name__]

    def pick(*_: object) -> str:
        return "SGLang's own"

    for name in names:
        monkeypatch.setattr(module, name, pick, raising=False)
    gather_labels_without_waiting(Processor, Processor)
    return module


def test_the_labels_of_all_rows_are_picked_at_once_and_a_row_without_labels_has_none(picking: Any) -> None:
    logprobs = torch.arange(4 * 10, dtype=torch.float32).view(4, 10)
    wanted = [[3, 9], None, [5], []]
    for found, labels in (
        picking.get_token_ids_logprobs_batch_optimized(logprobs, wanted),
        picking.get_token_ids_logprobs(logprobs, wanted, no_copy_to_cpu=True),
    ):
        assert [values.tolist() for values in found] == [[3, 9], [], [25], []]
        assert labels == [[3, 9], [], [5], []]


def test_labels_that_are_wanted_as_lists_are_picked_by_sglang(picking: Any) -> None:
    assert picking.get_token_ids_logprobs(torch.zeros(1, 10), [[3]]) == "SGLang's own"


class Sampling(msgspec.Struct):
    """Stands for SGLang's parameters of sampling."""

    max_new_tokens: int


class Row(msgspec.Struct, kw_only=True):
    """Stands for a request of SGLang."""

    rid: str
    input_ids: list[int]
    sampling_params: Sampling
    time_stats: Any
    labels: list[int] | None = None
    priority: int = 0
    start: int = -1


class Message(msgspec.Struct, kw_only=True):
    """Stands for a message with several requests."""

    batch: list[Row]
    more: str = ""


def rows(count: int, max_new_tokens: int = 0, *, traced: bool = False, **fields: Any) -> list[Row]:
    return [
        Row(
            rid=f"{i:08x}",
            input_ids=[i, i + 1],
            sampling_params=Sampling(max_new_tokens),
            time_stats=SimpleNamespace(trace_ctx=SimpleNamespace(tracing_enable=traced)),
            **{name: values[i] for name, values in fields.items()},
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module", autouse=True)
def sending_shared_fields_once() -> None:
    send_shared_fields_once(Message)


@pytest.mark.parametrize(
    "sent",
    [
        rows(0),
        rows(1),
        rows(3),
        rows(3, labels=[[1], None, [2, 3]], start=[1000, 1001, 1000]),
        rows(2, labels=[[7], [7]], priority=[5000, -5]),
        rows(3, 20),
        [*rows(2), *rows(1, 20)],
        rows(2, traced=True),
    ],
)
def test_a_message_arrives_as_it_was_sent(sent: list[Row]) -> None:
    message = Message(batch=sent, more="and more")
    assert pickle.loads(pickle.dumps(message)) == message
    assert message.batch is sent


def test_what_rows_share_is_sent_once_and_what_sequences_share_with_each() -> None:
    [first, *others] = pickle.loads(pickle.dumps(Message(batch=rows(5)))).batch
    assert all(row.sampling_params is first.sampling_params and row.time_stats is first.time_stats for row in others)
    for own in (rows(5, 20), rows(5, traced=True)):
        [first, *others] = pickle.loads(pickle.dumps(Message(batch=own))).batch
        assert not any(row.sampling_params is first.sampling_params or row.time_stats is first.time_stats for row in others)


def freeing(begins_itself: bool) -> tuple[Any, list[str]]:
    """Stands for SGLang's class that takes results, of an older version or of a newer one; and what its pool was asked."""
    asked: list[str] = []

    class Pool:
        def free_group_begin(self) -> None:
            asked.append("begin")

        def free_group_end(self) -> None:
            asked.append("end")

    class Results:
        token_to_kv_pool_allocator = Pool()

        def process_batch_result_prefill(self, batch: Any, result: Exception | None) -> None:
            asked.append("free")
            if result is not None:
                raise result

    class NewerResults(Results):
        def process_batch_result_prefill(self, batch: Any, result: Exception | None) -> None:
            self.token_to_kv_pool_allocator.free_group_begin()
            super().process_batch_result_prefill(batch, result)
            self.token_to_kv_pool_allocator.free_group_end()

    found = NewerResults if begins_itself else Results
    free_rows_together(found)
    return found(), asked


@pytest.mark.parametrize("begins_itself", [False, True])
def test_rows_of_a_forward_are_freed_together(begins_itself: bool) -> None:
    results, asked = freeing(begins_itself)
    results.process_batch_result_prefill(SimpleNamespace(is_prefill_only=True), None)
    assert asked == ["begin", "free", "end"]


def test_prompts_of_sequences_are_freed_as_sglang_frees_them() -> None:
    results, asked = freeing(begins_itself=False)
    results.process_batch_result_prefill(SimpleNamespace(is_prefill_only=False), None)
    assert asked == ["free"]


def test_a_pool_gathers_nothing_more_after_results_that_failed() -> None:
    results, asked = freeing(begins_itself=False)
    with pytest.raises(RuntimeError):
        results.process_batch_result_prefill(SimpleNamespace(is_prefill_only=True), RuntimeError())
    assert asked == ["begin", "free", "end"]
