"""Adapters that are loaded while engines run: all workers of a group load a version, or the one before stays."""

from typing import Any

import msgspec
import pytest

from enginepool.config import Limits
from enginepool.coordinator.core import effects as ef
from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterAsked, AdapterStored, AdaptersWritten
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.core.states import WorkerState
from enginepool.coordinator.weights.adapter_checks import open_load
from enginepool.protocol.adapters import LOADS_ADAPTERS, adapter_digest, engine_name
from enginepool.protocol.capabilities import MAX_ADAPTERS
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import ErrorReply, FrameSpec, Idle, Ready, StartGeneration
from enginepool.protocol.messages.adapters import AdapterChanged, AdapterReport, ChangeAdapter, LoadAdapter, UnloadAdapter
from enginepool.protocol.messages.control import Control
from enginepool.protocol.roles import FROM_CLIENT
from tests.core.generations import CAN, GeneratingPool, generate, outputs
from tests.core.machines import EPOCH, Sent, config, failures

LOADING = msgspec.structs.replace(CAN, features=(*CAN.features, LOADS_ADAPTERS), adapters=("own",))
TENSORS = b"tensors"
DIGEST = adapter_digest(b"{}", TENSORS)


class AdapterPool(GeneratingPool):
    """A pool with a journal and a store of adapters, which are written when the test says so."""

    def __init__(self, **settings: Any) -> None:
        pool = config(**settings)
        groups = {name: msgspec.structs.replace(group, adapter_roots=["/a"]) for name, group in pool.groups.items()}
        self.effects: list[ef.Effect] = []
        super().__init__(msgspec.structs.replace(pool, groups=groups))

    def other(self, effect: ef.Effect) -> None:
        self.effects.append(effect)

    def load(self, link: bytes, version: int = 1, name: str = "f", id: int = 9, path: str = "/a/f") -> list[Sent]:
        return self.do(AdapterAsked(0, link, LoadAdapter(id, name, version, path=path)))

    def load_tensors(self, link: bytes, version: int = 1, id: int = 9) -> list[Sent]:
        message = LoadAdapter(id, "f", version, digest=DIGEST)
        return self.do(AdapterAsked(0, link, message, (b"{}", TENSORS)))

    def unload(self, link: bytes, name: str = "f", id: int = 8) -> list[Sent]:
        return self.do(AdapterAsked(0, link, UnloadAdapter(id, name)))

    def done(self, sent: Sent, digest: str = DIGEST, code: str = "", message: str = "") -> list[Sent]:
        """A worker has changed its adapters."""
        assert isinstance(sent.message, ChangeAdapter)
        return self.do(ev.WorkerSaid(0, sent.link, AdapterChanged(sent.message.task, digest, code, message)))

    def written(self, error: str = "") -> list[Sent]:
        """The journal is written."""
        [effect] = [one for one in self.effects if isinstance(one, ef.WriteAdapters)]
        self.effects.remove(effect)
        return self.do(AdaptersWritten(0, effect.change, error))

    def commit(self, link: bytes, version: int = 1, name: str = "f", id: int = 9) -> None:
        """Load an adapter into all workers, whose unloads are done too."""
        waiting = changes(self.load(link, version, name, id))
        while waiting:
            waiting = [more for one in waiting for more in changes(self.done(one))]
        for one in changes(self.written()):
            self.done(one)

    def ready(self, name: str, *adapters: str) -> list[Sent]:
        """A worker whose engine has these is ready."""
        link = name.encode()
        self.do(ev.WorkerRegistered(0, link, "g", name, 1, "host"), ev.WorkerSaid(0, link, Idle(EPOCH)))
        return self.do(ev.WorkerSaid(0, link, Ready(LOADING, adapters=list(adapters))))

    @property
    def committed(self) -> dict[str, int]:
        return {name: one.version for name, one in self.machine.core.groups["g"].adapters.committed.items()}

    def state(self, name: str) -> WorkerState:
        return self.machine.core.groups["g"].workers[name].state


def changes(sent: list[Sent]) -> list[Sent]:
    return [one for one in sent if isinstance(one.message, ChangeAdapter)]


