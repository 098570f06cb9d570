"""Requests to generate in the coordinator: slots, tokens, streams, credit, and sequences that are interrupted."""

from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.fleet.checks import impossible
from enginepool.coordinator.requests.fitting import refusal as refusal_of
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    MAX_CREDIT,
    MAX_NEW_TOKENS,
    Exiting,
    FrameSpec,
    GenerationProgress,
    SequenceEnd,
    StartGeneration,
    Step,
    Tokens,
)
from tests.core.generations import CAN, GeneratingPool, generate, outputs, streamed
from tests.core.machines import EPOCH, config, failures

ADAPTED = msgspec.structs.replace(CAN, adapters=("a", "b"))


def started(pool: GeneratingPool) -> list[StartGeneration]:
    return [one.message for one in pool.tasks() if isinstance(one.message, StartGeneration)]


# --- what it refuses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", 0), ("top_k", -2),
        ("min_p", 2.0), ("frequency_penalty", 2.5), ("presence_penalty", -3.0), ("repetition_penalty", 0.0),
        ("max_new_tokens", 0), ("max_new_tokens", MAX_NEW_TOKENS + 1), ("min_new_tokens", -1), ("min_new_tokens", 9),
        ("stop", [""]),
    ],
)  # fmt: skip
def test_a_sampling_parameter_outside_its_range_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(WireError) as refused:
        generate(**{field: value})
    assert (refused.value.code, refused.value.field) == ("bad_request", f"sampling.{field}")
    assert refused.value.message.startswith(f"sampling.{field}: ")


def test_two_grammars_a_wrong_bias_a_wrong_stop_id_and_too_much_text_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": "a", "ebnf": "b"}, "sampling.ebnf"),
        ({"logit_bias": {"x": 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "sampling.logit_bias"),
        ({"stop_token_ids": [3, -1]}, "sampling.stop_token_ids[1]"),
        ({"stop": ["a" * 1024] * 60, "regex": "b" * 5000}, "sampling.stop"),
    ]
    for sampling, field in cases:
        with pytest.raises(WireError) as refused:
            generate(**sampling)
        assert (refused.value.code, refused.value.field) == ("bad_request", field)


def test_a_grammar_may_end_before_a_least_number_of_tokens() -> None:
    with pytest.raises(WireError, match="min_new_tokens: 3 with ebnf, whose text may end before; 0") as refused:
        generate(ebnf="root ::= a", min_new_tokens=3)
    assert (refused.value.field, refused.value.limit) == ("sampling.min_new_tokens", "0")


def test_a_parameter_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises((TypeError, msgspec.ValidationError), match="temprature"):
        generate(temprature=1.0)


@pytest.mark.parametrize("credit", [0, -1, MAX_CREDIT + 1])
def test_credit_has_bounds(credit: int) -> None:
    with pytest.raises(WireError, match="credit"):
        generate(stream=True, credit=credit)


def test_what_it_brings_along_must_fit_the_request() -> None:
    for output, ended, field in (
        ([[1], [2]], [], "output_lengths"),
        ([[-5]], [], "output[0]"),
        ([[1] * 8], [], "output_lengths[0]"),
        ([[1] * 9], [SequenceEnd(0, "length")], "output_lengths[0]"),
        ([[1]], [SequenceEnd(1, "stop")], "ended[0]"),
        ([[1]], [SequenceEnd(0, "stop"), SequenceEnd(0, "stop")], "ended[1]"),
    ):
        with pytest.raises(WireError) as refused:
            generate(3, output=output, ended=ended)
        assert refused.value.field == field, refused.value


def test_what_depends_on_the_model_is_refused_with_field_and_limit() -> None:
    def refusal(work: Any, **can: Any) -> tuple[str, str]:
        wrong = refusal_of(work, msgspec.structs.replace(CAN, **can))
        assert isinstance(wrong, WireError), wrong
        assert wrong.message.startswith(f"{wrong.field}: "), wrong.message
        return wrong.field, wrong.limit

    assert refusal(generate(93)) == ("items[0]", "100")
    assert refusal(generate(3, 50, max_new_tokens=51)) == ("items[1]", "100")
    assert refusal(generate(stop_token_ids=[1000])) == ("sampling.stop_token_ids", "1000")
    assert refusal(generate(logit_bias={"1000": 1.0})) == ("sampling.logit_bias", "1000")
    assert refusal(generate(output=[[1000]])) == ("output", "1000")
    assert refusal(generate(regex="a"), features=()) == ("sampling.regex", "")
    assert refusal(generate(stop=["a"]), features=("grammar",)) == ("sampling.stop", "")
    assert refusal(generate(temperature_schedule=(1, 0, 5))) == ("sampling.temperature_schedule", "")
    thinks = generate(regex="a", require_reasoning=True)
    assert refusal(thinks, features=("grammar",)) == ("sampling.require_reasoning", "")
    processors = ("logit_processors",)
    assert refusal(generate(allowed_token_ids=[1000]), features=processors) == ("sampling.allowed_token_ids", "1000")
    everything = generate(disallowed_token_ids=[*range(4)])
    assert refusal(everything, features=processors, vocab=4) == ("sampling.disallowed_token_ids", "3")


# --- slots --------------------------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_go_to_one_worker_in_one_task() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, 4, n=3))
    assert [(task.n, task.at, task.frames[0].shape) for task in started(pool)] == [(3, 0, (3,)), (3, 0, (4,))]
    assert [np.frombuffer(one.frames[0], np.int32).tolist() for one in pool.tasks()] == [[0, 1, 2], [10, 11, 12, 13]]


def test_each_sample_keeps_its_own_seed_wherever_it_goes_on() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True, sampling_seed=7))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), (task, 1, 0, [5], ""))
    pool.worker("b", can=CAN)
    pool.do(ev.WorkerExited(0, "a", "killed"))
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    assert [(one.at, one.n, one.sampling.sampling_seed) for one in started(pool)] == [(0, 2, 7), (2, 1, 7), (1, 1, 8)]


