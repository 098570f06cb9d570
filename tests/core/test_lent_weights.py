"""Weights that lie in memory of their publisher: the transaction, the worker's half, and what the publisher says again."""

from typing import Any

import pytest

from enginepool.client.session.events import UpdateSent
from enginepool.coordinator.core import events as ev
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import Message
from enginepool.protocol.messages.weight_reports import Finding
from enginepool.protocol.messages.weights import (
    Commit,
    Committed,
    Join,
    LoadWeights,
    MemoryRegion,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    ReleaseWeights,
    Sent,
    Staged,
    VerifyWeights,
    WeightsLoaded,
)
from enginepool.workers.events import Disconnected, SendToCoordinator
from tests.core.machines import EPOCH, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool, of_type
from tests.core.test_client_updates import Publisher
from tests.core.test_weights import aborted, phases, ready, refusal
from tests.core.test_worker_updates import UPDATE, Worker, given, said

SPACES = [MemoryRegion("file", 768, path="/proc/1/fd/3", seal=b"0123456789abcdef")]


def offer(trainer: Trainer, version: int = 1, **changes: Any) -> list[Any]:
    return trainer.publish(version, transfer="ipc", address="", peer="", host="here", **changes)


def to_verify(pool: UpdatePool, trainer: Trainer, **changes: Any) -> list[Any]:
    """Up to what the members are asked when the publisher says where the bytes lie."""
    pool.answer(offer(trainer, **changes))
    return trainer.say(Sent(trainer.ids, DIGEST, 512, SPACES))


# --- the transaction ---------------------------------------------------------------------------------------------------


def test_the_straight_path_needs_no_process_group() -> None:
    pool, trainer, links = ready()
    prepares = offer(trainer, gpu="GPU")
    assert [(p.transfer, p.host, p.gpu) for p in of_type(prepares, Prepare)] == [("ipc", "here", "GPU")] * 2
    opened = pool.answer(prepares)
    assert phases(opened) == ["transfer"] and not of_type(opened, Join)
    asked = trainer.say(Sent(1, DIGEST, 512, SPACES))
    assert [(s.link, s.message) for s in asked] == [(link, VerifyWeights(pool.update.id, SPACES)) for link in links]
    assert phases(pool.stage(links)) == ["staged"]
    handed = trainer.commit()
    assert [s.link for s in handed if isinstance(s.message, LoadWeights)] == links
    pool.answer(handed)
    end = pool.written()
    assert of_type(end, Published)[0].record.transfer == "ipc"
    assert of_type(end, Committed)[0].digest == DIGEST


def test_an_offer_without_its_host_is_refused_at_the_door() -> None:
    _, trainer, _ = ready()
    with pytest.raises(WireError, match="host: handles needs the identity"):
        trainer.publish(1, transfer="ipc", address="")


def test_who_cannot_reach_the_memory_says_so_before_anything_is_laid_out() -> None:
    pool, trainer, links = ready()
    offer(trainer)
    sent = pool.tell(links[1], Prepared(pool.update.id, code="unsupported", message="another host"))
    assert "w1: another host" in aborted(pool, sent, "unsupported")


def test_bytes_that_are_announced_too_early_are_looked_at_when_all_have_agreed() -> None:
    pool, trainer, links = ready()
    prepares = offer(trainer)
    assert not of_type(trainer.say(Sent(1, DIGEST, 512, SPACES)), VerifyWeights)
    asked = pool.answer(prepares)
    assert [s.link for s in asked if isinstance(s.message, VerifyWeights)] == links


def test_a_member_on_a_new_link_is_asked_again_until_it_has_looked() -> None:
    pool, trainer, links = ready()
    to_verify(pool, trainer)
    pool.stage(links[:1])
    for name, asked in (("w0", []), ("w1", [VerifyWeights(pool.update.id, SPACES)])):
        again = pool.do(ev.WorkerRegistered(0, b"new " + name.encode(), "g", name, 1, "host", EPOCH))
        assert of_type(again, VerifyWeights) == asked


@pytest.mark.parametrize("digests", [(DIGEST, "e" * 32), ("e" * 32, "e" * 32)])
def test_a_publisher_is_not_believed(digests: tuple[str, str]) -> None:
    pool, trainer, links = ready()
    to_verify(pool, trainer)
    pool.stage(links[:1], digest=digests[0])
    assert "staged other bytes" in aborted(pool, pool.stage(links[1:], digest=digests[1]))


