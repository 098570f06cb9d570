"""Snapshots of a stager during updates: what they wait for, and what waits for them."""

import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

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
