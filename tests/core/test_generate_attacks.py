"""Requests to generate in the coordinator: hostile clients, broken workers, and what the innocent lose by them."""

import tracemalloc
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.generation_state import GenerationState
from enginepool.coordinator.fleet.checks import MAX_CONTEXT, impossible
from enginepool.coordinator.operations.generate import GENERATE
from enginepool.coordinator.shell.incoming import Incoming
from enginepool.coordinator.shell.peers import SAME_USER
from enginepool.coordinator.shell.process_memory import CollectorPauses
from enginepool.coordinator.shell.router import ROUND_BYTES
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    MAX_CREDIT,
    MAX_HEADER_BYTES,
    MAX_MATCHED,
    MAX_SEQUENCES,
    Batch,
    FrameSpec,
    Generate,
    SequenceEnd,
    Step,
    Tokens,
)
from tests.core.counting import cost_of
from tests.core.generations import CAN, GeneratingPool, generate, outputs, streamed
from tests.core.machines import EPOCH, config, failures, work

MIXED = msgspec.structs.replace(CAN, operations=("generate", "score"), sequences=8, sequence_tokens=200, sequence_context=100)


# --- workers ------------------------------------------------------------------------------------------------------------


def test_a_request_of_many_prompts_is_no_suspect_after_the_loss_of_one_worker() -> None:
    pool = GeneratingPool()
    link = pool.worker("a", can=CAN)
    pool.submit(pool.client(), 1, generate(3, 4, 5))
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    pool.worker("b", can=CAN)
    assert len(pool.tasks()) == 6, "its prompts run together again"
    assert pool.machine.core.groups["g"].trial is None


def test_a_worker_that_generates_for_a_batch_of_rows_is_lost() -> None:
    pool = GeneratingPool()
    link = pool.worker("a", can=MIXED)
    pool.submit(pool.client(), 1, work(1, 3))
    batch = pool.batches[0].message
    assert isinstance(batch, Batch)
    pool.do(ev.TokensGenerated(0, link, EPOCH, 0, [Step(batch.batch[1], 0, 0, 0)], memoryview(b""), memoryview(b"")))
    assert link not in pool.machine.core.worker_links


def test_a_worker_outlives_the_cancel_of_a_task_that_ran_for_long() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3))
    pool.submit(client, 2, generate(3))
    first, second = pool.tasks()
    for at in range(7):
        for _ in range(8):
            pool.do(ev.WorkerHeard(0, link))
            pool.do(ev.Heard(0, client))
            pool.wait(1.0)
        pool.step(link, (first, 0, at, [1], ""), (second, 0, at, [1], ""))
    pool.do(ev.CancelAsked(0, client, 1))
    pool.wait(0.3)
    assert link in pool.machine.core.worker_links
    assert pool.machine.core.worker_links[link].open


def test_tokens_that_exceed_the_credit_are_sent_as_far_as_it_goes() -> None:
    pool = GeneratingPool()
    link = pool.worker(can=CAN)
    client = pool.client()
    pool.submit(client, 1, generate(3, stream=True, credit=2))
    [task] = pool.tasks()
    assert streamed(pool.step(link, (task, 0, 0, [1, 2, 3], ""))) == [(1, 0, 0, 0, [1, 2])]
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 2))) == [(1, 0, 2, 0, [3])]


def test_a_sequence_that_has_all_its_tokens_has_ended_if_its_worker_is_lost_before_it_says_so() -> None:
    pool = GeneratingPool()
    link = pool.worker("a", can=CAN)
    pool.submit(pool.client(), 1, generate(3, stream=True, max_new_tokens=2))
    pool.step(link, (pool.tasks()[0], 0, 0, [1, 2], ""))
    sent = pool.do(ev.WorkerBroken(0, link, "it broke"))
    message, rows = outputs(sent)[1]
    assert rows == [[1, 2]] and message.ended == [SequenceEnd(0, "length")]


def test_a_worker_that_sends_progress_without_tokens_of_its_tasks_has_no_more_time() -> None:
    pool = GeneratingPool()
    link = pool.worker("a", can=CAN)
    client = pool.client()
    pool.submit(client, 1, generate(3))
    for at in range(40):
        pool.do(ev.Heard(0, client))
        steps = [Step(1 << 40, 0, 0, 0)] if at % 2 else []
        pool.do(ev.TokensGenerated(0, link, EPOCH, 0, steps, memoryview(b""), memoryview(b"")))
        pool.wait(1.0)
    assert link not in pool.machine.core.worker_links


