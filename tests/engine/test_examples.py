"""What needs the real engine of the examples and of the programs on pages runs; the example teaches its model what it says."""

import re
from pathlib import Path

import pytest

from enginepool.cli.tiny_model_files import make_tiny_model
from tests.engine.forked import PRELOADED
from tests.house.markdown import Block
from tests.house.test_docs import lay_out, programs, run_forked
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


@pytest.mark.parametrize(("name", "block"), programs(model=True))
def test_a_program_on_a_page_runs_on_a_real_model(processes: Processes, name: str, block: Block, tmp_path: Path) -> None:
    """The comment before it names the models, in place of which tiny ones are made."""
    lay_out(name, tmp_path)
    for model in block.value.split():
        make_tiny_model(tmp_path / model, "reward" if "reranker" in model else "causal")
    program = tmp_path / "program.py"
    program.write_text(block.text, "utf-8")
    run_forked(processes, file_command(program), tmp_path, PRELOADED)