def test_a_mask_and_a_schedule_stay_as_they_are_wherever_a_sequence_goes_on() -> None:
    pool, can = GeneratingPool(), msgspec.structs.replace(CAN, features=("logit_processors",))
    link = pool.worker("a", can=can)
    pool.submit(pool.client(), 1, generate(3, disallowed_token_ids=[5, 6], temperature_schedule=(1.0, 0.5, 8)))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [11, 12, 13], ""))
    pool.worker("b", can=can)
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    first, again = started(pool)
    assert (again.at, again.sampling) == (3, msgspec.structs.replace(first.sampling, max_new_tokens=5))


def test_an_adapter_that_the_workers_do_not_have_is_refused_before_the_queue_with_those_that_they_have() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.submit(client, 1, generate(adapter="d"))
    pool.worker("a", can=ADAPTED)  # what waited for the first worker is refused, too
    pool.submit(client, 2, generate(adapter="c"))
    for refused in failures(pool.sent)[1], failures(pool.sent)[2]:
        assert (refused.code, refused.field, refused.limit) == ("bad_request", "adapter", "a, b")
    assert failures(pool.sent)[2].message == "adapter: 'c'; the workers of this group have a, b"
    wrong = refusal_of(generate(adapter="a"), CAN)
    assert isinstance(wrong, WireError) and wrong.message == "adapter: 'a'; the workers of this group have no adapters"


def test_a_sequence_keeps_its_adapter_wherever_it_goes_on() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=ADAPTED)
    pool.submit(client, 1, generate(3, n=2, adapter="b"))
    pool.submit(client, 2, generate(3))
    assert [one.adapter for one in started(pool)] == ["b", ""]
    pool.step(link, (pool.tasks()[0], 0, 0, [1, 2], ""))
    pool.worker("b", can=ADAPTED)
    pool.do(ev.WorkerExited(0, "a", "killed"))
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    assert [(one.adapter, one.at) for one in started(pool)[2:]] == [("b", 2), ("b", 0), ("", 0)]


def test_the_same_prompt_for_another_adapter_is_another_request() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker("a", can=ADAPTED)
    pool.submit(client, 1, generate(adapter="a"))
    pool.submit(client, 1, generate(adapter="b"))
    assert failures(pool.sent)[1].code == "id_reused"


def test_a_worker_with_other_adapters_than_the_first_one_is_refused() -> None:
    pool = GeneratingPool()
    pool.worker("a", can=ADAPTED)
    pool.worker("b", can=msgspec.structs.replace(ADAPTED, adapters=("a",)))
    assert list(pool.machine.core.groups["g"].workers) == ["a"]
    for names in (("",), ("a" * 129,), tuple(map(str, range(65)))):
        assert impossible(msgspec.structs.replace(ADAPTED, adapters=names))


