"""What SGLang is started with, what is refused, and the budgets inside which no batch is ever cut."""

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.host.settings import (
    Running,
    SettingsError,
    budgets,
    engine_kwargs,
    is_deterministic,
    refuse_impossible,
    refuse_shared_storage,
    reserved,
)
from enginepool.workers.sglang.score.packing_support import with_packing
from tests.engine.forked import run_code

KNOWN = {
    "attention_backend",
    "chunked_prefill_size",
    "cuda_graph_max_bs_prefill",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "disable_overlap_schedule",
    "disable_prefill_cuda_graph",
    "disable_priority_preemption",
    "dp_size",
    "dtype",
    "enable_priority_scheduling",
    "device",
    "max_prefill_tokens",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "model_path",
    "nccl_port",
    "page_size",
    "schedule_policy",
}
ALL_KNOWN = KNOWN | {
    "allow_auto_truncate",
    "custom_sigquit_handler",
    "disaggregation_mode",
    "dllm_algorithm",
    "enable_dp_attention",
    "enable_eplb",
    "enable_mis",
    "enable_mixed_chunk",
    "enable_prefill_delayer",
    "enable_tokenizer_batch_encode",
    "max_queued_requests",
    "min_free_slots_delay",
    "nnodes",
    "hicache_storage_backend",
    "pp_size",
    "preferred_sampling_params",
    "prefill_max_requests",
    "speculative_algorithm",
    "tokenizer_worker_num",
}


def wanted(device: str = "cuda", **fields: Any) -> EngineSettings:
    settings = EngineSettings(model="model", device=device, **fields)
    refuse_impossible(settings)
    return settings


def running(**facts: Any) -> Running:
    settings = {"max_prefill_tokens": 32769, "chunked_prefill_size": -1, "page_size": 1} | facts.pop("settings", {})
    return Running(settings, **({"kv_tokens": 500_000, "max_running": 1024, "longest": 40_000} | facts))


def test_a_scoring_engine_never_chunks_and_runs_by_priority() -> None:
    kwargs = engine_kwargs(wanted(), KNOWN)
    assert kwargs["chunked_prefill_size"] == -1
    assert kwargs["schedule_policy"] == "fcfs"
    assert kwargs["enable_priority_scheduling"] is True
    assert kwargs["disable_priority_preemption"] is True
    assert "attention_backend" not in kwargs


def test_the_engine_is_sized_for_the_batches_that_are_wanted() -> None:
    kwargs = engine_kwargs(wanted(max_batch_tokens=1000, max_batch_rows=10, forwards_in_flight=3), KNOWN)
    assert kwargs["max_prefill_tokens"] == 3001
    assert kwargs["max_running_requests"] == 60


def test_a_cpu_gets_what_sglang_needs_there() -> None:
    kwargs = engine_kwargs(wanted("cpu", max_batch_tokens=100, max_batch_rows=5, options={"page_size": 4}), KNOWN)
    assert kwargs["attention_backend"] == "torch_native"
    assert kwargs["dtype"] == "float32"
    assert kwargs["max_total_tokens"] >= 201 + 10 * 4
    assert engine_kwargs(wanted("cpu", dtype="bfloat16"), KNOWN)["dtype"] == "bfloat16"


def test_small_plain_forwards_on_a_gpu_are_graphs_and_no_others() -> None:
    kwargs = engine_kwargs(wanted(), KNOWN)
    assert kwargs["disable_decode_cuda_graph"] is True
    assert kwargs["cuda_graph_max_bs_prefill"] == 6144
    assert not {"disable_cuda_graph", "disable_prefill_cuda_graph"} & kwargs.keys()
    assert engine_kwargs(wanted(max_batch_tokens=1000), KNOWN)["cuda_graph_max_bs_prefill"] == 2000
    assert engine_kwargs(wanted(packing="on"), PACKED_KNOWN)["cuda_graph_max_bs_prefill"] == 12_288
    kwargs = engine_kwargs(wanted(device="cpu"), ALL_KNOWN | {"disable_radix_cache"})
    assert kwargs["disable_cuda_graph"] is kwargs["disable_prefill_cuda_graph"] is True
    assert "cuda_graph_max_bs_prefill" not in kwargs


