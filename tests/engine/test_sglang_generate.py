"""Generation on the real engine: its tokens and log-probabilities are those of a direct computation."""

import asyncio
import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Sampling, TemperatureSchedule
from enginepool.protocol.messages.control import Command
from enginepool.workers.engine import EngineDied, EngineError, GenerationTask, NewTokens, OnlyAtStart
from enginepool.workers.saving import WeightSaving
from tests.engine.hosted import HostedEngine
from tests.engine.reference import Models, Reference
from tests.engine.test_sglang_lent import Lending
from tests.engine.test_sglang_scores import declared, full_batch
from tests.engine.test_sglang_weights import Given, Subject
from tests.process.redis_server import redis_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
VOCAB = 512
OLDEST = "ENGINEPOOL_TEST_OLDEST" in os.environ
PROMPTS = ([5, 17, 300], [8], [*range(40, 90)], [11, 12, 13, 14, 15, 16, 17])
#: tokens; as many are generated once
CONTEXT = 1024
#: What is cancelled before it ends: a test may get no turn for as long as hundreds of tokens take.
ENDLESS = 900
#: logits are off by so much
FLOAT32 = 1e-4


@pytest.fixture(scope="module")
def generating(models: Models) -> Iterator[HostedEngine]:
    """One engine for all tests. A random model would fill JSON with spaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(
            str(models.causal),
            operations=("generate",),
            options={"constrained_json_disable_any_whitespace": True, "context_length": CONTEXT},
        )
        yield engine.wait_until_started()
        engine.end()


def task(prompt: Sequence[int] = PROMPTS[0], n: int = 1, logprobs: bool = False, **sampling: Any) -> GenerationTask:
    """A task that is greedy unless it says otherwise."""
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12} | sampling
    return GenerationTask(np.array(prompt, np.int32), Sampling(**wanted), n, logprobs)


class Continued:
    """All that was emitted of one sequence."""

    def __init__(self, emitted: list[NewTokens]) -> None:
        self.tokens = [token for new in emitted for token in new.tokens]
        self.logprobs = [logprob for new in emitted for logprob in new.logprobs]
        self.chunks = [len(new.tokens) for new in emitted]
        self.cached = [new.cached for new in emitted if new.cached is not None]
        assert [new.reason for new in emitted[:-1]] == [""] * (len(emitted) - 1)
        self.reason, self.matched = emitted[-1].reason, emitted[-1].matched


def run(engine: HostedEngine, *tasks: GenerationTask) -> list[list[Continued]]:
    """The sequences of each task, all of them at once."""
    found: list[list[Continued]] = []
    for asked, emitted in zip(tasks, engine.call("generate", tasks), strict=True):
        assert not isinstance(emitted, Exception), emitted
        found.append([Continued([new for new in emitted if new.sequence == i]) for i in range(asked.n)])
    return found


def one(engine: HostedEngine, asked: GenerationTask) -> Continued:
    [[sequence]] = run(engine, asked)
    return sequence


def refusal(engine: HostedEngine, asked: GenerationTask) -> str:
    [error] = engine.call("generate", (asked,))
    assert isinstance(error, EngineError), error
    assert "\n" not in str(error)
    return str(error)


def assert_greedy(reference: Reference, prompt: Sequence[int], found: Continued, error: float = FLOAT32) -> None:
    """These are the tokens of the largest logits, one after the other, with their log-probabilities."""
    below, logprobs = reference.following(prompt, found.tokens)
    assert below.max() < error
    if found.logprobs:
        np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-4, atol=error)


@pytest.mark.every_version
def test_an_engine_that_generates_says_what_it_runs_at_once(generating: HostedEngine) -> None:
    can = declared(generating)
    assert (can.kind, can.operations, can.pace) == ("causal", ("generate",), 0)
    assert (can.dtype, can.parallel, can.device) == ("float32", (1, 1, 1, 1), "cpu")
    # The oldest version restricts tokens on GPUs alone.
    assert set(can.features) == {"stop_text", "logit_processors"} | (set() if OLDEST else {"grammar"})
    assert (can.inflight_rows, can.inflight_tokens) == (64, 8192)
    assert can.context + can.reserved == CONTEXT
    # Neither less than asked for, nor refused.
    longest = one(generating, task([7] * (can.context - 1), max_new_tokens=1))
    assert (len(longest.tokens), longest.reason) == (1, "length")
    short = one(generating, task([7], max_new_tokens=can.context - 1, ignore_eos=True))
    assert (len(short.tokens), short.reason) == (can.context - 1, "length")
    assert re.search(f"{can.context} together", refusal(generating, task([7] * can.context, max_new_tokens=1)))


@pytest.mark.every_version
@pytest.mark.parametrize("n", [1, 2])
def test_greedy_tokens_and_logprobs_equal_a_direct_computation(generating: HostedEngine, reference: Reference, n: int) -> None:
    tasks = [task(prompt, n, logprobs=True, ignore_eos=True, max_new_tokens=24) for prompt in PROMPTS]
    for prompt, sequences in zip(PROMPTS, run(generating, *tasks), strict=True):
        for sequence in sequences:
            assert sequence.reason == "length"
            assert sequence.chunks == [1] * 24  # as they come, one for each step
            assert_greedy(reference, prompt, sequence)


@pytest.mark.every_version
def test_a_sequence_goes_on_from_its_tokens_as_if_it_had_not_stopped(generating: HostedEngine) -> None:
    for prompt in PROMPTS:
        whole = one(generating, task(prompt, logprobs=True, ignore_eos=True, max_new_tokens=20))
        for has in (1, 7, 19):
            tokens = [*prompt, *whole.tokens[:has]]
            rest = one(generating, task(tokens, logprobs=True, ignore_eos=True, max_new_tokens=20 - has))
            assert rest.tokens == whole.tokens[has:]
            np.testing.assert_allclose(rest.logprobs, whole.logprobs[has:], rtol=1e-4, atol=1e-5)


@pytest.mark.every_version
def test_the_engine_says_once_for_a_task_how_much_of_its_prompt_was_in_the_prefix_cache(generating: HostedEngine) -> None:
    prompt = [*range(100, 140)]
    [[first, sample]] = run(generating, task(prompt, n=2, ignore_eos=True))
    assert (first.cached, sample.cached) == ([0], [])
    [second] = one(generating, task([*prompt, *first.tokens, 7, 8, 9], ignore_eos=True)).cached
    assert len(prompt) < second < len(prompt) + len(first.tokens), "the last token was not computed yet"


@pytest.mark.every_version
def test_many_at_once_do_not_touch_each_other(generating: HostedEngine, reference: Reference) -> None:
    prompts = [[3 + i, 400 - i, *range(i, 2 * i)] for i in range(32)]
    found = run(generating, *(task(prompt, ignore_eos=True, max_new_tokens=4 + i % 9) for i, prompt in enumerate(prompts)))
    for prompt, [sequence] in zip(prompts, found, strict=True):
        assert_greedy(reference, prompt, sequence)


@pytest.mark.every_version
def test_logprobs_are_given_to_those_that_asked_among_others(generating: HostedEngine, reference: Reference) -> None:
    tasks = [task(prompt, logprobs=bool(i % 2), ignore_eos=True, max_new_tokens=6 + i) for i, prompt in enumerate(PROMPTS)]
    for i, (prompt, [sequence]) in enumerate(zip(PROMPTS, run(generating, *tasks), strict=True)):
        assert len(sequence.logprobs) == (len(sequence.tokens) if i % 2 else 0)
        assert_greedy(reference, prompt, sequence)


# --- where a sequence ends -------------------------------------------------------------------------------------------------


def varied(engine: HostedEngine) -> tuple[list[int], list[int], int]:
    """A prompt, the tokens that follow it, and a position whose token is not among those before."""
    prompts = [[token, token + 1] for token in range(3, 203, 5)]
    for prompt, [found] in zip(prompts, run(engine, *(task(one, ignore_eos=True) for one in prompts)), strict=True):
        for at in range(5, len(found.tokens)):
            if found.tokens[at] not in found.tokens[:at]:
                return prompt, found.tokens, at
    raise AssertionError("all sequences of this model repeat themselves")


@pytest.mark.every_version
def test_a_stop_token_ends_a_sequence_and_is_named(generating: HostedEngine) -> None:
    prompt, tokens, at = varied(generating)
    stopped = one(generating, task(prompt, stop_token_ids=[tokens[at], 3]))
    assert (stopped.tokens, stopped.reason, stopped.matched) == (tokens[: at + 1], "stop", tokens[at])
    cut = one(generating, task(prompt, max_new_tokens=at))
    assert (cut.tokens, cut.reason, cut.matched) == (tokens[:at], "length", None)


@pytest.mark.every_version
def test_the_models_own_end_stops_a_sequence_unless_it_is_ignored(generating: HostedEngine, reference: Reference) -> None:
    eos = reference.tokenizer.eos_token_id
    bias = {str(eos): 1000.0}
    ended = one(generating, task(logit_bias=bias, max_new_tokens=5))
    assert (ended.tokens, ended.reason, ended.matched) == ([eos], "stop", eos)
    going = one(generating, task(logit_bias=bias, max_new_tokens=5, ignore_eos=True))
    assert (going.tokens, going.reason) == ([eos] * 5, "length")
    least = one(generating, task(logit_bias=bias, max_new_tokens=8, min_new_tokens=4))
    assert (len(least.tokens), least.tokens[-1], least.reason) == (5, eos, "stop")
    assert eos not in least.tokens[:4]


@pytest.mark.every_version
def test_stop_strings_and_patterns_end_a_sequence_and_are_named(generating: HostedEngine, reference: Reference) -> None:
    prompt, tokens, at = varied(generating)
    text = reference.tokenizer.decode(tokens[at - 1 : at + 1])
    stopped = one(generating, task(prompt, stop=["never", text]))
    assert (stopped.reason, stopped.matched) == ("stop", text)
    assert stopped.tokens == tokens[: len(stopped.tokens)] and text in reference.tokenizer.decode(stopped.tokens)
    pattern = f"({re.escape(text)}|nothing)"
    stopped = one(generating, task(prompt, stop_regex=[pattern]))
    assert (stopped.reason, stopped.matched) == ("stop", pattern)
    assert text in reference.tokenizer.decode(stopped.tokens)


# --- how tokens are chosen -------------------------------------------------------------------------------------------------


@pytest.mark.every_version
def test_a_bias_decides_between_tokens(generating: HostedEngine) -> None:
    found = one(generating, task(logit_bias={"77": 500.0, "78": -1e9}, max_new_tokens=3))
    assert found.tokens == [77] * 3


@pytest.mark.every_version
def test_greedy_tokens_under_a_mask_are_the_likeliest_of_those_that_it_allows(
    generating: HostedEngine, reference: Reference
) -> None:
    free = [one(generating, task(prompt, ignore_eos=True)).tokens for prompt in PROMPTS]
    chosen = sorted({token for tokens in free for token in tokens})
    # Several masks in one forward, and rows without.
    masks: list[dict[str, Any]] = [
        {"allowed_token_ids": [*range(3, VOCAB, 7)]},
        {"disallowed_token_ids": chosen},
        {"disallowed_token_ids": [*range(400)]},
        {},
    ]
    tasks = [task(prompt, logprobs=True, ignore_eos=True, **mask) for prompt in PROMPTS for mask in masks]
    for i, [found] in enumerate(run(generating, *tasks)):
        prompt, mask = PROMPTS[i // 4], masks[i % 4]
        allowed = set(mask.get("allowed_token_ids", range(VOCAB))) - set(mask.get("disallowed_token_ids", ()))
        assert set(found.tokens) <= allowed
        below, logprobs = reference.following(prompt, found.tokens, sorted(allowed))
        assert below.max() < 1e-4
        np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.every_version
def test_tokens_outside_a_mask_are_never_chosen_however_hot(generating: HostedEngine) -> None:
    ending: dict[str, Any] = {"stop_token_ids": [7], "min_new_tokens": 30}
    asked: dict[str, Any] = {"temperature": 50.0, "max_new_tokens": 40}
    tasks = [
        task(n=2, allowed_token_ids=[7, 100, 101], ignore_eos=True, **asked),
        task(n=2, disallowed_token_ids=[*range(10, VOCAB)], ignore_eos=True, **asked),
        task(allowed_token_ids=[7], **asked, **ending),  # the mask has the last word
    ]
    masked, others, [ended] = run(generating, *tasks)
    assert {token for one in masked for token in one.tokens} == {7, 100, 101}
    assert {token for one in others for token in one.tokens} <= set(range(10))
    assert (ended.tokens, ended.reason) == ([7], "stop")


@pytest.mark.every_version
def test_a_temperature_follows_its_schedule_by_the_position_in_the_output(
    generating: HostedEngine, reference: Reference
) -> None:
    prompt = PROMPTS[0]
    # At these temperatures the chosen logits decide nothing, and then everything.
    schedule = TemperatureSchedule(1e5, 0.0, 12)
    asked: dict[str, Any] = {"temperature": 1.0, "temperature_schedule": schedule, "ignore_eos": True}
    whole = one(generating, task(prompt, logprobs=True, max_new_tokens=24, **asked))
    np.testing.assert_allclose(whole.logprobs[:12], -np.log(VOCAB), rtol=1e-2)
    below, _ = reference.following([*prompt, *whole.tokens[:12]], whole.tokens[12:])
    assert below.max() < 1e-4
    np.testing.assert_allclose(whole.logprobs[12:], 0.0, atol=1e-5)
    # A sequence that goes on at position 8 has four hot tokens more, and one at position 12 has none.
    for at in (8, 12, 20):
        rest = one(generating, replace(task([*prompt, *whole.tokens[:at]], logprobs=True, **asked), at=at))
        hot = max(0, 12 - at)
        np.testing.assert_allclose(rest.logprobs[:hot], -np.log(VOCAB), rtol=1e-2)
        np.testing.assert_allclose(rest.logprobs[hot:], 0.0, atol=1e-5)


@pytest.mark.every_version
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1e6},
        {"top_p": 0.5},
        {"top_k": 3},
        {"top_k": 1 << 40},
        {"min_p": 0.2},
        {"frequency_penalty": 1.5, "presence_penalty": -2.0},
        {"repetition_penalty": 0.01},
        {"sampling_seed": 5},
        {"sampling_seed": (1 << 63) - 1, "min_p": 0.5},
        {"logit_bias": {"5": 1e20, "6": -1e20}, "temperature": 1e-5},
        {"min_new_tokens": 6, "stop_token_ids": [*range(256)]},
    ],
)
def test_every_way_of_sampling_gives_tokens_with_their_logprobs(generating: HostedEngine, sampling: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 8} | sampling
    [sequences] = run(generating, task(n=2, logprobs=True, **asked))
    for sequence in sequences:
        assert 1 <= len(sequence.tokens) <= 8
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert all(0 <= token < VOCAB for token in sequence.tokens)
        assert all(logprob <= 0 for logprob in sequence.logprobs)


def test_a_json_schema_and_a_pattern_are_kept_to(generating: HostedEngine, reference: Reference) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}, "required": ["ok", "n"]}
    decode = reference.tokenizer.decode
    for temperature in (0.0, 1.0):
        asked = task(json_schema=json.dumps(schema), max_new_tokens=60, temperature=temperature)
        found = one(generating, asked)
        assert found.reason == "stop"
        answer = json.loads(decode(found.tokens, skip_special_tokens=True))
        assert set(answer) == {"ok", "n"} and answer["n"] in (1, 22)
        [sequences] = run(generating, task(n=2, regex="(ab|cd){3}x", max_new_tokens=40, temperature=temperature))
        for sequence in sequences:
            assert re.fullmatch("(ab|cd){3}x", decode(sequence.tokens, skip_special_tokens=True))
    said = refusal(generating, task(ebnf="root ::= root"))
    assert said.startswith("the engine computed NaN; perhaps no token fits ebnf; "), said


@pytest.mark.every_version
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": []}, "prompt: it has no tokens"),
        ({"prompt": [VOCAB]}, "prompt: a token id is outside"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids: 512"),
        ({"stop_regex": ["a", "("]}, "stop_regex[1]: missing ), unterminated subpattern"),
        ({"stop_regex": [r"((([\s\S])+)+)+(?!)"], "max_new_tokens": 60, "ignore_eos": True}, "a search took longer than"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 2.0}, "min_p"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"min_new_tokens": 13}, "min_new_tokens"),
        ({"json_schema": '{"type": "nothing"}'}, ""),
        ({"json_schema": "{"}, ""),
        ({"regex": "(a"}, ""),
        ({"ebnf": "root ::= nothing"}, ""),
        ({"structural_tag": "{}"}, ""),
        ({"regex": "a", "json_schema": "{}"}, ""),
        ({"n": 65}, "n: 65"),
    ],
)
def test_a_bad_value_is_refused_in_one_line_and_the_engine_lives(
    generating: HostedEngine, wrong: dict[str, Any], said: str
) -> None:
    assert said in refusal(generating, task(**wrong))
    assert len(one(generating, task(ignore_eos=True)).tokens) == 12


@pytest.mark.every_version
def test_a_high_priority_takes_a_slot_from_a_low_one_which_goes_on_later(generating: HostedEngine) -> None:
    slots = declared(generating).inflight_rows
    low = task(n=slots, ignore_eos=True, max_new_tokens=100)
    high = replace(task(PROMPTS[1], ignore_eos=True, max_new_tokens=10), priority=100)
    assert generating.call("ends", [low], high) == [1, 0]


# --- its end, and new weights ----------------------------------------------------------------------------------------------

LONG = task(n=3, ignore_eos=True, max_new_tokens=1000)


@pytest.mark.every_version
@pytest.mark.parametrize("after", [0, -1, -2, -5, 1, 40])
def test_a_cancelled_task_leaves_the_engine_and_new_weights_are_not_kept_waiting(
    generating: HostedEngine, models: Models, tmp_path: Path, after: int
) -> None:
    emitted, left = generating.call("stop", LONG, after)
    assert max(after, 0) <= emitted < 3 * 1000
    assert left == 0
    subject = Subject(generating, models.causal, tmp_path)
    given = subject.drawn(1)
    # SGLang's lock is free, and its scheduler idle.
    subject.load_weights(given.weights, 1, given.digest)
    own = Given(tmp_path, subject.own)
    subject.load_weights(own.weights, 2, own.digest)


@pytest.mark.every_version
def test_after_new_weights_tokens_are_those_of_the_new_ones_and_nothing_of_the_old_is_reused(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    subject = Subject(generating, models.causal, tmp_path)
    tasks = [task(prompt, logprobs=True, ignore_eos=True) for prompt in PROMPTS]
    for version in (3, 4):
        given = subject.drawn(version)
        run(generating, *tasks)  # now their beginnings are in the cache
        subject.load_weights(given.weights, version, given.digest)
        with reference.holding(given.tensors):
            for prompt, [sequence] in zip(PROMPTS, run(generating, *tasks), strict=True):
                assert_greedy(reference, prompt, sequence)
    own = Given(tmp_path, subject.own)
    subject.load_weights(own.weights, 5, own.digest)
    assert_greedy(reference, PROMPTS[0], one(generating, tasks[0]))


@pytest.mark.every_version
def test_nan_ends_its_sequence_however_that_is_sampled_and_the_others_go_on(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    subject = Subject(generating, models.causal, tmp_path)
    tensors = {name: tensor.clone() for name, tensor in subject.own.items()}
    tensors["model.embed_tokens.weight"][300] = float("nan")
    wrong = Given(tmp_path, tensors)
    subject.load_weights(wrong.weights, 1, wrong.digest)
    sampled: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5},
    ]
    masked: list[dict[str, Any]] = [{"allowed_token_ids": [5, 6]}, *([] if OLDEST else [{"regex": "[a-z]+"}])]
    # The second prompt is fine until its first token, 300, is computed.
    later: list[dict[str, Any]] = [how | {"logit_bias": {"300": 1e6}} for how in sampled]
    broken = [
        task(prompt, logprobs=logprobs, **how)
        for logprobs in (False, True)
        for prompt, ways in (([5, 300], [*sampled, *masked]), ([8, 9], later))
        for how in ways
    ]
    whole = [task([*prompt, 7], logprobs=True, ignore_eos=True) for prompt in PROMPTS[1:]]
    found = generating.call("generate", (*broken, *whole))
    for asked, error in zip(broken, found, strict=False):
        assert isinstance(error, EngineError) and str(error).startswith("the engine computed NaN; "), (asked, error)
    for asked, emitted in zip(whole, found[len(broken) :], strict=True):
        assert_greedy(reference, asked.prompt.tolist(), Continued(emitted))
    own = Given(tmp_path, subject.own)
    subject.load_weights(own.weights, 2, own.digest)
    assert_greedy(reference, PROMPTS[0], one(generating, task(logprobs=True)))


@pytest.mark.every_version
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_engine_emits_nothing_and_goes_on_as_if_it_had_not_stopped(
    generating: HostedEngine, reference: Reference, mode: str
) -> None:
    tasks = tuple(task(prompt, logprobs=True, ignore_eos=True, max_new_tokens=ENDLESS) for prompt in PROMPTS)
    emitted, [counts] = generating.call("pause", tasks, 5, mode)
    for prompt, one_of_them, count in zip(PROMPTS, emitted, counts, strict=True):
        found = Continued(one_of_them)
        assert 5 <= count <= len(found.tokens) - 5
        assert_greedy(reference, prompt, found)


@pytest.mark.every_version
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_is_cancelled_in_a_pause_leaves_where_it_waits_and_else_with_the_next_step(
    generating: HostedEngine, reference: Reference, mode: str
) -> None:
    tasks = tuple(task(prompt, logprobs=True, ignore_eos=True, max_new_tokens=200) for prompt in PROMPTS)
    left, emitted = generating.call("cancel_in_pause", tasks, mode)
    assert left == (mode == "retract")
    for prompt, one_of_them in zip(PROMPTS[1:], emitted[1:], strict=True):
        found = Continued(one_of_them)
        assert len(found.tokens) == 200
        assert_greedy(reference, prompt, found)


@pytest.mark.skipif(OLDEST, reason="needs a CUDA GPU: SGLang 0.5.17 has no grammars on a CPU")
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_what_is_cancelled_in_a_pause_while_its_grammar_is_compiled_leaves_at_once(
    generating: HostedEngine, reference: Reference, mode: str
) -> None:
    running = task(PROMPTS[0], logprobs=True, ignore_eos=True, max_new_tokens=200)
    words = "|".join(str(number * number) for number in range(1000, 2000))  # so many that it takes a while
    found = Continued(generating.call("cancel_prepared", running, task(PROMPTS[1], regex=f"({words})+{mode}"), mode))
    assert len(found.tokens) == 200
    assert_greedy(reference, PROMPTS[0], found)


@pytest.mark.every_version
def test_parts_of_the_memory_are_released_and_taken_back_in_any_order_and_weights_arrive_in_between(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    subject, asked = Subject(generating, models.causal, tmp_path), task(PROMPTS[2], logprobs=True, ignore_eos=True)
    given, own = subject.drawn(6), Given(tmp_path, subject.own)
    one(generating, asked)
    generating.call("stop", LONG, 1)  # a sequence is only just leaving
    lost = generating.call("do", "sleep", ["cuda_graph", "kv_cache", "weights"])
    assert not lost, "on a CPU SGLang releases nothing"
    with pytest.raises(EngineError, match="weights are asleep: wake them first"):
        generating.call("do", "inspect", "digest")
    generating.call("do", "wake", ["weights"])
    subject.load_weights(given.weights, 6, given.digest)
    generating.call("do", "wake", ["cuda_graph", "kv_cache"])
    with reference.holding(given.tensors):
        assert_greedy(reference, PROMPTS[2], one(generating, asked))
    generating.call("do", "sleep", ["kv_cache"])
    generating.call("do", "sleep", ["weights"])
    generating.call("do", "wake", ["kv_cache", "weights"])
    subject.load_weights(own.weights, 7, own.digest)
    again = one(generating, asked)
    assert_greedy(reference, PROMPTS[2], again)
    assert again.cached == [0], "what sleeps keeps no prefixes"


Spans = list[tuple[dict[str, Any], list[int]]]
#: New weights come three times while sequences run, each time once all of them have five more tokens.
APART, TIMES = 5, 3


def across_updates(
    engine: HostedEngine, subject: Subject, reference: Reference, mode: str, given: Sequence[Given | Lending], error: float
) -> Iterator[tuple[Sequence[int], Spans, list[float]]]:
    """For each sequence its prompt, the weights and the tokens of each span, and the logprobs of all of them."""
    tasks = tuple(task(prompt, logprobs=True, ignore_eos=True, max_new_tokens=ENDLESS) for prompt in PROMPTS)
    loads = tuple((one.weights, 10 + i, one.digest, mode) for i, one in enumerate(given))
    emitted, pauses = engine.call("pause", tasks, APART, mode, loads)
    # Nothing that is asked for now finds keys and values of other weights; only what was asked for now.
    again = [run(engine, *(task(prompt, logprobs=True, ignore_eos=True) for prompt in PROMPTS)) for _ in range(2)]
    with reference.holding(given[-1].tensors):
        for prompt, [first], [second] in zip(PROMPTS, *again, strict=True):
            assert_greedy(reference, prompt, first, error)
            assert_greedy(reference, prompt, second, error)
            assert mode == "retract" or first.cached == [0]
            assert second.cached == [len(prompt) - 1]
    own = Given(subject.directory, subject.own)
    subject.load_weights(own.weights, 20, own.digest)
    for number, prompt in enumerate(PROMPTS):
        found = Continued(emitted[number])
        ends = [*(counts[number] for counts in pauses), len(found.tokens)]
        assert len(ends) == TIMES + 1 and all(after - before >= APART for before, after in pairwise([0, *ends]))
        weights = [subject.own, *(one.tensors for one in given)]
        spans = [(one, found.tokens[a:b]) for one, a, b in zip(weights, [0, *ends], ends, strict=False)]
        yield prompt, spans, found.logprobs


def check_spans(
    engine: HostedEngine, reference: Reference, model: Path, directory: Path, mode: str,
    lender: str = "", dtype: Any = None, error: float = FLOAT32,
) -> None:  # fmt: skip
    """Each token is that of the weights that came last. `lender`: the device of a publisher that lends them, or ""."""
    subject = Subject(engine, model, directory)
    drawn = [subject.drawn(seed, dtype) for seed in range(10, 10 + TIMES)]
    given = [Lending(one.tensors, lender) for one in drawn] if lender else drawn
    computed = reference.across if mode == "in_place" else reference.afresh
    for prompt, spans, logprobs in across_updates(engine, subject, reference, mode, given, error):
        below, expected = computed(prompt, spans)
        assert below.max() < error
        np.testing.assert_allclose(logprobs, expected, rtol=1e-4, atol=error)
    engine.call("do", "release_buffers")
    for one in given:
        if isinstance(one, Lending):
            one.end()


@pytest.mark.every_version
def test_nothing_stays_of_a_sequence_that_went_on_with_weights_that_are_not_committed(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    subject = Subject(generating, models.causal, tmp_path)
    given, asked = subject.drawn(21), task(PROMPTS[2], logprobs=True, ignore_eos=True, max_new_tokens=ENDLESS)
    generating.call("drop_after_load", asked, (given.weights, 21, given.digest, "in_place"))
    own = Given(tmp_path, subject.own)
    subject.load_weights(own.weights, 22, own.digest)  # as a restore
    again = one(generating, task(PROMPTS[2], logprobs=True, ignore_eos=True))
    assert_greedy(reference, PROMPTS[2], again)
    assert again.cached == [0]


@pytest.mark.every_version
def test_sequences_go_on_under_new_weights_over_keys_and_values_of_the_old_ones(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    check_spans(generating, reference, models.causal, tmp_path, "in_place")


@pytest.mark.every_version
def test_retracted_sequences_go_on_as_if_the_new_weights_had_computed_all_before(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path
) -> None:
    check_spans(generating, reference, models.causal, tmp_path, "retract")


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_sequences_go_on_under_weights_that_their_publisher_lends(
    generating: HostedEngine, reference: Reference, models: Models, tmp_path: Path, mode: str
) -> None:
    check_spans(generating, reference, models.causal, tmp_path, mode, lender="cpu")


def test_rows_are_refused_by_an_engine_that_generates_and_the_other_way_round(
    generating: HostedEngine, causal: HostedEngine
) -> None:
    [error] = generating.score(full_batch(declared(causal), 1, 1))
    assert isinstance(error, EngineError) and str(error) == "score: this engine only generates"
    assert refusal(causal, task()).startswith("generate: this engine runs score")


@pytest.mark.every_version
def test_all_of_that_holds_where_forwards_overlap(models: Models, reference: Reference, tmp_path: Path) -> None:
    """As on every GPU: SGLang notes a token only after it has launched the next forward."""
    options = {"disable_overlap_schedule": False, "context_length": CONTEXT}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = HostedEngine(str(models.causal), operations=("generate",), options=options).wait_until_started()
        test_greedy_tokens_under_a_mask_are_the_likeliest_of_those_that_it_allows(engine, reference)
        test_a_temperature_follows_its_schedule_by_the_position_in_the_output(engine, reference)
        test_nan_ends_its_sequence_however_that_is_sampled_and_the_others_go_on(engine, reference, models, tmp_path)
        test_a_paused_engine_emits_nothing_and_goes_on_as_if_it_had_not_stopped(engine, reference, "in_place")
        test_a_paused_engine_emits_nothing_and_goes_on_as_if_it_had_not_stopped(engine, reference, "retract")
        for mode in ("in_place", "retract"):
            test_what_is_cancelled_in_a_pause_leaves_where_it_waits_and_else_with_the_next_step(engine, reference, mode)
            if not OLDEST:
                test_what_is_cancelled_in_a_pause_while_its_grammar_is_compiled_leaves_at_once(engine, reference, mode)
        test_sequences_go_on_under_new_weights_over_keys_and_values_of_the_old_ones(engine, reference, models, tmp_path)
        test_retracted_sequences_go_on_as_if_the_new_weights_had_computed_all_before(engine, reference, models, tmp_path)
        engine.end()


def test_tasks_end_with_the_engine(models: Models) -> None:
    engine = HostedEngine(str(models.causal), operations=("generate",)).wait_until_started()
    with pytest.raises(EngineDied, match="killed by SIGKILL"):
        engine.call("die_generating", LONG)
    engine.close()


@pytest.mark.parametrize(
    ("model", "operations", "said"),
    [
        ("reward", ("generate",), "operations: this model predicts no next token, so it cannot generate"),
        ("causal", ("embed",), "operations: this model is for score, .*not for embed"),
    ],
)
def test_an_operation_that_is_not_the_models_is_refused_by_name(
    models: Models, model: str, operations: tuple[str, ...], said: str
) -> None:
    engine = HostedEngine(str(getattr(models, model)), operations=operations)
    with pytest.raises(EngineDied, match=said):
        engine.wait_until_started()
    engine.end()


def check_profile(engine: HostedEngine, directory: Path, categories: set[str]) -> None:
    """A profile of an engine has the operators that ran meanwhile, and events of these categories; the engine serves on."""

    def traces(folder: Path) -> list[list[dict[str, Any]]]:
        texts = [gzip.decompress(file.read_bytes()) for file in folder.glob("*.trace.json.gz")]
        return [json.loads(text)["traceEvents"] for text in texts]

    for steps in (0, 3):
        folder = directory / str(steps)
        engine.call("do", "profiler.start", str(folder), steps)
        one(engine, task(max_new_tokens=8, ignore_eos=True))
        assert bool(traces(folder)) == (steps > 0), "it ends by itself after so many forwards"
        engine.call("do", "profiler.stop")
        [events] = traces(folder)
        assert {"aten::mm", "aten::linear"} & {event.get("name", "") for event in events}
        assert categories <= {event.get("cat", "") for event in events}
    engine.call("do", "profiler.start", str(directory / "0"), 0)
    engine.call("do", "profiler.stop")
    with pytest.raises(EngineError, match=r"SGLang did not stop its profiler: .*not in progress"):
        engine.call("do", "profiler.stop")
    # A folder that cannot be made stands for a disk that is full: the engine goes on, and so does its next profile.
    (directory / "file").touch()
    for steps in (0, 1):
        engine.call("do", "profiler.start", str(directory / "file/folder"), steps)
        one(engine, task(max_new_tokens=8, ignore_eos=True))
        with pytest.raises(EngineError, match=r"^the traces could not be written: Not a directory$"):
            engine.call("do", "profiler.stop")
    engine.call("do", "profiler.start", str(directory / "after"), 0)
    engine.call("do", "profiler.stop")
    assert len(traces(directory / "after")) == 1


def check_saved(engine: HostedEngine, model: Path, root: str, atol: float, **settings: Any) -> None:
    """An engine of these settings that starts on the weights that `engine` saves under `root` generates the same."""

    def generated(by: HostedEngine) -> list[Continued]:
        """One after the other, and each computed as a whole."""
        by.call("do", "flush")
        return [one(by, task(prompt, logprobs=True, ignore_eos=True)) for prompt in PROMPTS]

    saved = f"{root}/saved"
    saving = WeightSaving(Hosted(engine), [root], "g", str(model))  # type: ignore[arg-type]
    said, load_format = ("23 keys", "remote") if root.startswith("redis") else ("5 files, ", "sharded_state")
    assert asyncio.run(saving.run(Command((1, 1), "save", path=saved))).startswith(f"version 0: {said}")
    settings["options"] = {**settings["options"], "load_format": load_format}
    fresh = HostedEngine(saved, operations=("generate",), **settings)
    try:
        fresh.wait_until_started()
        for first, again in zip(generated(engine), generated(fresh), strict=True):
            assert first.tokens == again.tokens
            np.testing.assert_allclose(first.logprobs, again.logprobs, rtol=1e-5, atol=atol)
        assert declared(fresh).features == declared(engine).features
        with pytest.raises(OnlyAtStart, match="not loaded from a checkpoint's tensors"):
            fresh.call("do", "model_tensors")
    finally:
        fresh.end()


@pytest.mark.every_version
def test_a_profile_has_the_operators_that_ran_meanwhile(generating: HostedEngine, tmp_path: Path) -> None:
    check_profile(generating, tmp_path, {"cpu_op"})


@pytest.mark.every_version
def test_an_engine_that_starts_on_saved_weights_generates_the_same(
    generating: HostedEngine, models: Models, tmp_path: Path
) -> None:
    check_saved(generating, models.causal, str(tmp_path), atol=0.0, options={"context_length": CONTEXT})


@pytest.mark.every_version
def test_an_engine_that_starts_on_weights_saved_in_redis_generates_the_same(generating: HostedEngine, models: Models) -> None:
    with redis_server() as redis:
        redis.client.set("saved0/files/config.json", "of a model whose name begins so")
        check_saved(generating, models.causal, redis.root.rstrip("/"), atol=0.0, options={"context_length": CONTEXT})
        with pytest.raises(EngineDied, match=f"{redis.root}no: there is no model: no key no/files/config.json"):
            HostedEngine(f"{redis.root}no", operations=("generate",)).wait_until_started()


class Hosted:
    """A hosted engine, as far as its weights are saved."""

    def __init__(self, engine: HostedEngine) -> None:
        self._engine = engine
        self.version, self.digest, self.weights = 0, "", self

    async def save(self, target: str) -> str:
        return self._engine.call("do", "save", target)