def test_a_worker_whose_context_has_no_room_in_an_answer_is_refused() -> None:
    """What it says of two prompts with media would add up to a number that no message can hold."""
    assert not impossible(msgspec.structs.replace(CAN, context=MAX_CONTEXT))
    assert impossible(msgspec.structs.replace(CAN, context=MAX_CONTEXT + 1))


# --- clients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": ["𐍈" * 1000] * 65},
        {"stop_regex": ["a"] * 32},
        {"json_schema": "𐍈" * 65_000},
        {"logit_bias": {str(token): 1.0 for token in range(256)}},
        {"allowed_token_ids": [2**31 - 1] * 4096},
        {"disallowed_token_ids": [2**31 - 1] * 4096},
    ],
)
def test_a_request_counts_the_text_of_its_header(sampling: dict[str, Any]) -> None:
    plain, long = generate(3), generate(3, **sampling)
    assert plain.charge is not None and long.charge is not None
    header = len(msgspec.msgpack.encode(long.sampling))
    assert long.charge[1] - plain.charge[1] >= header
    assert long.charge[0] == plain.charge[0]


def test_an_answer_of_all_sequences_with_the_longest_match_fits_its_header() -> None:
    matched = "é" * (MAX_MATCHED // 2)
    ended = [SequenceEnd(i, "interrupted", matched) for i in range(MAX_SEQUENCES)]
    pool = GeneratingPool()
    output = [[1]] * MAX_SEQUENCES
    sent = pool.submit(pool.client(), 1, generate(1, n=MAX_SEQUENCES, stream=True, output=output, ended=ended))
    assert len(encode_header(outputs(sent)[1][0])) < MAX_HEADER_BYTES


@pytest.mark.parametrize("brought", [True, False])
def test_a_kept_answer_counts_what_it_says_of_each_sequence(brought: bool) -> None:
    """A client that brings all tokens along gets an answer without any engine, and need not acknowledge it."""
    pool, n, kept = GeneratingPool(), 256, 4
    client = pool.client()
    link = pool.worker(can=msgspec.structs.replace(CAN, inflight_rows=n, batch_rows=n, inflight_tokens=200 * n))

    def answered(id_: int) -> None:
        if brought:
            ended = [SequenceEnd(i, "stop", f"{i:𐍈>32}") for i in range(n)]
            pool.submit(client, id_, generate(3, n=n, output=[[1]] * n, ended=ended))
        else:
            [task] = pool.tasks(pool.submit(client, id_, generate(3, n=n)))
            pool.step(link, *[(task, i, 0, [300, 301], "stop") for i in range(n)])
        pool.sent.clear()

    answered(0)
    answers = pool.machine.core.answers
    before = answers.nbytes
    tracemalloc.start()
    try:
        for id_ in range(1, 1 + kept):
            answered(id_)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(answers) == 1 + kept
    assert taken <= answers.nbytes - before


def test_a_stream_that_is_sent_again_many_times_at_once_is_followed_once() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    content = generate(3, stream=True, logprobs=True, prompt_logprobs=True)
    pool.submit(client, 1, content)
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), logprobs=True, prompts=[(task, [0.0, -1.0, -2.0])])
    again = ev.Submit(0, client, 1, content, 0, None)
    sent = pool.do(*[again] * 8, pool.progress(link, (task, 0, 2, [3], ""), logprobs=True), again)
    assert streamed(sent) == [(1, 0, 0, 0, [1, 2, 3])]
    messages = [one.message for one in sent]
    assert [len(message.prompts) for message in messages if isinstance(message, Tokens)] == [1, 0]
    assert streamed(pool.step(link, (task, 0, 3, [4], ""), logprobs=True)) == [(1, 0, 3, 0, [4])]


def test_a_stream_that_is_sent_again_and_whose_link_is_cut_at_once_is_sent_nothing() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    content = generate(3, stream=True)
    pool.submit(client, 1, content)
    pool.step(link, (pool.tasks()[0], 0, 0, [1, 2], ""))
    assert streamed(pool.do(ev.Submit(0, client, 1, content, 0, None), ev.LinkCut(0, client))) == []


