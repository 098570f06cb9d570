"""Weight updates: every step of the transaction, what ends it, and what is never allowed to happen on the way."""

from typing import Any

import pytest

from enginepool.config import RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.fleet.fan_out import AGAIN_MS, OPEN, OPEN_EACH
from enginepool.protocol.basis import MAX_CHUNK, MAX_FINDINGS, MAX_HEADER_BYTES
from enginepool.protocol.frames import encode_header
from enginepool.protocol.layout import layered
from enginepool.protocol.manifest import worst
from enginepool.protocol.messages import Batch, ErrorReply, Idle, Ready, Stage
from enginepool.protocol.messages.weight_reports import HELD, Finding, Inspect, Inspected, InspectWeights, WeightsReport
from enginepool.protocol.messages.weights import (
    AbortUpdate,
    Committed,
    Join,
    Joined,
    LoadWeights,
    Phase,
    Prepare,
    Prepared,
    Published,
    ReleaseWeights,
    Restore,
    Restored,
    Sent,
    Staged,
    WeightsLoaded,
    WeightsNeeded,
)
from tests.core.invariants import check_machine
from tests.core.machines import CAN, EPOCH, codes, failures, results, text, texts, work
from tests.core.publishers import DIGEST, FIRST, Trainer, UpdatePool, of_type


def ready(workers: int = 2, **kwargs: Any) -> tuple[UpdatePool, Trainer, list[bytes]]:
    """A pool of external workers, and a trainer."""
    pool = UpdatePool(**kwargs)
    return pool, Trainer(pool), [pool.worker(f"w{i}") for i in range(workers)]


def refusal(sent: list[Any], id: int) -> ErrorReply:
    """The error that answers this publish."""
    return failures(sent)[id]


def phases(sent: list[Any]) -> list[str]:
    return [phase.phase for phase in of_type(sent, Phase)]


def to_transfer(pool: UpdatePool, trainer: Trainer, version: int = 1, **changes: Any) -> list[Any]:
    """Open a transaction, let all join; what followed the last answer."""
    return pool.answer(pool.answer(trainer.publish(version, **changes)))


def committed(pool: UpdatePool, trainer: Trainer, version: int, links: list[bytes], **changes: Any) -> list[Any]:
    """A whole staged update."""
    pool.publish(trainer, version, links, **changes)
    return pool.written()


# --- the straight path -------------------------------------------------------------------------------------------------


def test_the_straight_path_of_a_staged_update() -> None:
    pool, trainer, links = ready()
    prepares = trainer.publish(1)
    assert [s.link for s in prepares if isinstance(s.message, Prepare)] == links
    joins = pool.answer(prepares)
    (mine, *theirs) = of_type(joins, Join)
    assert (mine.id, mine.rank, mine.world, mine.rendezvous) == (1, 0, 3, theirs[0].rendezvous)
    assert [join.rank for join in theirs] == [1, 2]
    assert phases(pool.answer(joins)) == ["transfer"]
    assert trainer.sent() == []
    assert phases(pool.stage(links)) == ["staged"]
    handed = trainer.commit()
    assert [s.link for s in handed if isinstance(s.message, LoadWeights)] == links
    pool.wait(0.7)
    assert of_type(pool.answer(handed), Published) == []
    assert pool.journal[-1].weights == GroupWeights(1, DIGEST, staged=True, publisher=FIRST)
    pool.wait(0.4)
    end = pool.written()
    assert [s.link for s in end if isinstance(s.message, Committed)] == links
    (published,) = of_type(end, Published)
    assert (published.version, published.record.outcome, published.record.committed) == (1, "committed", 2)
    took = published.record.phases
    assert {"open", "join", "transfer", "staged", "hold", *HELD} <= took.keys()
    assert took["hold"] == sum(took[part] for part in HELD)
    assert took["load"] >= 700_000 > took["journal"] >= 400_000
    pool.submit(trainer.link, 50, work())
    assert results(pool.finish(pool.batches[0], version=1))[50].version == 1


def test_ranks_follow_the_members_and_a_worker_may_bring_several() -> None:
    pool, trainer, _ = ready(3)
    joins = of_type(pool.answer(trainer.publish(1), ranks=2), Join)
    assert [(join.rank, join.world) for join in joins] == [(0, 7), (1, 7), (3, 7), (5, 7)]


def test_a_process_group_is_kept_while_the_same_sides_are_in_it() -> None:
    pool, trainer, links = ready()
    committed(pool, trainer, 1, links)
    first = pool.machine.core.groups["g"].process_group
    committed(pool, trainer, 2, links)
    assert first is not None and pool.machine.core.groups["g"].process_group == first
    trainer.publish(3, peer="another side")
    joins = of_type(pool.answer([s for s in pool.sent[-3:] if isinstance(s.message, Prepare)]), Join)
    assert joins and all(join.rendezvous != first.name for join in joins)


def test_a_process_group_is_not_kept_for_a_member_whose_stager_is_another_one() -> None:
    pool, trainer, links = ready()
    committed(pool, trainer, 1, links)
    first = pool.machine.core.groups["g"].process_group
    prepares = [s for s in trainer.publish(2) if isinstance(s.message, Prepare)]
    joins = of_type(pool.answer(prepares[:1]) + pool.answer(prepares[1:], peer="another"), Join)
    assert first is not None and len(joins) == 3 and all(join.rendezvous != first.name for join in joins)


@pytest.mark.parametrize("transfer", ["checkpoint", "set_version"])
def test_an_update_without_bytes_needs_only_a_commit(transfer: str) -> None:
    pool, trainer, _ = ready()
    opened = pool.answer(trainer.publish(4, transfer=transfer, path="/models/4" if transfer == "checkpoint" else ""))
    assert phases(opened) == ["staged"]
    digest = DIGEST if transfer == "checkpoint" else ""
    for sent in trainer.commit():
        if isinstance(sent.message, LoadWeights):
            pool.tell(sent.link, WeightsLoaded(sent.message.update, 4, digest))
    assert pool.journal[-1].weights.path == ("/models/4" if transfer == "checkpoint" else "")
    assert of_type(pool.written(), Published)[0].version == 4
    assert pool.machine.core.groups["g"].weights.digest == digest


def test_a_direct_transfer_holds_before_it_transfers() -> None:
    pool, trainer, links = ready()
    assert phases(to_transfer(pool, trainer, transfer="direct")) == []
    handed = trainer.commit()
    assert phases(handed) == ["hold", "transfer"]
    assert [s.link for s in handed if isinstance(s.message, LoadWeights)] == links
    pool.answer(handed)
    assert not pool.journal, "the publisher has not said what it sent"
    trainer.sent()
    assert of_type(pool.written(), Published)[0].version == 1


def test_a_snapshot_is_named_where_stagers_hold_all_bytes() -> None:
    pool, trainer, links = ready()
    pool.machine.ending.snapshots = {"memory": "/dev/shm/pool"}
    committed(pool, trainer, 1, links)
    weights = pool.machine.core.groups["g"].weights
    assert weights.snapshot == f"/dev/shm/pool/g-{DIGEST}"
    part = committed(pool, trainer, 2, links, partial=True)
    assert {message.digest for message in of_type(part, Committed)} == {layered(DIGEST, DIGEST)}
    assert pool.machine.core.groups["g"].weights.snapshot == ""


def test_a_snapshot_is_named_with_its_run_where_versions_began_again() -> None:
    pool, trainer, links = ready()
    pool.machine.ending.snapshots = {"memory": "/dev/shm/pool"}
    committed(pool, trainer, 7, links)
    committed(pool, trainer, 1, links, new_run=True)
    assert pool.machine.core.groups["g"].weights.snapshot == f"/dev/shm/pool/g+1-{DIGEST}"


# --- who may publish ---------------------------------------------------------------------------------------------------


def test_one_publisher_at_a_time_and_the_second_hears_of_the_first() -> None:
    pool, trainer, _ = ready()
    trainer.publish(1)
    other = Trainer(pool, b"other")
    failure = refusal(other.publish(2), 1)
    assert (failure.code, failure.limit) == ("publishing", trainer.link.ljust(16, b".").hex()[:8])


def test_versions_only_grow_unless_a_new_run_begins() -> None:
    pool, trainer, links = ready()
    committed(pool, trainer, 5, links)
    for version in (5, 4):
        failure = refusal(trainer.publish(version), trainer.ids)
        assert (failure.code, failure.field, failure.limit) == ("version_backwards", "version", "5")
        assert "expected 6 or higher, or a new run, since 5 is committed; got " in failure.message
    committed(pool, trainer, 1, links, new_run=True)
    weights = pool.machine.core.groups["g"].weights
    assert (weights.version, weights.run) == (1, 1)


