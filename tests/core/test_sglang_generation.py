"""What SGLang is started with where it generates, and which tasks are refused before its scheduler would die of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginepool.protocol.messages import Capabilities, Sampling, TemperatureSchedule
from enginepool.workers.engine import EngineError, GenerationTask, RequestRefused, TaskMedium
from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate.prefill_admission import Prefill
from enginepool.workers.sglang.generate.sampling import refuse_fatal, sampling_kwargs, why_aborted
from enginepool.workers.sglang.generate.sequences import EngineGeneration, Sequences
from enginepool.workers.sglang.generate.settings import (
    experts_of,
    generation_budgets,
    generation_features,
    generation_kwargs,
    hidden_of,
    prefill_tokens,
)
from enginepool.workers.sglang.host.processes import Processes
from enginepool.workers.sglang.host.settings import Running, SettingsError

#: some of SGLang's settings
KNOWN = {
    "attention_backend", "chunked_prefill_size", "custom_sigquit_handler", "custom_weight_loader", "disable_cuda_graph",
    "disable_priority_preemption", "hicache_ratio", "hicache_storage_backend", "max_queued_requests", "prefill_max_requests",
    "preferred_sampling_params",
    "disable_overlap_schedule", "disable_radix_cache", "dp_size", "enable_hierarchical_cache", "enable_mixed_chunk",
    "enable_custom_logit_processor", "enable_priority_scheduling", "enable_watermark", "grammar_backend",
    "log_level", "max_running_requests",
    "max_total_tokens", "nccl_port", "nnodes", "page_size", "pp_size", "schedule_policy", "speculative_algorithm",
    "tokenizer_worker_num", "enable_return_hidden_states", "return_hidden_states_mode",
}  # fmt: skip
CAN = Capabilities(
    "causal", 512, 100, 1000, 8, 1000, 8, operations=("generate",), features=("grammar", "stop_text", "logit_processors")
)


def kwargs_of(device: str = "cuda", grammars: bool = True, **fields: Any) -> dict[str, Any]:
    wanted: dict[str, Any] = {"operations": ("generate",)} | fields
    return generation_kwargs(EngineSettings(model="model", device=device, **wanted), KNOWN, grammars=grammars)


def test_a_generating_engine_takes_sglangs_own_defaults() -> None:
    kwargs = kwargs_of(nccl_port=4711)
    assert kwargs == {
        "model_path": "model", "device": "cuda", "dtype": "auto", "nccl_port": 4711, "log_level": "error",
        "custom_weight_loader": ["enginepool.workers.sglang.weights.loader.load"],
        "enable_priority_scheduling": True, "enable_custom_logit_processor": True,
    }  # fmt: skip
    assert kwargs_of(grammars=False)["grammar_backend"] == "none"
    with pytest.raises(SettingsError, match="does not work here; use 'none'"):
        kwargs_of(grammars=False, options={"grammar_backend": "xgrammar"})


def test_a_generating_engine_on_a_cpu_gets_what_sglang_needs_there() -> None:
    kwargs = kwargs_of("cpu", options={"max_total_tokens": 100})
    assert kwargs["attention_backend"] == "torch_native"
    assert kwargs["dtype"] == "float32"
    assert kwargs["disable_cuda_graph"] is True
    assert (kwargs["max_total_tokens"], kwargs["max_running_requests"]) == (100, 64)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "EAGLE"},
        {"chunked_prefill_size": 512},
        {"enable_mixed_chunk": True},
        {"disable_radix_cache": False, "enable_hierarchical_cache": True},
        {"disable_overlap_schedule": True},
        {"enable_priority_scheduling": True, "disable_priority_preemption": False},
        {"hicache_storage_backend": "file", "hicache_ratio": 2.0},
        {"prefill_max_requests": 4},
        {"dp_size": 2, "pp_size": 2},
    ],
)
def test_options_that_would_cut_batches_of_rows_are_taken(options: dict[str, Any]) -> None:
    assert options.items() <= kwargs_of(options=options).items()


class AskedEngine(EngineGeneration):
    """Notes what it is asked, and ends at once."""

    def __init__(self, context: int) -> None:
        can = Capabilities("causal", 512, context, 1000, 8, 1000, 8, operations=("generate",))
        super().__init__(
            SimpleNamespace(_handle_batch_output=None, _result_dispatcher=None, rid_to_state={}, mm_processor=None),
            None,
            can,
            Running({}, 1000, 8, context),
            "",
            {},
        )
        self.asked: list[tuple[list[int], int]] = []

    def ask(
        self, task: GenerationTask, prompt: list[int], given: Sequence[TaskMedium], sequence: int, rid: str
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append((prompt, task.sampling.max_new_tokens))
        return self._answers()

    async def _answers(self) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"finish_reason": {"type": "length"}}}


@pytest.mark.parametrize(("context", "prompt", "new"), [(100, 64, 4), (10, 6, 4), (2, 1, 1)])
def test_a_warm_engine_has_computed_a_prompt_that_was_in_its_prefix_cache(context: int, prompt: int, new: int) -> None:
    engine = AskedEngine(context)
    asyncio.run(engine.warm_up())
    assert engine.asked == [([0] * prompt, new)] * 2


def test_a_prompt_that_waits_for_its_prefill_is_taken_back_without_asking_sglang() -> None:
    async def scene() -> None:
        engine = AskedEngine(100)
        Prefill(engine.admission, 1 << 20, 0)  # the engine computes a long prompt of another task
        task = GenerationTask(np.zeros(4, np.int32), Sampling(max_new_tokens=4), n=2)
        running = asyncio.create_task(Sequences(engine, task, lambda _: None).run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert engine.asked == [] and engine.messages.takers == {}
        later = Prefill(engine.admission, 1, 0)
        assert not later.turn.done()

    asyncio.run(scene())


class NaNEngine(AskedEngine):
    """Gives a log-probability of NaN, and says of the sequence that it was aborted."""

    def ask(
        self, task: GenerationTask, prompt: list[int], given: Sequence[TaskMedium], sequence: int, rid: str
    ) -> AsyncIterator[dict[str, Any]]:
        self.messages.takers[rid]([7], [float("nan")], None, 0, None, 0)
        return self._answers()

    async def _answers(self) -> AsyncIterator[dict[str, Any]]:
        yield {"meta_info": {"finish_reason": {"type": "abort", "message": "Aborted"}}}


def test_a_sequence_that_was_aborted_for_its_answer_says_what_was_wrong_with_that() -> None:
    task = GenerationTask(np.zeros(4, np.int32), Sampling(max_new_tokens=4), logprobs=True)
    with pytest.raises(EngineError, match=r"^logprobs: NaN; "):
        asyncio.run(Sequences(NaNEngine(100), task, lambda _: None).run())


def test_an_order_without_priorities_turns_them_off() -> None:
    assert kwargs_of(options={"schedule_policy": "lpm"})["enable_priority_scheduling"] is False
    assert kwargs_of(options={"enable_priority_scheduling": False})["enable_priority_scheduling"] is False


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nnodes": 2}, "one host"),
        ({"tokenizer_worker_num": 2}, "does not work"),
        ({"preferred_sampling_params": {"temperature": 0.5}}, "leaves at its default"),
        ({"max_queued_requests": 4}, "the pool bounds its own queue"),
        ({"custom_sigquit_handler": print}, "needs the signal"),
        ({"chunked_prefil_size": 2}, "did you mean 'chunked_prefill_size'"),
        ({"custom_weight_loader": []}, "comes from the pool"),
    ],
)
def test_an_option_that_does_not_work_is_refused_with_the_reason(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        kwargs_of(options=options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"operations": ("embed", "generate")}, "operations: a model that embeds does not generate"),
        ({"max_batch_tokens": 100}, "max_batch_tokens is 100"),
        ({"cached_query_tokens": 100}, "cached_query_tokens is 100"),
    ],
)
def test_settings_of_rows_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        kwargs_of(**fields)


@pytest.mark.parametrize(
    ("longest", "kv_tokens", "page", "context"), [(89, 1000, 1, 90), (993, 1000, 1, 994), (993, 1000, 64, 872)]
)
def test_prompt_and_new_tokens_are_bounded_by_what_sglang_cuts(longest: int, kv_tokens: int, page: int, context: int) -> None:
    found = generation_budgets(Running({"page_size": page}, kv_tokens, 16, longest))
    assert (found.context, found.inflight_tokens, found.inflight_rows) == (context, kv_tokens, 16)


def test_replicas_run_more_together_and_none_a_longer_sequence() -> None:
    found = generation_budgets(Running({"dp_size": 2}, 1000, 16, 2000))
    assert (found.context, found.inflight_tokens, found.inflight_rows) == (998, 2000, 32)


def test_replicas_that_are_process_groups_of_their_own_find_their_own_ports() -> None:
    known = {*KNOWN, "enable_dp_attention"}

    def port(**options: Any) -> int | None:
        settings = EngineSettings(model="model", device="cuda", operations=("generate",), options=options, nccl_port=4711)
        return generation_kwargs(settings, known, grammars=True).get("nccl_port")

    assert (port(), port(pp_size=2), port(dp_size=2)) == (4711, 4711, None)
    assert port(dp_size=2, enable_dp_attention=True) == 4711


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({"tp_size": 2}, Processes(2)),
        ({"tp_size": 2, "dp_size": 3}, Processes(2, 3, "engine option dp_size=3: weight updates do not reach its replicas")),
        (
            {"speculative_draft_model_path": "d"},
            Processes(1, 1, "engine option speculative_draft_model_path=d: weight updates do not reach the draft model"),
        ),
        ({"pp_size": 2}, Processes(1, 2, "engine option pp_size=2: weight updates do not reach its later stages")),
        (
            {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
            Processes(
                1, 1, "engine option hicache_storage_backend=file: weight updates do not reach the KV caches in its storage"
            ),
        ),
        (
            {"enable_lmcache": True},
            Processes(1, 1, "engine option enable_lmcache=True: weight updates do not reach the KV caches in its storage"),
        ),
        ({"enable_hierarchical_cache": True, "enable_lmcache": False, "hicache_storage_backend": None}, Processes(1)),
        (
            {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True},
            Processes(4, 1, "engine option dp_size=2: weight updates do not reach its replicas"),
        ),
    ],
)
def test_every_process_of_an_engine_is_known(settings: dict[str, Any], processes: Processes) -> None:
    assert Processes.of(settings) == processes


def test_what_sglang_resolved_for_generation_is_checked() -> None:
    with pytest.raises(SettingsError, match="nnodes=2"):
        generation_budgets(Running({"nnodes": 2}, 1000, 16, 100))
    with pytest.raises(SettingsError, match="no room for one sequence"):
        generation_budgets(Running({}, 3, 16, 100))


def test_grammars_and_stop_strings_need_a_tokenizer() -> None:
    assert generation_features({"grammar_backend": "xgrammar"}, True) == ("grammar", "stop_text")
    assert generation_features({"grammar_backend": "none", "reasoning_parser": "qwen3"}, True) == ("stop_text",)
    thinks = generation_features({"grammar_backend": "xgrammar", "reasoning_parser": "qwen3"}, True)
    assert thinks == ("grammar", "stop_text", "reasoning_parser")
    assert generation_features({"grammar_backend": "xgrammar"}, False) == ()
    assert generation_features({"grammar_backend": "xgrammar", "skip_tokenizer_init": True}, True) == ()


def test_an_engine_says_that_it_is_deterministic() -> None:
    for option in ("enable_deterministic_inference", "rl_on_policy_target"):
        assert generation_features({option: True}, False) == ("deterministic",)
    assert generation_features({"enable_deterministic_inference": False, "rl_on_policy_target": None}, False) == ()


def test_logit_processors_run_where_sglang_calls_them_for_each_token_and_says_its_position() -> None:
    on = {"enable_custom_logit_processor": True}
    assert generation_features(on, False) == ("logit_processors",)
    for without in ({"speculative_algorithm": "EAGLE"}, {"enable_mixed_chunk": True}, {"enable_custom_logit_processor": False}):
        assert generation_features(on | without, False) == ()
    assert kwargs_of(options={"enable_watermark": True})["enable_custom_logit_processor"] is False
    assert kwargs_of(options={"enable_custom_logit_processor": False})["enable_custom_logit_processor"] is False


def test_hidden_states_are_given_where_each_step_has_one_token_and_those_of_prompts_stay_in_the_engine() -> None:
    on = {"enable_return_hidden_states": True}
    assert (hidden_of(on, 64), hidden_of({}, 64)) == (64, 0)
    for several in ({"speculative_algorithm": "EAGLE"}, {"stream_interval": 2}, {"pp_size": 2}):
        assert hidden_of(on | several, 64) == 0
    assert kwargs_of(options=on)["return_hidden_states_mode"] == "last"
    assert kwargs_of(options=on | {"return_hidden_states_mode": "full"})["return_hidden_states_mode"] == "full"
    assert "return_hidden_states_mode" not in kwargs_of()


def test_routed_experts_are_given_where_a_computed_token_stays_in_its_place() -> None:
    on, config = {"enable_return_routed_experts": True}, SimpleNamespace(num_hidden_layers=4, num_experts_per_tok=2)
    assert (experts_of(on, config), experts_of({}, None)) == ((4, 2), (0, 0))
    for other in ("speculative_algorithm", "enable_hierarchical_cache", "hicache_storage_backend", "enable_dp_attention"):
        assert experts_of(on | {other: "set"}, config) == (0, 0)
    assert experts_of(on | {"pp_size": 2}, config) == (0, 0)
    with pytest.raises(SettingsError, match="chunked_prefill_size=-1 is refused: SGLang notes routed experts"):
        generation_budgets(Running(on | {"chunked_prefill_size": -1}, 1000, 16, 100))
    generation_budgets(Running(on | {"chunked_prefill_size": 512}, 1000, 16, 100))


def task(prompt: tuple[int, ...] = (1, 2), n: int = 1, **sampling: Any) -> GenerationTask:
    wanted: dict[str, Any] = {"max_new_tokens": 10} | sampling
    return GenerationTask(np.array(prompt, np.int32), Sampling(**wanted), n)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (task(()), "prompt: it has no tokens"),
        (task((1, 512)), "prompt: a token id is outside 0..511"),
        (task((-1,)), "prompt: a token id is outside 0..511"),
        (task((1,) * 91), "prompt: 91 tokens, and max_new_tokens = 10; this engine takes 100 together"),
        (task(n=9), "n: 9; this engine runs 1 to 8 sequences at once"),
        (task(stop_token_ids=[3, 512]), "stop_token_ids: 512 is outside 0..511"),
        (task(logit_bias={"512": 1.0}), "logit_bias: '512': 1; token ids are 0..511"),
        (task(logit_bias={"5": 1e300}), "biases up to ±1e\\+20"),
        (task(logit_bias={"5": float("nan")}), "logit_bias: '5': nan"),
        (task(temperature=1e300), "temperature: 1e\\+300 is outside"),
        (task(temperature=float("nan")), "temperature: nan is outside"),
        (task(repetition_penalty=1e-30), "repetition_penalty: 1e-30; at least 0.01"),
        (task(sampling_seed=1 << 63), "sampling_seed: 9223372036854775808 has more than 64 bits"),
        (task(regex="a+", min_new_tokens=2), "min_new_tokens: given with regex"),
        (task(regex="a+", allowed_token_ids=[2]), "allowed_token_ids: given with regex"),
        (task(allowed_token_ids=[3, 512]), "allowed_token_ids: a token id is outside 0..511"),
        (task(disallowed_token_ids=[-1]), "disallowed_token_ids: a token id is outside 0..511"),
        (task(disallowed_token_ids=[*range(512)]), "disallowed_token_ids: all 512 tokens"),
        (task(temperature_schedule=TemperatureSchedule(1, 1e300, 5)), "temperature_schedule: 1e\\+300 is outside"),
    ],
)
def test_a_task_of_which_the_scheduler_would_die_is_refused(wrong: GenerationTask, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        refuse_fatal(wrong, CAN, False)


def test_what_the_engine_has_not_is_refused() -> None:
    plain = Capabilities("causal", 512, 100, 1000, 8, 1000, 8)
    with pytest.raises(EngineError, match="json_schema: this engine runs no grammar backend"):
        refuse_fatal(task(json_schema="{}"), plain, False)
    with pytest.raises(EngineError, match="allowed_token_ids: this engine runs no logit processors"):
        refuse_fatal(task(allowed_token_ids=[1]), plain, False)
    with pytest.raises(EngineError, match="require_reasoning: this engine was started without a reasoning_parser"):
        refuse_fatal(task(regex="a", require_reasoning=True), CAN, False)
    refuse_fatal(task(min_p=0.5), CAN, False)
    with pytest.raises(EngineError, match=r"min_p: 0\.5; an engine with enable_deterministic_inference takes 0"):
        refuse_fatal(task(min_p=0.5), CAN, True)


def test_sglang_gets_what_was_asked_for_by_its_own_names() -> None:
    assert sampling_kwargs(task(), 512, 0, False) == {"max_new_tokens": 10}
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "stop": ["x"],
        "logit_bias": {"3": 1.5},
        "stop_token_ids": [7],
        "json_schema": "{}",
    }
    assert sampling_kwargs(task(**asked), 512, 0, False) == {"max_new_tokens": 10, **asked}
    assert sampling_kwargs(task(top_k=1 << 40), 512, 0, False)["top_k"] == -1
    assert sampling_kwargs(task(regex="a", require_reasoning=True), 512, 0, False) == {"max_new_tokens": 10, "regex": "a"}


def test_sglang_gets_a_mask_and_a_schedule_as_parameters_of_our_logit_processor() -> None:
    masked = sampling_kwargs(task(allowed_token_ids=[9, 3, 9]), 512, 0, False)
    assert masked == {"max_new_tokens": 10, "custom_params": {"allowed": [3, 9]}}
    schedule = TemperatureSchedule(1.0, 0.5, 8)
    asked = replace(task(disallowed_token_ids=[4], temperature_schedule=schedule), at=6)
    assert sampling_kwargs(asked, 512, 0, False)["custom_params"] == {"disallowed": [4], "schedule": [1.0, 0.5, 8], "at": 6}
    assert [schedule.at(position) for position in (0, 2, 8, 100)] == [1.0, 0.875, 0.5, 0.5]


def test_the_sequences_of_a_task_have_seeds_of_their_own() -> None:
    seeds = [sampling_kwargs(task(n=3, sampling_seed=(1 << 63) - 2), 512, i, False)["sampling_seed"] for i in range(3)]
    assert seeds == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]


def test_without_a_seed_each_sequence_of_a_deterministic_engine_draws_by_one_of_its_own() -> None:
    seeds = [sampling_kwargs(task(n=16), 512, i, True)["sampling_seed"] for i in range(16)]
    assert len(set(seeds)) == 16 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert sampling_kwargs(task(sampling_seed=7), 512, 2, True)["sampling_seed"] == 9


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"max_prefill_tokens": 16384, "chunked_prefill_size": 8192}, 8192),
        ({"max_prefill_tokens": 4096, "chunked_prefill_size": 8192}, 4096),
        ({"max_prefill_tokens": 4096, "chunked_prefill_size": -1}, 4096),
        ({"max_prefill_tokens": 4096, "chunked_prefill_size": None}, 4096),
        ({}, 16384),
        ({"max_prefill_tokens": 4096, "dp_size": 2}, 8192),
    ],
)
def test_a_prefill_takes_as_many_tokens_as_sglang_puts_into_one_forward(settings: dict[str, Any], tokens: int) -> None:
    assert prefill_tokens(settings) == tokens


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Failed to compile regex grammar: [09:19:59] /build/cpp/regex.cc:83: Regex error:\n at 2", "regex: Regex error: at 2"),
        ("Failed to compile json grammar: Unsupported type", "json_schema: Unsupported type"),
        ("Grammar compilation failed:", "Grammar compilation failed"),
    ],
)
def test_what_sglang_refuses_is_told_without_the_place_in_its_source(said: str, why: str) -> None:
    found = why_aborted({"type": "abort", "message": said, "status_code": 400})
    assert isinstance(found, RequestRefused) and str(found) == why
    found = why_aborted({"type": "abort", "message": said, "status_code": 500})
    assert not isinstance(found, RequestRefused) and str(found).startswith("the engine aborted the sequence: ")
