"""Engines that generate and run rows: what is started, the room of each, and which forward SGLang's scheduler runs next."""

from typing import Any

import pytest

from enginepool.workers.engine_settings import EngineSettings
from enginepool.workers.sglang.generate.mixed import mixed_budgets, row_room
from enginepool.workers.sglang.generate.settings import generation_budgets
from enginepool.workers.sglang.host.settings import Running, SettingsError
from enginepool.workers.sglang.patches.row_forwards import keep_rows_apart
from tests.core.test_sglang_generation import kwargs_of

OPERATIONS = ("score", "logprobs", "generate")
MIXED = EngineSettings(model="model", device="cuda", operations=OPERATIONS)


def test_a_mixed_engine_has_the_defaults_of_a_generating_one_and_room_for_rows() -> None:
    kwargs = kwargs_of(operations=OPERATIONS)
    assert kwargs["schedule_policy"] == "fcfs"
    assert kwargs["enable_priority_scheduling"] is True and kwargs["disable_priority_preemption"] is True
    assert "chunked_prefill_size" not in kwargs and "max_running_requests" not in kwargs
    alone, both = kwargs_of("cpu"), kwargs_of("cpu", operations=OPERATIONS, max_batch_tokens=100, max_batch_rows=8)
    assert both["max_running_requests"] == alone["max_running_requests"] + 16
    assert both["max_total_tokens"] == alone["max_total_tokens"] + 217


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"cached_query_tokens": 100}, "cached_query_tokens is 100: rows share"),
        ({"options": {"enable_mixed_chunk": True}}, "enable_mixed_chunk=True"),
        ({"options": {"speculative_algorithm": "EAGLE"}}, "speculative_algorithm"),
        ({"options": {"pp_size": 2}}, "pp_size=2"),
        ({"options": {"disable_priority_preemption": False}}, "disable_priority_preemption=False"),
        ({"options": {"enable_hierarchical_cache": True}}, "enable_hierarchical_cache=True is refused: rows share"),
        ({"options": {"enable_return_hidden_states": True}}, "enable_return_hidden_states=True is refused: rows share"),
    ],
)
def test_what_does_not_work_on_a_mixed_engine_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        kwargs_of(operations=OPERATIONS, **fields)


def running(**settings: Any) -> Running:
    resolved = {"max_prefill_tokens": 16384, "chunked_prefill_size": 8192, "page_size": 1} | settings
    return Running(resolved, kv_tokens=400_000, max_running=2048, longest=32_767)


def test_rows_and_sequences_share_what_the_engine_has() -> None:
    engine = running()
    found = mixed_budgets(MIXED, engine, generation_budgets(engine))
    assert (found.batch_tokens, found.batch_rows) == (8192, 256), "one chunk of a prompt"
    assert (found.inflight_tokens, found.inflight_rows, found.context) == (16384, 512, 8192)
    assert (found.sequences, found.sequence_context) == (2048 - 512, 32_768)
    assert found.sequence_tokens == 400_000 - 16384 - 257


def test_a_small_engine_keeps_half_of_its_room_for_sequences() -> None:
    engine = Running({"max_prefill_tokens": 16384, "page_size": 16}, kv_tokens=4096, max_running=32, longest=32_767)
    found = mixed_budgets(MIXED, engine, generation_budgets(engine))
    assert found.sequence_tokens >= 2048 and found.sequences >= 16 and found.sequence_context == found.sequence_tokens - 32
    assert found.batch_tokens % 16 == 0 and found.inflight_tokens + (found.batch_rows + 1) * 16 <= 2048
    tiny = Running({"max_prefill_tokens": 16384, "page_size": 1}, kv_tokens=8, max_running=32, longest=32_767)
    with pytest.raises(SettingsError, match="no room for rows and sequences"):
        mixed_budgets(MIXED, tiny, generation_budgets(tiny))


