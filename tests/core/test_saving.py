"""Snapshots of a stager during updates: what they wait for, and what waits for them."""

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import pytest

from enginepool.protocol.manifest import Tensor
from enginepool.workers.stager.saving import Snapshots
from enginepool.workers.stager.snapshot import Footer, remove_all, write_footer
from enginepool.workers.stager.state import KeptUpdate

PATIENCE_S = 60.0


def test_a_snapshot_that_is_read_is_waited_for_and_one_behind_a_slow_disk_is_given_up(tmp_path: Path) -> None:
    class Slow:
        """Memory whose snapshot is read and written when the test says so."""

        kind = "device"

        def __init__(self) -> None:
            self.begun, self.read, self.written = threading.Event(), threading.Event(), threading.Event()

        def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
            self.begun.set()
            assert self.read.wait(PATIENCE_S)
            left()
            assert self.written.wait(PATIENCE_S)
            with open(path, "wb") as file:
                write_footer(file.fileno(), 0, footer)

    said: list[str] = []
    told = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        told.set()

    snapshots = Snapshots(say)
    first, second = Slow(), Slow()
    snapshots.write(KeptUpdate(1, "a", [], cast(Any, first)), str(tmp_path / f"g-{'a' * 32}"))
    assert first.begun.wait(PATIENCE_S)
    waiting = threading.Thread(target=snapshots.leave_memory)
    waiting.start()
    assert waiting.is_alive(), "its memory is read"
    first.read.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive(), "the disk is not waited for"
    for version in (2, 3):
        snapshots.write(KeptUpdate(version, "b", [], cast(Any, second)), str(tmp_path / f"g-{'b' * 32}"))
    snapshots.leave_memory()
    first.written.set()
    while len(said) < 2:
        assert told.wait(PATIENCE_S)
        told.clear()
    assert ["no snapshot of version 2" in said[0], "no snapshot of version 3" in said[1]] == [True, True]
    assert not second.begun.is_set() and (tmp_path / f"g-{'a' * 32}").exists()


class Written:
    """Memory that is kept at once."""

    kind = "host"

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        with open(path, "wb") as file:
            write_footer(file.fileno(), 0, footer)
        left()


def test_no_snapshot_is_written_into_a_folder_that_others_can_reach_and_one_line_says_why(tmp_path: Path) -> None:
    """Its name can be foreseen, so another user can have made it first, with a forged snapshot in it."""
    folder = tmp_path / "enginepool-0123456789ab"
    forged = folder / f"g-{'a' * 32}"
    said: list[str] = []
    snapshots = Snapshots(said.append)
    for there in (True, False):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        if there:
            forged.write_bytes(b"forged")
        else:
            forged.unlink()
        snapshots.write(KeptUpdate(1, "a", [], cast(Any, Written())), str(forged))
        snapshots.finish()
        assert said.pop().endswith(f": others can enter {folder} (mode 0777): chmod 700 it") and not said
        assert list(folder.iterdir()) == ([forged] if there else [])
        remove_all(str(forged))
        assert list(folder.iterdir()) == ([forged] if there else []), "what lies there is not ours to remove"
    folder.rmdir()
    snapshots.write(KeptUpdate(1, "a", [], cast(Any, Written())), str(forged))
    snapshots.finish()
    assert not said and forged.exists() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    remove_all(str(forged))
    assert not folder.exists()


class FullDisk:
    """Memory of 4 MB whose snapshot finds no room until the test makes some."""

    kind = "device"

    def __init__(self, *, room: bool = False) -> None:
        self.room = room
        self.tries = 0

    def save(self, path: str, footer: Footer, left: Callable[[], None]) -> None:
        self.tries += 1
        left()  # its bytes are copied, and the copy finds no room
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with open(path, "wb") as file:
            write_footer(file.fileno(), 4_000_000, footer)


class Story:
    """Snapshots in a folder, what they say, and what the operator is told."""

    def __init__(self, folder: Path, again_s: float) -> None:
        self.folder = folder
        self.said: SimpleQueue[str] = SimpleQueue()
        self.told: SimpleQueue[str] = SimpleQueue()
        self.snapshots = Snapshots(self.said.put, self.told.put, again_s)

    def path(self, letter: str) -> Path:
        return self.folder / f"g-{letter * 32}"

    def write(self, version: int, letter: str, memory: FullDisk) -> None:
        kept = KeptUpdate(version, letter, [Tensor("w", "float32", (1_000_000,))], cast(Any, memory))
        self.snapshots.write(kept, str(self.path(letter)))

    def missing(self, version: int, letter: str) -> str:
        return (
            f"no snapshot of version {version} in {self.path(letter)}: No space left on device; it needs 20.8 MB: 4.0 MB, and "
            "16.8 MB that stay free"
        )


def test_a_snapshot_without_room_is_tried_again_until_it_is_written_and_one_line_says_why(tmp_path: Path) -> None:
    story, memory = Story(tmp_path, again_s=0.001), FullDisk()
    story.write(2, "b", memory)
    for _ in range(3):
        assert story.told.get(timeout=PATIENCE_S) == story.missing(2, "b")
    memory.room = True
    while why := story.told.get(timeout=PATIENCE_S):
        assert why == story.missing(2, "b")
    assert story.path("b").exists() and memory.tries >= 4
    story.snapshots.finish()
    assert story.told.empty()
    assert story.said.get_nowait() == story.missing(2, "b")
    assert story.said.get_nowait() == f"the snapshot of version 2 is written: {story.path('b')}" and story.said.empty()


def without_room(tmp_path: Path) -> tuple[Story, FullDisk]:
    """A snapshot of version 2 was tried once, on a full disk, and waits for its next try."""
    story, memory = Story(tmp_path, again_s=PATIENCE_S), FullDisk()
    story.write(2, "b", memory)
    assert story.told.get(timeout=PATIENCE_S) == story.missing(2, "b")
    return story, memory


@pytest.mark.parametrize("room", [False, True])
def test_a_snapshot_that_waits_for_room_has_its_last_try_at_the_end(tmp_path: Path, room: bool) -> None:
    story, memory = without_room(tmp_path)
    memory.room = room
    story.snapshots.finish()
    assert memory.tries == 2 and story.path("b").exists() == room
    assert story.told.get_nowait() == ("" if room else story.missing(2, "b"))


def test_a_snapshot_is_not_tried_again_when_a_later_version_is_committed(tmp_path: Path) -> None:
    (story, old), new = without_room(tmp_path), FullDisk(room=True)
    old.room = True
    story.write(3, "c", new)
    assert story.told.get(timeout=PATIENCE_S) == ""
    assert (old.tries, new.tries) == (1, 1)
    assert story.path("c").exists() and not story.path("b").exists()


def test_a_snapshot_is_not_tried_again_when_weights_without_one_are_committed(tmp_path: Path) -> None:
    story, memory = without_room(tmp_path)
    memory.room = True
    story.snapshots.stop_trying()
    story.snapshots.finish()
    assert memory.tries == 1 and not story.path("b").exists()


def test_a_snapshot_that_waits_for_room_is_given_up_when_its_memory_changes(tmp_path: Path) -> None:
    story, memory = without_room(tmp_path)
    memory.room = True
    story.snapshots.leave_memory()
    line = f"no snapshot of version 2 in {story.path('b')}: an update came while the one before it was written"
    assert story.told.get(timeout=PATIENCE_S) == line
    story.snapshots.finish()
    assert memory.tries == 1 and not story.path("b").exists()
