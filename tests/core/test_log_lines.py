"""What the machine tells an operator's log: one line for each thing that happened."""

import re

from enginepool.config import Limits, RestartConfig
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.protocol.messages import Exiting, Ready, Stage, StatusReport
from enginepool.protocol.messages.weights import AbortUpdate, Restored
from tests.core.machines import CAN, EPOCH, Pool, codes, work
from tests.core.publishers import DIGEST, Trainer, UpdatePool


def lines(pool: Pool, word: str) -> list[str]:
    """The lines with `word` in them."""
    return [text for text in pool.logged if word in text]


def test_a_worker_that_joins_and_is_lost_is_one_line_each() -> None:
    pool = Pool(workers=1)
    name = pool.started[0].incarnation
    pool.worker(name)
    pool.do(ev.WorkerBroken(0, name.encode(), "it sent an invalid message: no"))
    assert lines(pool, "is ready") == [f"worker g-0 is ready: incarnation {name}, process 1 on host, weight version 0"]
    why = "it sent an invalid message: no"
    assert lines(pool, "is lost") == [f"worker g-0 is lost: {why} (incarnation {name}, 0 batches in flight)"]


def test_an_external_worker_is_named_by_its_incarnation() -> None:
    pool = Pool()
    pool.worker("outside")
    pool.wait(6.0)
    pool.do(ev.WorkerSaid(0, b"outside", Exiting("drained", failed=False)))
    assert pool.logged == [
        "worker outside is ready: incarnation outside, process 1 on host, weight version 0",
        "worker outside ends: drained (incarnation outside, 0 batches in flight, process 1 on host, connected for 6 s)",
        f"group g: {pool.machine.core.groups['g'].no_worker}; requests that wait: 0",
    ]
    assert pool.kinds == ["external"] * 3


def test_a_worker_that_an_operator_restarts_is_not_called_lost() -> None:
    pool = Pool(workers=1)
    name = pool.started[0].incarnation
    pool.worker(name)
    pool.do(ev.RestartAsked(0, b"operator", 9, group="g", worker="g-0", incarnation=name))
    pool.wait(0.5)
    assert lines(pool, "operator") == [f"worker g-0 ends: an operator restarts it (incarnation {name}, 0 batches in flight)"]
    assert not lines(pool, "lost")


def test_a_worker_that_is_refused_is_a_line_with_the_reason() -> None:
    pool = Pool()
    pool.do(ev.WorkerRegistered(0, b"w", "other", "w", 1, "host"))
    assert lines(pool, "refused") == ["worker w of host is refused: group: 'other' is none of: g"]
    assert pool.kinds[-1] == "refused"


def test_a_worker_that_is_given_up_is_a_line_with_the_command_that_revives_it() -> None:
    pool = Pool(workers=1, restart=RestartConfig(max_restarts=0))
    pool.do(ev.WorkerExited(0, pool.started[0].incarnation, "exit code 1: no"))
    (line,) = lines(pool, "given up")
    assert line.startswith("worker g-0 is given up: ended more than 0 times")
    assert line.endswith("; `enginepool restart g/g-0` starts it again")


def test_a_full_queue_is_one_line_when_it_begins_and_one_with_the_count_when_it_ends() -> None:
    pool = Pool(limits=Limits(queue_items=10))
    client = pool.client()
    refused = 0
    for id_ in range(1, 51):
        refused += codes(pool.submit(client, id_, work())).count("busy")
        pool.wait(0.1)
    assert refused > 30 and len(lines(pool, "full")) == 1
    pool.wait(2.0)
    (begin,) = lines(pool, "is full")
    (end,) = lines(pool, "refused with busy in")
    assert begin == "the queue is full: limits.queue_items = 10 is reached; requests are refused with busy"
    assert re.fullmatch(rf"the queue has room again: {refused} requests were refused with busy in [345]\.\d s", end)
    assert pool.kinds[-1] == "queue"


def test_a_stall_of_the_coordinator_is_a_line_with_its_length() -> None:
    pool = Pool()
    pool.wait(1.0)
    pool.now += 5.0
    pool.do(ev.Tick(pool.now))
    (line,) = lines(pool, "stood still")
    assert re.fullmatch(r"the coordinator stood still for [45]\.\d s: .*", line)


