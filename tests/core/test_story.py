"""What the log is told of an internal error: what was in hand, without payloads and secrets."""

import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.story import story
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.workers import WorkerRegistry
from enginepool.protocol.messages import Stage
from tests.core.machines import Pool, work


def broken(pool: Pool, event: ev.Event) -> str:
    """The story of the error that `event` causes."""
    with pytest.raises(KeyError) as caught:
        pool.do(event)
    return "\n".join(story(caught.value, pool.machine.core))


def test_the_story_of_a_message_names_its_client_its_request_and_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.worker()
    client = pool.client()

    def fail(self: Context, group: Group) -> None:
        raise KeyError("what\nwas missing")

    monkeypatch.setattr(Context, "wake", fail)
    told = broken(pool, ev.Submit(0, client, 5, work(), 3, None))
    assert told.startswith("internal error: KeyError: 'what\\nwas missing'\nraised in: ")
    assert "admission.py" in told and f"event: Submit link={client.hex()} id=5" in told
    assert "request: <Request" in told and "QUEUED rows=1" in told and "priority=3" in told
    assert "group: g waiting=1 running=0 version=0 update=none workers=<Worker w ready" in told
    assert len(told) < 3000


def test_the_story_of_a_worker_names_its_batches_and_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    worker = pool.worker()
    pool.submit(pool.client(), 1, work())

    def fail(self: WorkerRegistry, worker: Worker) -> None:
        raise KeyError(0)

    monkeypatch.setitem(pool.machine._on_worker, Stage, lambda worker, _: fail(pool.machine.fleet, worker))  # pyright: ignore[reportPrivateUsage]
    told = broken(pool, ev.WorkerSaid(0, worker, Stage("ready", "detail")))
    assert "worker: <Worker w ready batches=1" in told and "batch: <Batch" in told and "/1 RUNNING rows=1" in told


def test_a_story_holds_no_secret_of_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()

    def fail(e: ev.ClientHello) -> None:
        raise KeyError(0)

    monkeypatch.setitem(pool.machine._on, ev.ClientHello, fail)  # pyright: ignore[reportPrivateUsage]
    told = broken(pool, ev.ClientHello(0, b"link", b"c" * 16, b"secret-of-client", 0))
    assert "event: ClientHello link=6c696e6b" in told
    assert "secret" not in told and b"secret".hex() not in told


def test_an_error_while_work_is_dispatched_is_told_with_the_groups_in_question(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    pool.worker()
    client = pool.client()

    def fail(core: object, group: object) -> None:
        raise KeyError(0)

    monkeypatch.setattr("enginepool.coordinator.core.machine.pump", fail)
    told = broken(pool, ev.Submit(0, client, 5, work(), 3, None))
    assert "event: none in hand" in told and "group: g waiting=1" in told and "/5 QUEUED" in told
