"""The journal holds the old record or the new one, also when a write fails or is cut off, and says so when it holds neither."""

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginepool.coordinator.core.effects import KeepHistory, KeepHolds, WriteAdapters
from enginepool.coordinator.core.events import Event, HoldsKept
from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import GroupWeights
from enginepool.coordinator.shell import journal as under_test
from enginepool.coordinator.shell.journal import BLOCK, ROOM, Journal, Record, prepare_state_dir
from enginepool.coordinator.shell.journal_writer import JournalWriter
from enginepool.errors import ConfigError

CALLS = ("open", "pwrite", "fsync", "fdatasync", "replace", "close")
SECTOR = 512


def record(epoch: int, size: int = 0) -> Record:
    """One whose text grows with `size`."""
    return Record(epoch, {"policy": GroupWeights(epoch, f"{epoch:032x}", snapshot="s" * size)})


def held(directory: Path) -> Record:
    """What a coordinator finds that starts now."""
    journal = Journal(directory)
    journal.close()
    return journal.record


class Crash(BaseException):
    """The process ends here."""


class Disk:
    """The system's calls, of which the `last`th is never made; what has surely reached the disk, and what only may have."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.last = 1 << 30
        #: raised instead of that call, and of so many more
        self.error: BaseException = Crash()
        self.errors = 1
        #: these calls fail, too
        self.failing: set[int] = set()
        self.calls: list[str] = []
        #: by inode: synced content, and writes since
        self.synced: dict[int, bytes] = {}
        self.pending: dict[int, list[tuple[int, bytes]]] = {}
        #: Files that are open here stay, also without a name: a new one does not get the number of one that the disk still has.
        self._kept: list[int] = []
        self.names = self._now()
        for name, inode in self.names.items():
            self.synced[inode] = (directory / name).read_bytes()
            self._kept.append(os.open(directory / name, os.O_RDONLY))

    def let_go(self) -> None:
        while self._kept:
            os.close(self._kept.pop())

    def _now(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self.directory) if entry.name.startswith("journal")}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any) -> Any:
            self.calls.append(name)
            if self.last <= len(self.calls) < self.last + self.errors:
                raise self.error
            if len(self.calls) in self.failing:
                if name == "close":
                    real(*args)
                raise OSError(errno.EIO, "Input/output error")
            result = real(*args)
            self._note(name, args, result)
            return result

        return call

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "open" and args[1] & os.O_TRUNC:
            self._kept.append(os.dup(result))
            self.pending[os.fstat(result).st_ino] = []
            self.synced[os.fstat(result).st_ino] = b""
        elif name == "pwrite":
            self.pending.setdefault(os.fstat(args[0]).st_ino, []).append((args[2], args[1][:result]))
        elif name in ("fsync", "fdatasync"):
            inode = os.fstat(args[0]).st_ino
            if inode == os.stat(self.directory).st_ino:
                self.names = self._now()
            else:
                self.synced[inode] = os.pread(args[0], 1 << 30, 0)
                self.pending[inode] = []

    def after_power_loss(self, random: Random, to: Path) -> None:
        """Write what may be found: each name as it was or as it is, each sector that was not synced old, new or half new."""
        to.mkdir()
        names = random.choice((self.names, self._now()))
        for name, inode in names.items():
            content = bytearray(self.synced[inode])
            for at, data in self.pending.get(inode, []):
                for start in range(0, len(data), SECTOR):
                    sector = data[start : start + SECTOR]
                    reached = random.choice((0, len(sector), random.randint(0, len(sector))))
                    end = at + start + reached
                    content.extend(bytes(max(0, end - len(content))))
                    content[at + start : end] = sector[:reached]
            (to / name).write_bytes(content)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk under a journal that holds one record."""
    journal = Journal(tmp_path)
    journal.write(record(1))
    journal.close()
    watched = Disk(tmp_path)
    monkeypatch.setattr(under_test, "os", watched)
    yield watched
    watched.let_go()


def test_what_was_written_is_what_a_successor_finds(tmp_path: Path) -> None:
    assert held(tmp_path) == Record()
    for epoch in range(1, 6):
        journal = Journal(tmp_path)
        assert journal.record == (record(epoch - 1) if epoch > 1 else Record())
        journal.write(record(epoch))
        assert journal.record == record(epoch) and not journal.torn
        journal.close()
    assert held(tmp_path) == record(5)


def test_a_person_can_read_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(record(1))
    journal.write(record(2))
    journal.close()
    first, second = (tmp_path / "journal.json").read_text().splitlines()
    assert len(first) == len(second) == BLOCK - 1
    lines = [msgspec.json.decode(line) for line in (first, second)]
    assert [(line["sequence"], line["record"]["epoch"]) for line in lines] == [(1, 1), (2, 2)]