def test_a_client_that_is_cut_is_a_line_and_one_that_goes_is_none() -> None:
    pool = Pool()
    one, other = pool.client(), pool.client()
    pool.do(ev.LinkCut(0, one))
    assert lines(pool, "client") == []
    pool.do(ev.LinkCut(0, other, "it has 5000 bytes unread, and at most 4000 are allowed"))
    (line,) = lines(pool, "is cut")
    assert line == f"client {other.ljust(16, b'.').hex()[:8]} is cut: it has 5000 bytes unread, and at most 4000 are allowed"
    assert pool.kinds[-1] == "client"


def test_a_silent_client_with_requests_is_a_line() -> None:
    pool = Pool()
    pool.client()
    client = pool.client()
    pool.submit(client, 1, work())
    pool.wait(pool.machine.core.config.timing.client_silence_s + 1.0)
    (line,) = lines(pool, "client")
    assert re.fullmatch(r"client [0-9a-f]{8} was silent for \d+ s: 1 request is cancelled", line)


def test_an_update_is_one_line_when_it_is_committed_and_one_with_the_reason_when_it_is_aborted() -> None:
    pool = UpdatePool()
    trainer, worker = Trainer(pool), pool.worker()
    trainer.publish(1)
    trainer.say(AbortUpdate(trainer.ids, "the trainer changed its mind"))
    (line,) = lines(pool, "update of")
    assert pool.kinds[-1] == "update"
    assert line.startswith("update of g to version 1 (staged, 1 worker): update_aborted: ")
    assert "the trainer changed its mind" in line
    pool.publish(trainer, 2, [worker])
    pool.written()
    assert lines(pool, "update of")[1:] == ["update of g to version 2 (staged, 1 worker): committed"]


def test_a_worker_that_cannot_restore_the_committed_weights_is_one_line_and_one_more_when_it_can() -> None:
    pool = UpdatePool()
    pool.machine = pool.machine.__class__(pool.machine.core.config)
    pool.do(ev.Started(0, EPOCH, {"g": GroupWeights(3, DIGEST, "/snapshots/g")}))
    second = pool.worker("second")
    for _ in range(3):
        pool.tell(second, Restored(3, "needs_weights", "no snapshot"))
        pool.live(pool.machine.core.config.timing.restore_again_s + 1.0)
    assert lines(pool, "restore") == [
        "worker second cannot restore weight version 3: no snapshot; it gets no work, and tries again every 10 s"
    ]
    pool.do(ev.WorkerSaid(0, second, Ready(CAN, 3, DIGEST)))
    assert lines(pool, "restore")[1:] == ["worker second has restored the committed weight version 3"]


def test_weights_without_a_snapshot_are_one_line_for_all_workers_and_one_more_when_there_is_one() -> None:
    pool = UpdatePool()
    trainer, names = Trainer(pool), [pool.worker("a"), pool.worker("b")]
    pool.publish(trainer, 1, names)
    pool.written()
    why = "no snapshot of version 1 in /s/g: No space left on device"

    def say(name: bytes, line: str) -> list[str]:
        pool.tell(name, Stage("ready", line))
        (sent,) = pool.do(ev.StatusAsked(0, trainer.link, 9))
        assert isinstance(sent.message, StatusReport)
        assert {worker.stage for worker in sent.message.groups[0].workers} == {"ready"}
        return [worker.detail for worker in sent.message.groups[0].workers]

    assert say(names[0], why) == [why, ""]
    for name in (names[1], names[0]):  # each try says it
        assert say(name, why) == [why, why]
    pool.do(ev.WorkerSaid(0, names[0], Ready(CAN, 1, DIGEST, (0, 1))))
    assert say(names[0], why) == [why, why]
    assert lines(pool, "snapshot") == [f"worker a could not save the committed weights: {why}"]
    assert say(names[1], "") == [why, ""] and len(lines(pool, "snapshot")) == 1
    assert say(names[0], "") == ["", ""]
    assert lines(pool, "snapshot")[1:] == ["worker a: the snapshot of weight version 1 is written"]
    say(names[0], why)
    pool.publish(trainer, 2, names)
    pool.written()
    assert say(names[1], "") == ["", ""], "it was of the version before"
    assert len(lines(pool, "snapshot")) == 3
