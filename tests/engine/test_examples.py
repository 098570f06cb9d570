"""The example that needs the real engine runs, and teaches its model what it says."""

import re
from pathlib import Path

import pytest

from tests.engine.forked import PRELOADED
from tests.process.forking import ForkedProcess, file_command
from tests.process.processes import Processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


def test_the_example_of_new_weights_teaches_its_model_to_prefer_a_token(processes: Processes, tmp_path: Path) -> None:
    log = tmp_path / "output.txt"
    command = file_command(ROOT / "examples" / "new_weights.py")
    with log.open("w") as output:
        status = processes.keep(ForkedProcess(command, PRELOADED, cwd=tmp_path, stdout=output)).wait(500)
    assert status == 0, log.read_text("utf-8")
    said = log.read_text("utf-8")
    assert said.count("the hold took") == 20
    found = re.search(r"the good token was at (\d\.\d+), and is at (\d\.\d+)", said)
    assert found is not None and float(found[1]) <= float(found[2]), said
    assert " better, " in said