def test_a_write_in_place_is_one_write_and_one_sync(disk: Disk) -> None:
    journal = Journal(disk.directory)
    before = len(disk.calls)
    for epoch in (2, 3, 4):
        journal.write(record(epoch))
    assert disk.calls[before:] == ["pwrite", "fdatasync"] * 3
    journal.close()


def test_what_does_not_fit_gets_a_larger_file_before_it_has_the_name(disk: Disk) -> None:
    journal = Journal(disk.directory)
    before = len(disk.calls)
    journal.write(record(2, 2 * BLOCK))
    assert disk.calls[before:] == ["open", "pwrite", "fsync", "replace", "close", "open", "fsync", "close"]
    journal.write(record(3, 2 * BLOCK))
    assert disk.calls[-2:] == ["pwrite", "fdatasync"]
    journal.close()
    assert held(disk.directory) == record(3, 2 * BLOCK)


@pytest.mark.parametrize("writes", [1, 2])
def test_a_write_that_is_torn_at_any_byte_leaves_the_old_record_or_the_new_one(tmp_path: Path, writes: int) -> None:
    journal = Journal(tmp_path)
    for epoch in range(1, writes + 1):
        journal.write(record(epoch))
    path = tmp_path / "journal.json"
    old = path.read_bytes()
    journal.write(record(writes + 1))
    journal.close()
    new = path.read_bytes()
    changed = [at for at in range(len(old)) if old[at] != new[at]]
    for at in range(changed[0], changed[-1] + 2):
        for torn in (new[:at] + old[at:], old[: changed[0]] + old[changed[0] : at] + new[at:]):
            path.write_bytes(torn)
            assert held(tmp_path) in (record(writes), record(writes + 1)), at
    path.write_bytes(old)
    assert held(tmp_path) == record(writes)


def test_after_a_torn_write_the_line_that_holds_is_not_written_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for epoch in (1, 2):
        journal.write(record(epoch))
    journal.close()
    path = tmp_path / "journal.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:BLOCK] + b"#" + whole[BLOCK + 1 :])
    journal = Journal(tmp_path)
    assert journal.torn and journal.record == record(1)
    journal.write(record(3))
    journal.close()
    assert path.read_bytes()[:BLOCK] == whole[:BLOCK]
    assert held(tmp_path) == record(3)


@pytest.mark.parametrize("line", [0, 1])
def test_a_line_with_bytes_that_are_no_text_is_a_damaged_one(tmp_path: Path, line: int) -> None:
    journal = Journal(tmp_path)
    for epoch in (1, 2):
        journal.write(record(epoch))
    journal.close()
    path = tmp_path / "journal.json"
    content = bytearray(path.read_bytes())
    for at in range(200):
        damaged = bytearray(content)
        damaged[line * BLOCK + at] = 0xFF
        path.write_bytes(damaged)
        journal = Journal(tmp_path)
        journal.close()
        assert journal.torn and journal.record == record(2 - line), at


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"{}", b'{"epoch":1,"weights":{}}', b" " * BLOCK + b"\n" * BLOCK, b"\xff" * (2 * BLOCK)],
    ids=["empty", "odd", "json", "one_record", "blank", "noise"],
)
def test_a_file_without_a_whole_record_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"journal\.json.*neither of its two lines.*or move it away"):
        Journal(tmp_path)
    assert (tmp_path / "journal.json").read_bytes() == content


def test_two_damaged_lines_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for epoch in (1, 2):
        journal.write(record(epoch))
    journal.close()
    path = tmp_path / "journal.json"
    path.write_bytes(path.read_bytes().replace(b'"epoch":', b'"epoch":9'))
    with pytest.raises(ConfigError, match=r"journal\.json"):
        Journal(tmp_path)


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(Record("seven"))  # type: ignore[arg-type]
    journal.close()
    with pytest.raises(ConfigError, match=r"journal\.json: not a journal of this pool"):
        Journal(tmp_path)