def asked(sent: list[Sent]) -> list[tuple[bytes, str, str]]:
    return [(one.link, one.message.action, one.message.name) for one in sent if isinstance(one.message, ChangeAdapter)]


def reports(sent: list[Sent]) -> list[AdapterReport]:
    return [one.message for one in sent if isinstance(one.message, AdapterReport)]


def starts(sent: list[Sent]) -> list[StartGeneration]:
    return [one.message for one in sent if isinstance(one.message, StartGeneration)]


def pool_of(*names: str) -> tuple[AdapterPool, bytes]:
    pool = AdapterPool()
    for name in names:
        pool.worker(name, can=LOADING)
    return pool, pool.client()


def test_a_version_is_committed_once_all_workers_have_it_and_then_requests_may_name_it() -> None:
    pool, client = pool_of("a", "b")
    first, second = changes(pool.load(client))
    assert asked([first, second]) == [(b"a", "load", "f@1"), (b"b", "load", "f@1")]
    assert first.message == ChangeAdapter(first.message.task, "load", "f@1", "/a/f")  # type: ignore[attr-defined]
    pool.done(first)
    pool.submit(client, 1, generate(adapter="f"))
    assert failures(pool.sent)[1].limit == "own", "not before it is committed"
    assert not pool.effects
    pool.done(second)
    [write] = pool.effects
    assert isinstance(write, ef.WriteAdapters) and [*write.adapters] == [AdapterVersion("f", 1, DIGEST, "/a/f")]
    assert reports(pool.written()) == [AdapterReport(9, "g", "f", 1, DIGEST)]
    pool.submit(client, 2, generate(adapter="f"))
    [task] = pool.tasks()
    pool.step(task.link, (task, 0, 0, [1, 2], "length"))
    assert starts([task])[0].adapter == "f@1"
    assert outputs(pool.sent)[2][0].adapters == [[(1, 0)]]


def test_what_runs_keeps_its_version_which_is_unloaded_when_nothing_uses_it_any_more() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    pool.submit(client, 1, generate(adapter="f"))
    [old] = pool.tasks()
    pool.commit(client, 2)
    pool.submit(client, 2, generate(adapter="f"))
    pool.wait(1.0)
    assert [one.adapter for one in starts(pool.sent)] == ["f@1", "f@2"]
    assert not any(action == "unload" for _, action, _ in asked(pool.sent))
    [last] = changes(pool.step(b"a", (old, 0, 0, [1, 2], "length")))
    assert asked([last]) == [(b"a", "unload", "f@1")]
    assert outputs(pool.sent)[1][0].adapters == [[(1, 0)]]
    pool.done(last)
    assert pool.machine.core.groups["g"].workers["a"].adapters.loaded == {"f@2"}


def test_a_sequence_that_goes_on_elsewhere_says_which_version_each_token_has() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    pool.submit(client, 1, generate(adapter="f"))
    [task] = pool.tasks()
    pool.step(b"a", (task, 0, 0, [1, 2], ""))
    pool.commit(client, 2)
    pool.do(ev.WorkerBroken(0, b"a", "it broke"))
    [load] = changes(pool.ready("b"))
    assert asked([load]) == [(b"b", "load", "f@2")]
    again = pool.tasks(pool.done(load))[0]
    assert (starts([again])[0].adapter, starts([again])[0].at) == ("f@2", 2)
    pool.step(b"b", (again, 0, 2, [3], "length"))
    assert outputs(pool.sent)[1][0].adapters == [[(1, 0), (2, 2)]]


