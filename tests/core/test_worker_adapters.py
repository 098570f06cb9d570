"""Changes of adapters in a worker: each runs once, and no coordinator is wrong about what an engine has."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from enginepool.coordinator.core.adapter_events import AdapterStored, AdaptersWritten
from enginepool.coordinator.core.effects import StoreAdapter, WriteAdapters
from enginepool.coordinator.core.events import Event
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.shell.adapter_store import AdapterStore
from enginepool.coordinator.shell.journal import Journal
from enginepool.coordinator.shell.journal_writer import JournalWriter
from enginepool.protocol.adapters import adapter_digest
from enginepool.protocol.messages.adapters import AdapterChanged, ChangeAdapter
from enginepool.workers.adapter_state import AdapterState
from enginepool.workers.adapters import AdapterRunner
from enginepool.workers.engine import EngineError
from enginepool.workers.events import CommandDone, RunCommand, SendToCoordinator
from tests.core.test_adapter_files import CONFIG, folder

LOAD = ChangeAdapter((7, 1), "load", "f@1", "/a")


def done(task: tuple[int, int], *adapters: str) -> CommandDone:
    return CommandDone(0.0, AdapterChanged(task, "d"), adapters=adapters)


def test_a_change_that_is_delivered_twice_runs_once_and_is_answered_twice() -> None:
    state = AdapterState()
    assert state.take(LOAD, 7, "ready") == [RunCommand(LOAD)]
    assert state.take(LOAD, 7, "ready") == []
    assert not state.done(done((7, 1), "f@1")) and state.loaded == ("f@1",)
    assert state.take(LOAD, 7, "ready") == [SendToCoordinator(AdapterChanged((7, 1), "d"))]


def test_a_worker_that_is_not_ready_says_so() -> None:
    [answer] = AdapterState().take(LOAD, 7, "draining")
    assert answer == SendToCoordinator(AdapterChanged((7, 1), code="pool_down", message="not ready: draining"))
    [answer] = AdapterState().take(LOAD, 8, "ready")
    assert isinstance(answer, SendToCoordinator), "of an earlier coordinator"


def test_what_is_loaded_for_a_coordinator_that_has_ended_is_said_to_the_present_one() -> None:
    state = AdapterState()
    state.take(LOAD, 7, "ready")
    state.forget()
    assert state.done(done((7, 1), "f@1")) and state.loaded == ("f@1",)


class Engine:
    """One that refuses what is called `no`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.weights = SimpleNamespace(model_tensors=self._none)

    def _none(self) -> None:
        raise EngineError("it takes none")

    async def load_adapter(self, name: str, path: str) -> None:
        self.calls.append(("load", name))
        await asyncio.sleep(0)
        if name == "no@1":
            raise EngineError("no room")

    async def unload_adapter(self, name: str) -> None:
        self.calls.append(("unload", name))


def test_a_runner_does_nothing_twice_and_says_why_it_does_not(tmp_path: Path) -> None:
    folder(tmp_path / "f")
    engine: Any = Engine()
    runner = AdapterRunner(engine, [str(tmp_path)], "")

    async def run(action: Any, name: str, **more: Any) -> AdapterChanged:
        message = ChangeAdapter((7, 1), action, name, path=str(tmp_path / "f"))
        return await runner.run(msgspec.structs.replace(message, **more))

    async def main() -> None:
        first, second = await asyncio.gather(run("load", "f@1"), run("load", "f@1"))
        assert first == second and first.digest and not first.code
        assert (await run("load", "no@1")).message == "no room" and [*runner.loaded] == ["f@1"]
        assert (await run("load", "f@2", digest="0" * 32)).code == "weights_refused"
        assert (await run("load", "f@1", digest="0" * 32)).message.endswith("its files have changed")
        stored = await run("load", "f@2", stored=True)
        assert stored.message.startswith("it came as tensors, which only workers that the pool starts itself can read")
        for _ in range(2):
            assert not (await run("unload", "f@1")).code

    asyncio.run(main())
    assert engine.calls == [("load", "f@1"), ("load", "no@1"), ("unload", "f@1")]


def test_the_store_keeps_what_is_committed_for_this_user_alone(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path)
    config, data = str(CONFIG).encode(), b"tensors"
    kept, other = (AdapterVersion(name, 1, adapter_digest(config, data), "", 9) for name in ("kept", "other"))
    for group in ("g", "h"):
        for adapter in (kept, other):
            store.write(store.folder(group, adapter), StoreAdapter((7, 1), group, adapter, config, data))
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "adapters").rglob("*"))
    with pytest.raises(ValueError, match=r"digest: .* is not that of the frames config and tensors"):
        store.write(store.folder("g", kept), StoreAdapter((7, 1), "g", kept, config, b"others"))
    store.keep_only({"g": [kept]}, "g")
    assert {path.name for path in (tmp_path / "adapters").glob("*/*")} == {"kept@1", "other@1"}
    store.keep_only({"g": [kept]})
    assert [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "adapters").glob("*/*")] == ["adapters/g/kept@1"]
    store.remove(store.folder("g", kept))
    store.remove(store.folder("g", kept))


def test_what_is_stored_at_once_after_a_commit_stays(tmp_path: Path) -> None:
    """The coordinator reads its sockets again before it returns from an event: the next adapter may be among it."""
    config, data = str(CONFIG).encode(), b"tensors"
    one, other = (AdapterVersion(name, 1, adapter_digest(config, data), "", 9) for name in ("one", "other"))

    async def story() -> None:
        journal, seen = Journal(tmp_path), list[Event]()

        def tell(event: Event) -> None:
            seen.append(event)
            if isinstance(event, AdaptersWritten):
                writer.perform(StoreAdapter((7, 2), "g", other, config, data))

        writer = JournalWriter(asyncio.get_running_loop(), journal, tell, lambda line: None, lambda: None)
        writer.perform(StoreAdapter((7, 1), "g", one, config, data))
        writer.perform(WriteAdapters((7, 1), "g", [one]))
        while sum(isinstance(event, AdapterStored) for event in seen) < 2:
            await asyncio.sleep(0.001)
        writer.close()
        journal.close()

    asyncio.run(story())
    assert {path.name for path in (tmp_path / "adapters").glob("*/*")} == {"one@1", "other@1"}


def test_tensors_of_another_digest_are_the_fault_of_their_publisher_and_not_of_the_disk(tmp_path: Path) -> None:
    lines: list[str] = []
    wrong = AdapterVersion("f", 1, "0" * 32, "", 9)

    async def story() -> AdapterStored:
        journal, seen = Journal(tmp_path), asyncio.Queue[Event]()
        writer = JournalWriter(asyncio.get_running_loop(), journal, seen.put_nowait, lines.append, lambda: None)
        writer.perform(StoreAdapter((7, 1), "g", wrong, str(CONFIG).encode(), b"tensors"))
        stored = await seen.get()
        writer.close()
        journal.close()
        assert isinstance(stored, AdapterStored)
        return stored

    stored = asyncio.run(story())
    assert (stored.change, stored.error, lines) == ((7, 1), "", [])
    assert stored.misfit == f"digest: {'0' * 32} is not that of the frames config and tensors"