def test_a_worker_is_given_no_more_than_it_runs_at_once_and_the_rest_waits_by_priority() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(*[3] * 8), priority=5)
    pool.submit(client, 2, generate(5))
    pool.submit(client, 3, generate(7), priority=5)
    tasks = pool.tasks()
    assert len(tasks) == 8
    pool.step(link, (tasks[0], 0, 0, [1], "stop"))
    assert [one.frames[0].shape for one in started(pool)[8:]] == [(7,)]
    pool.step(link, (tasks[1], 0, 0, [1], "stop"))
    assert [one.frames[0].shape for one in started(pool)[9:]] == [(5,)]


def test_room_for_tokens_bounds_what_runs_too() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker(can=CAN)
    pool.submit(client, 1, generate(20, 20, 20, max_new_tokens=60))
    assert len(started(pool)) == 2
    pool.submit(client, 2, generate(3, max_new_tokens=8))
    assert len(started(pool)) == 2, "a smaller one overtook"


def test_sequences_go_to_the_worker_with_the_least() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker("a", can=CAN)
    pool.worker("b", can=CAN)
    pool.submit(client, 1, generate(3, 3, 3, 3))
    assert sorted(one.link for one in pool.tasks()) == [b"a", b"a", b"b", b"b"]


# --- answers ------------------------------------------------------------------------------------------------------------


def test_the_answer_has_the_tokens_of_each_sequence_in_order_with_logprobs_and_spans() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, 4, n=2, logprobs=True))
    one, two = pool.tasks()
    pool.step(link, (two, 1, 0, [7], ""), (one, 0, 0, [1, 2], ""), logprobs=True)
    pool.step(link, (one, 1, 0, [5], "stop"), (one, 0, 2, [3], "length"), (two, 0, 0, [6], "stop"), logprobs=True)
    sent = pool.step(link, (two, 1, 1, [8], "stop"), logprobs=True)
    message, rows = outputs(sent)[1]
    assert rows == [[1, 2, 3], [5], [6], [7, 8]]
    assert [end.reason for end in message.ended] == ["length", "stop", "stop", "stop"]
    assert [end.sequence for end in message.ended] == [0, 1, 2, 3]
    assert message.spans == [[(0, 3)], [(0, 1)], [(0, 1)], [(0, 2)]]
    assert message.usage == (type(message.usage))(4, 7, 7)
    answer = next(s for s in sent if s.message is message)
    assert np.frombuffer(answer.frames[2], np.float32).tolist() == [-1, -2, -3, -5, -6, -7, -8]


def test_an_error_of_the_engine_answers_the_request_and_stops_its_other_sequences() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, 4))
    one, _ = pool.tasks()
    pool.step(link, (one, 0, 0, [], "error"))
    assert failures(pool.sent)[1].code == "engine_error"
    assert isinstance(one.message, StartGeneration)
    first = one.message.task[1]
    assert pool.stopped() == [(link, [first, first + 1])]


@pytest.mark.parametrize(
    ("why", "message", "field"),
    [("regex: no", "sampling.regex: no", "sampling.regex"), ("too much", "too much", ""), ("model: no", "model: no", "")],
)
def test_what_an_engine_refuses_is_an_error_of_the_request(why: str, message: str, field: str) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    start = pool.tasks()[0].message
    assert isinstance(start, StartGeneration)
    task = start.task[1]
    tokens = [FrameSpec("tokens", "int32", (0,))]
    header = encode_header(GenerationProgress(EPOCH, 0, [Step(task, 0, 0, 0, "refused", why)], tokens))
    pool.do(worker_event(0, link, [header, b""]))
    failed = failures(pool.sent)[1]
    assert (failed.code, failed.message, failed.field) == ("bad_request", message, field) and pool.machine.core.worker_links


def test_a_worker_that_cannot_read_a_task_may_say_so_at_any_position() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, output=[[1, 2]]))
    pool.step(link, (pool.tasks()[0], 0, 0, [], "error"))
    assert failures(pool.sent)[1].code == "engine_error" and pool.machine.core.worker_links


