"""Folders of processes: those of ended processes are removed by the next one, those of living processes stay."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from enginepool.host.folders import PrivateFolder, exposed, make_private, written_by_others

#: makes a folder, says where, and waits
MAKES_ONE = """
import sys
from pathlib import Path
from enginepool.host.folders import PrivateFolder
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


def test_a_folder_where_nothing_can_be_locked_is_made_and_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- folders that no other user reaches --------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o377])
def test_a_private_folder_is_private_for_any_umask(tmp_path: Path, umask: int) -> None:
    """Under the strictest one its parents exist already, as the owner's own: else no process could make anything in them."""
    folder = tmp_path / "a" / "b" / "c"
    if umask & 0o200:
        folder.parent.mkdir(parents=True)
    before = os.umask(umask)
    try:
        make_private(folder)
        make_private(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert exposed(folder) == ""


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o720, 0o740, 0o704, 0o755, 0o777, 0o1777])
def test_a_folder_that_others_can_read_write_or_enter_is_exposed(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    folder.chmod(mode)
    advice = "name a directory of your own" if mode & stat.S_ISVTX else "chmod 700 it"
    assert exposed(folder) == f"others can enter {folder} (mode {mode:04o}): {advice}"
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert exposed(link) == exposed(folder)
    folder.chmod(0o700)
    assert exposed(link) == exposed(folder) == exposed(folder / ".." / "f") == ""


@pytest.mark.parametrize(("mode", "allowed"), [(0o777, False), (0o720, False), (0o702, False), (0o755, True), (0o1777, True)])
def test_a_parent_in_which_others_can_rename_exposes_what_lies_below(tmp_path: Path, mode: int, allowed: bool) -> None:
    parent = tmp_path / "p"
    folder = parent / "q" / "f"
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    parent.chmod(mode)
    assert exposed(folder) == (
        "" if allowed else f"others can write to {parent} (mode {mode:04o}): chmod go-w it, or name another directory"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which can give a folder to another user")
def test_what_belongs_to_another_user_is_exposed_and_so_is_what_its_links_lead_to(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    make_private(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    assert exposed(link) == exposed(link / "..") == f"the symbolic link {link} belongs to another user"
    os.chown(folder, 12345, 12345)
    assert exposed(folder) == f"{folder} belongs to another user"
    assert written_by_others(folder) == written_by_others(folder / "new") == f"{folder} belongs to another user"
    (folder / "own").mkdir(mode=0o700)
    assert exposed(folder / "own") == written_by_others(folder / "own") == f"{folder} belongs to another user"


def test_a_folder_that_others_may_read_alone_is_written_by_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir(mode=0o755)
    assert written_by_others(folder) == written_by_others(folder / "new" / "one") == ""
    for mode in (0o775, 0o757, 0o1777):
        folder.chmod(mode)
        advice = "" if mode & stat.S_ISVTX else "chmod go-w it, or "
        said = f"others can write to {folder} (mode {mode:04o}): {advice}name another directory"
        assert written_by_others(folder) == written_by_others(folder / "new" / "one") == said