def test_memory_is_never_left_to_a_rule_that_gives_a_small_card_nothing() -> None:
    assert 0 < engine_kwargs(wanted(), KNOWN)["mem_fraction_static"] < 1
    assert engine_kwargs(wanted(options={"mem_fraction_static": 0.3}), KNOWN)["mem_fraction_static"] == 0.3


def test_settings_that_the_installed_version_does_not_have_are_left_out() -> None:
    assert "grammar_backend" not in engine_kwargs(wanted(), KNOWN - {"grammar_backend"})


def test_the_users_option_wins() -> None:
    kwargs = engine_kwargs(wanted("cpu", options={"attention_backend": "intel_amx", "max_running_requests": 6}), KNOWN)
    assert kwargs["attention_backend"] == "intel_amx"
    assert kwargs["max_running_requests"] == 6


def test_the_port_that_the_coordinator_gave_is_taken() -> None:
    assert engine_kwargs(wanted(nccl_port=4711), KNOWN)["nccl_port"] == 4711
    assert "nccl_port" not in engine_kwargs(wanted(), KNOWN)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp_size": 2}, "dp_size=2 is refused"),
        ({"pp_size": 2}, "pipeline stages"),
        ({"nnodes": 2}, "one host"),
        ({"enable_dp_attention": True}, "one by one"),
        ({"speculative_algorithm": "EAGLE"}, "adds forwards"),
        ({"dllm_algorithm": "LowConfidence"}, "several forwards"),
        ({"disaggregation_mode": "prefill"}, "another engine"),
        ({"enable_mixed_chunk": True}, "be cut"),
        ({"prefill_max_requests": 4}, "would be split"),
        ({"enable_prefill_delayer": True}, "held back"),
        ({"min_free_slots_delay": 8}, "held back"),
        ({"hicache_storage_backend": "file"}, "held back"),
        ({"preferred_sampling_params": '{"logit_bias": {"3": 5.0}}'}, "other scores"),
        ({"enable_eplb": True}, "change places"),
        ({"max_queued_requests": 10}, "refused while others run"),
        ({"enable_mis": True}, "see packing of the group"),
        ({"allow_auto_truncate": True}, "cut silently"),
        ({"enable_tokenizer_batch_encode": True}, "token ids"),
        ({"tokenizer_worker_num": 2}, "does not work"),
        ({"schedule_policy": "lpm"}, "other orders"),
        ({"enable_priority_scheduling": False}, "would not reach"),
        ({"disable_priority_preemption": False}, "runs again"),
        ({"custom_sigquit_handler": print}, "needs the signal"),
        ({"chunked_prefill_size": 8192}, "cut into chunks"),
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 16384}, "cut into chunks"),
        ({"dp_sise": 2}, "did you mean 'dp_size'"),
        ({"device": "cpu"}, "comes from device"),
        ({"nccl_port": 1}, "comes from the coordinator"),
    ],
)
def test_an_option_that_would_cut_batches_is_refused_with_the_reason(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        engine_kwargs(wanted(options=options), ALL_KNOWN)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


# --- packed ------------------------------------------------------------------------------------------------------------

PACKED_KNOWN = ALL_KNOWN | {"disable_radix_cache", "prefill_attention_backend", "decode_attention_backend"}
RESOLVED = {"enable_mis": True, "attention_backend": "flashinfer", "disable_radix_cache": True}


def test_an_engine_that_packs_is_started_as_multi_item_scoring_needs_it() -> None:
    kwargs = engine_kwargs(wanted(packing="on"), PACKED_KNOWN)
    assert kwargs["enable_mis"] is True
    assert kwargs["attention_backend"] == "flashinfer"
    assert kwargs["disable_radix_cache"] is True
    assert kwargs["chunked_prefill_size"] == -1


CAN_BE_PACKED = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
CANNOT_BE_PACKED = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}


def decided(settings: EngineSettings, config: dict[str, Any] = CAN_BE_PACKED, known: Collection[str] = ()) -> str:
    return with_packing(settings, lambda: config, known or PACKED_KNOWN, lambda _names, embeds: not embeds).packing


def test_packing_is_on_by_default_where_engine_model_and_device_allow_it() -> None:
    assert decided(wanted()) == "on"
    assert decided(wanted(packing="off")) == "off"


