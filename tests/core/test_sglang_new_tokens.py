"""New tokens are read off the scheduler's messages, and SGLang reads what ends, and what is its own."""

import asyncio
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from enginepool.workers.sglang.generate.new_tokens import SchedulerMessages
from enginepool.workers.sglang.patches.new_weights import WENT_ON


class Answers(msgspec.Struct, kw_only=True):
    """Of SGLang's message, the parts that matter."""

    rids: list[str]
    finished_reasons: list[dict[str, Any] | None]
    output_ids: list[Any]
    output_token_logprobs_val: list[Any] | None = None
    prompt_tokens: list[int]
    cached_tokens: list[int]
    dp_ranks: list[int] | None = None
    time_stats: Any = b"packed"


def message(**ends: bool) -> Answers:
    """Of each request, its next two tokens, and whether it ends."""
    return Answers(
        rids=list(ends),
        finished_reasons=[{"type": "length"} if end else None for end in ends.values()],
        output_ids=[array("q", [i, i + 1]) for i in range(len(ends))],
        prompt_tokens=[10 * i for i in range(len(ends))],
        cached_tokens=[5 * i for i in range(len(ends))],
    )


class Said(msgspec.Struct):
    """SGLang's answer to a ticket."""

    message: str


class Reader:
    """SGLang's readers of answers."""

    def __init__(self, metrics: bool = False) -> None:
        self.read: list[Answers] = []
        self.others: list[Said] = []
        self.enable_metrics = metrics
        self._result_dispatcher = self.others.append

    async def _handle_batch_output(self, recv_obj: Answers) -> None:
        self.read.append(recv_obj)


def hand_on(tm: Any, *messages: Answers, takers: str = "abc") -> list[tuple[str, list[int], list[float], Any, int]]:
    """What the takers get of these messages."""
    taken: list[tuple[str, list[int], list[float], Any, int]] = []
    forwards: list[int] = []
    subject = SchedulerMessages(tm, lambda: forwards.append(len(taken)))

    def take(rid: str, tokens: list[int], logprobs: Sequence[float], reason: Any, cached: int, *_: Any) -> None:
        taken.append((rid, tokens, list(logprobs), reason, cached))

    for rid in takers:
        subject.takers[rid] = partial(take, rid)
    for one in messages:
        asyncio.run(tm._handle_batch_output(one))
    of_sequences = [one for one in messages if set(one.rids) & set(takers)]
    assert len(forwards) == len(of_sequences) and forwards[-1:] == ([len(taken)] if forwards else [])  # after its tokens
    return taken


def test_sglang_is_not_bothered_with_tokens_of_requests_that_go_on() -> None:
    tm = Reader()
    assert hand_on(tm, message(a=False, b=False)) == [("a", [0, 1], [], None, 0), ("b", [1, 2], [], None, 5)]
    assert tm.read == []


def test_sglang_reads_the_requests_that_end_and_those_that_are_not_ours() -> None:
    tm = Reader()
    taken = hand_on(tm, message(a=False, b=True, x=False, c=False))
    assert [rid for rid, *_ in taken] == ["a", "b", "c"]
    [read] = tm.read
    assert (read.rids, read.prompt_tokens, read.time_stats) == (["b", "x"], [10, 20], None)
    assert [list(ids) for ids in read.output_ids] == [[1, 2], [2, 3]]
    assert read.dp_ranks is None


def test_log_probabilities_are_those_of_their_request() -> None:
    some = message(a=False, b=False)
    some.output_token_logprobs_val = [None, [-1.0, -2.0]]
    assert hand_on(Reader(), some) == [("a", [0, 1], [], None, 0), ("b", [1, 2], [-1.0, -2.0], None, 5)]


@pytest.mark.parametrize("ends", [False, True])
def test_sglang_reads_everything_where_it_counts_tokens_itself(ends: bool) -> None:
    tm = Reader(metrics=True)
    one = message(a=False, b=ends)
    assert len(hand_on(tm, one)) == 2
    assert tm.read == [one] and one.time_stats == b"packed"


def test_messages_of_rows_pass_and_count_as_no_step_of_the_sequences() -> None:
    tm = Reader()
    assert hand_on(tm, message(x=True), takers="") == []
    assert [read.rids for read in tm.read] == [["x"]]


def test_tokens_that_follow_a_load_with_which_the_scheduler_went_on_are_held_back_in_order() -> None:
    async def main() -> None:
        tm: Any = Reader()
        subject, taken = SchedulerMessages(tm, lambda: None), list[tuple[list[int], Any]]()

        def take(rid: str, tokens: list[int], _: Sequence[float], reason: Any, *more: Any) -> None:
            taken.append((tokens, reason))

        subject.takers["b"] = partial(take, "b")
        await tm._handle_batch_output(message(a=False, b=False))
        tm._result_dispatcher(Said("Success"))
        await tm._handle_batch_output(message(b=False))
        assert [tokens for tokens, _ in taken] == [[1, 2], [0, 1]]
        tm._result_dispatcher(Said(WENT_ON))
        before = len(tm.read)
        await tm._handle_batch_output(message(a=False, b=False))
        await tm._handle_batch_output(message(b=True))
        assert len(taken) == 2 and len(tm.read) == before and len(tm.others) == 2
        await subject.release()
        assert [tokens for tokens, _ in taken[2:]] == [[1, 2], [0, 1]]
        assert taken[-1][1] == {"type": "length"} and len(tm.read) == before + 2
        await tm._handle_batch_output(message(b=False))
        assert len(taken) == 5

    asyncio.run(main())
