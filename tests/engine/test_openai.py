"""OpenAI's clients over a pool, by SGLang's own serving classes.

With chosen tokens: what the API makes of them does not depend on a model (`openai_scenes.py`). With a real engine: its answers
are those of a direct computation.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool.config import GroupConfig, PoolConfig
from tests.engine.forked import PRELOADED, ForkedDaemon
from tests.engine.language_models import LanguageModel
from tests.engine.openai_vision import IMAGES
from tests.engine.reference import Models, Reference
from tests.engine.vision_models import make_vision_model
from tests.process.forking import ForkedProcess, file_command
from tests.process.processes import Processes

#: as in `openai_real.py`
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
PROMPTS = [[5, 17, 300], [*range(40, 60)]]
TOP = 3
SCENES = Path(__file__).with_name("openai_scenes.py")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "CI" not in os.environ and importlib.util.find_spec("jsonschema") is None,
        reason="needs the jsonschema package: make setup",
    ),
]


def names() -> list[str]:
    """Of the scenes."""
    skipped = ("__init__", "ask", "streamed", "until", "failure")
    lines = SCENES.read_text("utf-8").splitlines()
    found = [line.split("def ")[1].partition("(")[0] for line in lines if line.startswith("    async def ")]
    return [name for name in found if name not in skipped]


def run(program: Path, model: Path, folder: Path) -> str:
    """What a program said, in a process that has SGLang."""
    log = folder / "log.txt"
    with Processes() as processes, log.open("w") as output:
        command = [*file_command(program), str(model)]
        process = ForkedProcess(command, PRELOADED, cwd=folder, stdout=output, stderr=output)
        status = processes.keep(process).wait(400)
    said = log.read_text("utf-8")
    assert status == 0, said
    return said


@pytest.fixture(scope="module")
def played(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each scene failed, or ""; one process plays them all."""
    said = run(SCENES, models.causal, tmp_path_factory.mktemp("scenes"))
    return dict(json.loads(line) for line in said.splitlines() if line.startswith('["'))


@pytest.mark.every_version
@pytest.mark.parametrize("name", names())
def test_openai_client(played: dict[str, str], name: str) -> None:
    assert played[name] == "", played[name]


@pytest.mark.every_version
def test_images_of_a_chat_go_to_the_pool_with_their_placeholders_and_are_not_opened_here(tmp_path: Path) -> None:
    placeholder = make_vision_model(tmp_path / "model")
    said = run(Path(__file__).with_name("openai_vision.py"), tmp_path / "model", tmp_path)
    whole, streamed, refused = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))
    for asked, images in ((whole, [IMAGES]), (streamed, IMAGES)):
        assert asked["images"] == images
        [ids] = asked["prompts"]
        places = [at for at, token in enumerate(ids) if token == placeholder[1]]
        assert len(places) == 2 and all(ids[at - 1 : at + 2] == placeholder for at in places)
    assert refused == ["messages", 400]


@pytest.fixture(scope="module")
def direct(models: Models) -> LanguageModel:
    return LanguageModel(models.causal)


@pytest.fixture(scope="module")
def answered(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a real engine answered."""
    said = run(Path(__file__).with_name("openai_real.py"), models.causal, tmp_path_factory.mktemp("real"))
    return json.loads(next(line for line in said.splitlines() if line.startswith("{")))


def test_a_chat_is_what_transformers_generates_greedily(answered: dict[str, Any], reference: Reference) -> None:
    tokenizer = reference.tokenizer
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ids = reference.greedy(prompt, 40)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert answered["whole"] == [text, text]
    assert answered["streamed"] == text and answered["blocking"] == [text, text]
    logprobs = reference.following(prompt, ids)[1]
    for name in ("logprobs", "streamed_logprobs"):
        np.testing.assert_allclose(answered[name], logprobs, rtol=1e-4, atol=1e-5)
    assert (answered["usage"]["prompt_tokens"], answered["usage"]["completion_tokens"]) == (len(prompt), 80)
    ids = reference.greedy(tokenizer.encode("Paris is"), 8)
    assert answered["completion"] == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_most_probable_tokens_are_those_of_transformers_also_in_a_stream(
    answered: dict[str, Any], direct: LanguageModel, reference: Reference
) -> None:
    prompt = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    table = direct.logprobs([*prompt, *reference.greedy(prompt, 40)])[len(prompt) - 1 : -1]
    for found in answered["tops"]:
        np.testing.assert_allclose(found, np.sort(table)[:, ::-1][:, :TOP], rtol=1e-4, atol=1e-4)


def same(wanted: list[str], found: list[str]) -> bool:
    """Texts of tokens. Of a token that is no whole character, versions of SGLang have different ones."""
    return all(one == other or "\ufffd" in one for one, other in zip(wanted, found, strict=True))


def test_an_echoed_prompt_has_the_log_probabilities_of_transformers(
    answered: dict[str, Any], direct: LanguageModel, reference: Reference
) -> None:
    for prompt, found in zip(PROMPTS, answered["echoed"], strict=True):
        ids = [*prompt, *reference.greedy(prompt, 1)]
        table, decode = direct.logprobs(ids), reference.tokenizer.decode
        assert same([decode([one]) for one in ids], found["tokens"])
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        expected = [table[at, token] for at, token in enumerate(ids[1:])]
        np.testing.assert_allclose(found["token_logprobs"][1:], expected, rtol=1e-4, atol=1e-4)
        best = [[*one.items()] for one in found["top_logprobs"][1:]]
        assert same([decode([one]) for one in table[:-1].argmax(axis=1)], [text for [(text, _)] in best])
        np.testing.assert_allclose([value for [(_, value)] in best], table[:-1].max(axis=1), rtol=1e-4, atol=1e-4)


def test_a_tool_that_must_be_called_is_called_as_its_schema_says(answered: dict[str, Any]) -> None:
    name, arguments = answered["tool"]
    assert (name, set(arguments)) == ("weather", {"city"})
    assert arguments["city"] in ("Rome", "Paris")


def test_a_stream_that_is_left_ends_in_the_engine(answered: dict[str, Any]) -> None:
    """Long before its 3,000 tokens: the pool counts a request that was taken back as failed."""
    assert answered["failed"] == 1


def test_a_chat_on_the_command_line_is_answered(processes: Processes, models: Models, tmp_path: Path) -> None:
    group = GroupConfig(model=str(models.causal), engine="sim", operations=["generate"], options={"vocab": 512})
    config = PoolConfig({"policy": group}, listen=f"ipc://{tmp_path}/pool.sock", state_dir=str(tmp_path / "state"))
    daemon = ForkedDaemon(processes, config).listening()
    code = "from enginepool.cli.main import app; app()"
    (tmp_path / "lines").write_text("Hello\nAnd again\n/quit\n")
    command = [sys.executable, "-c", code, "chat", "--connect", daemon.address, "--max-tokens", "20", "--temperature", "0"]
    with (tmp_path / "lines").open() as lines, (tmp_path / "log").open("w") as log:
        status = processes.keep(ForkedProcess(command, PRELOADED, cwd=tmp_path, stdin=lines, stdout=log, stderr=log)).wait(200)
    said = (tmp_path / "log").read_text("utf-8")
    assert status == 0 and len([line for line in said.splitlines() if line.strip()]) >= 2, said