def test_a_publish_that_comes_again_is_attached_and_its_answer_is_kept() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    again = trainer.publish(1, id=1)
    assert phases(again) == ["transfer"]
    assert not of_type(again, Prepare)
    assert [join.id for join in of_type(again, Join)] == [1]
    assert refusal(trainer.publish(2, id=1), 1).code == "id_reused"
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    pool.written()
    assert of_type(trainer.publish(1, id=1), Published)
    assert of_type(trainer.say(Sent(1, DIGEST, 1)), Published), "a question after the end is answered with the end"


def test_the_id_of_an_open_transaction_is_used_for_nothing_else() -> None:
    pool, trainer, _ = ready()
    trainer.publish(1)
    assert codes(pool.submit(trainer.link, trainer.ids, work())) == ["id_reused"]
    trainer.say(AbortUpdate(trainer.ids))
    assert codes(pool.submit(trainer.link, trainer.ids, work())) == ["id_reused"], "its answer is kept"
    assert len(pool.machine.core.answers) == 1


def test_the_id_of_a_live_request_names_no_transaction() -> None:
    pool, trainer, _ = ready()
    pool.submit(trainer.link, 1, work())
    assert codes(trainer.publish(1, id=1)) == ["id_reused"]
    assert not pool.machine.core.updates


def test_a_client_hears_only_of_its_own_transaction() -> None:
    pool, trainer, _ = ready()
    assert refusal(trainer.renew(), 0).code == "update_aborted"
    assert codes(pool.do(ev.PublisherSaid(0, b"stranger", AbortUpdate(1)))) == ["hello_required"]


def test_without_a_ready_worker_there_is_nothing_to_update() -> None:
    pool = UpdatePool()
    trainer = Trainer(pool)
    pool.worker("w", ready=False)
    assert refusal(trainer.publish(1), 1).code == "update_aborted"


# --- before the hand-over: abort ---------------------------------------------------------------------------------------


def aborted(pool: UpdatePool, sent: list[Any], code: str = "update_aborted") -> str:
    """The transaction ended with that error; every member that lives was told, and serves on."""
    failure = refusal(sent, 1)
    assert failure.code == code
    group = pool.machine.core.groups["g"]
    assert not pool.machine.core.updates and not group.on_hold
    assert [s.link for s in sent if isinstance(s.message, ReleaseWeights)] == [w.link for w in group.workers.values()]
    assert all(worker.able for worker in group.workers.values())
    assert group.history[-1].outcome == code
    return failure.message


@pytest.mark.parametrize("code", ["weights_refused", "unsupported", "bad_request"])
def test_a_member_that_cannot_says_why(code: str) -> None:
    pool, trainer, links = ready()
    trainer.publish(1)
    sent = pool.tell(links[1], Prepared(pool.update.id, code=code, message="unknown names: x", field="x"))
    assert refusal(sent, 1).field == "x"
    assert "w1: unknown names: x" in aborted(pool, sent, code)


def test_what_a_worker_says_of_an_update_of_which_it_is_no_member_is_nothing() -> None:
    pool, trainer, links = ready()
    joins = pool.answer(trainer.publish(1))
    late = pool.worker("late")
    assert not pool.tell(late, Joined(pool.update.id, code="engine_error", message="no route"))
    pool.answer(joins)
    assert pool.update.phase == "transfer"
    assert not pool.tell(late, Staged(pool.update.id, "e" * 32))
    trainer.sent()
    assert phases(pool.stage(links)) == ["staged"]


def test_bytes_flow_while_one_member_after_the_other_has_them_all() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer, lease_ms=1_000_000)
    stall = pool.machine.core.config.timing.update_stall_s
    pool.live(0.75 * stall)
    pool.stage(links[:1])
    pool.live(0.75 * stall)
    assert pool.update.phase == "transfer"


@pytest.mark.parametrize("phase", ["open", "join", "transfer", "staged", "hold"])
def test_a_lost_member_aborts_before_the_load(phase: str) -> None:
    pool, trainer, links = ready()
    if phase == "hold":
        pool.submit(trainer.link, 50, work())
        pool.submit(trainer.link, 51, work())
    prepares = trainer.publish(1)
    if phase != "open":
        joins = pool.answer(prepares)
        if phase != "join":
            pool.answer(joins)
            if phase != "transfer":
                trainer.sent()
                pool.stage(links)
                if phase == "hold":
                    trainer.commit()
    assert pool.update.phase == phase
    assert "w1 was lost: dies" in aborted(pool, pool.do(ev.WorkerBroken(0, links[1], "dies")))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Joined((0, 0), code="engine_error", message="no route"), "w0: no route"),
        (Staged((0, 0), code="engine_error", message="connection reset"), "w0: connection reset"),
    ],
)
def test_a_process_group_that_fails_aborts(answer: Joined | Staged, reason: str) -> None:
    pool, trainer, links = ready()
    pool.answer(trainer.publish(1))
    answer.update = pool.update.id
    assert reason in aborted(pool, pool.tell(links[0], answer))


class Broken:
    """A process group of four that broke in the middle of the bytes, because the stager of w1 died."""

    def __init__(self) -> None:
        self.pool, self.trainer, self.links = ready(4)
        to_transfer(self.pool, self.trainer)

    def member(self, place: int) -> list[Any]:
        """Another one than w1 has noticed."""
        said = Staged(self.pool.update.id, code="update_aborted", message="connection reset", broken=True)
        return self.pool.tell(self.links[place], said)

    def publisher(self) -> list[Any]:
        return self.trainer.say(AbortUpdate(1, "connection closed", broken=True))

    def culprit(self) -> list[Any]:
        said = Staged(self.pool.update.id, code="update_aborted", message="the stager ended")
        return self.pool.tell(self.links[1], said)


def test_who_broke_a_process_group_is_waited_for() -> None:
    broken = Broken()
    assert broken.publisher() == broken.member(0) == broken.member(2) == []
    assert "w1: the stager ended" in aborted(broken.pool, broken.culprit())


def test_a_process_group_that_broke_for_no_known_reason_is_given_up_after_a_second() -> None:
    broken = Broken()
    assert broken.member(0) == []
    assert not of_type(broken.pool.wait(0.6), ReleaseWeights) and broken.publisher() == []
    assert broken.trainer.renew(100) == []
    assert "w0: connection reset" in aborted(broken.pool, broken.pool.wait(0.6))


def test_a_process_group_of_which_all_say_that_it_broke_is_given_up_at_once() -> None:
    broken = Broken()
    broken.pool.stage(broken.links[3:])
    assert broken.member(0) == broken.member(1) == []
    assert "w0: connection reset" in aborted(broken.pool, broken.member(2))
    broken = Broken()
    broken.pool.stage(broken.links)
    assert "aborted by its publisher: connection closed" in aborted(broken.pool, broken.publisher())


def test_a_stager_that_dies_after_it_had_all_still_aborts() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    assert pool.update.phase == "staged"
    lost = Staged(pool.update.id, code="engine_error", message="the stager died")
    assert "the stager died" in aborted(pool, pool.tell(links[0], lost))


def test_other_bytes_than_were_sent_abort() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    pool.stage(links[:1])
    pool.stage(links[1:], digest="e" * 32)
    assert "w1 staged other bytes" in aborted(pool, trainer.sent())


@pytest.mark.parametrize("kind", ["nan", "infinity"])
def test_what_is_no_number_is_refused(kind: Any) -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links[:1])
    sent = pool.stage(links[1:], findings=[Finding("w", kind, 3)])
    assert refusal(sent, 1).field == "w"
    assert f"w: 3 elements are {kind}" in aborted(pool, sent, "weights_refused")


def test_zeros_are_refused_where_the_committed_weights_have_none() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    zeros = [Finding("w", "zero", 6), Finding("b", "zero", 3)]
    asked = pool.stage(links, findings=zeros)
    (question,) = of_type(asked, Inspect)
    assert question.what == "validate"
    sent = pool.tell(links[0], Inspected(question.task, findings=[Finding("b", "zero", 3)]))
    assert refusal(sent, 1).field == "w"
    aborted(pool, sent, "weights_refused")


