"""Workers that generate and run rows: each has room of its own, neither waits for the other, and deadlines hold for both."""

from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.protocol.capabilities import halved
from enginepool.protocol.messages import Capabilities, Exiting, StartGeneration, StatusReport
from tests.core.generations import GeneratingPool, generate, outputs
from tests.core.machines import config, failures, results, work

#: rows: batches of 40 tokens and 4 rows, two in flight; sequences: 2 at once, of 100 tokens in all, and at most 60 each
MIXED = Capabilities(
    "causal", 1000, 40, batch_tokens=40, batch_rows=4, inflight_tokens=80, inflight_rows=8,
    operations=("score", "logprobs", "generate"), sequences=2, sequence_tokens=100, sequence_context=60,
)  # fmt: skip


def mixed(*names: str, can: Capabilities = MIXED, **settings: object) -> tuple[GeneratingPool, bytes]:
    pool = GeneratingPool(config(**settings))  # type: ignore[arg-type]
    client = pool.client()
    for name in names or ("w",):
        pool.worker(name, can=can)
    return pool, client


def test_rows_run_while_all_slots_of_sequences_are_taken_and_others_wait() -> None:
    pool, client = mixed()
    for id_ in (1, 2, 3):
        pool.submit(client, id_, generate(3))
    assert len(pool.tasks()) == 2, "the third sequence waits"
    pool.submit(client, 4, work(4, 10))
    [batch] = pool.batches
    assert 4 in results(pool.finish(batch))


def test_sequences_begin_while_the_batches_of_rows_are_full_and_others_wait() -> None:
    pool, client = mixed()
    for id_ in (1, 2, 3):
        pool.submit(client, id_, work(4, 10))
    assert len(pool.batches) == 2, "the third batch waits: two are in flight"
    pool.submit(client, 4, generate(3))
    [task] = pool.tasks()
    assert 4 in outputs(pool.step(b"w", (task, 0, 0, [7], "stop")))
    assert len(results(pool.finish_all())) == 3


def test_a_request_of_lower_priority_is_not_behind_one_of_the_other_kind() -> None:
    pool, client = mixed()
    for id_ in (1, 2, 3):
        pool.submit(client, id_, generate(3), priority=9)
    pool.submit(client, 4, work(1), priority=-9)
    assert len(pool.batches) == 1
    for id_ in (5, 6):
        pool.submit(client, id_, work(4, 10), priority=9)
    pool.finish(pool.batches[0])
    pool.submit(client, 7, work(4, 10), priority=9)
    assert len(pool.batches) == 2, "one waits"
    [first, second] = pool.tasks()
    started = pool.tasks(pool.step(b"w", (first, 0, 0, [7], "stop"), (second, 0, 0, [8], "stop")))
    assert len(started) == 1


def test_rows_go_to_the_worker_with_room_for_rows_however_many_sequences_it_has() -> None:
    pool, client = mixed("a", "b")
    for id_ in (1, 2):
        pool.submit(client, id_, work(4, 10))
    busy = {one.link for one in pool.batches}
    assert busy == {b"a", b"b"}
    pool.finish(next(one for one in pool.batches if one.link == b"b"))
    pool.submit(client, 3, generate(40, max_new_tokens=10))
    pool.submit(client, 4, generate(30, max_new_tokens=10))
    for id_ in (5, 6, 7):
        pool.submit(client, id_, work(4, 10))
    assert sorted(one.link for one in pool.batches) == [b"a", b"a", b"b", b"b"]


def test_a_prompt_may_be_longer_than_a_row_and_a_row_no_longer_than_its_own_limit() -> None:
    pool, client = mixed()
    pool.submit(client, 1, generate(50))
    assert len(pool.tasks()) == 1
    assert failures(pool.submit(client, 2, generate(53)))[2].limit == "60"
    assert failures(pool.submit(client, 3, work(1, 41)))[3].limit == "40"