@pytest.mark.parametrize("token", [CAN.vocab, -1])
def test_a_token_that_no_engine_has_reaches_no_other_engine(token: int) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    step = Step(pool.tasks()[0].message.task[1], 0, 0, 1)  # type: ignore[attr-defined]
    progress = GenerationProgress(EPOCH, 0, [step], [FrameSpec("tokens", "int32", (1,))])
    pool.do(worker_event(0.0, link, [encode_header(progress), np.array([token], np.int32).tobytes()]))
    assert any("outside 0..999" in line for line in pool.logged)
    pool.worker("b", can=CAN)
    assert [task.at for task in started(pool)] == [0, 0]


def test_a_logprob_that_is_nan_is_an_error_of_the_engine_and_no_result() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True, logprobs=True))
    pool.submit(client, 2, generate(3, stream=True, logprobs=True))
    steps = [Step(task.task[1], 0, 0, 1) for task in started(pool)]
    specs = [FrameSpec("tokens", "int32", (2,)), FrameSpec("logprobs", "float32", (2,))]
    frames = [np.array([7, 8], np.int32).tobytes(), np.array([np.nan, -1.0], np.float32).tobytes()]
    sent = pool.do(worker_event(0.0, link, [encode_header(GenerationProgress(EPOCH, 0, steps, specs)), *frames]))
    error = failures(sent)[1]
    assert (error.code, error.message) == ("engine_error", "the logprob of a token of sequence 0 is NaN")
    assert streamed(sent) == [(2, 0, 0, 0, [8])] and pool.machine.core.worker_links


def test_what_a_broken_worker_generated_before_its_mistake_is_sent_and_answered() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    for key in (1, 2, 3):
        pool.submit(client, key, generate(3, stream=key != 2))
    one, two, three = pool.tasks()
    sent = pool.step(link, (one, 0, 0, [1], ""), (two, 0, 0, [2], "stop"), (three, 0, 7, [3], ""))
    assert not pool.machine.core.worker_links
    assert streamed(sent) == [(1, 0, 0, 0, [1])]
    assert outputs(sent)[2][1] == [[2]]


def test_cancel_and_the_deadline_stop_the_work_at_once() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    pool.do(ev.CancelAsked(0, client, 1))
    assert failures(pool.sent)[1].code == "cancelled" and len(pool.stopped()) == 1
    pool.submit(client, 2, generate(3), timeout=1.0)
    pool.wait(1.5)
    assert failures(pool.sent)[2].code == "deadline_exceeded" and len(pool.stopped()) == 2


@pytest.mark.parametrize(
    "step",
    [(0, 1, [1], ""), (1, 0, [1], ""), (0, 0, [1] * 9, ""), (-1, 0, [1], "")],
    ids=["gap", "sequence", "long", "negative"],
)
def test_a_worker_that_generates_what_none_can_is_lost(step: tuple[int, int, list[int], str]) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3))
    pool.step(link, (pool.tasks()[0], *step))
    assert not pool.machine.core.worker_links
    assert any("it generated" in line for line in pool.logged)


# --- streams ------------------------------------------------------------------------------------------------------------


def test_a_client_gets_one_message_for_what_one_message_of_a_worker_has_for_it() -> None:
    pool = GeneratingPool()
    first, second = pool.client(), pool.client()
    link = pool.worker(can=CAN)
    pool.submit(first, 1, generate(3, stream=True))
    pool.submit(first, 2, generate(3, stream=True))
    pool.submit(second, 1, generate(3, stream=True))
    a, b, c = pool.tasks()
    sent = pool.step(link, (a, 0, 0, [1], ""), (c, 0, 0, [3, 4], ""), (b, 0, 0, [2], "stop"))
    mine = [one for one in sent if isinstance(one.message, Tokens)]
    assert [one.link for one in mine] == [first, second]
    assert streamed(mine[:1]) == [(1, 0, 0, 0, [1]), (2, 0, 0, 0, [2])]
    assert streamed(mine[1:]) == [(1, 0, 0, 0, [3, 4])]
    message = mine[0].message
    assert isinstance(message, Tokens) and [(end.id, end.reason) for end in message.ended] == [(2, "stop")]