def test_what_a_worker_finds_in_all_tensors_of_a_large_model_fits_its_message() -> None:
    names = [
        f"model.layers.{i // 768}.mlp.experts.{i % 256}.{('up', 'gate', 'down')[i % 3]}_proj.weight" for i in range(45_000)
    ]
    zeros, nans = ([Finding(name, kind, 7) for name in names] for kind in ("zero", "nan"))
    said = worst([*zeros, *nans])
    assert said == nans[:MAX_FINDINGS], "what is refused goes before what may be meant"
    pool, trainer, links = ready(3)
    to_transfer(pool, trainer)
    trainer.sent()
    sent = pool.stage(links, findings=said)
    assert refusal(sent, 1).code == "weights_refused"
    assert len(pool.machine.core.groups["g"].workers) == 3, "their answers could be read"
    asked = of_type(trainer.say(InspectWeights(7, what="validate")), Inspect)
    for link, question in zip(links, asked, strict=True):
        sent = pool.tell(link, Inspected(question.task, findings=said))
    (report,) = of_type(sent, WeightsReport)
    assert [len(worker.findings) for worker in report.workers] == [MAX_FINDINGS // 3] * 3
    assert len(encode_header(report)) < MAX_HEADER_BYTES


def test_zeros_are_not_refused_where_a_worker_could_not_name_all_that_there_were() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    (question,) = of_type(pool.stage(links, findings=[Finding("w", "zero", 6)]), Inspect)
    others = [Finding(f"e{i}", "zero", 1) for i in range(MAX_FINDINGS)]
    assert phases(pool.tell(links[0], Inspected(question.task, findings=others))) == ["staged"]


def test_only_a_worker_that_has_the_committed_weights_is_asked_what_is_zero_in_them() -> None:
    zeros = [Finding("w", "zero", 6)]
    for holds in (True, False):
        pool = UpdatePool()
        trainer, links = Trainer(pool), [pool.worker("other", version=7)]
        pool.tell(links[0], Restored(0, "needs_weights", "nowhere"))
        links += [pool.worker("w")] if holds else []
        to_transfer(pool, trainer)
        trainer.sent()
        sent = pool.stage(links, findings=zeros)
        assert [s.link for s in sent if isinstance(s.message, Inspect)] == links[1:]
        assert holds or phases(sent) == ["staged"]


def test_zeros_that_were_there_before_are_reported() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    zeros = [Finding("w", "zero", 6)]
    (question,) = of_type(pool.stage(links, findings=zeros), Inspect)
    assert phases(pool.tell(links[0], Inspected(question.task, findings=zeros))) == ["staged"]
    pool.answer(trainer.commit())
    assert "all zero: w" in of_type(pool.written(), Published)[0].record.message
    to_transfer(pool, trainer, 2)
    trainer.sent()
    assert phases(pool.stage(links, findings=zeros)) == ["staged"], "known from the last one"


def test_a_vector_of_zeros_is_nothing_to_ask_about() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    assert phases(pool.stage(links, findings=[Finding("b", "zero", 3)])) == ["staged"]


def test_a_publisher_that_is_silent_loses_its_lease() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer, lease_ms=2000)
    pool.wait(1.5)
    trainer.renew(100)
    pool.wait(1.5)
    assert pool.update.phase == "transfer"
    assert "silent for 2000 ms" in aborted(pool, pool.wait(1.0))


def test_a_lease_may_be_longer_than_the_silence_after_which_clients_are_forgotten() -> None:
    pool, trainer, links = ready(1)
    to_transfer(pool, trainer, lease_ms=45_000)
    trainer.say(Sent(trainer.ids, DIGEST, 512))
    pool.stage(links)
    for _ in range(44):
        pool.do(ev.WorkerHeard(0, links[0]))
        assert not failures(pool.wait(1.0))
    assert pool.update.phase == "staged"
    pool.do(ev.WorkerHeard(0, links[0]))
    assert "silent for 45000 ms" in refusal(pool.wait(1.5), 1).message
    pool.wait(29.0)
    assert refusal(trainer.renew(), 1).code == "update_aborted", "the answer is kept as long as any other"


def test_a_publisher_that_was_away_hears_what_became_of_its_transaction() -> None:
    pool, trainer, links = ready(1)
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    handed = trainer.commit()
    for _ in range(40):
        pool.do(ev.WorkerHeard(0, links[0]))
        pool.wait(1.0)
    pool.do(ev.ClientHello(0, b"back", b"trainer.........", b"t" * 16, 1))
    trainer.link = b"back"
    assert phases(trainer.publish(1, id=1, peer="trainer")) == ["load"]
    for _ in range(15):
        pool.do(ev.WorkerHeard(0, links[0]))
        pool.wait(1.0)
    pool.answer(handed)
    pool.written()
    pool.do(ev.WorkerHeard(0, links[0]))
    pool.wait(9.0)
    assert of_type(trainer.publish(1, id=1, peer="trainer"), Published)


def test_once_all_is_sent_and_wanted_the_publisher_may_go() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer, lease_ms=1000)
    trainer.commit()
    trainer.sent()
    pool.do(ev.ClientLeft(0, trainer.link))
    pool.wait(2.0)
    pool.answer(pool.stage(links))
    pool.written()
    assert pool.machine.core.groups["g"].version == 1


def test_a_publisher_that_leaves_before_that_aborts() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    pool.do(ev.ClientLeft(0, trainer.link))
    released = [s.link for s in pool.wait(0.5) if isinstance(s.message, ReleaseWeights)]
    assert released == links


def test_bytes_that_stop_flowing_abort_although_the_publisher_lives() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer)
    sent: list[Any] = []
    for _ in range(14):
        sent += trainer.renew(100)
        sent += pool.live(5.0)
        if of_type(sent, ReleaseWeights):
            break
    assert "transfer took too long" in refusal(sent, 1).message


@pytest.mark.parametrize(("answered", "who"), [(0, "w0, w1"), (1, "w1")])
def test_a_member_that_does_not_answer_aborts_in_time(answered: int, who: str) -> None:
    pool, trainer, _ = ready()
    prepares = [s for s in trainer.publish(1, lease_ms=100_000) if isinstance(s.message, Prepare)]
    pool.answer(prepares[:answered])
    sent = pool.live(31.0)
    assert f"open took too long, waiting for {who}" in refusal(sent, 1).message


def test_a_publisher_may_change_its_mind() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer)
    assert "the gather failed" in aborted(pool, trainer.say(AbortUpdate(1, "the gather failed")))


# --- the hold ----------------------------------------------------------------------------------------------------------


def to_hold(in_flight: str, drain_ms: int = 10_000) -> tuple[UpdatePool, Trainer, list[bytes], list[Any]]:
    """Two workers with a batch each, one more that waits, and a transaction that wants to go on."""
    pool, trainer, links = ready()
    for id_ in (50, 51):
        pool.submit(trainer.link, id_, work(8, 10))
    to_transfer(pool, trainer, in_flight=in_flight, drain_ms=drain_ms)
    trainer.sent()
    pool.stage(links)
    return pool, trainer, links, trainer.commit()


def test_a_drain_finishes_what_was_begun_and_starts_nothing_new() -> None:
    pool, trainer, _, sent = to_hold("drain")
    assert phases(sent) == ["hold"]
    pool.submit(trainer.link, 52, work())
    assert len(pool.batches) == 2
    assert 50 in results(pool.finish(pool.batches[0]))
    last = pool.finish(pool.batches[0])
    assert 51 in results(last)
    assert len(of_type(last, LoadWeights)) == 2
    assert not pool.batches
    pool.answer(last)
    pool.written()
    assert [batch.link for batch in pool.batches], "what waited runs on the new weights"


def test_a_drain_finishes_what_is_in_flight_and_not_the_rest_of_a_large_request() -> None:
    pool, trainer, links = ready(1)
    pool.submit(trainer.link, 50, work(400, 10))
    assert len(pool.batches) == 2
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    sent = trainer.commit()
    finished = 0
    while not of_type(sent, LoadWeights):
        finished += 1
        sent = pool.finish(pool.batches[0])
    assert finished == 2 and not pool.batches
    pool.answer(sent)
    pool.written()
    answers: dict[int, Any] = {}
    while pool.batches:
        answers |= results(pool.finish(pool.batches[0], version=1))
    assert answers[50].version == 1
    assert len(answers[50].forwards) == 50 + finished, "its rows of the old version ran again"


def test_rows_that_were_computed_count_when_the_version_stays() -> None:
    pool, trainer, links = ready(1)
    pool.submit(trainer.link, 50, work(40, 10))
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    trainer.commit()
    pool.finish(pool.batches[0])
    trainer.say(AbortUpdate(1, "the gather failed"))
    answers: dict[int, Any] = {}
    while pool.batches:
        answers |= results(pool.finish(pool.batches[0]))
    assert len(answers[50].forwards) == 5