@pytest.mark.parametrize("how", ["refused", "lost", "late", "disk", "other files"])
def test_a_failure_at_any_worker_leaves_the_version_before_and_the_next_change_succeeds(how: str) -> None:
    pool, client = pool_of("a", "b")
    pool.commit(client)
    first, second = changes(pool.load(client, 2))
    pool.done(first)
    if how == "refused":
        sent = pool.done(second, code="weights_refused", message="r is 0")
        wrong = ("weights_refused", "b did not load f@2: r is 0")
    elif how == "lost":
        sent = pool.do(ev.WorkerBroken(0, b"b", "it broke"))
        wrong = ("update_aborted", "b did not load f@2: it was lost: it broke")
    elif how == "late":
        sent = list[Sent]()
        for _ in range(61):
            pool.do(ev.Heard(0, client))
            sent += beat(pool)
        wrong = ("update_aborted", "b did not load f@2: it was lost: it did not load f@2 within 60 s")
    elif how == "disk":
        pool.done(second)
        sent, wrong = pool.written("no space"), ("update_aborted", "the journal could not be written: no space")
    else:
        sent = pool.done(second, "another")
        wrong = ("weights_refused", "b sees other files in /a/f than another worker: copy the same ones to each host")
    assert (failures(sent)[9].code, failures(sent)[9].message) == wrong
    unloads = [one for one in asked(sent) if one[1] == "unload"]
    assert unloads == [(link, "unload", "f@2") for link in (b"a", b"b") if how in ("disk", "other files") or link == b"a"]
    for one in changes(sent):
        pool.done(one)
    assert pool.committed == {"f": 1}
    pool.submit(client, 1, generate(adapter="f"))
    assert starts(pool.sent)[-1].adapter == "f@1"
    pool.commit(client, 2, id=10)
    assert pool.committed == {"f": 2}


def test_tensors_are_charged_until_they_are_stored_and_workers_read_the_store() -> None:
    pool, client = pool_of("a")
    assert not changes(pool.load_tensors(client))
    [store] = pool.effects
    assert isinstance(store, ef.StoreAdapter) and pool.machine.core.live_bytes == 9
    [load] = changes(pool.do(AdapterStored(0, store.change, "/state/adapters/g/f@1")))
    assert pool.machine.core.live_bytes == 0
    assert isinstance(load.message, ChangeAdapter)
    assert (load.message.path, load.message.digest, load.message.stored) == ("/state/adapters/g/f@1", DIGEST, True)
    pool.effects.clear()
    pool.done(load)
    assert reports(pool.written()) == [AdapterReport(9, "g", "f", 1, DIGEST)]


def test_tensors_that_cannot_be_stored_or_loaded_are_dropped() -> None:
    pool, client = pool_of("a")
    for error in ("no space", ""):
        pool.load_tensors(client)
        [store] = pool.effects
        assert isinstance(store, ef.StoreAdapter)
        pool.effects.clear()
        sent = pool.do(AdapterStored(0, store.change, "/s", error))
        if not error:
            [load] = changes(sent)
            sent = pool.done(load, code="engine_error", message="no room")
        assert failures(sent)[9].code == ("update_aborted" if error else "engine_error")
        assert [type(one) for one in pool.effects] == [ef.DropStored]
        pool.effects.clear()


def test_a_question_that_is_asked_again_is_one_change_and_its_answer_is_given_again() -> None:
    pool, client = pool_of("a")
    [load] = changes(pool.load(client))
    assert not pool.load(client), "on a new link, for example"
    pool.done(load)
    pool.written()
    assert reports(pool.load(client, id=9)) == [AdapterReport(9, "g", "f", 1, DIGEST)]
    assert failures(pool.load(client, id=10, path="/a/other"))[10].code == "version_backwards"


def test_one_change_of_a_group_at_a_time() -> None:
    pool, client = pool_of("a")
    pool.load(client)
    assert failures(pool.load(client, name="h", id=10))[10].code == "busy"
    assert failures(pool.unload(pool.client()))[8].code == "busy"


def test_unloading_ends_what_names_the_adapter_and_then_engines_drop_it() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    for id_ in (1, 2):
        pool.submit(client, id_, generate(adapter="f"))
    pool.submit(client, 3, generate())
    pool.step(b"a", (pool.tasks()[0], 0, 0, [5], ""))
    assert not pool.unload(client)
    sent = pool.written()
    assert reports(sent) == [AdapterReport(8, "g", "f")]
    assert outputs(sent)[1][1] == [[5]] and outputs(sent)[1][0].ended[0].reason == "interrupted"
    assert (failures(sent)[2].code, failures(sent)[2].field) == ("bad_request", "adapter")
    assert asked(sent) == [(b"a", "unload", "f@1")]
    pool.done(changes(sent)[0])
    pool.submit(client, 4, generate(adapter="f"))
    assert failures(pool.sent)[4].limit == "own"
    assert reports(pool.unload(client, id=7)) == [AdapterReport(7, "g", "f")], "there is none of that name any more"


