"""Updates by restart: engines that take weights only at their start. All or nothing, and no answer of two versions."""

from typing import Any

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.protocol.messages import Batch, Exiting, Idle, Ready, Result
from enginepool.protocol.messages.weights import Committed, Prepare, Prepared, Published, ReleaseWeights
from tests.core.machines import CAN, EPOCH, failures, results, work
from tests.core.machines import Sent as Message_
from tests.core.publishers import DIGEST, FIRST, Trainer, UpdatePool, of_type

PATH = "/models/next"
NEW = GroupWeights(1, DIGEST, path=PATH, restart=True, publisher=FIRST)
START_S = 5.0


class RestartPool(UpdatePool):
    """A pool of slots whose engines take weights only at their start."""

    def __init__(self, workers: int = 2, mode: str = "rolling") -> None:
        super().__init__(workers=workers, restart_updates=mode)
        for _ in range(workers):
            self.up()
        self.trainer = Trainer(self)

    def up(self, version: int | None = None, digest: str = "") -> bytes:
        """The process that was started first of those that did not register dials in and is ready with what it started on."""
        start = self.started.pop(0)
        name = start.incarnation
        link = name.encode()
        held = start.weights or GroupWeights()
        self.do(ev.WorkerRegistered(0, link, "g", name, 1, "host"))
        self.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
        version = held.version if version is None else version
        self.do(ev.WorkerSaid(0, link, Ready(CAN, version, digest or held.digest)))
        return link

    def end(self) -> None:
        """Every process that was killed has ended, and the pool starts others."""
        while self.killed:
            self.do(ev.WorkerExited(0, self.killed.pop(0), "killed", False))
        self.live(START_S)

    def offer(self, **changes: Any) -> list[Message_]:
        """A checkpoint is published, and every member can be started on it."""
        sent = self.trainer.publish(1, transfer="checkpoint", path=PATH, **changes)
        out: list[Message_] = []
        for one in sent:
            if isinstance(one.message, Prepare):
                out += self.tell(one.link, Prepared(one.message.update, restart=True, digest=DIGEST))
        return out + self.trainer.commit()

    def score(self, id: int) -> list[Message_]:
        return self.submit(self.trainer.link, id, work())

    def answers(self) -> dict[int, Result]:
        return results(self.finish_all())


def versions(pool: RestartPool) -> list[int]:
    return sorted(worker.version for worker in pool.machine.core.groups["g"].workers.values())


def test_a_rolling_restart_serves_on_the_old_version_until_the_first_worker_is_verified() -> None:
    pool = RestartPool(2)
    pool.offer()
    assert len(pool.killed) == 1 and not pool.journal
    [first] = [one for one in pool.score(10) if isinstance(one.message, Batch)]
    pool.batches.remove(first)
    assert pool.finish(first) and len(pool.killed) == 1
    pool.end()
    assert [start.weights for start in pool.started] == [NEW]
    assert not pool.journal
    new = pool.up()
    assert pool.journal[-1].weights == NEW
    end = pool.written()
    (published,) = of_type(end, Published)
    assert (published.record.outcome, published.record.committed) == ("committed", 1)
    assert [one.link for one in end if isinstance(one.message, Committed)] == [new]
    [batch] = [one for one in pool.score(11) if isinstance(one.message, Batch)]
    assert batch.link == new
    assert results(pool.finish(batch, version=1))[11].version == 1
    pool.end()
    assert [start.weights for start in pool.started] == [NEW]
    pool.up()
    assert versions(pool) == [1, 1]


def test_half_of_the_workers_are_new_before_the_switch() -> None:
    pool = RestartPool(5)
    pool.offer()
    for _ in range(2):
        assert len(pool.killed) == 1 and not pool.journal
        pool.end()
        pool.up()
    assert pool.journal and not pool.killed
    pool.written()
    assert len(pool.killed) == 3


@pytest.mark.parametrize("mode", ["rolling", "at_once"])
def test_one_worker_alone_is_restarted_and_requests_wait(mode: str) -> None:
    pool = RestartPool(1, mode)
    pool.offer()
    pool.score(10)
    pool.end()
    assert not pool.batches
    pool.up()
    pool.written()
    assert pool.finish(pool.batches[0], version=1)