def test_a_drain_does_not_wait_for_a_worker_that_is_kept_for_a_trial() -> None:
    pool, trainer, (dying,) = ready(1)
    for number in (50, 52):
        pool.submit(trainer.link, number, work(1, 100))
    kept = pool.worker("kept")
    pool.submit(trainer.link, 51, work(60, 10))
    pool.batches = [batch for batch in pool.batches if batch.link == kept]
    pool.do(ev.WorkerBroken(0, dying, "nonsense"))
    assert pool.machine.core.groups["g"].reserved_worker is pool.machine.core.worker_links[kept]
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage([kept])
    sent = trainer.commit()
    assert phases(sent) == ["hold"]
    while pool.batches:
        sent = pool.finish(pool.batches[0])
    assert of_type(sent, LoadWeights), "what could be finished is, without waiting for the end of the drain"
    pool.answer(sent)
    pool.written()
    assert pool.machine.core.groups["g"].trial is not None, "the suspects have their turn on the new weights"


def test_a_drain_neither_waits_for_a_suspect_nor_runs_it_with_others() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    late = pool.worker("late")
    pool.submit(trainer.link, 50, work(rows=56, length=1))
    trainer.commit()
    pool.do(ev.WorkerBroken(0, late, "died"))
    begun = [batch for batch in pool.batches if batch.link != late]
    assert len(begun) == 4
    sent = [one for batch in begun for one in pool.finish(batch)]
    assert not of_type(sent, Batch)
    assert len(of_type(sent, LoadWeights)) == 2


def test_a_drain_that_takes_too_long_puts_back_and_goes_on() -> None:
    pool, _, _, _ = to_hold("drain", drain_ms=500)
    old = list(pool.batches)
    sent = pool.wait(1.0)
    assert len(of_type(sent, LoadWeights)) == 2
    assert results(pool.finish(old[0])) == {}, "an answer that comes too late is of dropped weights"
    pool.batches.clear()
    pool.answer(sent)
    assert of_type(pool.written(), Published)[0].record.aborted_batches == 2
    assert {results(pool.finish(batch, version=1)).popitem()[1].version for batch in list(pool.batches)} == {1}


def test_an_abort_of_work_puts_back_at_once_and_suspects_none() -> None:
    pool, _, _, sent = to_hold("abort")
    assert phases(sent) == ["hold", "load"]
    group = pool.machine.core.groups["g"]
    assert group.waiting == 2 and not group.suspects.waiting()


def test_text_that_is_taken_back_is_tokenized_once_the_new_weights_are_there() -> None:
    pool, trainer, links = ready()
    pool.submit(trainer.link, 50, text("q", ["a"]))
    pool.publish(trainer, 1, links, in_flight="abort")
    assert len(texts(pool.sent)) == 1
    assert len(texts(pool.written())) == 1


def test_late_workers_give_no_answers_of_old_weights() -> None:
    """A worker that became ready during the transaction works on, until the commit."""
    pool, trainer, links = ready(1)
    to_transfer(pool, trainer)
    late = pool.worker("late")
    pool.submit(trainer.link, 50, work(8, 10))
    pool.submit(trainer.link, 51, work(8, 10))
    of_late = next(batch for batch in pool.batches if batch.link == late)
    pool.finish(next(batch for batch in pool.batches if batch.link != late))
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    end = pool.written()
    assert [s.link for s in end if isinstance(s.message, Restore)] == [late]
    assert results(pool.finish(of_late)) == {}


def test_nothing_is_given_to_an_engine_that_takes_weights() -> None:
    """A part that comes back from a late worker during the hand-over waits for its end, also when a member is idle."""
    pool, trainer, links = ready(1)
    to_transfer(pool, trainer)
    late = pool.worker("late")
    pool.submit(trainer.link, 50, work(60, 10))
    trainer.sent()
    pool.stage(links)
    asked = trainer.commit()
    while not of_type(asked, LoadWeights):
        asked = pool.finish(next(batch for batch in pool.batches if batch.link != late))
    of_late = list(pool.batches)
    pool.batches.clear()
    for batch in of_late:
        pool.do(ev.WorkerSaid(0, late, ErrorReply("shutting_down", "", batch.message.batch[1])))  # type: ignore[union-attr]
    assert of_late and not pool.batches
    pool.answer(asked)
    pool.written()
    rows = 0
    sent: list[Any] = []
    while pool.batches:
        rows += sum(part.frames[-1].shape[0] for part in pool.batches[0].message.parts)  # type: ignore[union-attr]
        sent = pool.finish(pool.batches[0], version=1)
    assert rows == 60, "every row has run on the new weights"
    assert results(sent)[50].version == 1


# --- from the hand-over on ---------------------------------------------------------------------------------------------


def to_load(**changes: Any) -> tuple[UpdatePool, Trainer, list[bytes]]:
    pool, trainer, links = ready()
    to_transfer(pool, trainer, **changes)
    trainer.sent()
    pool.stage(links)
    trainer.commit()
    assert pool.update.phase == "load"
    return pool, trainer, links


@pytest.mark.parametrize("broken", [True, False])
def test_what_became_of_staged_bytes_is_nothing_once_engines_take_them(broken: bool) -> None:
    pool, _, links = to_load()
    said = Staged(pool.update.id, code="update_aborted", message="the stager ended", broken=broken)
    assert not pool.tell(links[0], said)
    pool.live(3.0)
    for link in links:
        pool.tell(link, WeightsLoaded(pool.update.id, 1, DIGEST))
    assert of_type(pool.written(), Published)


def test_the_record_has_the_time_of_the_slowest_engine() -> None:
    pool, _, links = to_load()
    for link, us in zip(links, (30, 20), strict=True):
        pool.tell(link, WeightsLoaded(pool.update.id, 1, DIGEST, copy_us=us))
    (published,) = of_type(pool.written(), Published)
    assert published.record.phases["copy"] == 30
    assert "flush" not in published.record.phases, "there was none"


def test_if_one_has_loaded_it_is_committed_and_the_others_come_back() -> None:
    pool, _, links = to_load()
    update = pool.update.id
    pool.tell(links[0], WeightsLoaded(update, 1, DIGEST))
    pool.do(ev.WorkerBroken(0, links[1], "dies"))
    (published,) = of_type(pool.written(), Published)
    assert (published.record.members, published.record.committed) == (2, 1)
    assert "lost: dies" in published.record.message


@pytest.mark.parametrize(
    "answer",
    [
        WeightsLoaded((0, 0), code="engine_error", message="the load failed"),
        WeightsLoaded((0, 0), 1, "e" * 32),
        WeightsLoaded((0, 0), 2, DIGEST),
    ],
)
def test_a_member_that_did_not_take_it_is_given_up(answer: WeightsLoaded) -> None:
    pool, _, links = to_load()
    update = pool.update.id
    answer.update = update
    pool.tell(links[0], WeightsLoaded(update, 1, DIGEST))
    pool.tell(links[1], answer)
    end = pool.written()
    assert [s.link for s in end if isinstance(s.message, ErrorReply) and s.message.code == "superseded"] == [links[1]]
    assert list(pool.machine.core.groups["g"].workers) == ["w0"]


def test_if_none_has_loaded_all_come_back_on_the_old_weights() -> None:
    pool, _, links = to_load()
    update = pool.update.id
    sent: list[Any] = []
    for link in links:
        sent += pool.tell(link, WeightsLoaded(update, code="engine_error", message="the load failed"))
    assert "no engine runs on it: w0: engine_error: the load failed" in refusal(sent, 1).message
    assert not pool.journal and not pool.machine.core.groups["g"].workers
    assert pool.machine.core.groups["g"].version == 0


def test_a_load_without_an_answer_ends_in_time() -> None:
    pool, _, links = to_load()
    pool.tell(links[0], WeightsLoaded(pool.update.id, 1, DIGEST))
    pool.live(61.0)
    assert pool.journal
    pool.written()
    assert list(pool.machine.core.groups["g"].workers) == ["w0"]


def test_work_that_never_leaves_an_engine_is_not_put_back_without_end() -> None:
    """It hangs, and updates with a short drain would take it back before its worker is lost for it."""
    pool, trainer, links = ready(1)
    pool.submit(trainer.link, 50, work())
    to_transfer(pool, trainer, in_flight="abort")
    trainer.sent()
    pool.stage(links)
    trainer.commit()
    pool.live(61.0)
    group = pool.machine.core.groups["g"]
    assert [request.id for request in group.suspects.waiting()] == [50]


@pytest.mark.parametrize("cancelled", [50, 51])
def test_work_that_never_leaves_an_engine_is_found_where_it_was_alone(cancelled: int) -> None:
    """Unless it has its answer meanwhile."""
    pool, trainer, _ = ready(1, restart=RestartConfig(max_attempts=1))
    for id_ in (50, 51):
        pool.submit(trainer.link, id_, work())
    pool.do(ev.WorkerBroken(0, b"w0", "dies"))
    pool.batches.clear()
    link = pool.worker("w1")
    assert len(pool.batches) == 1, "a trial"
    to_transfer(pool, trainer, in_flight="abort")
    trainer.sent()
    pool.stage([link])
    trainer.commit()
    assert pool.update.phase == "load"
    pool.do(ev.CancelAsked(0, trainer.link, cancelled))
    pool.live(61.0)
    assert failures(pool.sent)[cancelled].code == "cancelled"
    if cancelled != 50:
        assert failures(pool.sent)[50].code == "poisoned" and "not loaded" in failures(pool.sent)[50].evidence[0]