def test_a_slow_reader_is_sent_no_more_than_its_credit_and_then_what_waited() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True, credit=2))
    [task] = pool.tasks()
    assert streamed(pool.step(link, (task, 0, 0, [1, 2], ""))) == [(1, 0, 0, 0, [1, 2])]
    assert streamed(pool.step(link, (task, 0, 2, [3, 4, 5], ""))) == []
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 1))) == [(1, 0, 2, 0, [3])]
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 1))) == [], "the same credit counted twice"
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 99))) == [], "credit for what was not sent"
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 3))) == [(1, 0, 3, 0, [4, 5])]
    sent = pool.step(link, (task, 0, 5, [6], "stop"))
    assert streamed(sent) == [] and outputs(sent)[1][1] == [[1, 2, 3, 4, 5, 6]]


def test_a_stream_that_is_sent_again_on_a_new_link_goes_on_after_what_its_client_has() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2, 3], ""))
    pool.do(ev.LinkCut(0, client))
    pool.step(link, (task, 0, 3, [4], ""))
    again = pool.client(b"again", client=client.ljust(16, b"."), incarnation=1)
    assert streamed(pool.submit(again, 1, generate(3, stream=True, output=[[1]]))) == [(1, 0, 1, 0, [2, 3, 4])]
    assert len(pool.tasks()) == 1, "it runs once"


def test_a_stream_that_comes_with_other_tokens_than_its_run_here_takes_the_place_of_that_run() -> None:
    """Its answer was lost, and dropped here for its age or size. A message from before the answer had begun another run."""
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True))
    [other] = pool.tasks()
    pool.step(link, (other, 0, 0, [7], ""))
    pool.submit(client, 1, generate(3, stream=True, output=[[1, 2]]))
    task = pool.tasks()[-1]
    assert task is not other and np.frombuffer(task.frames[0], np.int32).tolist() == [0, 1, 2, 1, 2]
    assert not pool.step(link, (other, 0, 1, [8], "")), "it was stopped"
    sent = pool.step(link, (task, 0, 2, [3], "stop"))
    assert streamed(sent) == [(1, 0, 2, 0, [3])] and outputs(sent)[1][1] == [[3]]


@pytest.mark.parametrize("partial", [True, False])
def test_an_end_that_its_client_knows_ends_a_stream_that_runs_here(partial: bool) -> None:
    """A client calls a partial one interrupted on its own: it goes on where it runs."""
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, stream=True, partial=partial))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [7], ""))
    ended = [SequenceEnd(0, "interrupted")]
    sent = pool.submit(client, 1, generate(3, stream=True, partial=partial, output=[[7]], ended=ended))
    if partial:
        assert streamed(pool.step(link, (task, 0, 1, [8], ""))) == [(1, 0, 1, 0, [8])]
    else:
        message, rows = outputs(sent)[1]
        assert (rows, message.starts, message.ended[0].reason) == ([[]], [1], "interrupted")


def test_after_a_restart_of_the_coordinator_a_stream_goes_on_after_the_tokens_that_it_brings_along() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True, output=[[1, 2], [9]], ended=[SequenceEnd(1, "stop", 9)]))
    [task] = pool.tasks()
    assert isinstance(task.message, StartGeneration)
    assert (task.message.n, task.message.at, task.message.sampling.max_new_tokens) == (1, 2, 6)
    assert np.frombuffer(task.frames[0], np.int32).tolist() == [0, 1, 2, 1, 2]
    sent = pool.step(link, (task, 0, 2, [3], "stop"))
    assert streamed(sent) == [(1, 0, 2, 0, [3])]
    message, rows = outputs(sent)[1]
    assert rows == [[3], []] and message.starts == [2, 1]
    assert [(end.reason, end.matched) for end in message.ended] == [("stop", None), ("stop", 9)]


def test_a_request_whose_sequences_have_all_ended_is_answered_at_once() -> None:
    pool = GeneratingPool()
    client = pool.client()
    sent = pool.submit(client, 1, generate(3, stream=True, output=[[1]], ended=[SequenceEnd(0, "stop")]))
    assert outputs(sent)[1][1] == [[]] and not pool.tasks()


# --- interruptions ------------------------------------------------------------------------------------------------------


