"""OpenAI's clients over a pool, by SGLang's own serving classes.

With chosen tokens: what the API makes of them does not depend on a model (`openai_scenes.py`). With a real engine: its answers
are those of a direct computation.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.engine.forked import PRELOADED
from tests.engine.reference import Models
from tests.process.forking import ForkedProcess, file_command
from tests.process.processes import Processes

SCENES = Path(__file__).with_name("openai_scenes.py")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="needs the jsonschema package: make setup"),
]


def names() -> list[str]:
    """Of the scenes."""
    skipped = ("__init__", "ask", "streamed", "until", "failure")
    lines = SCENES.read_text("utf-8").splitlines()
    found = [line.split("def ")[1].partition("(")[0] for line in lines if line.startswith("    async def ")]
    return [name for name in found if name not in skipped]


@pytest.fixture(scope="module")
def played(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each scene failed, or ""; one process plays them all."""
    folder = tmp_path_factory.mktemp("scenes")
    log = folder / "log.txt"
    with Processes() as processes, log.open("w") as output:
        command = [*file_command(SCENES), str(models.causal)]
        process = ForkedProcess(command, PRELOADED, cwd=folder, stdout=output, stderr=output)
        status = processes.keep(process).wait(300)
    said = log.read_text("utf-8")
    assert status == 0, said
    return dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))


@pytest.mark.every_version
@pytest.mark.parametrize("name", names())
def test_openai_client(played: dict[str, str], name: str) -> None:
    assert played[name] == "", played[name]