@pytest.mark.parametrize("cancelled", [True, False])
def test_rows_and_text_that_never_left_an_engine_run_alone_from_then_on(cancelled: bool) -> None:
    pool, trainer, links = ready(1)
    content = [work(), text("q", ["x"])]
    for id_, one in enumerate(content, 50):
        pool.submit(trainer.link, id_, one)
    to_transfer(pool, trainer, in_flight="abort")
    trainer.sent()
    pool.stage(links)
    trainer.commit()
    if cancelled:
        pool.do(ev.CancelAsked(0, trainer.link, 51))
    pool.live(61.0)
    group = pool.machine.core.groups["g"]
    assert sorted(request.id for request in group.suspects.waiting()) == ([50] if cancelled else [50, 51])
    assert not group.texts.waiting() and not group.queue.waiting()
    pool.batches.clear()
    for name in ("a", "b"):
        pool.worker(name)
    assert len(pool.batches) + len(texts(pool.sent[-3:])) == 1, "one at a time"


def test_any_failure_of_a_direct_transfer_restarts_every_member() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer, transfer="direct")
    pool.answer([s for s in trainer.commit() if s.link == links[0]])
    trainer.sent()
    sent = pool.tell(links[1], WeightsLoaded(pool.update.id, code="engine_error", message="connection reset"))
    assert refusal(sent, 1).code == "update_aborted"
    assert not pool.machine.core.groups["g"].workers and not pool.journal


def test_a_publisher_that_dies_in_a_direct_transfer_restarts_every_member() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer, transfer="direct", lease_ms=1000)
    trainer.commit()
    sent = pool.wait(2.0)
    assert refusal(sent, 1).code == "update_aborted"
    assert not pool.machine.core.groups["g"].workers


def test_a_direct_transfer_goes_on_while_its_publisher_is_heard() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer, transfer="direct", lease_ms=2000)
    handed = trainer.commit()
    for i in range(5):
        pool.live(1.0)
        trainer.renew(100 * i)
    trainer.sent()
    pool.answer(handed)
    assert of_type(pool.written(), Published)[0].record.committed == len(links)


@pytest.mark.parametrize("broken", [False, True])
def test_a_publisher_that_gives_a_direct_transfer_up_delays_no_request(broken: bool) -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer, transfer="direct")
    trainer.commit()
    sent = trainer.say(AbortUpdate(trainer.ids, "the process group broke", broken))
    assert "aborted by its publisher: the process group broke" in refusal(sent, 1).message
    assert not pool.machine.core.groups["g"].workers and not pool.journal


def test_nothing_is_committed_before_it_is_journaled() -> None:
    pool, trainer, links = ready()
    pool.submit(trainer.link, 50, work())
    pool.finish_all()
    pool.publish(trainer, 1, links)
    pool.submit(trainer.link, 51, work())
    group = pool.machine.core.groups["g"]
    assert (group.version, group.on_hold, pool.batches) == (0, True, [])
    sent = pool.written("no space left on device")
    assert "no space left on device" in refusal(sent, 1).message
    assert not group.workers and group.version == 0


def test_an_update_is_refused_at_its_opening_when_the_journal_cannot_be_written() -> None:
    pool, trainer, links = ready()
    pool.disk = "/state/journal.json: Read-only file system"
    failure = refusal(trainer.publish(1, transfer="set_version"), 1)
    assert failure.code == "update_aborted"
    assert "phase open: the journal cannot be written: /state/journal.json: Read-only file system" in failure.message
    assert set(pool.machine.core.groups["g"].workers) == {link.decode() for link in links} and not pool.killed
    pool.disk = ""
    pool.answer(pool.answer(trainer.publish(1, transfer="set_version")))
    pool.answer(trainer.commit(), digest="")
    pool.written()
    assert pool.machine.core.groups["g"].version == 1


@pytest.mark.parametrize("transfer", ["set_version", "staged", "checkpoint"])
@pytest.mark.parametrize("published", [False, True])
def test_a_commit_that_cannot_be_journaled_puts_engines_back_without_a_new_process(transfer: str, published: bool) -> None:
    """Where the committed weights are those that engines start with, only a start brings them back."""
    pool, trainer, links = ready()
    if published:
        pool.publish(trainer, 1, links)
        pool.written()
    digest = DIGEST if published else ""
    new = digest if transfer == "set_version" else "e" * 32
    opened = pool.answer(trainer.publish(2, transfer=transfer, path="/models/two" if transfer == "checkpoint" else ""))
    if transfer == "staged":
        pool.answer(opened)
        trainer.sent(new)
        pool.stage(links, new)
    pool.answer(trainer.commit(), digest=new)
    pool.submit(trainer.link, 50, work())
    sent = pool.written("/state/journal.json: No space left on device")
    assert "No space left on device" in refusal(sent, trainer.ids).message
    group = pool.machine.core.groups["g"]
    if transfer != "set_version" and not published:
        assert not group.workers
        return
    assert len(of_type(sent, ReleaseWeights)) == 2
    assert [(restore.version, restore.digest) for restore in of_type(sent, Restore)] == [(int(published), digest)] * 2
    assert not pool.batches, "no work before they are back"
    for link in links:
        pool.tell(link, Ready(CAN, int(published), digest))
    assert len(pool.batches) == 1 and len(group.workers) == 2


@pytest.mark.parametrize(
    ("transfer", "partial", "kept"), [("staged", False, True), ("staged", True, False), ("ipc", False, False)]
)
def test_weights_that_died_with_all_who_had_loaded_them_are_not_committed(transfer: str, partial: bool, kept: bool) -> None:
    """A stager may keep them for a successor. No process keeps weights from the publisher's memory alone, or a part of them."""
    pool, trainer, links = ready()
    pool.answer(pool.answer(trainer.publish(1, transfer=transfer, partial=partial, host="here")))
    trainer.sent()
    pool.stage(links)
    sent = trainer.commit()
    pool.answer([one for one in sent if one.link == links[0]])
    pool.do(ev.WorkerBroken(0, links[0], "died"))
    last = pool.do(ev.WorkerBroken(0, links[1], "died"))
    assert bool(pool.journal) == kept
    if not kept:
        assert "lost after they had taken it: w0; w1: lost: died" in refusal(last, 1).message


def test_a_member_that_died_after_it_had_loaded_does_not_run_on_the_new_weights() -> None:
    pool, trainer, links = ready()
    to_transfer(pool, trainer)
    trainer.sent()
    pool.stage(links)
    sent = trainer.commit()
    pool.answer([one for one in sent if one.link == links[0]])
    pool.do(ev.WorkerBroken(0, links[0], "died"))
    pool.answer([one for one in sent if one.link == links[1]])
    (published,) = of_type(pool.written(), Published)
    assert (published.record.members, published.record.committed) == (2, 1)


@pytest.mark.parametrize("broken", [False, True])
def test_an_abort_after_the_load_changes_nothing(broken: bool) -> None:
    pool, trainer, links = to_load()
    assert trainer.say(AbortUpdate(1, broken=broken)) == []
    pool.live(5.0)
    for link in links:
        pool.tell(link, WeightsLoaded(pool.update.id, 1, DIGEST))
    assert of_type(pool.written(), Published)


def test_places_are_not_retired_for_updates_that_fail() -> None:
    pool = UpdatePool(workers=1)
    trainer = Trainer(pool)
    for version in range(1, 15):
        pool.wait(1.0)
        name = pool.started[-1].incarnation
        link = pool.worker(name)
        to_transfer(pool, trainer, version)
        trainer.sent()
        pool.stage([link])
        for sent in trainer.commit():
            if isinstance(sent.message, LoadWeights):
                pool.tell(link, WeightsLoaded(sent.message.update, code="engine_error", message="no"))
        assert pool.killed[-1] == name
        pool.do(ev.WorkerExited(0, name, "killed"))
    assert pool.machine.core.groups["g"].slots[0].state == "backoff"


# --- links that break --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["open", "join", "load"])
def test_a_worker_on_a_new_link_is_asked_again(phase: str) -> None:
    pool, trainer, links = ready(1)
    sent = trainer.publish(1)
    if phase != "open":
        sent = pool.answer(sent)
    if phase == "load":
        pool.answer(sent)
        trainer.sent()
        pool.stage(links)
        trainer.commit()
    again = pool.do(ev.WorkerRegistered(0, b"new", "g", "w0", 1, "host", EPOCH))
    kind = {"open": Prepare, "join": Join, "load": LoadWeights}[phase]
    assert [s.link for s in again if isinstance(s.message, kind)] == [b"new"]


