"""What a stager keeps of updates that are committed, given up or unheard of, and what it says that it holds."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages.weights import Committed, Join, Joined, MemoryRegion, ReleaseWeights, Staged
from enginepool.workers.stager import memory as stager_memory
from enginepool.workers.stager.link import StagerLink
from enginepool.workers.stager.messages import AskHeld, Reserve, Reserved, StagerHolds, StagerSpec
from enginepool.workers.stager.snapshot import Footer, write_footer
from enginepool.workers.stager.stager import Stager
from enginepool.workers.stager.state import KeptUpdate, StagedUpdate

PATIENCE_S = 60.0
OLD, NEW, OTHER = "a" * 32, "b" * 32, "c" * 32
UPDATE = (7, 1)
NOTHING = StagerHolds()


class Memory:
    """Memory as far as keeping is concerned: a name, and a snapshot that has a footer."""

    shards = 0

    def __init__(self, name: str, kind: str = "host", nbytes: int = 0) -> None:
        self.name, self.kind, self.nbytes = name, kind, nbytes

    def regions(self) -> list[MemoryRegion]:
        return [MemoryRegion("file", 0, path=self.name)]

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        with open(path, "wb") as file:
            write_footer(file.fileno(), 0, footer)
        left()


class Group:
    """A process group that a rank leaves, or not."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def abort(self) -> None:
        self.left.set()


def manifest(name: str) -> list[Tensor]:
    return [Tensor(name, "float32", (0,))]


def held(version: int, digest: str, name: str) -> StagerHolds:
    """What is said of the memory of this name."""
    return StagerHolds(version, digest, manifest(name), [MemoryRegion("file", 0, path=name)])


class Scene:
    """A stager that keeps version 1, with an open update; and its worker."""

    def __init__(self, one: Stager, link: StagerLink) -> None:
        self.stager, self.link = one, link
        self.group = Group()
        one.kept = KeptUpdate(1, OLD, manifest("kept"), cast(Any, Memory("kept")))
        one.update = self.update = StagedUpdate(Reserve(UPDATE, manifest("update"), 256), cast(Any, Memory("update")))
        one.group, one.peer = cast(Any, self.group), "peer"

    async def holds(self, digest: str = "") -> StagerHolds:
        return await self.link.ask(AskHeld(digest), StagerHolds)

    def came(self, digest: str = NEW, message: str = "") -> None:
        """All bytes of the update; or why not."""
        self.update.received = Staged(UPDATE, digest, code="update_aborted" if message else "", message=message)


def play(path: Path, story: Callable[[Scene], Awaitable[None]]) -> None:
    """A stager in this process, and its worker at the other end of a socket."""

    async def scene() -> None:
        socket = str(path / "stager.sock")
        one = Stager(StagerSpec(socket=socket))
        server = await asyncio.start_unix_server(one.serve, socket)
        link = StagerLink(socket, lambda _: None, lambda _: None)
        try:
            # Sooner than the link, which kills a stager that says nothing.
            async with asyncio.timeout(PATIENCE_S / 2):
                await story(Scene(one, link))
        finally:
            await link.close()
            server.close()

    asyncio.run(scene())


# --- what is held ------------------------------------------------------------------------------------------------------