def test_a_more_urgent_sequence_takes_a_slot_while_the_rows_before_it_have_no_room() -> None:
    pool, client = mixed()
    for id_ in (1, 2):
        pool.submit(client, id_, generate(3))
    for id_ in (3, 4, 5):
        pool.submit(client, id_, work(4, 10), priority=9)
    pool.submit(client, 6, generate(3), priority=5)
    assert len(pool.stopped()) == 1 and pool.tasks()[-1].message.priority == 5  # type: ignore[union-attr]


def test_a_batch_of_rows_that_is_late_ends_its_worker_while_tokens_arrive() -> None:
    pool, client = mixed()
    pool.submit(client, 1, generate(3, max_new_tokens=50))
    pool.submit(client, 2, work(1))
    [task], at = pool.tasks(), 0
    for _ in range(40):
        if pool.killed:
            break
        pool.wait(4.0)
        if pool.machine.core.worker_links:
            pool.do(ev.WorkerHeard(0, b"w", None))
            pool.step(b"w", (task, 0, at, [7], ""))
            at += 1
    assert not pool.machine.core.worker_links
    assert any("a batch of 1 rows and 10 tokens was not done in time" in line for line in pool.logged)


def test_sequences_that_get_no_tokens_end_their_worker_while_rows_are_answered() -> None:
    pool, client = mixed()
    pool.submit(client, 1, generate(3))
    for id_ in range(2, 40):
        if not pool.machine.core.worker_links:
            break
        pool.submit(client, id_, work(1))
        pool.finish_all()
        pool.wait(4.0)
        if pool.machine.core.worker_links:
            pool.do(ev.WorkerHeard(0, b"w", None))
    assert not pool.machine.core.worker_links


def test_a_lost_worker_gives_back_rows_and_sequences() -> None:
    pool, client = mixed("a")
    pool.submit(client, 1, generate(3))
    pool.submit(client, 2, work(2, 10))
    [task] = pool.tasks()
    pool.step(b"a", (task, 0, 0, [7], ""))
    pool.batches.clear()
    pool.do(ev.WorkerSaid(0, b"a", Exiting("died", failed=True)))
    pool.worker("b", can=MIXED)
    assert 2 in results(pool.finish_all())
    [again] = [one for one in pool.tasks() if one.link == b"b"]
    assert outputs(pool.step(b"b", (again, 0, 1, [8], "stop")))[1][1] == [[7, 8]]


def test_a_suspect_of_rows_takes_a_worker_from_its_sequences() -> None:
    pool, client = mixed("a", "b")
    pool.submit(client, 1, work(1))
    lost = pool.batches.pop().link
    other = b"b" if lost == b"a" else b"a"
    pool.submit(client, 2, generate(3, n=2, max_new_tokens=50))
    pool.submit(client, 3, generate(3, n=2, max_new_tokens=50))
    pool.do(ev.WorkerSaid(0, lost, Exiting("died", failed=True)))
    [batch] = pool.batches
    assert batch.link == other and pool.stopped(), "its sequences wait meanwhile"
    started = pool.tasks(pool.finish(batch))
    assert len(started) >= 1 and all(one.link == other for one in started)


def test_sequences_that_would_have_their_worker_back_at_once_stop_for_a_suspect_once_for_an_event() -> None:
    """By age rows are before a sequence, and that is before another one; this one is before the rows, as its client has used
    less. So who is first depends on what runs: now it is the suspect's turn, now it is not."""
    pool, light = mixed("x", ageing_s=1.0)
    heavy = pool.client()
    pool.submit(light, 1, work(1))
    pool.do(ev.WorkerSaid(0, b"x", Exiting("died", failed=True)))
    pool.batches.clear()
    pool.submit(light, 2, generate(3))
    pool.now += 4.5
    pool.submit(heavy, 3, work(12, 10), priority=5)
    pool.now += 1.0
    pool.submit(light, 4, generate(3), priority=5)
    pool.worker("w", can=replace(MIXED, sequences=1))
    assert [len(pool.tasks()), len(pool.stopped()), len(pool.batches)] == [2, 1, 2]
    found = pool.finish_all()
    inside = pool.machine.core.worker_links[b"w"].batches
    while running := [one for one in pool.tasks() if isinstance(one.message, StartGeneration) and one.message.task in inside]:
        found += [*pool.step(b"w", (running[0], 0, 0, [7], "stop")), *pool.finish_all()]
    assert ({*results(found)}, {*outputs(found)}) == ({1, 3}, {2, 4})