def test_answers_that_come_twice_count_once() -> None:
    pool, trainer, links = ready()
    prepares = trainer.publish(1)
    pool.answer(prepares[:-1])
    pool.answer(prepares[:-1])
    assert pool.update.phase == "open"
    pool.tell(links[0], Staged(pool.update.id, DIGEST))
    assert pool.update.phase == "open"


def test_a_publisher_that_missed_its_word_to_send_hears_it_again() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer, transfer="direct")
    trainer.commit()
    assert phases(trainer.publish(1, id=1, transfer="direct")) == ["transfer"]
    trainer.sent()
    assert phases(trainer.publish(1, id=1, transfer="direct")) == ["load"]


# --- requests for later versions ---------------------------------------------------------------------------------------


def test_a_request_for_a_later_version_waits_and_runs_once_it_is_committed() -> None:
    pool, trainer, links = ready()
    pool.do(ev.Submit(0, trainer.link, 50, work(), 0, None, 2))
    pool.submit(trainer.link, 51, work())
    assert len(pool.batches) == 1
    (report,) = [s.message for s in pool.do(ev.StatusAsked(0, trainer.link, 1))]
    assert (report.groups[0].queued, report.groups[0].early) == (1, 1)  # type: ignore[union-attr]
    pool.finish_all()
    committed(pool, trainer, 1, links)
    assert not pool.batches
    committed(pool, trainer, 2, links)
    assert results(pool.finish(pool.batches[0], version=2))[50].version == 2


def test_a_request_for_a_later_version_has_its_deadline() -> None:
    pool, trainer, _ = ready()
    pool.do(ev.Submit(0, trainer.link, 50, work(), 0, pool.now + 1.0, 2))
    failure = failures(pool.wait(2.0))[50]
    assert failure.code == "deadline_exceeded"
    assert failure.message.endswith("; min_version is 2, but the committed weight version is 0")
    check_machine(pool.machine)


def test_after_a_new_run_requests_wait_again() -> None:
    pool, trainer, links = ready(1)
    committed(pool, trainer, 5, links)
    pool.submit(trainer.link, 49, work(8, 10))
    pool.submit(trainer.link, 48, work(8, 10))
    pool.do(ev.Submit(0, trainer.link, 50, work(), 0, None, 5))
    to_transfer(pool, trainer, 1, new_run=True, in_flight="abort")
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    pool.written()
    group = pool.machine.core.groups["g"]
    assert [request.id for request in group.version_queue.waiting()] == [50]


def test_a_request_may_wait_for_its_version_a_second_time() -> None:
    """Its entry of the first time must not stay in the queue next to the new one."""
    pool, trainer, links = ready(1)
    for number in (50, 51):
        pool.do(ev.Submit(0, trainer.link, number, work(), 0, None, 5))
    for number in (60, 61):
        pool.submit(trainer.link, number, work(8, 10))
    for version in (5, 1, 5):
        committed(pool, trainer, version, links, in_flight="abort", new_run=version == 1)
        (report,) = [s.message for s in pool.do(ev.StatusAsked(0, trainer.link, 1))]
        assert report.groups[0].early == (2 if version == 1 else 0)  # type: ignore[union-attr]
    pool.batches = [batch for batch in pool.batches if batch.message.batch in pool.machine.core.worker_links[links[0]].batches]  # type: ignore[union-attr]
    sent: list[Any] = []
    while pool.batches:
        sent += pool.finish(pool.batches[0], version=5)
    assert sorted(results(sent)) == [50, 51, 60, 61]


@pytest.mark.parametrize("version", [0, 1])
def test_parts_of_other_weights_are_never_put_together_even_under_one_version(version: int) -> None:
    """A new run may begin at the version that was there: only the coordinator knows that the weights are others."""
    pool, trainer, links = ready(1)
    pool.submit(trainer.link, 50, work(16, 10))
    pool.finish(pool.batches[0])
    to_transfer(pool, trainer, version, new_run=True, in_flight="abort")
    trainer.sent()
    pool.stage(links)
    pool.batches.clear()
    pool.answer(trainer.commit())
    pool.written()
    rows = 0
    sent: list[Any] = []
    while pool.batches:
        rows += sum(part.frames[-1].shape[0] for part in pool.batches[0].message.parts)  # type: ignore[union-attr]
        sent = pool.finish(pool.batches[0], version=version)
    assert rows == 16, "every row has run on the new weights"
    assert results(sent)[50].version == version


# --- workers on other weights ------------------------------------------------------------------------------------------


def committed_before(**kwargs: Any) -> UpdatePool:
    """A coordinator that starts with a journal."""
    pool = UpdatePool(**kwargs)
    weights = {"g": GroupWeights(3, DIGEST, "/snapshots/g", "/models/3")}
    pool.machine = pool.machine.__class__(pool.machine.core.config)
    pool.do(ev.Started(0, EPOCH, weights))
    return pool


def test_a_worker_that_missed_that_its_version_is_committed_hears_it_when_it_is_back() -> None:
    """Also of a version without a digest, which `set_version` makes: an engine that kept its generations waits for that."""
    pool = UpdatePool()
    pool.do(ev.Started(0, EPOCH, {"g": GroupWeights(4, "")}))
    link = pool.worker("w", ready=False)
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    told = pool.do(ev.WorkerSaid(0, link, Ready(CAN, 4, "", (0, 3))))
    assert of_type(told, Committed) == [Committed((0, 0), 4, "")]
    told = pool.do(ev.WorkerSaid(0, link, Ready(CAN, 4, "", (0, 4))))
    assert not of_type(told, Committed), "it knows"


def said_of_workers(pool: UpdatePool, link: bytes) -> list[tuple[str, str]]:
    """What the status says of each: its stage and detail."""
    (report,) = [s.message for s in pool.do(ev.StatusAsked(0, link, 1))]
    return [(worker.stage, worker.detail) for worker in report.groups[0].workers]  # type: ignore[union-attr]


def test_a_worker_that_holds_other_weights_is_restored_before_it_gets_work() -> None:
    pool = committed_before()
    client = pool.client()
    link = pool.worker("w", ready=False)
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    asked = pool.do(ev.WorkerSaid(0, link, Ready(CAN, 0)))
    assert of_type(asked, Restore) == [Restore(3, DIGEST, "/snapshots/g", "/models/3")]
    assert said_of_workers(pool, client) == [("restoring", "")]
    pool.submit(client, 1, work())
    assert not pool.batches
    told = pool.do(ev.WorkerSaid(0, link, Ready(CAN, 3, DIGEST)))
    assert said_of_workers(pool, client) == [("ready", "")]
    assert of_type(told, Committed) == [Committed((0, 0), 3, DIGEST, "/snapshots/g")]
    assert len(pool.batches) == 1


def test_a_worker_that_is_ready_on_an_unchanged_checkpoint_hears_of_no_commit() -> None:
    """Its stager keeps what was committed, and nothing was."""
    pool, _, _ = ready(1)
    assert not of_type(pool.sent, Committed)


def test_the_same_version_with_another_digest_is_another_one() -> None:
    pool = committed_before()
    link = pool.worker("w", ready=False)
    pool.do(ev.WorkerSaid(0, link, Idle(EPOCH)))
    assert of_type(pool.do(ev.WorkerSaid(0, link, Ready(CAN, 3, "e" * 32))), Restore)


def test_a_restore_is_said_again_on_a_new_link_and_has_a_deadline() -> None:
    pool = committed_before()
    link = pool.worker("w")
    assert of_type(pool.do(ev.WorkerRegistered(0, b"new", "g", "w", 1, "host", EPOCH)), Restore)
    assert link and pool.machine.core.groups["g"].workers
    pool.live(pool.machine.core.config.timing.loading_s + 1.0)
    assert not pool.machine.core.groups["g"].workers


def test_weights_that_exist_nowhere_are_wanted_of_every_client_that_is_there_or_comes() -> None:
    """Who published them may have been restarted, and be another client now."""
    pool, _, _ = lost_everywhere()
    assert [s.link for s in pool.sent if isinstance(s.message, WeightsNeeded)] == [b"trainer"]
    sent = pool.do(ev.ClientHello(0, b"other", b"restarted.......", b"t" * 16, 1))
    assert [(s.link, s.message) for s in sent[1:]] == [(b"other", WeightsNeeded("g", 3))]