def test_kept_weights_are_named_for_any_question(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        for digest in (OLD, OTHER, ""):
            assert await scene.holds(digest) == held(1, OLD, "kept")
        scene.stager.kept = None
        assert await scene.holds(OLD) == NOTHING

    play(tmp_path, story)


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_received_is_held_for_who_names_it_and_only_if_it_is_whole(tmp_path: Path, kept: bool) -> None:
    async def story(scene: Scene) -> None:
        if not kept:
            scene.stager.kept = None
        before = held(1, OLD, "kept") if kept else NOTHING
        assert await scene.holds(NEW) == before, "nothing came yet"
        scene.came(message="half of it")
        assert await scene.holds(NEW) == before
        scene.came()
        assert await scene.holds(OTHER) == before
        assert await scene.holds(NEW) == held(0, NEW, "update")

    play(tmp_path, story)


# --- commits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [UPDATE, (0, 0), (8, 1)], ids=["its own", "of a restart", "of another coordinator"])
def test_what_was_received_is_kept_once_its_digest_is_committed(tmp_path: Path, name: tuple[int, int]) -> None:
    async def story(scene: Scene) -> None:
        scene.came()
        await scene.holds()
        scene.link.tell(Committed(name, 2, NEW))
        assert await scene.holds(NEW) == held(2, NEW, "update")
        assert scene.stager.update is None

    play(tmp_path, story)


@pytest.mark.parametrize("came", ["nothing", "half", "others"])
def test_of_an_update_that_is_committed_and_not_here_nothing_is_left(tmp_path: Path, came: str) -> None:
    """Nor of what was committed before it."""

    async def story(scene: Scene) -> None:
        if came != "nothing":
            scene.came(OTHER if came == "others" else NEW, "half of it" if came == "half" else "")
        await scene.holds()
        scene.link.tell(Committed(UPDATE, 2, NEW))
        assert await scene.holds(NEW) == NOTHING
        assert scene.stager.update is None

    play(tmp_path, story)


def test_kept_weights_may_be_committed_again_by_another_name_during_an_update(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.came()
        await scene.holds()
        scene.link.tell(Committed((0, 0), 5, OLD))
        assert await scene.holds(OLD) == held(5, OLD, "kept")
        assert scene.stager.update is scene.update
        scene.link.tell(Committed((0, 0), 6, OTHER))
        assert await scene.holds(OLD) == NOTHING, "the group moved on without this stager"
        assert scene.stager.update is scene.update

    play(tmp_path, story)


def test_a_snapshot_is_written_of_what_is_kept_where_one_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def story(scene: Scene) -> None:
        paths = [tmp_path / f"g-{number:032x}" for number in range(3)]
        await scene.holds()
        scene.link.tell(Committed((0, 0), 1, OLD))
        scene.link.tell(Committed((0, 0), 1, OLD, str(paths[0])))
        await scene.holds()
        await asyncio.to_thread(scene.stager.finish)
        assert paths[0].exists() and capsys.readouterr().err == ""
        scene.link.tell(Committed(UPDATE, 2, NEW, str(paths[1])))
        await scene.holds()
        await asyncio.to_thread(scene.stager.finish)
        assert not paths[1].exists(), "it is not here"
        assert scene.stager.memory_snapshot == "", "none of them lies in memory"
        scene.link.tell(Committed((0, 0), 3, NEW, "/dev/shm/of-a-test/g"))
        await scene.holds()
        assert scene.stager.memory_snapshot == "/dev/shm/of-a-test/g"

    play(tmp_path, story)


# --- what is given up --------------------------------------------------------------------------------------------------


def test_room_for_another_update_gives_up_the_one_before(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        reserved = await scene.link.ask(Reserve((7, 2), [Tensor("next", "float32", (1,))], 256), Reserved)
        assert reserved.staging == "host" and reserved.peer not in ("", "peer")
        assert scene.update.forgotten and await asyncio.to_thread(scene.group.left.wait, PATIENCE_S)
        assert await scene.holds() == held(1, OLD, "kept")

    play(tmp_path, story)


def test_larger_room_on_a_device_replaces_the_kept_weights_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus_of(_device: str, wanted: int) -> int:
        return wanted

    def make_memory(nbytes: int, *, gpus: int) -> Any:
        return Memory(f"{nbytes} bytes", "device", nbytes)

    async def story(scene: Scene) -> None:
        async def room(number: int, nbytes: int) -> list[MemoryRegion]:
            tensors = [Tensor("a", "uint8", (nbytes,))]
            return (await scene.link.ask(Reserve((7, number), tensors, 256), Reserved)).regions

        small = await room(2, 256)
        assert await scene.holds() == held(1, OLD, "kept"), "which lies on the host"
        assert scene.stager.kept is not None and scene.stager.device_memory is not None
        scene.stager.kept.memory = scene.stager.device_memory
        assert await room(3, 256) == small, "there is one"
        assert (await scene.holds()).digest == OLD
        assert await room(4, 512) != small
        assert await scene.holds() == NOTHING

    monkeypatch.setattr(stager_memory, "gpus_of", gpus_of)
    monkeypatch.setattr(stager_memory, "make_memory", make_memory)
    play(tmp_path, story)


@pytest.mark.parametrize(("came", "leaves"), [("nothing", True), ("half", True), ("all", False)])
def test_a_release_leaves_a_process_group_that_may_not_be_in_step(tmp_path: Path, came: str, leaves: bool) -> None:
    async def story(scene: Scene) -> None:
        one = scene.stager
        if came != "nothing":
            scene.came(message="half of it" if came == "half" else "")
        await scene.holds()
        scene.link.tell(ReleaseWeights((7, 2)))
        await scene.holds()
        assert one.update is scene.update and not scene.update.forgotten, "that was another update"
        scene.link.tell(ReleaseWeights(UPDATE))
        assert await scene.holds(NEW) == held(1, OLD, "kept"), "what is committed stays"
        assert one.update is None and scene.update.forgotten
        if leaves:
            assert await asyncio.to_thread(scene.group.left.wait, PATIENCE_S)
            assert (one.group, one.peer) == (None, "")
        else:
            assert (one.group, one.peer) == (scene.group, "peer") and not scene.group.left.is_set()

    play(tmp_path, story)


def test_no_rank_joins_a_process_group_for_an_update_that_is_not_here(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        def ask(number: int) -> Awaitable[Joined]:
            return scene.link.ask(Join("g", 2, 1, "127.0.0.1:1", update=(7, number)), Joined)

        assert "not known here" in (await ask(2)).message and not scene.update.joining
        scene.stager.update = None
        assert "not known here" in (await ask(1)).message
        assert scene.stager.group is scene.group and not scene.group.left.is_set()

    play(tmp_path, story)


def test_a_worker_that_waits_for_a_process_group_hears_that_its_update_is_given_up(tmp_path: Path) -> None:
    """By its successor's, say, of which it knows nothing: the others in the group may be waited for a long time yet."""

    async def story(scene: Scene) -> None:
        said: list[Any] = []

        class Writer:
            def is_closing(self) -> bool:
                return False

            def write(self, data: bytes) -> None:
                said.append(data)

        scene.update.worker = cast(Any, Writer())
        await scene.holds()
        for joining in (False, True):
            scene.stager.update, scene.update.joining = scene.update, joining
            scene.link.tell(ReleaseWeights(UPDATE))
            await scene.holds()
            assert len(said) == joining
        assert b"given up meanwhile" in said[0]

    play(tmp_path, story)