@pytest.mark.parametrize(
    ("settings", "config", "known", "said"),
    [
        ({"device": "cpu"}, CAN_BE_PACKED, PACKED_KNOWN, r"FlashInfer.* runs on CUDA; the device is cpu"),
        ({"cached_query_tokens": 256}, CAN_BE_PACKED, PACKED_KNOWN, "queries are cached"),
        ({"operations": ("logprobs",)}, CAN_BE_PACKED, PACKED_KNOWN, "scores alone are packed"),
        ({"operations": ("score", "generate")}, CAN_BE_PACKED, PACKED_KNOWN, "rows next to sequences"),
        ({"options": {"enable_deterministic_inference": True}}, CAN_BE_PACKED, PACKED_KNOWN, "other bits"),
        ({"options": {"attention_backend": "triton"}}, CAN_BE_PACKED, PACKED_KNOWN, "FlashInfer alone"),
        ({"options": {"prefill_attention_backend": "fa3"}}, CAN_BE_PACKED, PACKED_KNOWN, "FlashInfer alone"),
        ({"options": {"decode_attention_backend": "fa3"}}, CAN_BE_PACKED, PACKED_KNOWN, "FlashInfer alone"),
        ({"options": {"disable_radix_cache": False}}, CAN_BE_PACKED, PACKED_KNOWN, "not the prefix of another"),
        ({"options": {"chunked_prefill_size": 65536}}, CAN_BE_PACKED, PACKED_KNOWN, "cut between items"),
        ({"options": {"enable_mis": False}}, CAN_BE_PACKED, PACKED_KNOWN, "it is what packs"),
        ({"options": {"is_embedding": True}}, CAN_BE_PACKED, PACKED_KNOWN, "this model embeds"),
        ({}, CAN_BE_PACKED, PACKED_KNOWN - {"enable_mis"}, "the installed SGLang has no setting enable_mis"),
        ({}, CANNOT_BE_PACKED, PACKED_KNOWN, "looks ahead"),
        ({}, {}, PACKED_KNOWN, "config.json cannot be read"),
    ],
)
def test_an_engine_that_cannot_pack_does_not_and_says_why_where_it_has_to(
    settings: dict[str, Any], config: dict[str, Any], known: Collection[str], said: str
) -> None:
    assert decided(wanted(**settings), config, known) == "off"
    with pytest.raises(SettingsError, match=said) as caught:
        decided(wanted(**settings, packing="on"), config, known)
    assert "\n" not in str(caught.value)


def test_the_deterministic_mode_is_taken_on_a_gpu_and_refused_on_a_cpu_with_the_reason() -> None:
    options: dict[str, Any] = {"enable_deterministic_inference": True}
    known = PACKED_KNOWN | {*options}
    assert engine_kwargs(wanted(options=options), known)["enable_deterministic_inference"] is True
    with pytest.raises(SettingsError, match="enable_deterministic_inference=True is refused on a CPU: SGLang"):
        wanted("cpu", options=options)
    wanted("cpu", options={"enable_deterministic_inference": False})
    budgets(wanted(options=options), running(settings=options))
    assert is_deterministic(options) and not is_deterministic({"enable_deterministic_inference": False})


def test_a_name_under_which_checkpoints_would_share_stored_kv_caches_is_refused() -> None:
    named = {"served_model_name": "m"}
    refuse_shared_storage(named)
    refuse_shared_storage({"enable_lmcache": True})
    with pytest.raises(SettingsError, match="served_model_name is refused with enable_lmcache"):
        refuse_shared_storage(named | {"enable_lmcache": True})