def test_at_once_holds_the_group_and_restarts_all() -> None:
    pool = RestartPool(3, "at_once")
    pool.offer()
    assert len(pool.killed) == 3
    pool.score(10)
    pool.end()
    pool.up()
    pool.up()
    assert not pool.batches and not pool.journal
    pool.up()
    assert len(pool.journal) == 1
    (published,) = of_type(pool.written(), Published)
    took = published.record.phases
    assert published.record.committed == 3
    assert took["hold"] == sum(took[part] for part in ("drain", "restart", "load", "journal")) > 0
    assert results(pool.finish(pool.batches[0], version=1))[10].version == 1


def test_at_once_commits_what_one_worker_verified() -> None:
    pool = RestartPool(2, "at_once")
    pool.offer()
    pool.end()
    pool.do(ev.WorkerExited(0, pool.started.pop(0).incarnation, "no room on this host", False))
    pool.up()
    (published,) = of_type(pool.written(), Published)
    assert published.record.committed == 1
    pool.live(START_S)
    assert [start.weights for start in pool.started] == [NEW]


@pytest.mark.parametrize("mode", ["rolling", "at_once"])
def test_a_worker_that_an_operator_restarts_while_it_starts_on_the_checkpoint_is_restarted_after_the_update(mode: str) -> None:
    pool = RestartPool(1, mode)
    pool.offer()
    pool.end()
    (start,) = pool.started
    pool.do(ev.RestartAsked(0, b"operator", 9, group="g", worker="g-0", incarnation=start.incarnation))
    assert not pool.killed and not failures(pool.sent)
    pool.up()
    (published,) = of_type(pool.written(), Published)
    assert published.record.committed == 1
    pool.live(START_S)
    assert pool.killed == [start.incarnation]
    pool.end()
    assert [start.weights for start in pool.started] == [NEW]
    pool.up()
    assert versions(pool) == [1]


def test_a_worker_that_an_operator_restarts_while_it_starts_on_the_checkpoint_may_fail() -> None:
    pool = RestartPool(1)
    pool.offer()
    pool.end()
    (start,) = pool.started
    pool.do(ev.RestartAsked(0, b"operator", 9, group="g", worker="g-0", incarnation=start.incarnation))
    pool.do(ev.WorkerExited(0, pool.started.pop(0).incarnation, "no such quantization", False))
    assert failures(pool.sent)[1].code == "update_aborted"
    pool.live(0.5)
    assert [start.weights for start in pool.started] == [None], "it starts at once, on what is committed"
    pool.up()
    pool.live(START_S)
    assert not pool.killed and versions(pool) == [0]


@pytest.mark.parametrize("mode", ["rolling", "at_once"])
@pytest.mark.parametrize("fault", ["exit", "permanent", "unusable", "digest", "silent"])
def test_a_worker_that_does_not_come_up_on_it_aborts_and_comes_back_on_the_old_weights(mode: str, fault: str) -> None:
    pool = RestartPool(1 if mode == "at_once" else 2, mode)
    pool.offer()
    pool.end()
    if fault == "digest":
        pool.up(digest="e" * 32)
    elif fault == "silent":
        pool.live(pool.machine.core.config.timing.starting_s + 1.0)
    else:
        name = pool.started.pop(0).incarnation
        if fault == "unusable":  # it says so itself before it ends
            pool.do(ev.WorkerRegistered(0, b"new", "g", name, 1, "host"))
            pool.do(ev.WorkerSaid(0, b"new", Exiting("no such quantization", failed=True, permanent=True)))
            assert pool.killed.pop() == name
        pool.do(ev.WorkerExited(0, name, "no such quantization", fault != "exit"))
    story = failures(pool.sent)[1]
    assert (story.code, "did not start on it" in story.message) == ("update_aborted", True)
    if fault == "digest":
        assert "it runs on version 1 with other weights than the checkpoint's" in story.message
    assert DIGEST not in story.message and "e" * 32 not in story.message
    assert not pool.journal
    pool.started.clear()
    pool.end()
    assert [start.weights for start in pool.started] == [None]
    pool.up()
    assert set(versions(pool)) == {0}
    pool.score(10)
    assert results(pool.finish(pool.batches[0]))[10].version == 0
    assert all(not slot.loss_times and slot.state == "up" for slot in pool.machine.core.groups["g"].slots)
    # What it said of that checkpoint says nothing of a later end.
    pool.do(ev.WorkerExited(0, name := pool.machine.core.groups["g"].slots[0].incarnation, "killed by SIGKILL"))
    pool.live(START_S)
    assert pool.machine.core.groups["g"].slots[0].incarnation not in ("", name)