def test_what_is_no_number_is_refused() -> None:
    pool, trainer, links = ready()
    to_verify(pool, trainer)
    pool.stage(links[:1])
    sent = pool.stage(links[1:], findings=[Finding("w", "nan", 3)])
    assert refusal(sent, 1).field == "w"
    aborted(pool, sent, "weights_refused")


def test_memory_that_cannot_be_opened_aborts() -> None:
    pool, trainer, links = ready()
    to_verify(pool, trainer)
    failed = Staged(pool.update.id, code="update_aborted", message="no such file")
    assert "w0: no such file" in aborted(pool, pool.tell(links[0], failed))


@pytest.mark.parametrize("phase", ["transfer", "staged", "hold"])
def test_until_the_load_a_publisher_that_goes_takes_its_memory_along(phase: str) -> None:
    pool, trainer, links = ready()
    if phase == "hold":
        other = pool.client(b"another")
        for id_ in (50, 51):
            pool.submit(other, id_, work())
    to_verify(pool, trainer)
    if phase != "transfer":
        pool.stage(links)
        if phase == "hold":
            trainer.commit()
    assert pool.update.phase == phase
    pool.do(ev.ClientLeft(0, trainer.link))
    group = pool.machine.core.groups["g"]
    pool.wait(1.0)
    assert not pool.machine.core.updates and not group.on_hold
    assert "its publisher is gone" in group.history[-1].message
    assert not pool.killed


def test_after_the_load_it_may_go() -> None:
    pool, trainer, links = ready()
    to_verify(pool, trainer)
    pool.stage(links)
    handed = trainer.commit()
    pool.do(ev.ClientLeft(0, trainer.link))
    pool.answer(handed)
    pool.written()
    assert pool.machine.core.groups["g"].version == 1


def test_no_snapshot_is_named_since_no_stager_holds_the_bytes() -> None:
    pool, trainer, links = ready()
    pool.machine.ending.snapshots = {"memory": "/dev/shm/pool"}
    to_verify(pool, trainer)
    pool.stage(links)
    pool.answer(trainer.commit())
    pool.written()
    assert pool.machine.core.groups["g"].weights.snapshot == ""


# --- the worker's half -------------------------------------------------------------------------------------------------

PREPARE = Prepare(UPDATE, 1, "ipc", host="here")
EXAMINE = VerifyWeights(UPDATE, SPACES)


def test_a_worker_looks_once_and_answers_again() -> None:
    worker = Worker()
    worker.hear(PREPARE)
    worker.answer(Prepared(UPDATE))
    assert given(worker.hear(EXAMINE)) == [EXAMINE]
    assert worker.hear(EXAMINE) == []
    assert said(worker.answer(Staged(UPDATE, "d"))) == [Staged(UPDATE, "d")]
    assert worker.hear(EXAMINE) == [SendToCoordinator(Staged(UPDATE, "d"))]
    worker.do(Disconnected(0))
    assert Staged(UPDATE, "d") in worker.again()
    worker.hear(LoadWeights(UPDATE, 1))
    assert said(worker.answer(WeightsLoaded(UPDATE, 1, "d"))) == [WeightsLoaded(UPDATE, 1, "d")]


def test_a_worker_that_is_told_to_look_at_something_unknown_says_so() -> None:
    (answer,) = said(Worker().hear(EXAMINE))
    assert isinstance(answer, Staged) and answer.code == "update_aborted"


def test_the_scan_of_a_released_update_is_dropped() -> None:
    worker = Worker()
    worker.hear(PREPARE)
    worker.hear(EXAMINE)
    assert given(worker.hear(ReleaseWeights(UPDATE, "given up"))) == [ReleaseWeights(UPDATE, "given up")]
    assert worker.answer(Staged(UPDATE, "d")) == []


# --- the publisher's session -------------------------------------------------------------------------------------------


def test_where_the_bytes_lie_is_said_again_on_a_new_link() -> None:
    publisher = Publisher()
    publisher.connect()
    publisher.open(transfer="ipc")
    publisher.hear(Phase(1, "transfer", 2, 0))
    publisher(UpdateSent(publisher.now, 1, DIGEST, 1000, SPACES))
    assert publisher.sent() == [Sent(1, DIGEST, 1000, SPACES)]
    publisher.commit()
    publisher.now += 1.0
    publisher.refuse("hello_required")
    publisher.welcome()
    messages: list[Message] = publisher.sent()
    assert [type(message) for message in messages if isinstance(message, Publish | Sent | Commit)] == [Publish, Sent, Commit]
    assert Sent(1, DIGEST, 1000, SPACES) in messages