def test_cached_queries_are_refused_where_the_deterministic_mode_turns_the_radix_cache_off() -> None:
    settings = wanted(cached_query_tokens=100, options={"enable_deterministic_inference": True})
    with pytest.raises(SettingsError, match="radix cache, which is off"):
        budgets(settings, running(settings={"disable_radix_cache": True}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dp_size": 2}, "one by one"),
        ({"pp_size": 2}, "pipeline stages"),
        ({"speculative_algorithm": "EAGLE"}, "adds forwards"),
    ],
)
def test_options_that_cut_batches_are_refused_where_an_engine_packs(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        engine_kwargs(wanted(packing="on", options=options), PACKED_KNOWN)


def test_what_sglang_resolved_for_packing_is_checked() -> None:
    found = budgets(wanted(packing="on"), running(settings=RESOLVED, max_running=8192))
    assert (found.inflight_rows, found.batch_rows) == (2048, 1024)
    with pytest.raises(SettingsError, match="attention_backend='fa3'"):
        budgets(wanted(packing="on"), running(settings=RESOLVED | {"attention_backend": "fa3"}))
    with pytest.raises(SettingsError, match="enable_mis=True"):
        budgets(wanted(), running(settings=RESOLVED))


def test_chunks_no_smaller_than_a_forward_are_let_through() -> None:
    options = {"chunked_prefill_size": 4096, "max_prefill_tokens": 4096}
    assert engine_kwargs(wanted(options=options), KNOWN)["chunked_prefill_size"] == 4096
    found = budgets(wanted(), running(settings=options))
    assert found.inflight_tokens == 4095


def test_what_sglang_resolved_is_checked_not_what_it_was_given() -> None:
    with pytest.raises(SettingsError, match="cut into chunks"):
        budgets(wanted(), running(settings={"chunked_prefill_size": 2048}))


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_batch_rows", "forwards_in_flight"])
def test_impossible_bounds_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is 0"):
        wanted("cuda", **{name: 0})


def test_budgets_of_a_large_engine_are_half_of_a_forward_each() -> None:
    found = budgets(wanted(), running())
    assert (found.inflight_tokens, found.batch_tokens) == (32768, 16384)
    assert (found.inflight_rows, found.batch_rows) == (512, 256)
    assert found.context == 32768


def test_a_row_is_never_longer_than_what_the_engine_takes() -> None:
    assert budgets(wanted(), running(longest=4089)).context == 4089
    assert budgets(wanted(), running(settings={"max_prefill_tokens": 1001})).context == 1000


def test_budgets_shrink_with_the_pool_and_the_slots() -> None:
    found = budgets(wanted(), running(kv_tokens=6000, max_running=100))
    assert found.inflight_rows == 50
    assert found.inflight_tokens + found.inflight_rows < 6000


def test_rows_of_a_batch_are_no_more_than_sglang_adds_to_one_forward() -> None:
    """For any `max_running_requests`: it counts against this one, which it takes from that unless it is given."""
    assert budgets(wanted(), running(settings={"pp_max_micro_batch_size": 64})).inflight_rows == 32
    assert budgets(wanted(), running(settings={"pp_max_micro_batch_size": None})) == budgets(wanted(), running())


def test_the_users_bounds_hold() -> None:
    found = budgets(wanted(max_batch_tokens=300, max_batch_rows=7), running())
    assert (found.batch_tokens, found.batch_rows) == (300, 7)
    assert (found.inflight_tokens, found.inflight_rows) == (600, 14)


@pytest.mark.parametrize("facts", [{"max_running": 1}, {"kv_tokens": 0}, {"settings": {"max_prefill_tokens": 1}}])
def test_an_engine_without_room_for_one_batch_is_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="no room for one batch"):
        budgets(wanted(), running(**facts))