def test_a_worker_that_starts_gets_no_work_before_it_has_what_is_committed() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    pool.commit(client, name="h", id=10)
    first = changes(pool.ready("b", "stale@3"))
    assert asked(first) == [(b"b", "unload", "stale@3")]
    second = changes(pool.done(first[0]))
    third = changes(pool.done(second[0]))
    assert asked([*second, *third]) == [(b"b", "load", "f@1"), (b"b", "load", "h@1")]
    assert pool.state("b") is WorkerState.MISSING_ADAPTERS
    pool.done(third[0])
    assert pool.state("b") is WorkerState.READY


def test_a_worker_that_cannot_load_what_is_committed_is_asked_again_and_unloading_frees_it() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    [load] = changes(pool.ready("b"))
    assert not changes(pool.done(load, code="weights_refused", message="its files have changed"))
    assert pool.state("b") is WorkerState.MISSING_ADAPTERS
    assert pool.logged[-1].endswith(
        "b cannot load adapter f@1: its files have changed; it gets no work, and tries again every 10 s"
    )
    again = [one for _ in range(11) for one in changes(beat(pool))]
    assert asked(again) == [(b"b", "load", "f@1")]
    pool.done(again[0], code="weights_refused", message="its files have changed")
    worker = pool.machine.core.groups["g"].workers["b"]
    assert worker.detail == "cannot load adapter f@1: its files have changed"
    pool.unload(client)
    pool.written()
    assert (worker.state, worker.detail) == (WorkerState.READY, "")


def beat(pool: AdapterPool) -> list[Sent]:
    pool.do(*(ev.WorkerHeard(0, link) for link in pool.machine.core.worker_links))
    return pool.wait(1.0)


def test_a_successor_knows_what_is_committed_and_unloads_the_rest() -> None:
    pool = AdapterPool()
    pool.machine.core.groups.clear()
    pool.do(ev.Started(0, EPOCH, {}, adapters={"g": [AdapterVersion("f", 3, DIGEST, "/a/f")]}))
    [unload] = changes(pool.ready("a", "f@3", "f@4"))
    assert asked([unload]) == [(b"a", "unload", "f@4")]
    assert pool.state("a") is WorkerState.READY
    pool.done(unload)
    assert reports(pool.load(pool.client(), 3)) == [AdapterReport(9, "g", "f", 3, DIGEST)], "the journal had taken it"


def test_a_task_that_is_lost_with_its_link_is_given_again_and_an_engine_that_cannot_unload_is_given_up() -> None:
    pool, client = pool_of("a")
    pool.commit(client)
    [load] = changes(pool.load(client, 2))
    [again] = changes(pool.do(ev.WorkerRegistered(0, b"new", "g", "a", 1, "host")))
    assert again.message == load.message and again.link == b"new"
    pool.do(ev.WorkerSaid(0, b"new", Idle(EPOCH)), ev.WorkerSaid(0, b"new", Ready(LOADING, adapters=["f@1"])))
    pool.done(again)
    [unload] = changes(pool.written())
    pool.done(unload, code="engine_error", message="it is used")
    assert "a" not in pool.machine.core.groups["g"].workers


def test_who_may_and_what_is_refused_before_anything_begins() -> None:
    assert FROM_CLIENT["load_adapter"] == FROM_CLIENT["unload_adapter"] == "publisher"
    pool, client = pool_of("a")
    cases = [
        (LoadAdapter(1, "f", 1, path="/etc"), "bad_request", "path"),
        (LoadAdapter(2, "f", 1, path="/a/../etc"), "bad_request", "path"),
        (LoadAdapter(3, "own", 1, path="/a/f"), "bad_request", "name"),
        (LoadAdapter(4, "f", 1, group="x", path="/a/f"), "unknown_group", "group"),
        (UnloadAdapter(5, "own"), "bad_request", "name"),
    ]
    for message, code, field in cases:
        refused = failures(pool.do(AdapterAsked(0, client, message)))[message.id]
        assert (refused.code, refused.field) == (code, field), message
    group = pool.machine.core.groups["g"]
    group.adapters.committed = {str(i): AdapterVersion(str(i), 1, "", "/a") for i in range(MAX_ADAPTERS)}
    group.capabilities = msgspec.structs.replace(LOADING, adapters=group.adapters.names)
    pool.check_every = 1000
    refused = failures(pool.load(client, id=6))[6]
    assert (refused.code, refused.message) == ("bad_request", "name: 65 adapters are loaded; at most 64")