def test_a_sequence_whose_worker_is_lost_goes_on_elsewhere_after_its_last_token() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True, min_new_tokens=3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), (task, 1, 0, [5], ""))
    other = pool.worker("b", can=CAN)
    pool.do(ev.WorkerExited(0, "a", "killed"))
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    first, second = pool.tasks()[1:]
    assert first.link == second.link == other
    assert np.frombuffer(first.frames[0], np.int32).tolist() == [0, 1, 2, 1, 2]
    assert isinstance(first.message, StartGeneration)
    assert (first.message.at, first.message.n) == (2, 1)
    assert (first.message.sampling.max_new_tokens, first.message.sampling.min_new_tokens) == (6, 1)
    sent = pool.step(other, (first, 0, 2, [3], "stop"), (second, 0, 1, [6], "stop"), version=0)
    assert streamed(sent) == [(1, 0, 2, 0, [3]), (1, 1, 1, 0, [6])]
    assert outputs(sent)[1][1] == [[1, 2, 3], [5, 6]]


@pytest.mark.parametrize("seen", [False, True])
def test_what_cannot_be_continued_exactly_begins_again_if_nothing_was_seen_and_ends_otherwise(seen: bool) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, stream=seen, regex="[0-9]+"))
    pool.step(link, (pool.tasks()[0], 0, 0, [1, 2], ""))
    pool.worker("b", can=CAN)
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    if seen:
        message, rows = outputs(pool.sent)[1]
        assert rows == [[1, 2]] and message.ended == [SequenceEnd(0, "interrupted")]
    else:
        task = pool.tasks()[1].message
        assert isinstance(task, StartGeneration) and (task.at, task.frames[0].shape) == (0, (3,))


@pytest.mark.parametrize("times", [0, 1, 2])
def test_tokens_on_their_way_to_a_client_that_sends_its_stream_again_may_be_seen(times: int) -> None:
    """On the link on which they are; a lost link has none on its way. Else a sequence would be one of two runs."""
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    asked: dict[str, Any] = {"n": 2, "stream": True, "credit": 1, "regex": "[0-9]+"}
    pool.submit(client, 1, generate(3, **asked))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1], ""), (task, 1, 0, [5], ""))
    assert streamed(pool.do(ev.CreditGiven(0, client, 1, 1))) == [(1, 1, 0, 0, [5])]
    pool.step(link, (task, 0, 1, [2], ""))
    if not times:
        pool.do(ev.LinkCut(0, client))
        client = pool.client(b"again", client=client.ljust(16, b"."), incarnation=1)
    again = [ev.Submit(0, client, 1, generate(3, **asked, output=[[1], []]), 0, None) for _ in range(max(times, 1))]
    assert streamed(pool.do(*again)) == [(1, 0, 1, 0, [2])]
    pool.worker("b", can=CAN)
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    started = [(start.message.at, start.message.n) for start in pool.tasks()[1:]]  # type: ignore[union-attr]
    assert started == ([] if times else [(0, 1)])
    if times:
        message, rows = outputs(pool.sent)[1]
        assert rows == [[1, 2], [5]] and [end.reason for end in message.ended] == ["interrupted"] * 2


def test_a_partial_rollout_comes_back_as_far_as_it_is() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, n=2, partial=True))
    pool.step(link, (pool.tasks()[0], 0, 0, [1, 2], ""), (pool.tasks()[0], 1, 0, [4], "stop"))
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    message, rows = outputs(pool.sent)[1]
    assert rows == [[1, 2], [4]] and [end.reason for end in message.ended] == ["interrupted", "stop"]


def test_a_worker_that_returns_on_a_new_link_is_told_to_stop_and_goes_on_with_new_tasks() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1], ""))
    sent = pool.do(ev.WorkerRegistered(0, b"new", "g", "a", 1, "host", 7))
    assert isinstance(task.message, StartGeneration)
    assert pool.stopped() == [(b"new", [task.message.task[1]])]
    [again] = pool.tasks(sent)
    assert isinstance(again.message, StartGeneration) and again.message.at == 1
    assert pool.step(b"new", (task, 0, 1, [2], "")) == [], "tokens of the old task count no more"


