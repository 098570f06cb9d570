"""Running commands in tests: in this process, or as processes of their own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.processes import ROOT
from enginepool.cli import doctor_checks
from enginepool.cli.main import app
from tests.process.forking import ForkedProcess
from tests.process.processes import Processes

PROGRAM = [sys.executable, "-c", "from enginepool.cli.main import app; app()"]
#: Seconds after which a command that should have ended is a failure.
LIMIT_S = 150


def call(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env=env, prog_name="enginepool")
    return result.exit_code, result.stdout, result.stderr


def import_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the doctor take what is installed for good: importing SGLang takes it five seconds."""

    def probe(_: object) -> doctor_checks.Probe:
        return doctor_checks.Probe()

    monkeypatch.setattr(doctor_checks, "probe", probe)


def start(processes: Processes, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
    """Start a command as a process of its own, which is forked, as what it starts is (`forking`)."""
    command = [*PROGRAM, *(str(argument) for argument in arguments)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return processes.keep(ForkedProcess(command, text=True, cwd=ROOT, **streams))


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for a process: exit code, stdout, stderr."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        pytest.fail(f"still running after {LIMIT_S} s; stderr: {err}")
    return process.returncode, out, err


def records(path: Path) -> dict[int, dict[str, Any]]:
    """The output file by line number; no number may be there twice."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {record["line"]: record for record in found}
    assert len(by_line) == len(found)
    return by_line