def test_weights_that_exist_nowhere_are_wanted_until_they_are_published() -> None:
    pool = committed_before()
    trainer = Trainer(pool)
    first, second = pool.worker("a"), pool.worker("b")
    pool.submit(trainer.link, 50, work())
    pool.tell(first, Restored(3, "needs_weights", "no snapshot"))
    pool.wait(1.0)
    assert not pool.machine.core.groups["g"].weights_lost, "the other one may have it"
    pool.tell(second, Restored(3, "needs_weights", "no snapshot"))
    sent = pool.live(11.0)
    assert failures(sent)[50].code == "needs_weights"
    assert of_type(sent, WeightsNeeded) == [WeightsNeeded("g", 3)]
    assert codes(pool.submit(trainer.link, 51, work())) == ["needs_weights"]
    assert of_type(pool.do(ev.ClientHello(0, b"again", trainer.link.ljust(16, b"."), b"t" * 16, 1)), WeightsNeeded)
    trainer.link = b"again"
    committed(pool, trainer, 3, [first, second])
    assert not pool.machine.core.groups["g"].weights_lost
    pool.submit(trainer.link, 52, work())
    assert 52 in results(pool.finish_all())


def lost_everywhere() -> tuple[UpdatePool, Trainer, list[bytes]]:
    """Version 3 is committed with DIGEST, and is lost."""
    pool = committed_before()
    trainer = Trainer(pool)
    links = [pool.worker("a"), pool.worker("b")]
    for link in links:
        pool.tell(link, Restored(3, "needs_weights", "no snapshot"))
    pool.live(11.0)
    assert pool.machine.core.groups["g"].weights_lost
    return pool, trainer, links


def test_status_forgets_that_a_worker_had_no_weights_once_it_has_some() -> None:
    pool, trainer, links = lost_everywhere()
    assert said_of_workers(pool, trainer.link) == [("restoring", "cannot restore weight version 3: no snapshot")] * 2
    committed(pool, trainer, 4, links)
    assert said_of_workers(pool, trainer.link) == [("ready", "")] * 2


def test_a_version_that_is_lost_names_no_other_weights_when_it_is_published_again() -> None:
    pool, trainer, links = lost_everywhere()
    other = "e" * 32
    to_transfer(pool, trainer, 3)
    trainer.sent(other)
    failure = refusal(pool.stage(links, other), 1)
    assert (failure.code, failure.field, failure.limit) == ("version_backwards", "version", "3")
    assert "publish these as 4 or higher" in failure.message
    assert DIGEST not in failure.message and other not in failure.message
    assert not pool.journal and not pool.killed
    committed(pool, trainer, 3, links)
    weights = pool.machine.core.groups["g"].weights
    assert (weights.version, weights.digest) == (3, DIGEST)


@pytest.mark.parametrize("transfer", ["direct", "checkpoint"])
def test_what_only_engines_can_tell_of_a_lost_version_ends_before_the_journal(transfer: str) -> None:
    pool, trainer, _ = lost_everywhere()
    opened = pool.answer(trainer.publish(3, transfer=transfer, path="/models/other" if transfer == "checkpoint" else ""))
    if transfer == "direct":
        pool.answer(opened)
    handed = trainer.commit()
    if transfer == "direct":
        trainer.sent("e" * 32)
    failure = refusal(pool.answer(handed, digest="e" * 32), 1)
    assert failure.code == "update_aborted" and "4 or higher" in failure.message
    assert not pool.journal


@pytest.mark.parametrize("changes", [{"partial": True}, {"transfer": "set_version"}])
def test_what_lies_over_present_weights_is_never_the_lost_version(changes: dict[str, Any]) -> None:
    _, trainer, _ = lost_everywhere()
    assert refusal(trainer.publish(3, **changes), 1).code == "version_backwards"


def test_a_new_run_may_use_the_number_of_a_lost_version() -> None:
    pool, trainer, links = lost_everywhere()
    to_transfer(pool, trainer, 3, new_run=True)
    trainer.sent("e" * 32)
    assert phases(pool.stage(links, "e" * 32)) == ["staged"]


def test_a_lost_version_without_a_digest_can_be_published_again() -> None:
    pool, trainer, links = lost_everywhere()
    group = pool.machine.core.groups["g"]
    group.weights = GroupWeights(3)
    to_transfer(pool, trainer, 3)
    trainer.sent()
    assert phases(pool.stage(links)) == ["staged"]


def test_a_worker_that_is_asked_once_more_does_not_hide_that_weights_are_missing() -> None:
    """Of many workers one is being asked again at any time; requests would wait for it without end."""
    pool = committed_before()
    client = pool.client()
    again = pool.machine.core.config.timing.restore_again_s
    early = pool.worker("early")
    pool.tell(early, Restored(3, "needs_weights", "no snapshot"))
    pool.live(again / 2)
    late = pool.worker("late")
    pool.submit(client, 1, work())
    asked = [(s.link, s.message) for s in pool.live(again) if isinstance(s.message, Restore)]
    assert [link for link, _ in asked] == [early], "and it has not answered yet"
    pool.tell(late, Restored(3, "needs_weights", "no snapshot"))
    assert failures(pool.live(again + 2.0))[1].code == "needs_weights"


def test_a_worker_that_finds_them_ends_the_need() -> None:
    pool = committed_before()
    link = pool.worker("a")
    pool.tell(link, Restored(3, "needs_weights", "no snapshot"))
    asked = pool.live(11.0)
    assert pool.machine.core.groups["g"].weights_lost
    assert of_type(asked, Restore), "it tries again"
    pool.do(ev.WorkerSaid(0, link, Ready(CAN, 3, DIGEST)))
    assert not pool.machine.core.groups["g"].weights_lost


def test_a_worker_that_is_lost_in_the_moment_in_which_it_finds_them_ends_no_need() -> None:
    pool, trainer, links = lost_everywhere()
    link = links[0]
    pool.machine.handle(ev.WorkerSaid(pool.now, link, Ready(CAN, 3, DIGEST)), ev.WorkerBroken(pool.now, link, "dies"))
    assert codes(pool.submit(trainer.link, 50, work())) == ["needs_weights"]


def test_a_worker_that_comes_while_others_are_updated_is_restored_at_once() -> None:
    pool = committed_before()
    trainer = Trainer(pool)
    member, late = pool.worker("member", ready=False), pool.worker("late", ready=False)
    pool.do(ev.WorkerSaid(0, member, Idle(EPOCH)))
    pool.do(ev.WorkerSaid(0, member, Ready(CAN, 3, DIGEST)))
    trainer.publish(4)
    assert of_type(pool.do(ev.WorkerSaid(0, late, Ready(CAN, 0))), Restore) == [Restore(3, DIGEST, "/snapshots/g", "/models/3")]


def test_a_member_that_is_ready_on_weights_that_are_not_committed_yet_keeps_them() -> None:
    """It was on its way to a new link when it took them."""
    pool, _, links = to_load()
    for link in links:
        pool.tell(link, WeightsLoaded(pool.update.id, 1, DIGEST))
    assert not of_type(pool.do(ev.WorkerSaid(0, links[0], Ready(CAN, 1, DIGEST))), Restore)
    assert not of_type(pool.written(), Restore)
    assert all(worker.able for worker in pool.machine.core.groups["g"].workers.values())


def test_a_worker_that_drains_is_not_restored() -> None:
    pool, trainer, links = ready(1)
    to_transfer(pool, trainer)
    late = pool.worker("late")
    pool.do(ev.WorkerSaid(0, late, Stage("draining", "")))
    trainer.sent()
    pool.stage(links)
    pool.answer(trainer.commit())
    assert not of_type(pool.written(), Restore)


def test_a_part_is_only_for_workers_that_hold_the_rest() -> None:
    pool = committed_before()
    trainer = Trainer(pool)
    pool.worker("a")
    assert refusal(trainer.publish(4, partial=True), 1).code == "update_aborted"


@pytest.mark.parametrize("found", [True, False])
def test_a_worker_that_was_told_to_take_other_weights_gets_no_work_before_it_says_what_it_holds(found: bool) -> None:
    """An operator goes back to weights from which a worker was being restored: its report of them may be out of date."""
    pool, trainer, links = ready(1)
    committed(pool, trainer, 1, links)
    to_transfer(pool, trainer, 2)
    trainer.sent("e" * 32)
    pool.stage(links, "e" * 32)
    pool.answer(trainer.commit(), digest="e" * 32)
    pool.written()
    late = pool.worker("late", ready=False)
    pool.do(ev.WorkerSaid(0, late, Idle(EPOCH)))
    assert of_type(pool.do(ev.WorkerSaid(0, late, Ready(CAN, 1, DIGEST))), Restore)
    told = committed(pool, trainer, 1, links, new_run=True)
    assert [s.link for s in told if isinstance(s.message, Restore)] == [late]
    for number in (50, 51, 52):
        pool.submit(trainer.link, number, work(8, 10))
    assert {batch.link for batch in pool.batches} == set(links)
    if found:
        pool.do(ev.WorkerSaid(0, late, Ready(CAN, 1, DIGEST)))
    else:
        pool.tell(late, Restored(1, "needs_weights", "no snapshot"))
        assert {batch.link for batch in pool.batches} == set(links)
        assert [s.link for s in pool.live(11.0) if isinstance(s.message, Restore)] == [late], "it is asked again"
        pool.do(ev.WorkerSaid(0, late, Ready(CAN, 1, DIGEST)))
    assert {batch.link for batch in pool.batches} == {late, *links}


