"""`enginepool serve --check` refuses, in one line, what `serve` would refuse on this host."""

import socket
from pathlib import Path

import pytest

from enginepool.coordinator.shell.journal import Journal
from tests.process.commands import call

SIM = '[groups.a]\nmodel = "m"\nengine = "sim"\n'
CUDA = '[groups.a]\nmodel = "some/model"\ndevice = "cuda"\n'
TCP = 'listen = "tcp://127.0.0.1:*"\nkeys = "{folder}/keys"\n'


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A directory that other users can enter; with a file in it."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "file").touch()
    return folder


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (TCP + SIM, "keys: {folder}/keys/server.key: No such file or directory"),
        ('listen = "ipc://{folder}/p.sock"\n' + SIM, "cannot listen: others can enter {folder} (mode 0755): chmod 700 it"),
        ('listen = "ipc://{folder}/no/p.sock"\n' + SIM, "cannot listen: No such file or directory"),
        ('state_dir = "{folder}/file"\n' + SIM, "state_dir = '{folder}/file': a file, not a directory"),
        ('state_dir = "{folder}/file/state"\n' + SIM, "state_dir = '{folder}/file/state': cannot be written: Not a directory"),
        ('state_dir = "{folder}"\n' + SIM, "state_dir = '{folder}': others can enter {folder} (mode 0755)"),
        ('state_dir = "/proc/enginepool"\n' + SIM, "state_dir = '/proc/enginepool': cannot be written: "),
        (SIM + 'checkpoint_roots = ["/", "runs"]', "groups.a.checkpoint_roots[1] = 'runs': an absolute path"),
        (SIM + 'checkpoint_roots = ["{folder}/no"]', "groups.a.checkpoint_roots[0] = '{folder}/no': no such directory"),
    ],
)
def test_what_this_host_cannot_serve_with_is_one_line(
    config: str, said: str, checked: bool, open_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "pool.toml"
    if "state_dir" not in config:
        config = 'state_dir = "{state}"\n' + config
    path.write_text(config.replace("{folder}", str(open_folder)).replace("{state}", str(tmp_path / "state")))
    code, out, err = call("serve", "--config", path, *(["--check"] if checked else []))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said.replace("{folder}", str(open_folder)) in err


def test_cuda_without_a_gpu_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="needs the sglang package: make setup")
    path = tmp_path / "pool.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n{CUDA}')
    code, _, err = call("serve", "--config", path, "--check", env={"CUDA_VISIBLE_DEVICES": ""})
    assert (code, err.count("\n")) == (2, 1)
    assert f"{path}: groups.a.device = 'cuda': no GPU is visible here" in err
    assert call("serve", "--config", path, "--check", env={"CUDA_VISIBLE_DEVICES": "0"})[0] == 0


def test_the_check_leaves_no_file_and_passes_while_the_pool_runs(tmp_path: Path) -> None:
    path, state = tmp_path / "pool.toml", tmp_path / "state"
    path.write_text(f'state_dir = "{state}"\nlisten = "ipc://{state}/p.sock"\n{SIM}')
    code, out, err = call("serve", "--config", path, "--check")
    assert (code, err) == (0, "") and ": good; groups: a (1 x sim)" in out
    assert list(state.iterdir()) == []
    journal = Journal(state)  # of the pool that runs
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"{state}/p.sock")
        taken.listen()
        code, out, _ = call("serve", "--config", path, "--check")
    assert code == 0 and out.endswith(f"listens on ipc://{state}/p.sock, where a pool runs now\n")
    journal.close()


@pytest.mark.parametrize("key", ["listen", "listen_workers"])
def test_the_check_refuses_a_port_of_another_process_and_leaves_a_free_one_free(tmp_path: Path, key: str) -> None:
    path, state = tmp_path / "pool.toml", tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config = f'state_dir = "{state}"\nlisten = "ipc://{state}/p.sock"\ninsecure_loopback = true\n'
        config = config.replace(f"ipc://{state}/p.sock", address) if key == "listen" else f'{config}{key} = "{address}"\n'
        path.write_text(config + SIM)
        code, out, err = call("serve", "--config", path, "--check")
        assert (code, out, err) == (2, "", f"enginepool: {address}: cannot listen: in use by another process\n")
        journal = Journal(state)  # of a pool that runs: the port may be its own
        assert call("serve", "--config", path, "--check")[0] == 0
        journal.close()
    for _ in range(2):
        assert call("serve", "--config", path, "--check")[::2] == (0, "")
    assert [file for file in state.iterdir() if file.is_socket()] == []