def test_a_caller_may_bound_batches_of_rows() -> None:
    bounded = EngineSettings(model="m", operations=OPERATIONS, max_batch_tokens=1000, max_batch_rows=10, forwards_in_flight=3)
    room = row_room(bounded, kv_tokens=400_000, page=1, prefill=16384, chunk=8192, max_running=2048)
    assert (room.batch_tokens, room.batch_rows, room.tokens, room.rows, room.kept) == (1000, 10, 3000, 30, 3011)


# --- the scheduler -------------------------------------------------------------------------------------------------------


class SglangReq:
    """A request of SGLang: a row, or a sequence."""

    def __init__(self, name: str, *, row: bool, tokens: int = 10, priority: int = 0) -> None:
        self.rid = name.ljust(32, "-")
        self.is_prefill_only, self.priority, self.origin_input_ids = row, priority, [0] * tokens
        self.extra_key, self.skip_radix_cache_insert = None, False

    def __repr__(self) -> str:
        return self.rid.rstrip("-")


class SglangPlan:
    """SGLang's plan of a step."""

    def __init__(self, batch: Any, running: Any) -> None:
        self.batch_to_run, self.running_batch = batch, running


class RequestBatch:
    """SGLang's batch."""

    def __init__(self, reqs: list[SglangReq]) -> None:
        self.reqs, self.batch_is_full = reqs, False

    @property
    def is_prefill_only(self) -> bool:
        return bool(self.reqs) and all(one.is_prefill_only for one in self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def new_tokens_required_next_decode(self, selected_indices: Any = None) -> int:
        return len(self.reqs)


class SglangPool:
    """Of SGLang's pools: how much is free."""

    def __init__(self, free: int) -> None:
        self.free = free

    def available_size(self) -> int:
        return self.free


class SglangPolicy:
    priority_sign = -1


def new_classes() -> tuple[type[Any], type[Any], type[Any]]:
    """Classes of SGLang, which a test changes."""

    class Batch(RequestBatch):
        """A batch."""

    class Adder:
        """A prefill that is put together."""

        def __init__(self) -> None:
            self.rem_total_token_offset = 0

    class Scheduler:
        """As much of SGLang's scheduler as decides what runs: all that waits is one prefill, else all that runs decodes."""

        def __init__(self, free: int = 1000, slots: int = 100, overlap: bool = False) -> None:
            self.waiting_queue: list[SglangReq] = []
            self.chunked_req: Any = None
            self.grammar_manager: Any = self
            self.grammars: list[SglangReq] = []
            self.policy, self.page_size, self.enable_overlap = SglangPolicy(), 1, overlap
            self.tree_cache: Any = None
            self.req_to_token_pool, self.token_to_kv_pool_allocator = SglangPool(slots), SglangPool(free)
            self.running_batch, self.last_batch = Batch([]), None
            self.offsets: list[int] = []

        def has_waiting_grammars(self) -> bool:
            return bool(self.grammars)

        def get_new_batch_prefill(self, running_batch: Any) -> SglangPlan:
            if self.grammar_manager.has_waiting_grammars():
                self.waiting_queue += self.grammars
                self.grammars = []
            adder = Adder()
            self.offsets.append(adder.rem_total_token_offset)
            batch, self.waiting_queue = [*self.waiting_queue], []
            if self.chunked_req is not None:
                batch.insert(0, self.chunked_req)
            return SglangPlan(Batch(batch) if batch else None, running_batch)

        def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> SglangPlan:
            if last_batch is not None:
                running_batch.reqs += [one for one in last_batch.reqs if one not in running_batch.reqs]
            plan = self.get_new_batch_prefill(running_batch)
            if plan.batch_to_run is None and not plan.running_batch.is_empty():
                plan.batch_to_run = plan.running_batch
            return plan

        def step(self) -> list[str]:
            """What the next forward has."""
            plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
            self.running_batch, self.last_batch = plan.running_batch, plan.batch_to_run
            return [] if plan.batch_to_run is None else sorted(map(repr, plan.batch_to_run.reqs))

    return Scheduler, Batch, Adder


def scheduler(room: int = 100, **settings: Any) -> Any:
    made, batch, adder = new_classes()
    evicted: list[int] = []
    keep_rows_apart(made, batch, adder, lambda _: room, lambda _, tokens: evicted.append(tokens))
    subject = made(**settings)
    subject.evicted = evicted
    return subject


def rows(batch: str, count: int = 2, **fields: Any) -> list[SglangReq]:
    """Rows of one batch, whose ids begin alike."""
    return [SglangReq(batch.ljust(24, "-") + str(i), row=True, **fields) for i in range(count)]


def test_a_forward_has_the_rows_of_one_batch_and_sequences_have_a_step_between_two() -> None:
    subject = scheduler()
    subject.running_batch.reqs = [SglangReq("s", row=False)]
    subject.waiting_queue = [*rows("a"), SglangReq("t", row=False), *rows("b")]
    names = [[str(one)[:1] for one in subject.step()] for _ in range(5)]
    assert names == [["a", "a"], ["t"], ["b", "b"], ["s", "t"], ["s", "t"]], "t was computed, then both decode"


def test_batches_follow_each_other_where_there_are_no_sequences() -> None:
    subject = scheduler()
    subject.waiting_queue = [*rows("a"), *rows("b"), *rows("c")]
    assert [[str(one)[:1] for one in subject.step()] for _ in range(4)] == [["a", "a"], ["b", "b"], ["c", "c"], []]


def test_the_batch_of_the_highest_priority_is_first() -> None:
    subject = scheduler()
    subject.waiting_queue = [*rows("a"), *rows("b", priority=5), *rows("c", priority=5)]
    assert [subject.step()[0][:1] for _ in range(3)] == ["b", "c", "a"]


@pytest.mark.parametrize("settings", [{"free": 20}, {"slots": 1}])
def test_a_batch_that_does_not_fit_waits_and_is_not_cut(settings: dict[str, int]) -> None:
    subject = scheduler(**settings)
    subject.running_batch.reqs = [SglangReq("s", row=False)]
    subject.waiting_queue = rows("a")
    assert subject.step() == ["s"] and len(subject.waiting_queue) == 2
    subject.req_to_token_pool.free, subject.token_to_kv_pool_allocator.free = 2, 23
    assert len(subject.step()) == 2


def test_a_prompt_in_pieces_and_a_grammar_that_is_ready_stay_out_of_a_forward_of_rows() -> None:
    subject = scheduler()
    subject.chunked_req, subject.grammars, subject.waiting_queue = (
        SglangReq("piece", row=False),
        [SglangReq("g", row=False)],
        rows("a"),
    )
    assert [one[:1] for one in subject.step()] == ["a", "a"]
    assert subject.step() == ["g", "piece"]


def test_rows_are_no_part_of_the_radix_cache_and_of_no_decode() -> None:
    subject = scheduler()
    mine = rows("a")
    subject.running_batch.reqs, subject.waiting_queue = [SglangReq("s", row=False)], [*mine]
    subject.step()
    assert all(one.skip_radix_cache_insert and one.extra_key for one in mine)
    assert subject.step() == ["s"] and subject.running_batch.reqs[0].extra_key is None


def test_prompts_and_decodes_leave_room_for_rows() -> None:
    subject = scheduler(room=100, overlap=True)
    subject.waiting_queue = [SglangReq("s", row=False)]
    subject.step()
    assert subject.offsets[-1] == 100, "a prompt"
    subject.waiting_queue = rows("a")
    subject.step()
    assert subject.offsets[-1] == 0 and subject.evicted == [23], "rows take it"
    subject.step()
    assert subject.running_batch.new_tokens_required_next_decode() == 1 + 100 - 20, "they still hold what they took"
    subject.step()
    assert subject.running_batch.new_tokens_required_next_decode() == 1 + 100