def test_a_second_pool_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    first.write(record(1))
    with pytest.raises(ConfigError, match="in use by another pool"):
        Journal(tmp_path)
    first.write(record(2))
    first.close()
    assert held(tmp_path) == record(2)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((0, 100, BLOCK, 3 * BLOCK)), min_size=1, max_size=5),
    step=st.integers(1, 45),
    random=st.randoms(use_true_random=False),
)
def test_a_crash_between_any_two_calls_leaves_the_last_record_or_the_one_that_was_being_written(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], step: int, random: Random
) -> None:
    directory = tmp_path_factory.mktemp("crash")
    disk = Disk(directory)
    disk.last, disk.errors = step, 1 << 30
    said = trying = Record()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "os", disk)
        journal = Journal(directory)
        try:
            for epoch, size in enumerate(sizes, 1):
                trying = record(epoch, size)
                journal.write(trying)
                said = trying
        except Crash:
            assert len(disk.calls) >= step
    # The process is gone, and its lock with it.
    journal._locks[0].close()  # pyright: ignore[reportPrivateUsage]
    if journal._file is not None:  # pyright: ignore[reportPrivateUsage]
        os.close(journal._file)  # pyright: ignore[reportPrivateUsage]
    disk.after_power_loss(random, directory / "found")
    disk.let_go()
    assert held(directory / "found") in (said, trying)
    assert held(directory) in (said, trying)


@pytest.mark.parametrize(("size", "step"), [*((0, step) for step in (1, 2)), *((BLOCK, step) for step in range(1, 9))])
def test_what_could_not_be_written_is_not_found_later(disk: Disk, size: int, step: int) -> None:
    journal = Journal(disk.directory)
    disk.last, disk.error = len(disk.calls) + step, OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        journal.write(record(2, size))
    assert journal.record == record(1)
    assert held_beside(disk) == record(1)
    journal.write(record(3, size))
    journal.close()
    assert held(disk.directory) == record(3, size)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((0, 100, BLOCK, 3 * BLOCK)), min_size=1, max_size=6),
    failing=st.sets(st.integers(1, 60), max_size=12),
    random=st.randoms(use_true_random=False),
)
def test_what_a_write_returned_for_is_on_the_disk_whichever_calls_failed_before(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], failing: set[int], random: Random
) -> None:
    directory = tmp_path_factory.mktemp("errors")
    disk = Disk(directory)
    disk.failing = failing
    found = [Record()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "os", disk)
        journal = Journal(directory)
        for epoch, size in enumerate(sizes, 1):
            try:
                journal.write(record(epoch, size))
                found = [record(epoch, size)]
            except OSError:
                found.append(record(epoch, size))
            assert journal.record == found[0]
        disk.failing = set()
        journal.close()
    disk.after_power_loss(random, directory / "found")
    disk.let_go()
    assert held(directory / "found") in found


def held_beside(disk: Disk) -> Record:
    """What a successor would find, while this one lives."""
    copy = disk.directory / "copy"
    copy.mkdir()
    (copy / "journal.json").write_bytes((disk.directory / "journal.json").read_bytes())
    return held(copy)


def test_after_a_disk_that_took_nothing_for_a_while_the_next_write_succeeds(disk: Disk) -> None:
    journal = Journal(disk.directory)
    disk.last, disk.errors, disk.error = len(disk.calls) + 1, 3, OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        journal.write(record(2))
    assert journal.record == record(1)
    disk.errors = 0
    journal.write(record(3))
    journal.close()
    assert held(disk.directory) == record(3)