def test_workers_that_end_as_planned_make_no_request_a_suspect() -> None:
    pool = GeneratingPool()
    client = pool.client()
    for name in ("a", "b", "c"):
        link = pool.worker(name, can=CAN)
        if name == "a":
            pool.submit(client, 1, generate(3))
            pool.submit(client, 2, generate(3))
        pool.step(link, (pool.tasks()[-2], 0, len(pool.tasks()) // 2 - 1, [1], ""))
        pool.do(ev.WorkerSaid(0, link, Exiting("drained: SIGTERM; 2 unfinished after 10 s")))
    pool.worker("d", can=CAN)
    assert [task.at for task in started(pool)] == [0, 0, 1, 0, 2, 0, 3, 0]
    assert pool.machine.core.groups["g"].trial is None


def test_hundreds_that_ran_at_a_lost_worker_run_together_again_and_alone_only_after_a_second_loss() -> None:
    pool = GeneratingPool()
    client = pool.client()
    for name in ("a", "b"):
        link = pool.worker(name, can=CAN)
        if name == "a":
            pool.submit(client, 1, generate(3))
            pool.submit(client, 2, generate(3))
        pool.do(ev.WorkerBroken(0, link, "it broke"))
    assert len(pool.tasks()) == 4
    pool.worker("c", can=CAN)
    assert len(pool.tasks()) == 5, "two suspects run at once"
    assert pool.machine.core.groups["g"].trial is not None


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "replaced"])
def test_a_stream_whose_client_has_a_new_link_is_sent_nothing_before_the_request_is_sent_again(cut: bool) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), (task, 1, 0, [5], ""))
    if cut:
        pool.do(ev.LinkCut(0, client, ""))
    pool.client(b"new", client=client.ljust(16, b"."), incarnation=1)
    assert streamed(pool.step(link, (task, 0, 2, [3], ""), (task, 1, 1, [], "stop"))) == []
    sent = pool.submit(b"new", 1, generate(3, n=2, stream=True, output=[[1], []]))
    assert streamed(sent) == [(1, 0, 1, 0, [2, 3]), (1, 1, 0, 0, [5])]
    assert [end.sequence for one in sent if isinstance(one.message, Tokens) for end in one.message.ended] == [1]
    assert streamed(pool.step(link, (task, 0, 3, [4], "")))


def test_a_stream_goes_on_whose_client_has_all_tokens_of_a_sequence_and_not_its_end() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=CAN)
    pool.submit(client, 1, generate(3, n=2, stream=True, max_new_tokens=2, stop=["x"]))
    [task] = pool.tasks()
    pool.step(link, (task, 0, 0, [1, 2], ""), (task, 1, 0, [5], ""))
    pool.client(b"new", client=client.ljust(16, b"."), incarnation=1)
    known = [SequenceEnd(0, "length"), SequenceEnd(1, "interrupted")]  # as a client says of what has a stop string
    again = generate(3, n=2, stream=True, max_new_tokens=2, stop=["x"], output=[[1, 2], [5]], ended=known)
    assert not pool.stopped() and not failures(pool.submit(b"new", 1, again))
    assert not pool.stopped(), "it runs"
    answered = outputs(pool.step(link, (task, 0, 2, [], "length"), (task, 1, 1, [6], "length")))
    assert answered[1][1] == [[1, 2], [5, 6]]


def test_what_waits_of_a_suspect_runs_alone_also_if_nothing_came_back_from_the_lost_worker() -> None:
    pool = GeneratingPool()
    pool.submit(pool.client(), 1, generate(3, 3, 3, partial=True))
    for name in ("a", "b"):
        link = pool.worker(name, can=msgspec.structs.replace(CAN, inflight_rows=1, batch_rows=1))
        pool.step(link, (pool.tasks()[-1], 0, 0, [1], ""))
        pool.do(ev.WorkerBroken(0, link, "it broke"))
    pool.worker("c", can=msgspec.structs.replace(CAN, inflight_rows=1, batch_rows=1))
    assert len(pool.tasks()) == 3
    assert pool.machine.core.groups["g"].trial is not None


def test_a_worker_that_generates_has_time_also_for_what_is_the_oldest_only_now() -> None:
    pool_config = config()
    timing = msgspec.structs.replace(pool_config.timing, forward_s=2.0)
    pool = GeneratingPool(msgspec.structs.replace(pool_config, timing=timing))
    client = pool.client()
    link = pool.worker(can=CAN)
    for number in (1, 2):
        pool.submit(client, number, generate(3))
    first, second = pool.tasks()
    for at in range(4):
        pool.wait(1.0)
        pool.step(link, (first, 0, at, [1], ""), (second, 0, at, [1], ""))
    pool.do(ev.CancelAsked(0, client, 1))
    pool.wait(1.0)
    assert pool.machine.core.worker_links, pool.logged
    pool.wait(1.5)
    assert not pool.machine.core.worker_links, "it generates no more"
