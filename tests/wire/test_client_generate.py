"""`Pool.generate` and `Pool.stream` on a real socket: what travels, what comes back, and which arguments are refused."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from enginepool import BlockingPool, Generation, Generations, Pool, TokenChunk, TokenStream, errors
from enginepool.client.generate import GenerateOptions
from enginepool.protocol.messages import (
    MAX_CREDIT,
    MAX_NEW_TOKENS,
    MAX_SEQUENCES,
    Cancel,
    FrameSpec,
    Generate,
    Sampling,
    SequenceEnd,
)
from tests.wire.generating_coordinator import VERSION, GeneratingCoordinator, token

T = TypeVar("T")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[GeneratingCoordinator]:
    fake = GeneratingCoordinator(f"ipc://{tmp_path}/c.sock")
    with fake:
        yield fake


def ask(coordinator: GeneratingCoordinator, call: Callable[[Pool], Awaitable[T]]) -> T:
    async def main() -> T:
        async with Pool.connect(coordinator.address) as pool:
            return await call(pool)

    return asyncio.run(asyncio.wait_for(main(), 60))


def generate(coordinator: GeneratingCoordinator, prompts: Any, **options: Any) -> Generations:
    return ask(coordinator, lambda pool: pool.generate(prompts, **options))


def test_samples_come_back_grouped_by_prompt_with_their_tokens_logprobs_ends_and_spans(
    coordinator: GeneratingCoordinator,
) -> None:
    coordinator.stops = {1: 2}
    found = generate(coordinator, [[1, 2], [3]], n=2, max_new_tokens=3, logprobs=True)
    assert len(found) == 2 and [len(group) for group in found] == [2, 2]
    assert [one.token_ids.tolist() for group in found for one in group] == [
        [0, 1, 2], [100, 101], [200, 201, 202], [300, 301, 302],
    ]  # fmt: skip
    stopped = found[0][1]
    assert (stopped.finish_reason, stopped.matched, stopped.spans) == ("stop", 7, ((VERSION, 2),))
    assert stopped.token_ids.dtype == np.int32 and stopped.token_ids.flags.writeable
    assert stopped.logprobs is not None and stopped.logprobs.dtype == np.float32 and stopped.logprobs.flags.writeable
    np.testing.assert_array_equal(stopped.logprobs, [-100, -101])
    assert (found[1][0].finish_reason, found[1][0].matched) == ("length", None)
    assert (found.version, found.usage, found.timings) == (VERSION, (4, 5, 11, 3), (0.0015, 2.0))
    assert coordinator.brought == [[b"\1\0\0\0\2\0\0\0\3\0\0\0", b"\2\0\0\0\1\0\0\0"]]
    [sent] = coordinator.asked
    assert sent.frames == [FrameSpec("items", "int32", (3,)), FrameSpec("item_lengths", "uint32", (2,))]
    assert (sent.n, sent.sampling, sent.stream) == (2, Sampling(max_new_tokens=3), False)


@pytest.mark.parametrize("prompt", ["zwölf", [5, 6], np.array([5, 6])], ids=["text", "ids", "array"])
def test_one_prompt_is_a_group_of_its_own(coordinator: GeneratingCoordinator, prompt: Any) -> None:
    [[one]] = generate(coordinator, prompt, max_new_tokens=2)
    assert one.token_ids.tolist() == [0, 1] and one.logprobs is None
    text = isinstance(prompt, str)
    assert coordinator.brought[0][0] == (prompt.encode() if text else b"\5\0\0\0\6\0\0\0")


def test_every_sampling_parameter_travels_by_its_own_name(coordinator: GeneratingCoordinator) -> None:
    given: dict[str, Any] = {
        "max_new_tokens": np.int64(4), "min_new_tokens": 1, "temperature": 0, "top_p": np.float32(0.5), "top_k": 5,
        "min_p": 0.25,
        "frequency_penalty": 1, "presence_penalty": -1.5, "repetition_penalty": 1.25, "stop": "\n\n", "stop_token_ids": (7, 8),
        "stop_regex": ["[0-9]+"], "ignore_eos": True, "logit_bias": {5: -1, "6": np.float64(2.5)}, "sampling_seed": 3,
        "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
        "allowed_token_ids": np.array([4, 5]), "disallowed_token_ids": None, "temperature_schedule": None,
        "require_reasoning": False,
    }  # fmt: skip
    assert given.keys() == set(Sampling.__struct_fields__) <= GenerateOptions.__annotations__.keys()
    given |= {"group": "g", "priority": -3, "adapter": "f"}
    generate(coordinator, ["a"], timeout=30, min_version=4, version=5, partial=True, **given)
    [sent] = coordinator.asked
    assert sent.sampling == Sampling(
        4, 1, 0.0, 0.5, 5, 0.25, 1.0, -1.5, 1.25, ["\n\n"], [7, 8], ["[0-9]+"], True, {"5": -1.0, "6": 2.5}, 3,
        allowed_token_ids=[4, 5],
    )  # fmt: skip
    assert (sent.group, sent.priority, sent.min_version, sent.version, sent.partial) == ("g", -3, 4, 5, True)
    assert sent.adapter == "f"
    assert sent.timeout_ms is not None and 0 < sent.timeout_ms <= 30_000


@pytest.mark.parametrize("grammar", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_a_grammar_travels_by_its_own_name(coordinator: GeneratingCoordinator, grammar: str) -> None:
    generate(coordinator, ["a"], **{grammar: "{}"})
    assert coordinator.asked[0].sampling == Sampling(**{grammar: "{}"})  # pyright: ignore[reportArgumentType]


def test_what_is_not_said_has_the_defaults_of_the_protocol(coordinator: GeneratingCoordinator) -> None:
    generate(coordinator, ["a"])
    [sent] = coordinator.asked
    assert sent == Generate(sent.id, sent.frames)


WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    ([], {}, "prompts", "1"),
    ("", {}, "prompts[0]", "1"),
    ([[]], {}, "prompts[0]", "1"),
    (["a", [1]], {}, "prompts[1]", ""),
    ([[1, -1]], {}, "prompts[0][1]", "0"),
    ([[1.5]], {}, "prompts[0][0]", ""),
    ([{"role": "user", "content": "a"}], {}, "prompts[0]", ""),
    (3, {}, "prompts", ""),
    (["a"] * (MAX_SEQUENCES + 1), {}, "prompts", str(MAX_SEQUENCES)),
    (["a", "b"], {"n": MAX_SEQUENCES // 2 + 1}, "n", str(MAX_SEQUENCES // 2)),
    ("a", {"n": 0}, "n", "1"),
    ("a", {"n": 1.0}, "n", ""),
    ("a", {"logprobs": 1}, "logprobs", ""),
    ("a", {"top_logprobs": 21}, "top_logprobs", "20"),
    ("a", {"top_logprobs": -1}, "top_logprobs", "0"),
    ("a", {"top_logprobs": True}, "top_logprobs", ""),
    ("a", {"prompt_logprobs": 1}, "prompt_logprobs", ""),
    ("a", {"partial": "yes"}, "partial", ""),
    ("a", {"priority": 1001}, "priority", "1000"),
    ("a", {"timeout": 0}, "timeout", "0"),
    ("a", {"min_version": -1}, "min_version", "0"),
    ("a", {"version": -1}, "version", "0"),
    ("a", {"version": "5"}, "version", ""),
    ("a", {"version": 5, "min_version": 6}, "min_version", "5"),
    ("a", {"group": 3}, "group", ""),
    ("a", {"adapter": 3}, "adapter", ""),
    ("a", {"adapter": "a" * 129}, "adapter", "128"),
    ("a", {"adapter": "\ud800"}, "adapter", ""),
    ("a", {"retry_busy": 0}, "retry_busy", ""),
    ("a", {"max_new_tokens": 0}, "max_new_tokens", str(MAX_NEW_TOKENS)),
    ("a", {"max_new_tokens": MAX_NEW_TOKENS + 1}, "max_new_tokens", str(MAX_NEW_TOKENS)),
    ("a", {"max_new_tokens": "8"}, "max_new_tokens", ""),
    ("a", {"max_new_tokens": True}, "max_new_tokens", ""),
    ("a", {"min_new_tokens": 129}, "min_new_tokens", "128"),
    ("a", {"temperature": -1}, "temperature", "1000000"),
    ("a", {"temperature": 1_000_001}, "temperature", "1000000"),
    ("a", {"temperature": float("nan")}, "temperature", "1000000"),
    ("a", {"temperature": "hot"}, "temperature", ""),
    ("a", {"top_p": 0}, "top_p", "1"),
    ("a", {"top_k": 0}, "top_k", "1"),
    ("a", {"top_k": 2**31}, "top_k", str(2**31 - 1)),
    ("a", {"min_p": 1.5}, "min_p", "1"),
    ("a", {"frequency_penalty": 3}, "frequency_penalty", "2"),
    ("a", {"presence_penalty": -3}, "presence_penalty", "2"),
    ("a", {"repetition_penalty": 0.009}, "repetition_penalty", "2"),
    ("a", {"temperature_schedule": (2e6, 0, 5)}, "temperature_schedule", "1000000"),
    ("a", {"json_schema": ""}, "json_schema", ""),
    ("a", {"ebnf": ""}, "ebnf", ""),
    ("a", {"regex": "abc", "ignore_eos": True}, "ignore_eos", "false"),
    ("a", {"stop": [""]}, "stop", ""),
    ("a", {"stop": [3]}, "stop[0]", ""),
    ("a", {"stop": ["\ud800"]}, "stop[0]", ""),
    ("a", {"stop": ["é" * 1024] * 256, "stop_regex": ["é" * 1024]}, "stop", "65536"),
    ("a", {"stop": ["a" * 1025]}, "stop[0]", "1024"),
    ("a", {"stop": ["a"] * 257}, "stop", "256"),
    ("a", {"stop_regex": ""}, "stop_regex", ""),
    ("a", {"stop_regex": ["a"] * 33}, "stop_regex", "32"),
    ("a", {"stop_regex": ["a" * 256, "a" * 257]}, "stop_regex[1]", "256"),
    ("a", {"stop_regex": ["é" * 129]}, "stop_regex[0]", "256"),
    ("a", {"stop_token_ids": [1, -1]}, "stop_token_ids[1]", str(2**31 - 1)),
    ("a", {"stop_token_ids": 5}, "stop_token_ids", ""),
    ("a", {"ignore_eos": 1}, "ignore_eos", ""),
    ("a", {"logit_bias": {-1: 2.0}}, "logit_bias", str(2**31 - 1)),
    ("a", {"logit_bias": {1: 2e20}}, "logit_bias", "1e+20"),
    ("a", {"logit_bias": {1: float("nan")}}, "logit_bias", "1e+20"),
    ("a", {"logit_bias": {1: "much"}}, "logit_bias", ""),
    ("a", {"logit_bias": [1.0]}, "logit_bias", ""),
    ("a", {"sampling_seed": -1}, "sampling_seed", str(2**63 - 1)),
    ("a", {"sampling_seed": 2**70}, "sampling_seed", str(2**63 - 1)),
    ("a", {"json_schema": {}}, "json_schema", ""),
    ("a", {"regex": "a" * 65_537}, "regex", "65536"),
    ("a", {"regex": "\ud800"}, "regex", ""),
    ("a", {"ebnf": "x", "structural_tag": "y"}, "structural_tag", "1"),
    ("a", {"allowed_token_ids": []}, "allowed_token_ids", "1"),
    ("a", {"allowed_token_ids": [0], "disallowed_token_ids": [1]}, "disallowed_token_ids", ""),
    ("a", {"disallowed_token_ids": [*range(4097)]}, "disallowed_token_ids", "4096"),
    ("a", {"disallowed_token_ids": [1], "regex": "a"}, "disallowed_token_ids", ""),
    ("a", {"temperature_schedule": (1.0, 0.0)}, "temperature_schedule", ""),
    ("a", {"temperature_schedule": (1.0, -1.0, 5)}, "temperature_schedule", "0"),
    ("a", {"temperature_schedule": (1.0, 0.0, 0)}, "temperature_schedule", str(1 << 20)),
    ("a", {"temperature_schedule": (1.0, 0.0, 5), "temperature": 0}, "temperature_schedule", ""),
    ("a", {"continue_from": "x"}, "continue_from", ""),
    ("a", {"continue_from": []}, "continue_from", "1"),
    ("a", {"continue_from": [3]}, "continue_from[0]", ""),
    ("a", {"continue_from": [[]]}, "continue_from[0]", "1"),
    ("a", {"continue_from": [[3]]}, "continue_from[0][0]", ""),
]


@pytest.mark.parametrize(("prompts", "options", "field", "limit"), WRONG, ids=[f"{o or p!r:.40}" for p, o, _, _ in WRONG])
def test_an_argument_that_cannot_be_served_is_named_and_nothing_is_sent(
    coordinator: GeneratingCoordinator, prompts: Any, options: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(errors.BadRequest) as refused:
        generate(coordinator, prompts, **options)
    assert (refused.value.field, refused.value.limit) == (field, limit)
    assert str(refused.value).startswith(f"{field}: ")
    assert not coordinator.asked


def test_a_prompt_of_another_type_is_told_that_text_and_token_ids_are_allowed(coordinator: GeneratingCoordinator) -> None:
    with pytest.raises(errors.BadRequest, match=r"^prompts\[0\]: None; a text, or a sequence of token ids$"):
        generate(coordinator, [None])


@pytest.mark.parametrize("schedule", [[1.0, 0.2], [1.0, 0.2, 5, 6], 0.2])
def test_the_error_for_a_wrong_schedule_names_its_three_numbers(coordinator: GeneratingCoordinator, schedule: Any) -> None:
    with pytest.raises(errors.BadRequest, match="must be three numbers: the first temperature, the last one, "):
        generate(coordinator, "a", temperature_schedule=schedule)


def test_an_unknown_option_is_refused_with_the_one_that_was_meant(coordinator: GeneratingCoordinator) -> None:
    with pytest.raises(TypeError, match=r"generate\(\) has no argument 'max_tokens'; did you mean max_new_tokens\?"):
        generate(coordinator, "a", max_tokens=3)

    async def stream(pool: Pool) -> None:
        pool.stream("a", credits=3)  # pyright: ignore[reportCallIssue]

    with pytest.raises(TypeError, match=r"stream\(\) has no argument 'credits'; did you mean credit\?"):
        ask(coordinator, stream)


# --- interrupted, and continued ------------------------------------------------------------------------------------------


def test_an_interrupted_sequence_is_an_error_that_has_everything_so_far(coordinator: GeneratingCoordinator) -> None:
    coordinator.stops, coordinator.reason = {1: 2}, "interrupted"
    with pytest.raises(errors.Interrupted, match="1 of 2 sequences were interrupted") as ended:
        generate(coordinator, "a", n=2, max_new_tokens=3)
    [group] = ended.value.generations
    assert [one.token_ids.tolist() for one in group] == [[0, 1, 2], [100, 101]]
    assert [one.finish_reason for one in group] == ["length", "interrupted"]


def test_partial_generations_are_returned_and_go_on_where_they_were_interrupted(coordinator: GeneratingCoordinator) -> None:
    coordinator.stops, coordinator.reason = {0: 1, 1: 2}, "interrupted"
    first = generate(coordinator, ["a", "b"], max_new_tokens=4, partial=True, logprobs=True)
    assert [one.token_ids.tolist() for [one] in first] == [[0], [100, 101]]
    coordinator.stops = {}
    whole = generate(coordinator, ["a", "b"], max_new_tokens=4, continue_from=first, logprobs=True)
    assert [one.token_ids.tolist() for [one] in whole] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert [one.spans for [one] in whole] == [((VERSION, 4),), ((VERSION, 4),)]
    assert (first.usage.output_tokens, whole.usage.output_tokens) == (3, 5), "each call counts what it generated"
    np.testing.assert_array_equal(whole[0][0].logprobs, [0, -1, -2, -3])
    _, again = coordinator.asked
    assert again.frames[2:] == [FrameSpec("output", "int32", (3,)), FrameSpec("output_lengths", "uint32", (2,))]
    assert again.ended == []


def test_what_stopped_stays_ended_and_what_was_too_short_goes_on(coordinator: GeneratingCoordinator) -> None:
    coordinator.stops = {1: 2}
    first = generate(coordinator, "a", n=3, max_new_tokens=2)
    whole = generate(coordinator, "a", n=3, max_new_tokens=4, continue_from=first, logprobs=True)
    assert [one.token_ids.tolist() for one in whole[0]] == [[0, 1, 2, 3], [100, 101], [200, 201, 202, 203]]
    assert coordinator.asked[1].ended == [SequenceEnd(1, "stop", 7)]
    np.testing.assert_array_equal(whole[0][0].logprobs, [np.nan, np.nan, -2, -3])


def test_a_call_that_has_nothing_to_continue_keeps_the_version_and_what_is_known_of_prompts(
    coordinator: GeneratingCoordinator,
) -> None:
    coordinator.stops = {0: 2}
    first = generate(coordinator, "a", max_new_tokens=4, prompt_logprobs=True)
    assert first.prompt_logprobs == (None,), "this coordinator computes none"
    known = np.array([np.nan, -1.5], np.float32)
    old = replace(first[0][0], spans=((VERSION - 1, 2),))
    first = replace(first, groups=((old,),), prompt_logprobs=(known,))
    again = generate(coordinator, "a", max_new_tokens=4, prompt_logprobs=True, continue_from=first)
    assert again[0][0].token_ids.tolist() == [0, 1]
    assert (again.version, again.usage.output_tokens) == (VERSION - 1, 0)
    assert again.prompt_logprobs is not None and again.prompt_logprobs[0] is known
    assert generate(coordinator, "a", max_new_tokens=4, continue_from=first).prompt_logprobs is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"token_ids": [1, 2]}, ".token_ids"),
        ({"token_ids": np.array([1, 2])}, ".token_ids"),
        ({"token_ids": np.array([1, -2], np.int32)}, ".token_ids"),
        ({"logprobs": np.array([1.0], np.float32)}, ".logprobs"),
        ({"logprobs": [1.0, 2.0]}, ".logprobs"),
        ({"top_ids": [[1], [2]]}, ".top_ids"),
        ({"top_ids": np.zeros((2, 3), np.int64)}, ".top_ids"),
        ({"top_logprobs": np.zeros((3, 2), np.float32)}, ".top_logprobs"),
        ({"top_logprobs": np.zeros(2, np.float32)}, ".top_logprobs"),
        ({"spans": ((3, 4),)}, ".spans"),
        ({"spans": (3, 2)}, ".spans"),
        ({"workers": (("w-0", 1),)}, ".workers"),
        ({"adapters": ((1, 1), (2, 2))}, ".adapters"),
        ({"finish_reason": "abort"}, ".finish_reason"),
        ({"matched": 1.5}, ".matched"),
        ({"matched": "\ud800"}, ".matched"),
    ],
)
def test_a_generation_that_was_made_wrong_is_refused(
    coordinator: GeneratingCoordinator, wrong: dict[str, Any], field: str
) -> None:
    ids = np.array([1, 2], np.int32)
    made: dict[str, Any] = {"token_ids": ids, "logprobs": None, "finish_reason": "length", "matched": None, "spans": ()}
    with pytest.raises(errors.BadRequest) as refused:
        generate(coordinator, "a", top_logprobs=2, continue_from=[[Generation(**made | wrong)]])
    assert refused.value.field == f"continue_from[0][0]{field}"
    value: Any = wrong[field[1:]]
    if hasattr(value, "dtype") and value.min() >= 0:
        assert f"{field}: an array {value.dtype} {list(value.shape)}; " in str(refused.value)
    assert not coordinator.asked


def test_more_tokens_than_are_asked_for_are_not_continued(coordinator: GeneratingCoordinator) -> None:
    first = generate(coordinator, "a", max_new_tokens=3)
    with pytest.raises(errors.BadRequest, match=r"^continue_from\[0\]\[0\]: 3 tokens; at most max_new_tokens = 2"):
        generate(coordinator, "a", max_new_tokens=2, continue_from=first)


# --- streams -------------------------------------------------------------------------------------------------------------


async def collected(stream: TokenStream) -> list[TokenChunk]:
    return [chunk async for chunk in stream]


def test_a_stream_gives_chunks_as_they_come_and_the_whole_at_its_end(coordinator: GeneratingCoordinator) -> None:
    coordinator.stops = {1: 2}

    async def take(pool: Pool) -> tuple[list[TokenChunk], Generations]:
        stream = pool.stream("a", n=2, max_new_tokens=3, logprobs=True)
        return await collected(stream), await stream.result()

    chunks, whole = ask(coordinator, take)
    assert [(c.sequence, c.token_ids.tolist(), c.finish_reason, c.matched) for c in chunks] == [
        (0, [0], "", None), (1, [100], "", None), (0, [1], "", None), (1, [101], "stop", 7), (0, [2], "length", None),
    ]  # fmt: skip
    assert {c.version for c in chunks} == {VERSION}
    assert chunks[1].logprobs is not None and chunks[1].logprobs.tolist() == [-100.0]
    assert [one.token_ids.tolist() for one in whole[0]] == [[0, 1, 2], [100, 101]]
    assert coordinator.asked[0].stream and coordinator.asked[0].credit == 1024


def test_a_reader_gives_credit_as_it_reads_and_one_that_does_not_read_gives_none(coordinator: GeneratingCoordinator) -> None:
    async def take(pool: Pool) -> list[int]:
        stream = pool.stream([1], max_new_tokens=20, credit=4)
        seen: list[int] = []
        async for chunk in stream:
            seen += chunk.token_ids.tolist()
            if len(seen) == 1:
                # The question goes behind all that this client has said.
                await pool.status()
                assert coordinator.credits == []
        return seen

    assert ask(coordinator, take) == list(range(20))
    assert coordinator.credits == list(range(2, 22, 2))[: len(coordinator.credits)]
    assert coordinator.credits[-1] >= 16


def test_a_loop_that_is_left_takes_the_request_back(coordinator: GeneratingCoordinator) -> None:
    async def take(pool: Pool) -> None:
        stream = pool.stream([1], max_new_tokens=20, credit=4)
        async for chunk in stream:
            assert chunk.token_ids.tolist() == [0]
            break
        await pool.status()
        with pytest.raises(errors.RequestCancelled):
            await stream.result()

    ask(coordinator, take)
    assert coordinator.wait_for(Cancel).id == coordinator.asked[0].id


def test_a_loop_over_a_stream_needs_an_event_loop(coordinator: GeneratingCoordinator) -> None:
    async def make(pool: Pool) -> TokenStream:
        return pool.stream([1])

    stream = ask(coordinator, make)
    with pytest.raises(RuntimeError, match="no running event loop"):
        aiter(stream)
    gc.collect()  # nothing is left behind that fails when it is collected


@pytest.mark.parametrize("how", ["with", "cancel", "task"])
def test_a_stream_that_is_given_up_takes_the_request_back(coordinator: GeneratingCoordinator, how: str) -> None:
    coordinator.forwards = False

    async def take(pool: Pool) -> None:
        async with pool.stream([1]) as stream:
            task = asyncio.ensure_future(stream.result())
            while not coordinator.asked:
                await pool.status()
            if how == "cancel":
                stream.cancel()
            elif how == "task":
                task.cancel()
        with pytest.raises((asyncio.CancelledError, errors.RequestCancelled)):
            await task

    ask(coordinator, take)
    assert coordinator.wait_for(Cancel).id == coordinator.asked[0].id


def test_a_stream_that_is_interrupted_says_so_after_its_tokens(coordinator: GeneratingCoordinator) -> None:
    coordinator.stops, coordinator.reason = {0: 2}, "interrupted"

    async def take(pool: Pool) -> list[int]:
        seen: list[int] = []
        with pytest.raises(errors.Interrupted) as ended:  # noqa: PT012 (the loop is what raises)
            async for chunk in pool.stream("a"):
                seen += chunk.token_ids.tolist()
        coordinator.stops = {}
        stream = pool.stream("a", max_new_tokens=4, continue_from=ended.value.generations)
        async for chunk in stream:
            seen += chunk.token_ids.tolist()
        assert (await stream.result())[0][0].token_ids.tolist() == [0, 1, 2, 3]
        return seen

    assert ask(coordinator, take) == [0, 1, 2, 3]


def test_a_stream_whose_coordinator_restarts_goes_on_with_each_token_once(coordinator: GeneratingCoordinator) -> None:
    async def take(pool: Pool) -> list[int]:
        stream = pool.stream([1], n=2, max_new_tokens=10, credit=4, logprobs=True)
        seen: list[int] = []
        async for chunk in stream:
            seen += chunk.token_ids.tolist()
            if len(seen) == 5:
                coordinator.epoch += 1
                coordinator.forget()
        [group] = await stream.result()
        assert [one.token_ids.tolist() for one in group] == [[token(s, at) for at in range(10)] for s in range(2)]
        assert all(one.logprobs is not None and one.logprobs.tolist() == [-float(t) for t in one.token_ids] for one in group)
        assert all(one.spans == ((VERSION, 10),) for one in group)
        return seen

    assert sorted(ask(coordinator, take)) == [token(s, at) for s in range(2) for at in range(10)]
    first, again = coordinator.asked
    assert first.id == again.id and [spec.name for spec in again.frames[2:]] == ["output", "output_lengths"]


@pytest.mark.parametrize(("credit", "limit"), [(0, "1"), (MAX_CREDIT + 1, str(MAX_CREDIT)), (1.5, ""), (True, "")])
def test_a_wrong_credit_is_refused(coordinator: GeneratingCoordinator, credit: Any, limit: str) -> None:
    async def take(pool: Pool) -> None:
        with pytest.raises(errors.BadRequest) as refused:
            pool.stream("a", credit=credit)
        assert (refused.value.field, refused.value.limit) == ("credit", limit)

    ask(coordinator, take)


def test_a_stream_takes_one_prompt(coordinator: GeneratingCoordinator) -> None:
    async def take(pool: Pool) -> None:
        for wrong, field in ((["a"], "prompt[0][0]"), ([[1], [2]], "prompt[0][0]"), ("", "prompt[0]"), ([], "prompt[0]")):
            with pytest.raises(errors.BadRequest) as refused:
                pool.stream(wrong)  # pyright: ignore[reportArgumentType]
            assert refused.value.field == field

    ask(coordinator, take)


# --- blocking ------------------------------------------------------------------------------------------------------------


def test_a_blocking_pool_generates_and_streams(coordinator: GeneratingCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:
        assert pool.generate([[1]], max_new_tokens=2)[0][0].token_ids.tolist() == [0, 1]
        stream = pool.stream([1], max_new_tokens=9, credit=2)
        assert [token_id for chunk in stream for token_id in chunk.token_ids.tolist()] == list(range(9))
        assert stream.result()[0][0].finish_reason == "length"


def test_a_blocking_loop_that_is_left_takes_the_request_back(coordinator: GeneratingCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:
        for _ in pool.stream([1], max_new_tokens=9, credit=2):
            break
        assert coordinator.wait_for(Cancel).id == coordinator.asked[0].id