def test_engines_that_load_none_or_start_with_it_are_known_once_a_worker_is_ready() -> None:
    for can, name in ((CAN, "f"), (LOADING, "own")):
        pool = AdapterPool()
        client = pool.client()
        assert not pool.load(client, name=name), "it waits for a worker"
        pool.worker("a", can=can)
        refused = failures(pool.sent)[9]
        assert refused.code == ("unsupported" if can is CAN else "bad_request")
        assert failures(pool.load(client, name=name))[9].message == refused.message


def test_a_load_waits_for_a_worker_for_a_while() -> None:
    pool = AdapterPool()
    client = pool.client()
    pool.load(client)
    [load] = changes(pool.ready("a"))
    pool.done(load)
    assert reports(pool.written()) == [AdapterReport(9, "g", "f", 1, DIGEST)]
    pool.do(ev.WorkerBroken(0, b"a", "it broke"))
    pool.load(client, 2)
    sent = list[Sent]()
    for _ in range(121):
        pool.do(ev.Heard(0, client))
        sent += pool.wait(1.0)
    assert (failures(sent)[9].code, failures(sent)[9].message) == ("update_aborted", "its workers were not ready in time")


def sleep(pool: AdapterPool, *workers: str, wake: bool = False) -> list[Sent]:
    """The engines of these are put to sleep, or woken, and keep their adapters."""
    sent: list[Sent] = []
    for name in workers:
        pool.do(ev.ControlAsked(0, b"c", Control(71 if wake else 70, "wake" if wake else "sleep", "g", name, ["kv_cache"])))
        loaded = sorted(pool.machine.core.groups["g"].workers[name].adapters.loaded)
        ready = Ready(LOADING, adapters=loaded, asleep=[] if wake else ["kv_cache"])
        sent += pool.do(ev.WorkerSaid(0, name.encode(), ready))
    return sent


def test_no_adapter_is_changed_while_an_engine_sleeps() -> None:
    pool, client = pool_of("a", "b")
    pool.commit(client)
    sleep(pool, "b")
    for sent in (pool.load(client, 2, id=20), pool.unload(client, id=20)):
        refused = failures(sent)[20]
        assert (refused.code, refused.field) == ("update_aborted", "group") and "b of 'g'" in refused.message, refused
        assert not changes(sent)
    assert reports(pool.load(client, 1, id=21)) and reports(pool.unload(client, "other", id=22)), "there is nothing to do"
    assert not changes(sleep(pool, "b", wake=True)), "it kept what it had"
    assert pool.state("b") is WorkerState.READY
    assert len(changes(pool.load(client, 2, id=23))) == 2


def test_an_engine_that_slept_through_a_change_makes_it_before_it_works() -> None:
    pool, client = pool_of("a", "b")
    first, second = changes(pool.load(client))
    assert not changes(sleep(pool, "b"))
    assert not changes(pool.done(second, code="pool_down", message="not ready: loading"))
    pool.done(first)
    pool.written()
    assert pool.committed == {"f": 1} and pool.state("b") is WorkerState.ASLEEP
    woken = sleep(pool, "b", wake=True)
    assert asked(woken) == [(b"b", "load", "f@1")]
    assert pool.state("b") is WorkerState.MISSING_ADAPTERS
    pool.done(changes(woken)[0])
    assert pool.state("b") is WorkerState.READY


def test_tensors_have_bounds() -> None:
    pool = AdapterPool()
    pool.worker("a", can=LOADING)
    client = pool.client()
    limits = pool.machine.core.config.limits
    message = LoadAdapter(1, "f", 1, digest=DIGEST)
    large = memoryview(bytearray(limits.window_bytes))
    assert failures(pool.do(AdapterAsked(0, client, message, (b"{}", large))))[1].code == "too_large"
    full = AdapterAsked(0, client, message, (b"{}", TENSORS), outboxes=limits.buffer_bytes)
    assert failures(pool.do(full))[1].code == "busy"
    assert pool.machine.core.live_bytes == 0 and not pool.effects


