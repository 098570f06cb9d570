"""A journal that was lost, or is an old one: what workers heard to be committed is neither thrown away nor answered over."""

from typing import Any

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.status import report
from enginepool.protocol.messages import Idle, Ready
from enginepool.protocol.messages.weight_reports import InspectWeights, WeightsReport
from enginepool.protocol.messages.weights import Prepare, Restore, WeightsNeeded
from tests.core.machines import CAN, EPOCH, codes, failures, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool, of_type
from tests.core.test_weights import ready, refusal, to_transfer


def lost_journal() -> tuple[UpdatePool, Trainer, list[bytes]]:
    """The journal is empty. The first worker starts fresh; the second one heard that version 11 of run 1 is committed."""
    pool, trainer, links = ready(1)
    pool.do(ev.WorkerRegistered(0, b"old", "g", "old", 1, "host"))
    pool.tell(b"old", Idle(EPOCH))
    pool.submit(trainer.link, 50, work(rows=40))
    assert pool.batches, "until then nothing is known of it"
    pool.tell(b"old", Ready(CAN, 11, DIGEST, (1, 11)))
    return pool, trainer, [*links, b"old"]


def test_workers_that_hold_more_than_the_journal_knows_are_neither_killed_nor_given_work() -> None:
    pool, trainer, _ = lost_journal()
    failure = failures(pool.sent)[50]
    assert failure.code == "needs_weights"
    assert "the journal is behind: old holds the committed weight version 11" in failure.message
    assert [(wanted.version, wanted.group) for wanted in of_type(pool.sent, WeightsNeeded)] == [(11, "g")]
    pool.batches.clear()
    assert codes(pool.submit(trainer.link, 51, work())) == ["needs_weights"]
    pool.live(60.0)
    group = pool.machine.core.groups["g"]
    assert [line for line in pool.logged if "behind" in line] == [failure.message], "said once"
    assert pool.kinds[pool.logged.index(failure.message)] == "external", "what external workers cause has a budget of its own"
    assert len(group.workers) == 2 and not pool.killed and not pool.batches
    assert not of_type(pool.sent, Restore) and group.journal_behind
    # A worker that starts meanwhile waits with them.
    pool.worker("new")
    assert not pool.batches and not of_type(pool.sent, Restore)
    assert {worker.stage for worker in report(pool.machine.core, ev.StatusAsked(0, b"x", 1)).groups[0].workers} == {"restoring"}


def test_a_set_version_takes_up_what_the_workers_hold_although_the_journal_has_lost_it() -> None:
    pool, trainer, links = lost_journal()
    pool.batches.clear()
    refused = refusal(trainer.publish(10, transfer="set_version"), 1)
    assert (refused.code, refused.limit) == ("version_backwards", "11")
    asked = trainer.publish(11, transfer="set_version")
    assert [one.link for one in asked if isinstance(one.message, Prepare)] == [b"old"]
    pool.answer(asked)
    pool.answer(trainer.commit())
    assert (pool.journal[-1].weights.run, pool.journal[-1].weights.version) == (1, 11)
    assert pool.journal[-1].weights.digest == DIGEST
    sent = pool.written()
    assert [(one.link, one.message.version) for one in sent if isinstance(one.message, Restore)] == [(links[0], 11)]
    pool.submit(trainer.link, 52, work())
    assert [batch.link for batch in pool.batches] == [b"old"]


@pytest.mark.parametrize(("version", "changes", "run"), [(11, {}, 1), (12, {}, 1), (3, {"new_run": True}, 2)])
def test_a_publish_ends_the_wait_for_weights_that_the_journal_has_lost(version: int, changes: dict[str, Any], run: int) -> None:
    pool, trainer, links = lost_journal()
    pool.batches.clear()
    assert refusal(trainer.publish(10), 1).code == "version_backwards"
    pool.publish(trainer, version, links, **changes)
    assert (pool.journal[-1].weights.run, pool.journal[-1].weights.version) == (run, version)
    pool.written()
    pool.submit(trainer.link, 52, work())
    assert len(pool.batches) == 1 and not pool.machine.core.groups["g"].journal_behind


def test_other_weights_cannot_have_the_version_that_the_journal_has_lost() -> None:
    pool, trainer, links = lost_journal()
    to_transfer(pool, trainer, 11)
    trainer.sent("e" * 32)
    sent = pool.stage(links, "e" * 32)
    assert refusal(sent, trainer.ids).code == "version_backwards"


def test_an_update_of_older_weights_ends_when_a_worker_knows_a_later_commit() -> None:
    pool, trainer, _ = ready(1)
    to_transfer(pool, trainer, 1)
    pool.do(ev.WorkerRegistered(0, b"old", "g", "old", 1, "host"))
    pool.tell(b"old", Idle(EPOCH))
    sent = pool.tell(b"old", Ready(CAN, 11, DIGEST, (0, 11)))
    assert "the journal is behind" in refusal(sent, 1).message
    assert not pool.killed


def test_the_version_after_the_one_that_is_said_to_be_committed_is_taken() -> None:
    """So does `publish` without a version."""
    pool, trainer, _ = lost_journal()
    [said] = of_type(pool.do(ev.WeightsAsked(0, trainer.link, InspectWeights(60, "g"))), WeightsReport)
    assert (said.version, said.digest) == (11, "")
    assert [group.version for group in report(pool.machine.core, ev.StatusAsked(0, b"x", 1)).groups] == [11]
    assert of_type(trainer.publish(said.version + 1), Prepare)


def test_weights_that_were_loaded_and_never_committed_are_still_replaced() -> None:
    """The coordinator ended between the hand-over and the journal."""
    pool, trainer, links = ready(1)
    pool.publish(trainer, 1, links)
    pool.written()
    pool.do(ev.WorkerRegistered(0, b"new", "g", "new", 1, "host"))
    pool.tell(b"new", Idle(EPOCH))
    sent = pool.tell(b"new", Ready(CAN, 2, "e" * 32, (0, 1)))
    assert [restore.version for restore in of_type(sent, Restore)] == [1]


def test_a_version_of_an_earlier_run_is_not_above_the_committed_one() -> None:
    pool, trainer, links = ready(1)
    pool.publish(trainer, 1, links, new_run=True)
    pool.written()
    pool.do(ev.WorkerRegistered(0, b"new", "g", "new", 1, "host"))
    pool.tell(b"new", Idle(EPOCH))
    sent = pool.tell(b"new", Ready(CAN, 11, "e" * 32, (0, 11)))
    assert [(restore.run, restore.version) for restore in of_type(sent, Restore)] == [(1, 1)]
