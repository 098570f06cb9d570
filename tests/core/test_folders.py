"""Folders of processes: nobody's are removed by the next process, those of the living are left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginepool.folders import PrivateFolder

#: makes a folder, says where, and waits
MAKES_ONE = """
import sys
from pathlib import Path
from enginepool.folders import PrivateFolder
print(PrivateFolder(Path(sys.argv[1]), "enginepool-x-").path, flush=True)
sys.stdin.read()
"""


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKES_ONE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "deep").mkdir()
        (tmp_path / "enginepool-x-of-nobody").mkdir()
        forgotten: list[Path] = []
        first = PrivateFolder(tmp_path, "enginepool-x-", forgotten.append)
        assert theirs.is_dir() and forgotten == []
        other.kill()
    second = PrivateFolder(tmp_path, "enginepool-x-", forgotten.append)
    assert forgotten == [theirs]
    assert sorted(os.listdir(tmp_path)) == sorted([first.path.name, second.path.name, "enginepool-x-of-nobody"])
    for folder in (first, first, second):
        folder.remove()
    assert os.listdir(tmp_path) == ["enginepool-x-of-nobody"]


def test_a_folder_where_nothing_can_be_locked_is_there_all_the_same_and_nobody_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(_descriptor: int, _how: int) -> None:
        raise OSError("no locks here")

    with monkeypatch.context() as without:
        without.setattr("fcntl.flock", flock)
        folder = PrivateFolder(tmp_path, "enginepool-x-")
        other = PrivateFolder(tmp_path, "enginepool-x-")
    PrivateFolder(tmp_path, "enginepool-x-").remove()
    assert folder.path.is_dir() and other.path.is_dir()
    folder.remove()
    other.remove()
