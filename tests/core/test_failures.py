"""Which failures are the same one, and what becomes of a worker that fails in the same way before it was ever ready."""

import pytest

from enginepool.config import RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.fleet.failures import lacks_disk_space, signature
from enginepool.protocol.messages import Exiting, StatusReport
from tests.core.machines import Pool, codes, config, failures, results, work

SAME = [
    ("m: no config.json", "m: no config.json"),
    ("worker g-0.65a1f2c3b4d5e.3 ends: no such model", "worker g-0.65a1f2c3b4d5e.17 ends: no such model"),
    ("[pid 4711] no such model", "[pid 99] no such model"),
    ("process 12 died", "process 4711 died"),
    ("object at 0x7f1e9b4afba0 is gone", "object at 0x7fe19c333ba0 is gone"),
    ("2026-11-23 05:15:36,123 no such model", "2026-11-23 05:16:01,7 no such model"),
    ("[05:15:36 TP0] no such model", "[23:59:59 TP0] no such model"),
    ("tried to allocate 2.50 GiB, 1.03 GiB are free", "tried to allocate 2.50 GiB, 987.25 MiB are free"),
    ("no answer within 10.2 s", "no answer within 9 s"),
    ("cannot connect to 127.0.0.1:48213", "cannot connect to 127.0.0.1:40001"),
    ("HTTPSConnectionPool(host='hub', port=443): (Request ID: 8b7e1f7a-0b51-4a52-9a3e-0a4d3f7e9c11)",) * 2,
    ("(Request ID: 8b7e1f7a-0b51-4a52-9a3e-0a4d3f7e9c11) 404", "(Request ID: 11111111-0b51-4a52-9a3e-0a4d3f7e9c11) 404"),
    ("m: no such model", "exit code 70: worker[g-0]: g/g-0.65a1f2c3b4d5e.3 ends: m: no such model"),
    ("exit code 1: no module x", "no module x"),
    ("exit code 3: worker 471: loading", "exit code 3: worker 4711: loading"),
    ("cannot read tmpab12cd_x/f", "cannot read tmpzz990000/f"),
]
OTHER = [
    ("no such model", "no such file"),
    ("HTTP 404", "HTTP 503"),
    ("exit code 1", "exit code 3"),
    ("layer 3 is missing", "layer 4 is missing"),
    ("ended by SIGSEGV", "ended by SIGABRT"),
    ("", "no such model"),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_two_failures_that_differ_in_what_each_process_has_of_its_own_are_the_same(first: str, second: str) -> None:
    assert signature(first) == signature(second)


@pytest.mark.parametrize(("first", "second"), OTHER)
def test_two_failures_that_differ_otherwise_are_not(first: str, second: str) -> None:
    assert signature(first) != signature(second)


def test_a_signature_takes_no_longer_than_its_text_is_long() -> None:
    assert len(signature("0x" + "1" * 1_000_000)) < 10
    assert len(signature("-1." * 300_000)) < 1_000_000


FULL = "the worker of g ends: OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("reason", "full"),
    [
        (FULL, True),
        ("exit code 70: OSError: [Errno 122] Disk quota exceeded: '/srv/cache/x'", True),
        ('SafetensorError: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })', True),
        ("Error while creating shared memory segment /dev/shm/nccl-a, error: No space left on device (28)", False),
        ("RuntimeError: unable to write to file </torch_71_0>: No space left on device (28)", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
        ("", False),
    ],
)
def test_a_disk_without_room_is_told_from_other_failures(reason: str, full: bool) -> None:
    assert lacks_disk_space(reason) == full


@pytest.mark.parametrize("permanent", [False, True])
def test_a_disk_without_room_retires_no_worker_however_often(permanent: bool) -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=2, backoff_s=0.5, backoff_max_s=30.0)))
    first = pool.started[-1].incarnation
    for _ in range(6):
        pool.worker(first, ready=False)
        pool.do(ev.WorkerSaid(0, first.encode(), Exiting(FULL, failed=True, permanent=permanent)))
        pool.do(ev.WorkerExited(0, first, f"exit code 78: {FULL}", permanent=permanent, failed=True))
        assert [slot.state for slot in pool.machine.core.groups["g"].slots] == ["backoff"]
        ended = pool.now
        first = next_start(pool)
        assert pool.now - ended == pytest.approx(30.0, abs=0.5)
    pool.worker(first)
    pool.do(ev.WorkerExited(0, first, "ended by SIGKILL"))
    assert next_start(pool), "the ends before do not count for max_restarts"


def test_failures_around_one_for_want_of_room_are_not_in_a_row() -> None:
    pool = Pool(workers=1)
    for reason in ("no such model", FULL, "no such model", FULL):
        fail(pool, pool.started[-1].incarnation, reason)
        next_start(pool)
    fail(pool, pool.started[-1].incarnation, "no such model")
    fail(pool, next_start(pool), "no such model")
    assert "failed 2 times in the same way" in pool.machine.core.groups["g"].down


def fail(pool: Pool, incarnation: str, reason: str) -> None:
    """An external worker says why it ends, and ends."""
    link = incarnation.encode()
    pool.worker(incarnation, ready=False)
    pool.do(ev.WorkerSaid(0, link, Exiting(reason, failed=True)))
    pool.do(ev.WorkerExited(0, incarnation, f"ended by SIGKILL: {reason}"))


