"""What engines have under the name of an adapter: no worker serves other content, and no group is looked at in vain."""

import msgspec
import pytest

from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterAsked, AdapterStored
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.shell.decode import worker_event
from enginepool.protocol.capabilities import MAX_ADAPTERS
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import MAX_HEADER_BYTES, Ready, StatusReport
from enginepool.protocol.messages.adapters import AdapterChanged, AdapterReport, LoadAdapter
from tests.core.machines import Sent, failures
from tests.core.test_adapters import DIGEST, LOADING, TENSORS, AdapterPool, asked, changes, pool_of, reports

OTHER = "0" * 32


def stored(pool: AdapterPool) -> list[Sent]:
    """The tensors of the change are on the disk."""
    [store] = [one for one in pool.effects if isinstance(one, ef.StoreAdapter)]
    pool.effects.remove(store)
    return pool.do(AdapterStored(0, store.change, "/s"))


@pytest.mark.parametrize("by", ["path", "tensors"])
def test_a_version_that_is_loaded_anew_takes_the_place_of_what_was_unloaded(by: str) -> None:
    pool, client = pool_of("a")
    pool.commit(client, name="e")
    pool.commit(client, id=10)
    pool.unload(client, "e", id=11)
    [busy] = changes(pool.written())
    pool.unload(client, "f", id=12)
    assert not changes(pool.written()), "it is told so once the other one is unloaded"
    if by == "path":
        pool.load(client, id=13, path="/a/new")
    else:
        pool.do(AdapterAsked(0, client, LoadAdapter(13, "f", 1, digest=DIGEST), (b"{}", TENSORS)))
        stored(pool)
    assert not pool.effects, "it is not committed yet"
    [unload] = changes(pool.done(busy))
    assert asked([unload]) == [(b"a", "unload", "f@1")]
    [load] = changes(pool.done(unload))
    assert asked([load]) == [(b"a", "load", "f@1")]
    pool.done(load, OTHER if by == "path" else DIGEST)
    assert reports(pool.written()) == [AdapterReport(13, "g", "f", 1, OTHER if by == "path" else DIGEST)]


def test_what_a_worker_loads_for_a_change_that_failed_is_not_taken_for_the_next_one() -> None:
    pool, client = pool_of("a", "b")
    slow, failed = changes(pool.load(client))
    pool.done(failed, code="weights_refused", message="r is 0")
    pool.load_tensors(client, id=10)
    [unload] = changes(pool.done(slow, OTHER))
    assert asked([unload]) == [(b"a", "unload", "f@1")]
    loads = [*changes(stored(pool)), *changes(pool.done(unload))]
    assert asked(loads) == [(b"b", "load", "f@1"), (b"a", "load", "f@1")]
    for load in loads:
        pool.done(load)
    assert reports(pool.written()) == [AdapterReport(10, "g", "f", 1, DIGEST)]


@pytest.mark.parametrize("by", ["path", "tensors"])
def test_what_a_worker_refuses_is_called_as_its_publisher_gave_it(by: str) -> None:
    pool, client = pool_of("a")
    sent = pool.load(client) if by == "path" else pool.load_tensors(client)
    [load] = changes(sent if by == "path" else stored(pool))
    sent = pool.done(load, code="weights_refused", message="r is 0")
    assert failures(sent)[9].field == by


def test_what_a_worker_brings_along_is_not_taken_for_the_version_that_is_being_loaded() -> None:
    pool = AdapterPool()
    client = pool.client()
    pool.load(client)
    [unload] = changes(pool.ready("a", "f@1"))
    assert asked([unload]) == [(b"a", "unload", "f@1")]
    [load] = changes(pool.done(unload))
    pool.done(load)
    assert reports(pool.written()) == [AdapterReport(9, "g", "f", 1, DIGEST)]


@pytest.mark.parametrize("committed", [False, True])
def test_a_worker_that_says_it_has_loaded_other_files_than_the_journal_has_is_lost(*, committed: bool) -> None:
    pool, client = pool_of("a")
    pool.done(changes(pool.load(client))[0])
    if committed:
        pool.written()
    pool.done(changes(pool.ready("b"))[0], OTHER)
    assert "b" not in pool.machine.core.groups["g"].workers
    assert "it has loaded other files as adapter f@1 than those that are committed" in pool.logged[-1]
    assert committed or reports(pool.written()) == [AdapterReport(9, "g", "f", 1, DIGEST)]
    assert failures(pool.sent).keys() <= {None}, "the publisher hears of no failure"


def test_a_digest_that_is_none_never_reaches_the_journal() -> None:
    said = msgspec.msgpack.encode(AdapterChanged((1, 1), "x" * 100_000))
    event = worker_event(0, b"w", [said])
    assert isinstance(event, ev.WorkerBroken)
    assert event.reason == f"it sent an invalid message: digest: '{'x' * 80}': expected 32 hexadecimal digits"


def test_a_group_is_looked_at_only_while_a_worker_has_something_to_do() -> None:
    pool, client = pool_of("a")
    adapters = pool.machine.core.groups["g"].adapters
    pool.commit(client)
    assert not adapters.stale
    [load] = changes(pool.ready("b"))
    assert adapters.stale, "what is committed is missing"
    pool.done(load)
    assert not adapters.stale
    pool.unload(client)
    unloads = changes(pool.written())
    assert [pool.done(one) for one in unloads] and not adapters.stale


def test_tensors_of_another_digest_are_a_bad_request_and_its_line_in_the_log_has_a_bounded_rate() -> None:
    pool, client = pool_of("a")
    pool.load_tensors(client)
    [store] = pool.effects
    assert isinstance(store, ef.StoreAdapter)
    refused = failures(pool.do(AdapterStored(0, store.change, "", misfit="digest: it is another")))[9]
    assert (refused.code, refused.field, refused.message) == ("bad_request", "digest", "digest: it is another")
    assert pool.machine.core.live_bytes == 0
    pool.commit(client, id=10)
    assert [kind for text, kind in zip(pool.logged, pool.kinds, strict=True) if text.startswith("adapter ")] == ["update"] * 2


def test_a_worker_that_says_it_has_loaded_more_than_engines_hold_is_broken() -> None:
    for count, kind in ((4096, ev.WorkerSaid), (4097, ev.WorkerBroken)):
        event = worker_event(0, b"w", [msgspec.msgpack.encode(Ready(LOADING, adapters=[f"f@{i}" for i in range(count)]))])
        assert type(event) is kind


def test_a_status_report_with_as_many_adapters_as_there_may_be_is_one_that_clients_read() -> None:
    pool, client = pool_of("a")
    group = pool.machine.core.groups["g"]
    path = "/a" + "/" * 4000 + "f"
    group.adapters.committed = {f"f{i}": AdapterVersion(f"f{i}", 1, DIGEST, path) for i in range(MAX_ADAPTERS - 1)}
    pool.check_every = 1000
    [report] = [one.message for one in pool.do(ev.StatusAsked(0, client, 1)) if isinstance(one.message, StatusReport)]
    assert len(report.groups[0].adapters) == MAX_ADAPTERS - 1
    assert len(encode_header(report)) < MAX_HEADER_BYTES // 16, "a pool may have many groups"