def test_a_link_that_says_hello_again_and_again_costs_no_list_of_the_sequences_of_each_stream() -> None:
    state = GenerationState[object](generate(3, n=1024, stream=True))
    state.expect()
    assert cost_of(state.expect).nbytes < 8 * 1024


def test_a_short_request_that_asks_for_much_takes_a_round_of_the_sockets_for_itself() -> None:
    """Its client may send it again and again, and others wait for the end of each round: a new one sets up all its sequences,
    and a stream that is sent again is answered with all tokens that there is credit for."""
    pool = GeneratingPool()
    router: Any = Mock(unread=0, unread_of=Mock(return_value=0), peer=Mock(return_value=SAME_USER))
    incoming = Incoming(pool.machine, router, router, 1 << 20, CollectorPauses())

    def counted(n: int, **more: Any) -> int:
        specs = [FrameSpec("items", "int32", (1,)), FrameSpec("item_lengths", "uint32", (1,))]
        one = (1).to_bytes(4, "little")
        return incoming.from_client(b"link", [encode_header(Generate(1, specs, n=n, **more)), one, one], Mock())

    assert counted(MAX_SEQUENCES) >= ROUND_BYTES > 64 * counted(8)
    assert counted(64, stream=True, credit=MAX_CREDIT, logprobs=True, top_logprobs=20) > ROUND_BYTES
    assert 64 * counted(8, stream=True, logprobs=True) < 2 * ROUND_BYTES, "most streams share a round"
    assert len(incoming.events) == 4


def test_a_match_that_is_too_long_is_refused() -> None:
    with pytest.raises(WireError, match="128"):
        generate(3, output=[[1]], ended=[SequenceEnd(0, "stop", "é" * MAX_MATCHED)])


def test_a_request_that_no_idle_coordinator_has_room_for_is_refused_instead_of_asked_to_wait() -> None:
    pool = GeneratingPool(config(limits=Limits(max_message_bytes=1 << 20, window_bytes=1 << 20)))
    content = generate(3, n=100, max_new_tokens=1500)
    assert content.charge is not None and content.charge[0] < 1 << 20 < content.charge[1], "its tokens count twice"
    (failure,) = failures(pool.submit(pool.client(), 1, content)).values()
    assert (failure.code, failure.field, failure.limit) == ("too_large", "items", str(1 << 20))


def test_an_answer_with_log_probabilities_of_prompts_is_no_longer_than_its_client_takes() -> None:
    pool = GeneratingPool()
    small = b"small"
    pool.do(ev.ClientHello(0, small, b"c" * 16, b"t" * 16, 0, max_message_bytes=1 << 20))
    assert failures(pool.submit(small, 1, generate(1 << 18))) == {}
    (failure,) = failures(pool.submit(small, 2, generate(1 << 18, prompt_logprobs=True))).values()
    assert (failure.code, failure.limit) == ("too_large", str(1 << 20))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_client_no_longer_takes_is_not_sent(stream: bool) -> None:
    pool = GeneratingPool()
    worker, before, after = pool.worker(can=CAN), b"before", b"after"
    pool.do(ev.ClientHello(0, before, b"c" * 16, b"t" * 16, 0))
    [task] = pool.tasks(pool.submit(before, 1, generate(3, stream=stream)))
    pool.do(ev.ClientHello(0, after, b"c" * 16, b"t" * 16, 1, max_message_bytes=8))
    sent = pool.step(worker, (task, 0, 0, [1, 2], "stop"))
    assert (failures(sent)[1].code, failures(sent)[1].limit) == ("too_large", "8")


def test_a_prompt_of_text_counts_as_its_ids() -> None:
    specs = [FrameSpec("items", "utf8", (1000,)), FrameSpec("item_lengths", "uint32", (1,))]
    content = GENERATE.open(Generate(1, specs), [b"a" * 1000, (1000).to_bytes(4, "little")])
    ids = generate(1000, max_new_tokens=128)
    assert content.charge is not None and ids.charge is not None
    assert content.charge[1] == ids.charge[1] + 1004
