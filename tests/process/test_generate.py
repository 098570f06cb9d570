"""Streams through a real coordinator and its sim workers: a fault in the middle changes no token."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from enginepool.protocol.messages import Sampling
from enginepool.workers.sim.tokens import expected_output
from tests.process.attackers import Header, Raw, raw
from tests.process.daemons import Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

VOCAB = 1000
#: 16 slots, and a step of 10 ms
GENERATES: dict[str, Any] = {
    "vocab": VOCAB, "context": 2000, "forward_s": 0.01, "inflight_rows": 16, "inflight_tokens": 20_000,
}  # fmt: skip


class Streams:
    """A client that speaks the protocol by hand, and the tokens of its streams."""

    def __init__(self, link: Raw) -> None:
        self.link = link
        #: by request and sequence: its tokens, and why it ended
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.ends: dict[tuple[int, int], str] = {}
        self.taken: dict[int, int] = {}
        self.finals: dict[int, Header] = {}

    def ask(self, id: int, prompt: list[int], n: int = 1, **sampling: Any) -> None:
        frames = np.array(prompt, np.int32).tobytes(), np.array([len(prompt)], np.uint32).tobytes()
        specs = [["items", "int32", [len(prompt)]], ["item_lengths", "uint32", [1]]]
        header = {"type": "generate", "id": id, "frames": specs, "n": n, "sampling": sampling, "stream": True}
        self.link.say(header, *frames)

    def hear(self) -> Header:
        """The next tokens, or a final answer."""
        message = self.link.wait_for("tokens", "generated", "error")
        if message["type"] == "tokens":
            self._tokens(message)
        else:
            self.finals[message["id"]] = message
        return message

    def _tokens(self, message: Header) -> None:
        flat, first = np.frombuffer(message["payload"][0], np.int32).tolist(), 0
        for key, sequence, at, count, _ in message["runs"]:
            mine = self.tokens.setdefault((key, sequence), [])
            assert at == len(mine), "a token is missing, or came twice"
            mine += flat[first : first + count]
            first += count
            self.taken[key] = self.taken.get(key, 0) + count
            self.link.say({"type": "credit", "id": key, "taken": self.taken[key]})
        for key, sequence, reason, _ in message.get("ended", ()):
            self.ends[key, sequence] = reason

    def until_tokens(self, count: int) -> None:
        """So many are there, of all streams together."""
        while sum(map(len, self.tokens.values())) < count:
            self.hear()

    def until_answered(self, ids: range) -> None:
        while not self.finals.keys() >= set(ids):
            self.hear()


@contextmanager
def streams(daemon: Daemon) -> Generator[Streams]:
    with raw(daemon.address) as link:
        yield Streams(link.hello())


def generating(processes: Processes, directory: Path, workers: int = 2, **options: Any) -> Daemon:
    config = sim_pool(directory, workers=workers, options={**GENERATES, **options}, generates=True)
    return ForkedDaemon(processes, config).listening()


def workers_of(daemon: Daemon) -> list[int]:
    """The processes of its workers."""
    return [msgspec.json.decode(path.read_bytes())["pid"] for path in Path(daemon.config.state_dir).glob("workers/*.json")]


def prompt(i: int) -> list[int]:
    return [(7 * i + j) % VOCAB for j in range(3 + i % 5)]


def check(client: Streams, ids: range, n: int = 1, **sampling: Any) -> None:
    """Every stream has the tokens of an undisturbed run."""
    for one in ids:
        assert client.finals[one]["type"] == "generated", client.finals[one]
        for sequence in range(n):
            tokens, _, reason = expected_output(prompt(one), Sampling(**sampling), sample=sequence, vocab=VOCAB)
            assert client.tokens[one, sequence] == tokens
            assert client.ends[one, sequence] == reason


def test_tokens_are_those_of_the_undisturbed_run_when_a_worker_is_killed_in_the_middle(
    processes: Processes, tmp_path: Path
) -> None:
    daemon, ids = generating(processes, tmp_path), range(1, 25)
    with streams(daemon) as client:
        for one in ids:
            client.ask(one, prompt(one), temperature=0.0, max_new_tokens=200)
        client.until_tokens(600)
        os.kill(workers_of(daemon)[0], signal.SIGKILL)
        client.until_answered(ids)
        check(client, ids, temperature=0.0, max_new_tokens=200)
    assert daemon.end() == 0