def test_who_holds_what_is_committed_once_more_keeps_its_work() -> None:
    """A new run may begin with the version and the weights that are there: who was no member has no reason to stop."""
    pool, trainer, _ = ready(1)
    pool.answer(trainer.publish(0, transfer="set_version", new_run=True))
    late = pool.worker("late")
    pool.submit(trainer.link, 50, work(16))
    sent = trainer.commit()
    for batch in list(pool.batches):
        if batch.link != late:
            sent += pool.finish(batch)
    (asked,) = of_type(sent, LoadWeights)
    pool.tell(b"w0", WeightsLoaded(asked.update, 0))
    worker = pool.machine.core.groups["g"].workers["late"]
    before = dict(worker.batches)
    pool.written()
    assert pool.machine.core.groups["g"].weights.run == 1
    assert before and worker.batches == before
    assert 50 in results(pool.finish_all())


# --- questions ---------------------------------------------------------------------------------------------------------


def test_versions_and_history_are_known_here() -> None:
    pool, trainer, links = ready()
    committed(pool, trainer, 1, links)
    refusal(trainer.publish(1), 2)
    (report,) = of_type(trainer.say(InspectWeights(7)), WeightsReport)
    assert (report.id, report.version, report.digest) == (7, 1, DIGEST)
    assert [(w.name, w.version, w.digest) for w in report.workers] == [("w0", 1, DIGEST), ("w1", 1, DIGEST)]
    assert [record.outcome for record in report.history] == ["committed"]
    pool.submit(trainer.link, 50, work())
    pool.finish(pool.batches[0], version=1)
    (report,) = of_type(trainer.say(InspectWeights(8)), WeightsReport)
    assert "first_answer" in report.history[0].phases


def test_engines_are_asked_for_their_digests_and_the_answers_put_together() -> None:
    pool, trainer, links = ready(3)
    asked = of_type(trainer.say(InspectWeights(7, what="digest")), Inspect)
    assert len(asked) == 3
    pool.tell(links[0], Inspected(asked[0].task, digest=DIGEST))
    pool.do(ev.WorkerBroken(0, links[1], "dies"))
    (report,) = of_type(pool.tell(links[2], Inspected(asked[2].task, code="engine_error", message="busy")), WeightsReport)
    told = {w.name: (w.digest, w.code) for w in report.workers}
    assert told == {"w0": (DIGEST, ""), "w1": ("", "engine_error"), "w2": ("", "engine_error")}


def test_a_weight_is_asked_of_one_worker_and_its_bytes_are_passed_on() -> None:
    pool, trainer, links = ready()
    (asked,) = of_type(trainer.say(InspectWeights(7, what="tensor", name="w")), Inspect)
    assert (asked.what, asked.name) == ("tensor", "w")
    answer = Inspected(asked.task, dtype="bfloat16")
    answer.frames = [ev.FrameSpec("tensor", "float32", (2,))]
    (sent,) = pool.tell(links[0], answer, (b"12345678",))
    assert isinstance(sent.message, WeightsReport)
    assert (sent.message.dtype, sent.frames) == ("bfloat16", [b"12345678"])


def test_a_chunk_of_a_weight_is_always_bounded() -> None:
    pool, trainer, links = ready()
    for count, most in ((0, MAX_CHUNK), (2**62, MAX_CHUNK), (5, 5)):
        (asked,) = of_type(trainer.say(InspectWeights(7, what="tensor", name="w", offset=2**40, count=count)), Inspect)
        assert (asked.offset, asked.count) == (2**40, most)
        pool.tell(links[0], Inspected(asked.task, code="engine_error", message="no"))
    small = b"small"
    pool.do(ev.ClientHello(0, small, b"s" * 16, b"t" * 16, 0, max_message_bytes=1 << 20))
    (asked,) = of_type(pool.do(ev.WeightsAsked(0, small, InspectWeights(8, what="tensor", name="w"))), Inspect)
    assert asked.count * 4 == 1 << 19
    (refused,) = failures(pool.do(ev.WeightsAsked(0, small, InspectWeights(9, what="tensor", name="w", offset=-1)))).values()
    assert (refused.code, refused.field) == ("bad_request", "offset")


def test_one_link_cannot_take_all_questions() -> None:
    pool, trainer, _ = ready()
    said = [codes(trainer.say(InspectWeights(i, what="validate"))) for i in range(1, 7)]
    assert said == [[], [], [], [], ["busy"], ["busy"]]
    other = pool.client()
    assert codes(pool.do(ev.WeightsAsked(0, other, InspectWeights(1, what="validate")))) == []


def test_a_question_ends_in_time_without_those_who_do_not_answer() -> None:
    pool, trainer, _ = ready(1)
    trainer.say(InspectWeights(7, what="validate"))
    sent = pool.live(61.0)
    (report,) = of_type(sent, WeightsReport)
    assert report.workers[0].code == "deadline_exceeded"


# --- the end -----------------------------------------------------------------------------------------------------------


def test_a_coordinator_that_drains_gives_up_what_has_touched_no_engine() -> None:
    pool, trainer, _ = ready()
    to_transfer(pool, trainer)
    assert refusal(pool.do(ev.DrainAsked(0, 5.0)), 1).code == "update_aborted"
    assert refusal(trainer.publish(2), 2).code == "shutting_down"


def test_a_coordinator_that_drains_finishes_a_load() -> None:
    pool, _, links = to_load()
    pool.do(ev.DrainAsked(0, 5.0))
    assert not pool.drained
    for link in links:
        pool.tell(link, WeightsLoaded(pool.update.id, 1, DIGEST))
    assert of_type(pool.written(), Published)
    assert pool.drained


def test_a_member_that_takes_weights_says_so_and_is_ready_after() -> None:
    """A link may break in the middle of it: then its stage tells."""
    pool, _, links = to_load()
    pool.do(ev.WorkerRegistered(0, b"new", "g", "w1", 1, "host", EPOCH))
    pool.tell(b"new", Stage("loading", "takes weights"))
    pool.tell(links[0], WeightsLoaded(pool.update.id, 1, DIGEST))
    pool.tell(b"new", WeightsLoaded(pool.update.id, 1, DIGEST))
    pool.written()
    worker = pool.machine.core.groups["g"].workers["w1"]
    assert not worker.able
    pool.do(ev.WorkerSaid(0, b"new", Ready(CAN, 1, DIGEST)))
    assert worker.able


def test_links_with_many_questions_make_room_for_others() -> None:
    """Four links may not take every place: each further link gets one, until no link has two more than another."""
    pool, trainer, _ = ready(1)
    greedy = [b"asker%d" % (number // OPEN_EACH) for number in range(OPEN)]
    for number, asker in enumerate(greedy, 1):
        pool.do(ev.WeightsAsked(0, asker, InspectWeights(number, what="digest")))
    given_up: list[int | None] = []
    for number in range(100, 112):
        sent = pool.do(ev.WeightsAsked(0, b"late%d" % number, InspectWeights(number, what="digest")))
        assert of_type(sent, Inspect), "the late one is asked at once"
        ((link, failure),) = ((s.link, s.message) for s in sent if isinstance(s.message, ErrorReply))
        assert link in greedy and failure.code == "busy"
        given_up.append(failure.id)
    assert sorted(id_ for id_ in given_up if id_ is not None) == [n for n in range(1, OPEN + 1) if n % OPEN_EACH != 1]
    assert refusal(trainer.say(InspectWeights(99, what="digest")), 99).code == "busy", "now each link has one"


def test_a_question_that_finds_too_many_open_is_told_when_to_ask_again() -> None:
    pool, trainer, _ = ready(1)
    for number in range(1, OPEN + 1):
        asker = b"asker%d" % number
        assert of_type(pool.do(ev.WeightsAsked(0, asker, InspectWeights(number, what="digest"))), Inspect)
    refused = refusal(trainer.say(InspectWeights(99, what="digest")), 99)
    assert (refused.code, refused.limit, refused.retry_after_ms) == ("busy", str(OPEN), AGAIN_MS)
    assert of_type(trainer.say(InspectWeights(100)), WeightsReport), "what asks no engine needs no room"