def test_members_that_see_different_checkpoints_refuse_the_update_and_name_no_digest() -> None:
    pool = RestartPool(2)
    asked = [one for one in pool.trainer.publish(1, transfer="checkpoint", path=PATH) if isinstance(one.message, Prepare)]
    for one, digest in zip(asked, (DIGEST, "e" * 32), strict=True):
        assert isinstance(one.message, Prepare)
        pool.tell(one.link, Prepared(one.message.update, restart=True, digest=digest))
    pool.trainer.commit()
    refused = failures(pool.sent)[1]
    assert refused.code == "weights_refused"
    assert refused.message.endswith(f"see different files in {PATH}: copy the same checkpoint to each of their hosts")
    assert DIGEST not in refused.message and "e" * 32 not in refused.message


def test_a_later_worker_that_fails_does_not_keep_the_others_from_the_switch() -> None:
    pool = RestartPool(4)
    pool.offer()
    pool.end()
    pool.up()
    pool.end()
    pool.do(ev.WorkerExited(0, pool.started.pop(0).incarnation, "no room on this host", False))
    assert pool.journal
    (published,) = of_type(pool.written(), Published)
    assert published.record.committed == 1


def test_old_work_is_finished_before_its_worker_leaves() -> None:
    pool = RestartPool(1)
    pool.score(10)
    pool.offer(drain_ms=5000)
    assert not pool.killed
    assert results(pool.finish(pool.batches[0]))[10].version == 0
    assert len(pool.killed) == 1


def test_old_work_that_takes_too_long_or_is_not_waited_for_runs_again() -> None:
    for changes in ({"drain_ms": 1000}, {"in_flight": "abort"}):
        pool = RestartPool(1)
        pool.score(10)
        pool.offer(**changes)
        pool.live(1.5)
        assert len(pool.killed) == 1
        pool.batches.clear()
        pool.end()
        pool.up()
        pool.written()
        assert results(pool.finish(pool.batches[0], version=1))[10].version == 1


def test_an_aborted_restart_turns_back() -> None:
    pool = RestartPool(2)
    pool.offer()
    pool.end()
    from enginepool.protocol.messages.weights import AbortUpdate

    sent = pool.trainer.say(AbortUpdate(1, "as a test"))
    assert len(of_type(sent, ReleaseWeights)) == 1
    assert pool.killed == [pool.started.pop(0).incarnation]
    pool.end()
    assert [start.weights for start in pool.started] == [None]


def test_a_journal_that_cannot_be_written_turns_back() -> None:
    pool = RestartPool(2)
    pool.offer()
    pool.end()
    pool.up()
    assert not of_type(pool.written("disk full"), Published)
    assert len(pool.killed) == 1 and versions(pool) == [0]
    pool.end()
    assert [start.weights for start in pool.started] == [None]


def test_a_worker_that_comes_back_later_starts_on_the_committed_checkpoint() -> None:
    pool = RestartPool(1)
    pool.offer()
    pool.end()
    link = pool.up()
    pool.written()
    pool.do(ev.WorkerExited(0, link.decode(), "killed", False))
    pool.live(START_S)
    assert [start.weights for start in pool.started] == [NEW]
    # Of an earlier coordinator, on what was not committed.
    pool.up(version=0, digest="e" * 32)
    assert len(pool.killed) == 1
    pool.end()
    assert [start.weights for start in pool.started] == [NEW]


@pytest.mark.parametrize("other", [{"restart": True, "digest": "e" * 32}, {}])
def test_members_that_see_another_checkpoint_or_need_no_restart_abort_before_anything_is_ended(other: Any) -> None:
    pool = RestartPool(2)
    first, second = [
        one for one in pool.trainer.publish(1, transfer="checkpoint", path=PATH) if isinstance(one.message, Prepare)
    ]
    update = pool.update.id
    pool.tell(first.link, Prepared(update, restart=True, digest=DIGEST))
    pool.tell(second.link, Prepared(update, **other))
    assert 1 in failures(pool.sent) and not pool.killed