def test_tensors_are_stored_on_the_disk_up_to_a_bound_and_unloading_makes_room() -> None:
    """A version is there next to the one that it takes the place of. Folders take no room."""
    nbytes = len(b"{}" + TENSORS)
    pool = AdapterPool(limits=Limits(adapters_bytes=2 * nbytes))
    pool.worker("a", can=LOADING)
    client = pool.client()

    def load(id_: int, name: str, version: int, tensors: bytes = TENSORS) -> ErrorReply | None:
        """Load it, or say why not."""
        sent = pool.do(AdapterAsked(0, client, LoadAdapter(id_, name, version, digest=DIGEST), (b"{}", tensors)))
        if id_ in failures(sent):
            return failures(sent)[id_]
        [effect] = [one for one in pool.effects if isinstance(one, ef.StoreAdapter)]
        [asks] = changes(pool.do(AdapterStored(0, effect.change, f"/state/{name}@{version}")))
        pool.effects.clear()
        pool.done(asks)
        for old in changes(pool.written()):
            pool.done(old)
        assert pool.committed[name] == version
        return None

    assert [load(id_, "f", id_) for id_ in (1, 2, 3)] == [None] * 3
    pool.commit(client, 1, "g", id=4)
    full = load(5, "h", 1, 2 * TENSORS)
    assert full is not None and (full.code, full.field, full.limit) == ("too_large", "tensors", str(2 * nbytes))
    assert full.message.startswith(f"tensors: {nbytes + len(TENSORS)} bytes, and {nbytes} bytes of adapters are stored; ")
    for one in changes([*pool.unload(client), *pool.written()]):
        pool.done(one)
    assert load(6, "h", 1, 2 * TENSORS) is None


BOTH = [FrameSpec("config", "uint8", (2,)), FrameSpec("tensors", "uint8", (7,))]


@pytest.mark.parametrize(
    ("message", "frames", "code", "field"),
    [
        (LoadAdapter(1, "../f", 1, path="/a"), (), "bad_request", "name"),
        (LoadAdapter(1, "", 1, path="/a"), (), "bad_request", "name"),
        (LoadAdapter(1, "f@1", 1, path="/a"), (), "bad_request", "name"),
        (LoadAdapter(1, "f" * 65, 1, path="/a"), (), "bad_request", "name"),
        (LoadAdapter(1, "f", 0, path="/a"), (), "bad_request", "version"),
        (LoadAdapter(1, "f", 2**63, path="/a"), (), "bad_request", "version"),
        (LoadAdapter(1, "f", 1, path="/" + "a" * 5000), (), "bad_request", "path"),
        (LoadAdapter(1, "f", 1), (), "bad_request", "path"),
        (LoadAdapter(1, "f", 1, path="/a", digest=DIGEST, frames=BOTH), (b"{}", TENSORS), "bad_request", "path"),
        (LoadAdapter(1, "f", 1, path="/a", digest=DIGEST), (), "bad_request", "digest"),
        (LoadAdapter(1, "f", 1, digest="x", frames=BOTH), (b"{}", TENSORS), "bad_request", "digest"),
        (LoadAdapter(1, "f", 1, digest=DIGEST, frames=BOTH[1:]), (TENSORS,), "malformed", "frames"),
        (LoadAdapter(1, "f", 1, digest=DIGEST, frames=BOTH), (b"{}",), "malformed", "frames"),
        (
            LoadAdapter(1, "f", 1, digest=DIGEST, frames=[FrameSpec("config", "uint8", (1 << 17,)), BOTH[1]]),
            (bytes(1 << 17), TENSORS), "bad_request", "config",
        ),
    ],
)  # fmt: skip
def test_what_nothing_could_load_is_refused_with_its_field(
    message: LoadAdapter, frames: tuple[bytes, ...], code: str, field: str
) -> None:
    with pytest.raises(WireError) as refused:
        open_load(message, frames)
    assert (refused.value.code, refused.value.field) == (code, field)
    assert engine_name("f", 1) == "f@1"