def admitted(lengths: list[int], page: int, prefill: int, kv: int, slots: int) -> int:
    """How many of these waiting rows SGLang admits to one forward, by its own rules, without prefix hits."""
    count, input_left, pool_left = 0, prefill, kv
    for length in lengths:
        paged = -(-length // page) * page
        if count >= slots or length + page >= pool_left or (count and paged >= input_left) or input_left <= 0:
            break
        count += 1
        input_left -= paged
        pool_left -= paged + page
    return count


@given(st.data())
def test_all_batches_within_the_budgets_are_admitted_to_one_forward(data: st.DataObject) -> None:
    """Everything that may be in flight at once, waiting together, with the slots of as much again still held."""
    draw = data.draw
    page = draw(st.sampled_from([1, 16, 64]))
    prefill = draw(st.integers(2, 5000))
    facts = running(
        settings={"max_prefill_tokens": prefill, "page_size": page},
        kv_tokens=draw(st.integers(0, 6000)),
        max_running=draw(st.integers(1, 64)),
        longest=draw(st.integers(1, 3000)),
    )
    asked = wanted(max_batch_tokens=draw(st.none() | st.integers(1, 5000)), max_batch_rows=draw(st.none() | st.integers(1, 64)))
    try:
        found = budgets(asked, facts)
    except SettingsError:
        return
    assert found.batch_tokens % page == 0
    assert 1 <= found.batch_rows <= found.inflight_rows
    assert 1 <= found.context <= found.inflight_tokens
    lengths: list[int] = []
    left = found.inflight_tokens
    while len(lengths) < found.inflight_rows and left >= page:
        length = draw(st.integers(1, min(left // page * page, found.context)))
        lengths.append(length)
        left -= -(-length // page) * page
    slots = facts.max_running - found.inflight_rows
    assert admitted(lengths, page, prefill, facts.kv_tokens, slots) == len(lengths)


# --- queries that are computed once --------------------------------------------------------------------------------------


def test_an_engine_that_keeps_queries_has_room_to_compute_them_again() -> None:
    """Batches that cannot be cached are as large as ever; four times that is in flight with all rows in full."""
    settings = wanted(cached_query_tokens=256)
    assert engine_kwargs(settings, KNOWN)["max_prefill_tokens"] == 4 * 32768 + 1
    found = budgets(settings, running(settings={"max_prefill_tokens": 4 * 32768 + 1}))
    assert (found.batch_tokens, found.cached_tokens, found.inflight_tokens) == (16384, 65536, 131072)
    assert (found.cached_query, found.context) == (256, 32768)
    plain = budgets(wanted(), running())
    assert (plain.batch_tokens, plain.cached_tokens, plain.inflight_tokens, plain.cached_query) == (16384, 0, 32768, 0)


def test_a_small_pool_bounds_cached_batches_too() -> None:
    found = budgets(wanted(cached_query_tokens=256), running(settings={"max_prefill_tokens": 10**6}, kv_tokens=20_000))
    assert found.cached_tokens * 2 <= found.inflight_tokens < 20_000
    assert found.batch_tokens <= found.cached_tokens
    with pytest.raises(SettingsError, match="cached_query_tokens is 10000; two rows of that have no room"):
        budgets(wanted(cached_query_tokens=10_000), running(kv_tokens=20_000))


@pytest.mark.parametrize("cached_query_tokens", [None, 256])
def test_nothing_is_kept_but_queries_that_were_asked_for(cached_query_tokens: int | None) -> None:
    kwargs = engine_kwargs(wanted(cached_query_tokens=cached_query_tokens), KNOWN | {"disable_radix_cache"})
    assert kwargs["disable_radix_cache"] == (cached_query_tokens is None)


def test_queries_are_not_kept_without_a_radix_cache() -> None:
    """Whether the options say so, or SGLang resolved its settings to that."""
    asked = wanted(cached_query_tokens=256, options={"disable_radix_cache": True})
    with pytest.raises(SettingsError, match="radix cache, which is off"):
        engine_kwargs(asked, KNOWN | {"disable_radix_cache"})
    with pytest.raises(SettingsError, match="radix cache, which is off"):
        budgets(wanted(cached_query_tokens=256), running(settings={"disable_radix_cache": True}))


def test_no_query_is_too_short_to_be_cached() -> None:
    with pytest.raises(SettingsError, match="cached_query_tokens is 0; it must be at least 1"):
        wanted(cached_query_tokens=0)


def test_the_settings_that_are_read_from_its_source_are_those_that_sglang_takes() -> None:
    """`enginepool serve` asks the source, the worker asks the class."""
    code = (
        "from enginepool.workers import options\n"
        "from enginepool.workers.sglang.host import build\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "takes = build._setting_names(ServerArgs)\n"
        "print(len(takes) > 100, sorted(takes - options.sglang_settings()))"
    )
    status, said = run_code(code)
    assert status == 0, said
    assert said.splitlines()[-1] == "True []"


@pytest.mark.parametrize(
    ("facts", "context", "expected"),
    [
        ({"longest": 505, "kv_tokens": 8192}, 505, 7),
        # The key-value pool, or the tokens of a batch, bound it before the context of the model does.
        ({"longest": 250, "kv_tokens": 256}, 250, 0),
        ({"longest": 505, "kv_tokens": 8192}, 128, 0),
    ],
)
def test_what_the_engine_keeps_of_the_context_is_said_where_that_bounds_a_row(
    facts: dict[str, Any], context: int, expected: int
) -> None:
    assert reserved(running(**facts), context, 512) == expected
