"""The default endpoint: an ipc socket in a directory that its user alone can enter."""

import os
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest

from enginepool import BlockingPool
from enginepool.errors import ConfigError
from enginepool.net.address import default_address
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes


@pytest.fixture
def short(processes: Processes) -> Path:
    """A folder whose path leaves room for those of sockets; removed when the processes have ended."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    processes.then(folder.cleanup)
    return Path(folder.name)


def test_a_pool_that_nothing_is_said_about_listens_where_clients_look_and_others_cannot(
    processes: Processes, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any umask: the directory keeps other users out."""
    tmp_path = short
    monkeypatch.setenv("HOME", str(tmp_path))
    config = msgspec.structs.replace(sim_pool(tmp_path, workers=1), listen="", state_dir="~/.local/state/enginepool")
    before = os.umask(0)
    try:
        daemon = ForkedDaemon(processes, config).listening()
    finally:
        os.umask(before)
    assert daemon.address == default_address() == f"ipc://{tmp_path}/.local/state/enginepool/pool.sock"
    folder = tmp_path / ".local" / "state" / "enginepool"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for parent in (folder.parent, folder.parent.parent):
        assert not stat.S_IMODE(parent.stat().st_mode) & 0o022
    with BlockingPool.connect(daemon.address) as pool:
        pool.ready(PATIENCE_S)
    code, out, _ = call("status", env={"HOME": str(tmp_path)})
    assert code == 0 and "g-0" in out
    assert daemon.end() == 0


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o1777])
@pytest.mark.parametrize("what", ["listen", "listen_workers", "state_dir"])
def test_a_directory_that_others_can_enter_is_refused_in_one_line(
    processes: Processes, tmp_path: Path, what: str, mode: int
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    value = str(folder) if what == "state_dir" else f"ipc://{folder}/x.sock"
    daemon = ForkedDaemon(processes, msgspec.structs.replace(sim_pool(tmp_path, workers=0), **{what: value}))
    assert daemon.process.wait(PATIENCE_S) == 2
    daemon.end()
    assert len(daemon.lines) == 1, daemon.lines
    advice = "name a directory of your own" if mode & stat.S_ISVTX else "chmod 700 it"
    assert f"others can enter {folder} (mode {mode:04o}): {advice}" in daemon.lines[0]
    assert not [path for path in folder.iterdir() if path.is_socket()]


def test_a_home_that_is_too_long_for_a_socket_gives_way_to_the_runtime_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / ("h" * 100)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == f"ipc://{tmp_path}/enginepool/pool.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    with pytest.raises(ConfigError, match="longer than the 107 bytes of a socket's path"):
        default_address()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match="name an address of your own"):
        default_address()
