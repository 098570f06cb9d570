"""What the specification says of each error code is what the machine does: whether it is kept, and what becomes of the id."""

from collections.abc import Callable

import pytest

from enginepool.config import Limits, RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.base import Work
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import ErrorReply, Idle
from tests.core.machines import EPOCH, Pool, Sent, config, failures, results, work

ID = 5
LINK = b"client"
#: it runs everywhere; it has an id that the model of `CAN` does not have
FINE, UNFIT = work(), work(labels=(5000,))

#: provokes a code under ID on LINK; returns what was sent
Provoke = Callable[[Pool], list[Sent]]


def asked(pool: Pool, content: Work = FINE) -> list[Sent]:
    return pool.submit(LINK, ID, content)


def busy(pool: Pool) -> list[Sent]:
    pool.submit(LINK, 1, FINE)
    return asked(pool)


def unknown_group(pool: Pool) -> list[Sent]:
    return asked(pool, work(group="poetry"))


def refused_at_once(pool: Pool) -> list[Sent]:
    pool.worker()
    return asked(pool, UNFIT)


def refused_by_the_first_worker(pool: Pool) -> list[Sent]:
    asked(pool, UNFIT)
    link = pool.worker(ready=False)
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    before = len(pool.sent)
    pool.worker()
    return pool.sent[before:]


def late(pool: Pool) -> list[Sent]:
    pool.submit(LINK, ID, FINE, timeout=1.0)
    return pool.wait(1.5)


def cancelled(pool: Pool) -> list[Sent]:
    asked(pool)
    return pool.do(ev.CancelAsked(0, LINK, ID))


def failed_in_the_engine(pool: Pool) -> list[Sent]:
    pool.worker()
    asked(pool)
    return pool.finish(pool.batches[0], error="it cannot")


def poisoned(pool: Pool) -> list[Sent]:
    asked(pool)
    out: list[Sent] = []
    for name in ("a", "b"):
        pool.worker(name)
        out = pool.do(ev.WorkerBroken(0, name.encode(), "it died"))
    return out


def down_meanwhile(pool: Pool) -> list[Sent]:
    asked(pool)
    return pool.do(ev.WorkerExited(0, pool.started[0].incarnation, "gone", permanent=True))


def down_before(pool: Pool) -> list[Sent]:
    pool.do(ev.WorkerExited(0, pool.started[0].incarnation, "gone", permanent=True))
    return asked(pool)


def draining(pool: Pool) -> list[Sent]:
    pool.submit(LINK, 1, FINE)
    pool.do(ev.DrainAsked(0, 10.0))
    return asked(pool)


def drained(pool: Pool) -> list[Sent]:
    asked(pool)
    pool.do(ev.DrainAsked(0, 1.0))
    return pool.wait(1.5)


CASES: list[tuple[str, bool, Provoke]] = [
    ("busy", False, busy),
    ("unknown_group", False, unknown_group),
    ("bad_request", False, refused_at_once),
    ("bad_request", True, refused_by_the_first_worker),
    ("deadline_exceeded", True, late),
    ("cancelled", True, cancelled),
    ("engine_error", True, failed_in_the_engine),
    ("poisoned", True, poisoned),
    ("pool_down", True, down_meanwhile),
    ("pool_down", False, down_before),
    ("shutting_down", False, draining),
    ("shutting_down", True, drained),
]


@pytest.mark.parametrize(("code", "kept", "provoke"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_an_error_is_kept_as_its_code_says(code: str, kept: bool, provoke: Provoke) -> None:
    places = 1 if code == "pool_down" else 0
    window = 1 if code == "busy" else 100
    pool = Pool(config(workers=places, limits=Limits(window_requests=window), restart=RestartConfig(max_attempts=1)))
    pool.client(LINK)
    failure = failures(provoke(pool))[ID]
    assert failure.code == code

    facts = CODES[code]
    assert facts.kept in ("accepted", "yes" if kept else "no")
    core = pool.machine.core
    client = core.links[LINK]
    assert ID not in client.live, "an error with an id is final, at least for this attempt"
    assert (core.answers.get(client, ID) is not None) == kept
    if kept:
        content = UNFIT if code == "bad_request" else FINE
        assert failures(asked(pool, content)) == {ID: failure}, "a resend is given the same again"
        pool.do(ev.Acked(0, LINK, [ID]))
        assert core.answers.get(client, ID) is None


def test_what_was_busy_is_sent_again_under_its_id() -> None:
    pool = Pool(config(limits=Limits(window_requests=1)))
    pool.client(LINK)
    assert CODES[failures(busy(pool))[ID].code].id == "free"
    pool.do(ev.CancelAsked(0, LINK, 1))
    pool.worker()
    asked(pool)
    assert list(results(pool.finish(pool.batches[0]))) == [ID]


def test_what_needed_a_hello_is_sent_again_under_its_id() -> None:
    pool = Pool(config())
    pool.worker()
    failure = failures(asked(pool))[ID]
    assert (failure.code, CODES[failure.code].final, CODES[failure.code].id) == ("hello_required", "no", "free")
    pool.client(LINK)
    asked(pool)
    assert list(results(pool.finish(pool.batches[0]))) == [ID]


def test_of_two_requests_under_one_id_the_second_is_refused_and_the_first_answered() -> None:
    pool = Pool(config())
    pool.client(LINK)
    pool.worker()
    asked(pool)
    failure = failures(asked(pool, work(2)))[ID]
    assert (failure.code, CODES[failure.code].final, CODES[failure.code].id) == ("id_reused", "second", "taken")
    assert list(results(pool.finish(pool.batches[0]))) == [ID]


@pytest.mark.parametrize("incarnation", [0, 4])
def test_a_hello_is_answered_with_its_incarnation(incarnation: int) -> None:
    pool = Pool(config())
    pool.do(ev.ClientHello(0, b"a", b"c" * 16, b"t" * 16, 5))
    answers = [
        pool.do(ev.ClientHello(0, b"b", b"c" * 16, b"t" * 16, incarnation)),
        pool.do(ev.ClientHello(0, b"d", b"c" * 16, b"x" * 16, incarnation)),
        pool.do(ev.ClientHello(0, b"e", b"d" * 16, b"t" * 16, incarnation)),
    ]
    assert [sent.message.incarnation for (sent,) in answers] == [incarnation] * 3  # type: ignore[attr-defined]
    (refused,) = pool.submit(b"nobody", 1, FINE)
    assert isinstance(refused.message, ErrorReply)
    assert refused.message.incarnation is None