def next_start(pool: Pool) -> str:
    """The incarnation that starts after the present backoff."""
    count = len(pool.started)
    while len(pool.started) == count:
        assert pool.now < 1000.0, "nothing is started any more"
        pool.wait(0.25)
    return pool.started[-1].incarnation


def detail(pool: Pool, client: bytes) -> list[tuple[str, str]]:
    (sent,) = pool.do(ev.StatusAsked(0, client, 99))
    assert isinstance(sent.message, StatusReport)
    return [(worker.stage, worker.detail) for worker in sent.message.groups[0].workers]


def test_a_worker_that_fails_twice_in_the_same_way_before_it_was_ready_is_not_started_again() -> None:
    pool = Pool(workers=1)
    client = pool.client()
    pool.submit(client, 1, work())
    fail(pool, pool.started[-1].incarnation, "[pid 11] m: the hub cannot be reached")
    assert not codes(pool.sent)
    fail(pool, next_start(pool), "[pid 12] m: the hub cannot be reached")
    failure = failures(pool.sent)[1]
    said = "g-0 failed 2 times in the same way before it was ready: [pid 12] m: the hub cannot be reached"
    assert failure.code == "pool_down"
    assert failure.message == f"group 'g': no worker is left and none will be restarted: {said}"
    assert failures(pool.submit(client, 2, work()))[2].message == failure.message
    assert detail(pool, client) == [("retired", said.removeprefix("g-0 "))]
    pool.wait(300)
    assert len(pool.started) == 2


def test_a_process_that_ends_by_itself_twice_before_it_registers_is_not_started_again() -> None:
    pool = Pool(workers=1)
    pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "exit code 1: no module x", failed=True))
    pool.do(ev.WorkerExited(0, next_start(pool), "exit code 1: no module x", failed=True))
    assert "no module x" in pool.machine.core.groups["g"].down


def test_failures_that_differ_do_not_count_together() -> None:
    pool = Pool(workers=1)
    fail(pool, pool.started[-1].incarnation, "the hub cannot be reached")
    for reason in ("no space left", "the hub cannot be reached", "no space left"):
        fail(pool, next_start(pool), reason)
    incarnation = next_start(pool)
    assert not pool.machine.core.groups["g"].down
    fail(pool, incarnation, "no space left")
    assert pool.machine.core.groups["g"].down


def test_a_worker_that_was_ready_once_is_started_again_however_it_fails_after() -> None:
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=100)))
    incarnation = pool.started[-1].incarnation
    pool.worker(incarnation)
    pool.do(ev.WorkerExited(0, incarnation, "ended by SIGKILL"))
    for _ in range(5):
        fail(pool, next_start(pool), "the hub cannot be reached")
    assert next_start(pool) and not pool.machine.core.groups["g"].down


def test_ends_that_a_worker_says_nothing_of_are_no_failures_of_its_start() -> None:
    """Killed from outside, silent, or late: another start may well succeed."""
    pool = Pool(config(workers=1, restart=RestartConfig(max_restarts=100)))
    for _ in range(5):
        pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "ended by SIGKILL"))
        pool.worker(next_start(pool), ready=False)
        pool.wait(11.0)  # silence
        assert pool.reasons[-1].startswith("stopped by the pool, because it was silent for 1")
        pool.do(ev.WorkerExited(0, pool.started[-1].incarnation, "ended by SIGKILL"))
        next_start(pool)
    assert not pool.machine.core.groups["g"].down


def test_what_two_starts_of_one_slot_have_shown_holds_for_its_neighbors() -> None:
    """One of them waits for its next start, one loads: neither needs two failures of its own."""
    pool = Pool(workers=3)
    client = pool.client()
    pool.submit(client, 1, work())
    first, second, third = (started.incarnation for started in pool.started)
    fail(pool, first, "no such model")
    again = next_start(pool)
    fail(pool, second, "no such model")
    assert [stage for stage, _ in detail(pool, client)] == ["starting", "backoff", "starting"]
    fail(pool, again, "no such model")
    stages = [stage for stage, _ in detail(pool, client)]
    assert stages == ["retired", "retired", "starting"] and not codes(pool.sent)
    assert detail(pool, client)[1][1] == "failed in the same way as g-0 before it was ready: no such model"
    fail(pool, third, "no such model")
    assert failures(pool.sent)[1].code == "pool_down"
    assert len(pool.started) == 4


def test_a_neighbor_that_fails_otherwise_or_was_ready_is_started_again() -> None:
    pool = Pool(workers=3)
    first, second, third = (started.incarnation for started in pool.started)
    pool.worker(third)
    pool.submit(pool.client(), 1, work())
    fail(pool, first, "no such model")
    fail(pool, second, "no space left")
    pool.wait(2.0)
    again = [started.incarnation for started in pool.started[3:]]
    assert len(again) == 2
    fail(pool, again[0], "no such model")
    fail(pool, third, "no such model")
    fail(pool, again[1], "connection refused")
    slots = pool.machine.core.groups["g"].slots
    assert [slot.state for slot in slots] == ["retired", "backoff", "backoff"]
    assert not codes(pool.sent) and not results(pool.sent)
