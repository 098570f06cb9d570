"""The systemd unit of the docs: what systemd would do with it, done to `enginepool serve`."""

import configparser
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from enginepool.cli.coordinator_process import RestartPolicy
from enginepool.config import Timing
from tests.house import markdown
from tests.process import commands
from tests.process.commands import ROOT, call
from tests.process.daemons import PATIENCE_S, end_workers
from tests.process.processes import Processes
from tests.process.test_planned_stop import runs

PAGE = ROOT / "docs" / "restarts.md"


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    """The unit that the page shows."""
    (text,) = [block.text for block in markdown.blocks(PAGE.read_text("utf-8")) if block.text.startswith("[Unit]")]
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    parser.read_string(text)
    return parser


def test_its_times_fit_those_of_the_pool(unit: configparser.ConfigParser) -> None:
    service, timing, policy = unit["Service"], Timing(), RestartPolicy()
    assert float(service["TimeoutStopSec"]) > 2 * timing.drain_s
    assert float(service["RestartSec"]) < timing.orphan_s
    # All starts that the limit allows lie within its interval, also where each of them crashes as slowly as counts as often.
    start_s = policy.window_s + float(service["RestartSec"])
    assert unit.getint("Unit", "StartLimitBurst") * start_s < unit.getfloat("Unit", "StartLimitIntervalSec")


def test_a_worker_that_the_kernel_kills_does_not_end_the_pool(unit: configparser.ConfigParser) -> None:
    assert unit["Service"]["OOMPolicy"] == "continue"
    assert unit["Service"]["KillMode"] == "process"


def test_a_configuration_that_cannot_be_used_is_not_tried_again(unit: configparser.ConfigParser, tmp_path: Path) -> None:
    config = tmp_path / "pool.toml"
    config.write_text("no_such_key = 1\n")
    assert call("serve", "--config", config)[0] == int(unit["Service"]["RestartPreventExitStatus"])


def test_restart_keeps_the_workers_and_stop_ends_them(
    unit: configparser.ConfigParser, processes: Processes, tmp_path: Path
) -> None:
    service = unit["Service"]
    program, *words = service["ExecStart"].split()
    assert (program, words[:2]) == ("enginepool", ["serve", "--config"])
    config = tmp_path / "pool.toml"
    address = f"ipc://{tmp_path}/pool.sock"
    config.write_text(
        f'listen = "{address}"\nstate_dir = "{tmp_path}/state"\n[groups.g]\nmodel = "sim"\nengine = "sim"\nworkers = 1\n'
    )
    processes.then(lambda: end_workers(f"{tmp_path}/state"))

    def start() -> tuple["subprocess.Popen[str]", int]:
        main = commands.start(processes, "serve", "--config", config, stderr=subprocess.DEVNULL, start_new_session=True)
        code, _, err = call("ready", "--timeout", PATIENCE_S, "--connect", address)
        assert code == 0, err
        (record,) = (tmp_path / "state" / "workers").glob("*.json")
        return main, int(record.read_text().partition('"pid":')[2].partition(",")[0])

    def signalled(main: "subprocess.Popen[str]", number: signal.Signals) -> int:
        """KillMode=process: the main process gets it alone."""
        coordinator = psutil.Process(main.pid).children()
        os.kill(main.pid, number)
        code = main.wait(float(service["TimeoutStopSec"]))
        assert psutil.wait_procs(coordinator, timeout=PATIENCE_S)[1] == [], "the coordinator ends with `serve`"
        return code

    main, worker = start()
    assert signalled(main, signal.Signals[service["RestartKillSignal"]]) == 0
    assert runs(worker)
    main, adopted = start()
    assert adopted == worker
    assert signalled(main, signal.SIGKILL) != 0, "on-failure starts it again"
    main, adopted = start()
    assert adopted == worker
    assert signalled(main, signal.SIGTERM) == 0
    assert not runs(worker)