def test_the_cost_model_learns_from_batches_that_ran_without_sequences() -> None:
    can = replace(MIXED, pace=1000)
    pool, client = mixed(can=can)
    worker = pool.machine.core.worker_links[b"w"]

    def run_batches(first: int) -> None:
        pool.submit(client, first, work(4, 10))
        for id_ in range(first + 1, first + 20):
            pool.submit(client, id_, work(4, 10))
            pool.now += 0.5
            pool.finish(pool.batches[0], run_s=0.9)
        pool.finish(pool.batches[0], run_s=0.9)

    pool.submit(client, 1, generate(3))
    assert worker.pace is not None
    before = repr(worker.pace)
    run_batches(10)
    assert repr(worker.pace) == before
    pool.step(b"w", (pool.tasks()[0], 0, 0, [7], "stop"))
    run_batches(50)
    assert repr(worker.pace) != before


def test_an_engine_out_of_memory_halves_both_kinds_of_budgets() -> None:
    can = halved(MIXED, 1)
    assert (can.inflight_tokens, can.inflight_rows, can.batch_tokens) == (40, 4, 20)
    assert (can.sequences, can.sequence_tokens, can.sequence_context) == (1, 60, 60)
    pool, client = mixed("a", "b")
    pool.submit(client, 1, generate(3))
    pool.submit(client, 2, work(1))
    first = pool.batches[0].link
    pool.batches.clear()
    pool.do(ev.WorkerSaid(0, first, Exiting("out of memory", failed=True, out_of_memory=True)))
    group = pool.machine.core.groups["g"]
    assert group.halvings == 1 and group.capabilities is not None and group.capabilities.sequences == 1


def test_capabilities_with_impossible_budgets_of_sequences_are_refused() -> None:
    for wrong in (
        replace(MIXED, sequences=0),
        replace(MIXED, sequence_tokens=0),
        replace(MIXED, sequence_context=101),
        replace(MIXED, operations=("score",)),
        replace(MIXED, operations=("generate",)),
        replace(MIXED, max_item=10),
    ):
        pool = GeneratingPool(config())
        pool.worker("w", can=wrong)
        assert not pool.machine.core.worker_links, wrong


def test_clients_of_both_operations_share_by_what_they_use() -> None:
    """A client that generated much waits behind one that did not, also with its rows."""
    can = replace(MIXED, inflight_rows=4, inflight_tokens=40)
    pool, heavy = mixed(can=can)
    light = pool.client()
    pool.submit(heavy, 1, generate(50, max_new_tokens=10))
    [task] = pool.tasks()
    pool.step(task.link, (task, 0, 0, [7] * 10, "length"))
    pool.submit(light, 2, work(4, 10))
    pool.submit(heavy, 3, work(4, 10))
    pool.submit(light, 4, work(4, 10))
    found = pool.finish(pool.batches[0])
    assert 2 in results(found)
    assert 4 in results(pool.finish(pool.batches[0])), "the light client's second batch is first"


def test_the_status_says_what_runs_and_how_long_a_prompt_may_be() -> None:
    pool, client = mixed()
    pool.submit(client, 1, generate(3))
    pool.submit(client, 2, work(1))
    [report] = [one.message for one in pool.do(ev.StatusAsked(0, client, 7)) if isinstance(one.message, StatusReport)]
    [group] = report.groups
    assert group.limits is not None and (group.limits.context, group.limits.sequence_context) == (40, 60)
    assert (group.workers[0].batches, group.workers[0].sequences) == (2, 1)