def test_what_is_written_after_the_file_was_removed_is_found_by_a_successor(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for epoch in (1, 2):
        journal.write(record(epoch))
    (tmp_path / "journal.json").unlink()
    journal.write(record(3))
    journal.write(record(4))
    journal.close()
    assert held(tmp_path) == record(4)


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced", "folder_removed", "folder_renamed", "lock_removed"])
@pytest.mark.parametrize("call", ["write", "check", "keep"])
def test_what_is_written_after_a_path_was_removed_or_renamed_is_found_by_a_successor(
    tmp_path: Path, how: str, call: str
) -> None:
    state = tmp_path / "state"
    prepare_state_dir(state)
    journal = Journal(state)
    for epoch in (1, 2):
        journal.write(record(epoch))
    path, old = state / "journal.json", tmp_path / "old"
    if how.startswith("folder"):
        state.rename(old)
        if how == "folder_removed":
            shutil.rmtree(old)
    elif how == "lock_removed":
        (state / "lock").unlink()
    else:
        path.rename(old)
        if how == "replaced":
            path.write_bytes(old.read_bytes())
    if call == "write":
        journal.write(record(3))
    elif call == "check":
        journal.check()
    else:
        journal.keep()
    assert journal.moved == str(state if how.startswith("folder") or how == "lock_removed" else path)
    with pytest.raises(ConfigError, match="in use by another pool"):
        Journal(state)
    if how == "folder_renamed":
        # Its records name worker processes of this pool.
        with pytest.raises(ConfigError, match="in use by another pool"):
            Journal(old)
    journal.close()
    assert held(state) == record(3 if call == "write" else 2)


@pytest.mark.parametrize("call", ["write", "check", "keep"])
def test_a_folder_that_was_renamed_and_has_its_name_again_is_used_again(tmp_path: Path, call: str) -> None:
    state, old, other = tmp_path / "state", tmp_path / "old", tmp_path / "other"
    prepare_state_dir(state)
    journal = Journal(state)
    journal.write(record(1))
    state.rename(old)
    journal.write(record(2))
    state.rename(other)
    old.rename(state)
    getattr(journal, call)(*[record(3)] * (call == "write"))
    assert journal.moved == str(state)
    for folder in (state, other):
        with pytest.raises(ConfigError, match="in use by another pool"):
            Journal(folder)
    journal.keep()
    journal.close()
    assert held(state) == record(3 if call == "write" else 2)


def test_a_folder_that_another_pool_has_made_meanwhile_is_refused_by_its_name(tmp_path: Path) -> None:
    state = tmp_path / "state"
    prepare_state_dir(state)
    journal = Journal(state)
    journal.write(record(1))
    shutil.rmtree(state)
    prepare_state_dir(state)
    other = Journal(state)
    other.write(record(9))
    for act in (journal.keep, journal.check):
        with pytest.raises(OSError, match=r"in use by another pool.*/state'"):
            act()
    journal.close()
    other.close()
    assert held(state) == record(9)


def test_a_folder_on_another_file_system_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_state_dir(tmp_path / "state")
    journal = Journal(tmp_path / "state")
    shutil.rmtree(tmp_path / "state")
    monkeypatch.setattr(journal, "_device", -1)
    with pytest.raises(OSError, match=r"on another file system.*/state'"):
        journal.check()
    journal.close()


def test_nothing_is_written_where_the_parent_of_the_directory_was_removed(tmp_path: Path) -> None:
    prepare_state_dir(tmp_path / "a" / "state")
    journal = Journal(tmp_path / "a" / "state")
    journal.write(record(1))
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="/a/state"):
        journal.write(record(2))
    assert journal.record == record(1)
    journal.close()


def test_every_error_of_a_write_names_the_file(disk: Disk) -> None:
    journal = Journal(disk.directory)
    disk.last, disk.error = len(disk.calls) + 1, OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(OSError, match=r"Read-only file system: '/\S+/journal\.json'"):
        journal.check()
    journal.close()


def test_after_a_check_one_more_update_needs_no_new_file(disk: Disk) -> None:
    journal = Journal(disk.directory)
    journal.check()
    before = len(disk.calls)
    journal.write(record(2, ROOM - 500))
    assert disk.calls[before:] == ["pwrite", "fdatasync"]
    journal.close()


def test_what_is_paused_and_sleeps_is_written_as_soon_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that sleep would be woken by the next coordinator, on the GPU of a trainer."""
    lines: list[str] = []
    holds = GroupHolds(paused=True)

    def full(self: Journal, record: Record, room: int = 0) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "journal.json")

    async def story() -> None:
        journal, seen = Journal(tmp_path), asyncio.Queue[Event]()
        writer = JournalWriter(asyncio.get_running_loop(), journal, seen.put_nowait, lines.append, lambda: None)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "write", full)
            writer.perform(KeepHolds(3, "g", holds))
            assert isinstance(await seen.get(), HoldsKept)
        writer.look()
        writer.close()
        journal.close()

    asyncio.run(story())
    assert lines == ["the journal could not be written: journal.json: No space left on device"]
    assert held(tmp_path).holds == {"g": holds}


@pytest.mark.parametrize("what", ["adapters", "moved"])
def test_what_is_written_when_the_coordinator_ends_asks_for_nothing_more(tmp_path: Path, what: str) -> None:
    """An error on its loop would end it as an internal error does."""
    told: list[Event] = []
    lines: list[str] = []
    errors: list[dict[str, Any]] = []

    async def story() -> None:
        loop, folder = asyncio.get_running_loop(), tmp_path / "state"
        loop.set_exception_handler(lambda _, error: errors.append(error))
        prepare_state_dir(folder)
        journal = Journal(folder)
        journal.write(record(1))
        writer = JournalWriter(loop, journal, told.append, lines.append, lambda: writer.write_history())
        writer.perform(KeepHistory("g", []))
        while not (folder / "updates.json").exists():
            await asyncio.sleep(0.01)
        if what == "moved":
            shutil.rmtree(folder)
        writer.perform(WriteAdapters((1, 1), "g", []))
        writer.close()
        journal.close()
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(story())
    assert errors == [] and told == []
    assert held(tmp_path / "state").adapters == {"g": []}
