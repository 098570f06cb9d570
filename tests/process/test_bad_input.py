"""For any bytes at its sockets, the coordinator stays up, says what was wrong, and serves the others."""

import asyncio
import errno
import itertools
import json
import os
import random
import resource
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from enginepool import Pool
from enginepool.config import Limits, PoolConfig
from enginepool.coordinator.shell.daemon import run
from enginepool.coordinator.shell.router import CLIENT_PROOF, OPEN_FILES, WORKER_PROOF
from enginepool.errors import ConfigError
from enginepool.host.restart_policy import HOST_FAULT
from enginepool.protocol.messages import MAX_HEADER_BYTES, StatusReport
from enginepool.workers.sim.scores import expected_scores
from tests.process.commands import call, import_nothing
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.wire.make_vectors import PATH
from tests.wire.test_vectors import frames_of, mutated

Socket = zmq.Socket[bytes]

VECTORS = json.loads(PATH.read_text(encoding="utf-8"))["vectors"]
FROM_CLIENTS, FROM_WORKERS = 80_000, 20_000
#: requests that others have answered meanwhile
SERVED = 100


@pytest.fixture
def daemon(processes: Processes, tmp_path: Path) -> Daemon:
    return ForkedDaemon(processes, sim_pool(tmp_path, options={"vocab": 1000, "context": 100})).listening()


@contextmanager
def sockets() -> Generator["zmq.Context[Socket]"]:
    """A context that closes its sockets at the end; a plain one would wait for those that a failing test left open."""
    context: zmq.Context[Socket] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


class Vandal(threading.Thread):
    """Sends mutated golden messages to one socket, on a few links, as fast as they are taken: `count`, on until `enough`."""

    def __init__(self, endpoint: str, direction: str, count: int, seed: int, enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.sources = [frames_of(v) for v in VECTORS if v["direction"] == direction]
        self.sources = [frames for frames in self.sources if sum(map(len, frames)) < 10_000]
        # A higher epoch makes a coordinator start again above it: `test_epochs.py`. Here no process would start it again.
        self.sources = [frames for frames in self.sources if b"epoch" not in frames[0]]
        # A publisher may hold a group for all clients, and an operator end their requests: `test_sleep.py`.
        holds = (b"sleep", b"pause", b"abort")
        self.sources = [
            frames for frames in self.sources if not (b"control" in frames[0] and any(h in frames[0] for h in holds))
        ]
        self.count = count
        self.enough = enough
        self.chance = random.Random(seed)
        self.sent = 0
        self.refusals: set[str] = set()

    def run(self) -> None:
        with sockets() as context:
            self._send(context)

    def _send(self, context: "zmq.Context[Socket]") -> None:
        links: list[Socket] = []
        for _ in range(4):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 5000)
            socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.connect(self.endpoint)
            links.append(socket)
        decode = msgspec.msgpack.decode
        for i in itertools.count():
            if i >= self.count and self.enough.is_set():
                break
            frames = mutated(list(self.chance.choice(self.sources)), self.chance)
            if frames:
                links[i % 4].send_multipart(frames)
            self.sent += 1
            socket = links[i % 4]
            while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[operator]
                header = decode(socket.recv_multipart()[0])
                if header["type"] == "error":
                    self.refusals.add(header["code"])
        for socket in links:
            socket.close(5000)


def test_a_hundred_thousand_mutated_messages_leave_the_coordinator_up_and_others_served(daemon: Daemon) -> None:
    enough = threading.Event()
    vandals = [
        Vandal(daemon.address, "client-coordinator", FROM_CLIENTS, 1, enough),
        Vandal(daemon.workers, "worker-coordinator", FROM_WORKERS, 2, enough),
    ]

    async def both_ready(pool: Pool) -> None:
        """Wait for the pool's own workers."""
        async with asyncio.timeout(PATIENCE_S):
            while sum(w.name.startswith("g-") and w.stage == "ready" for w in (await pool.status()).groups[0].workers) < 2:
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        served = 0
        async with Pool.connect(daemon.address) as pool:
            # What a vandal says that it can do binds those who come after it.
            await both_ready(pool)
            for vandal in vandals:
                vandal.start()
            while any(vandal.is_alive() for vandal in vandals):
                items = [[served % 1000, 1], [2]]
                result = await asyncio.wait_for(pool.score([1], items, label_token_ids=[3]), PATIENCE_S)
                np.testing.assert_array_equal(result.scores, expected_scores([1], items, labels=[3])["scores"])
                served += 1
                if served == SERVED:
                    enough.set()
            assert served >= SERVED
            # A publisher may have had one restarted, or woken, with the last of its messages.
            await both_ready(pool)

    asyncio.run(scenario())
    assert sum(vandal.sent for vandal in vandals) >= FROM_CLIENTS + FROM_WORKERS
    assert daemon.process.poll() is None
    assert {"malformed", "bad_request", "unsupported", "hello_required", "protocol_version"} <= vandals[0].refusals
    assert not any("Traceback" in line for line in daemon.lines), daemon.lines


def ask(socket: Socket, frames: list[bytes]) -> dict[str, object]:
    socket.send_multipart(frames)
    assert socket.poll(int(PATIENCE_S * 1000)), "no answer"
    return msgspec.msgpack.decode(socket.recv_multipart()[0])


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Socket]:
    """A link that said hello."""
    with sockets() as context:
        socket: Socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(daemon.address)
        hello = {"type": "hello", "client": b"c" * 16, "token": b"t" * 16}
        assert ask(socket, [msgspec.msgpack.encode(hello)])["type"] == "welcome"
        yield socket


def test_bytes_that_are_no_msgpack_and_headers_over_the_limit_are_refused(raw: Socket) -> None:
    assert ask(raw, [b"\xc1 nonsense"])["code"] == "malformed"
    assert ask(raw, [b"{}"])["code"] == "malformed"
    assert ask(raw, [bytes(MAX_HEADER_BYTES + 1)])["code"] == "too_large"


def test_a_message_over_the_size_limit_is_refused_and_over_twice_that_the_link_is_cut(
    processes: Processes, tmp_path: Path
) -> None:
    limits = Limits(max_message_bytes=100_000, window_bytes=1_000_000, buffer_bytes=10_000_000)
    config = sim_pool(tmp_path, limits=limits)
    daemon = ForkedDaemon(processes, config).listening()
    with sockets() as context:
        socket: Socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(daemon.address)
        answer = ask(socket, [msgspec.msgpack.encode({"type": "ping"}), bytes(150_000)])
        assert (answer["code"], answer["limit"]) == ("too_large", "100000")
        socket.send_multipart([msgspec.msgpack.encode({"type": "ping"}), bytes(250_000)])
        assert monitor.poll(int(PATIENCE_S * 1000)), "the link was not cut"
        socket.disable_monitor()
        monitor.close()
    assert daemon.end() == 0


def test_a_client_that_never_reads_is_bounded_and_cut(processes: Processes, tmp_path: Path) -> None:
    """What it does not read counts in its window: it gets `busy`, and is cut. Others are served meanwhile."""
    limits = Limits(window_bytes=2_000_000, answers_bytes=2_000_000, max_message_bytes=2_000_000, window_requests=100_000)
    workers = 2
    config = sim_pool(tmp_path, workers=workers, limits=limits)
    daemon = ForkedDaemon(processes, config).listening()
    process = psutil.Process(daemon.process.pid)
    labels = list(range(1, 1001))
    spec = [["query", "int32", [1]], ["items", "int32", [4]], ["item_lengths", "uint32", [4]]]
    payload = [b"\1\0\0\0", b"\2\0\0\0" * 4, b"\1\0\0\0" * 4]

    unread: list[int] = []

    async def bounded_status(pool: Pool) -> StatusReport:
        report = await pool.status()
        # The client that does not read: the window and an eighth of it. The other client is asked for a proof at CLIENT_PROOF.
        assert report.client_unread_bytes <= 2_250_000 + CLIENT_PROOF
        # Each worker is asked for a proof at WORKER_PROOF. All batches of this test together weigh less.
        assert report.worker_unread_bytes <= workers * WORKER_PROOF
        unread.append(report.client_unread_bytes)
        return report

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            before = process.memory_info().rss
            with sockets() as context, context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, 10)
                # One that does not read may not see that it is cut, and could send no more.
                socket.setsockopt(zmq.SNDHWM, 0)
                socket.connect(daemon.address)
                socket.send(msgspec.msgpack.encode({"type": "hello", "client": b"n" * 16, "token": b"t" * 16}))
                # Each answer has 16 kB, the whole 64 MB.
                for i in range(1, 4001):
                    score = {"type": "score", "id": i, "labels": labels, "frames": spec}
                    await asyncio.to_thread(socket.send_multipart, [msgspec.msgpack.encode(score), *payload])
                    if i % 100 == 0:
                        await asyncio.wait_for(pool.score([1], [[i]], label_token_ids=[1]), PATIENCE_S)
                        await bounded_status(pool)
                async with asyncio.timeout(PATIENCE_S):
                    while (report := await bounded_status(pool)).groups[0].queued or report.groups[0].running:
                        await asyncio.sleep(0.05)
                # 40 are those of the other client.
                assert 40 < report.groups[0].answered < 300
                grown = process.memory_info().rss - before
                assert report.answers_bytes <= 2_000_000
                assert max(unread) > 1_000_000
                assert grown < 16_000_000, f"grown by {grown}"

    asyncio.run(scenario())
    assert daemon.end() == 0


def test_an_endpoint_or_a_state_directory_in_use_is_refused_in_one_line(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    tcp = msgspec.structs.replace(config, listen="tcp://127.0.0.1:*", insecure_loopback=True, state_dir=str(tmp_path / "tcp"))
    first = [ForkedDaemon(processes, each).listening() for each in (config, tcp)]
    for listen in (daemon.address for daemon in first):
        second = ForkedDaemon(processes, msgspec.structs.replace(tcp, listen=listen, state_dir=str(tmp_path / "other")))
        assert second.process.wait(PATIENCE_S) == 2
        second.end()
        assert len(second.lines) == 1, second.lines
        assert listen in second.lines[0] and "in use" in second.lines[0]
    third = ForkedDaemon(processes, msgspec.structs.replace(config, listen=f"ipc://{tmp_path}/third.sock"))
    assert third.process.wait(PATIENCE_S) == 2
    third.end()
    assert len(third.lines) == 1 and "state_dir" in third.lines[0] and "in use" in third.lines[0]
    for daemon in first:
        assert daemon.end() == 0


def test_a_coordinator_takes_as_many_files_as_it_may_have_for_clients_beyond_the_default(
    processes: Processes, tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Enough to start a coordinator with, with any number of files open in this process.
    few = max(map(int, os.listdir("/proc/self/fd"))) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    daemon.listening()
    soft, hard = psutil.Process(daemon.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    assert few < soft == most
    assert daemon.end() == 0


def test_the_ipc_path_of_a_pool_that_was_killed_can_be_used_again(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    first = ForkedDaemon(processes, config).listening()
    first.kill()
    second = ForkedDaemon(processes, config).listening()
    assert second.end() == 0


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) != errno.EADDRNOTAVAIL


@pytest.mark.skipif(not (socket.has_ipv6 and _has_ipv6()), reason="this host has no ::1")
def test_clients_and_workers_reach_a_pool_at_an_ipv6_address(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=1)
    config = msgspec.structs.replace(config, listen="tcp://[::1]:*", listen_workers="tcp://[::1]:*", insecure_loopback=True)
    daemon = ForkedDaemon(processes, config).listening()
    assert daemon.address.startswith("tcp://[::1]:") and daemon.workers.startswith("tcp://[::1]:")

    async def scenario() -> None:
        async with Pool.connect(daemon.address) as pool:
            result = await pool.score([1], [[2]], label_token_ids=[3], timeout=PATIENCE_S)
            np.testing.assert_array_equal(result.scores, expected_scores([1], [[2]], labels=[3])["scores"])

    asyncio.run(scenario())
    assert daemon.end() == 0


def test_a_state_directory_that_cannot_be_used_is_refused_in_one_line_by_its_name(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "workers").touch()  # of something else
    daemon = ForkedDaemon(processes, config)
    assert daemon.process.wait(PATIENCE_S) == 2
    daemon.end()
    assert len(daemon.lines) == 1, daemon.lines
    assert f"{tmp_path}/state/workers: File exists" in daemon.lines[0]


def test_a_journal_that_cannot_be_written_at_the_start_is_said_in_one_line(processes: Processes, tmp_path: Path) -> None:
    config = sim_pool(tmp_path, workers=0)
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "journal.new").symlink_to("/dev/full")
    daemon = ForkedDaemon(processes, config)
    assert daemon.process.wait(PATIENCE_S) == HOST_FAULT
    daemon.end()
    assert len(daemon.lines) == 1, daemon.lines
    assert f"{tmp_path}/state/journal.json" in daemon.lines[0] and "cannot be written" in daemon.lines[0]


def test_without_a_home_the_state_directory_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    config = msgspec.structs.replace(sim_pool(tmp_path, workers=0), state_dir=PoolConfig(groups={}).state_dir)
    with pytest.raises(ConfigError, match=r"state_dir = '~/\.local/state/enginepool': "):
        run(config)
    import_nothing(monkeypatch)
    code, out, _ = call("doctor")
    assert code == 1
    assert "state directory" in out and "set state_dir" in out


# --- what newcomers type ------------------------------------------------------------------------------------------------

SIM = '[groups.a]\nmodel = "m"\nengine = "sim"\n'


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (SIM + "tp_size = 2", "unknown key groups.a.tp_size; a setting of the engine is written as options.tp_size"),
        (SIM + 'workers = "2"', "groups.a.workers = '2': must be a whole number"),
        (SIM + "gpus = [0]", "groups.a.gpus[0] = 0: must be a string"),
        (SIM + "options = 3", "groups.a.options = 3: must be a table"),
        (
            SIM + "options = { batch_token = 3 }",
            "groups.a.options.batch_token: the engine sim has no such option; did you mean",
        ),
        (SIM + "max_batch_tokens = 0", "groups.a.max_batch_tokens = 0: more than 0, or left out"),
        (SIM + "[timing]\nping = 1", "unknown key timing.ping; did you mean ping_s?"),
        ("groups = 3", "groups = 3: must be a table"),
        ('[groups.a]\nengine = "sim"', "groups.a.model: missing, and needed"),
        ('[group.a]\nmodel = "m"', "unknown key group; did you mean groups?"),
        ('listen = "localhost:5755"\n' + SIM, "listen = 'localhost:5755': write tcp://HOST:PORT or ipc://PATH"),
        ('{"groups": {}}', "not TOML"),
    ],
)
def test_a_configuration_with_a_mistake_is_one_line_that_names_it(config: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(config)
    code, out, err = call("serve", "--config", path, "--check")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"enginepool: {path}: ") and said in err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("serve", 2, "serve needs --config POOL.TOML or --model MODEL"),
        ("serve --config none.toml", 2, "none.toml: No such file or directory"),
        ("serve --config .", 2, ".: Is a directory"),
        ("serve --engine vllm", 2, "'vllm' is not one of 'sglang', 'sim'"),
        ("serve --engine sim --state-dir pyproject.toml", 2, "state_dir = 'pyproject.toml': a file, not a directory"),
        ("serve pool.toml", 2, "unexpected extra argument(s) (pool.toml)"),
        ("status --connect 127.0.0.1:5755", 2, "'127.0.0.1:5755': write tcp://127.0.0.1:5755"),
        ("status --connect http://x:1", 2, "'http://x:1': write tcp://HOST:PORT or ipc://PATH"),
        ("statu", 2, "did you mean 'status'"),
        ("score", 2, "missing argument 'IN.jsonl'"),
        ("score none.jsonl out.jsonl", 2, "none.jsonl: no such file"),
        ("score pyproject.toml pyproject.toml", 2, "pyproject.toml: answers go to a file of their own"),
        ("score pyproject.toml /none/out.jsonl", 2, "/none: no such directory"),
        ("score pyproject.toml out.jsonl --label-token-ids yes,no", 2, "--label-token-ids = 'yes,no': write token ids"),
        ("score pyproject.toml out.jsonl --label 5", 2, "no such option: --label (possible options: --help, --labels)"),
        ("ready --timeout soon", 2, "invalid value for '--timeout'"),
        ("weights publish folder", 2, "missing option '--version'"),
        ("tiny-model pyproject.toml", 2, "pyproject.toml: a file stands there; name a new directory"),
    ],
)
def test_a_command_with_a_mistake_is_one_line_that_names_it(
    command: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    got, out, err = call(*command.split())
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert said.lower() in err.lower()


def test_a_line_for_score_with_a_mistake_says_what_to_write(daemon: Daemon, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = [{"role": "user", "content": "Good day!"}]
    lines: list[tuple[dict[str, object], str]] = [
        ({"query": [1], "items": [[2]], "labels": [3]}, "labels[0]: a whole number; must be a string"),
        ({"query": [1], "items": [[2]], "label_ids": [3]}, "unknown key label_ids; did you mean label_token_ids?"),
        ({"query": chat, "items": ["a"]}, "chat messages: apply the chat template first"),
        ({"query": "a", "items": [chat]}, "chat messages: apply the chat template first"),
        ({"query": [1], "items": ["a"]}, "items[0]: text; the query is token ids"),
        ({"query": [1], "items": [[2]]}, "label_token_ids: a causal model scores label token ids; name at least one"),
        ({"query": [1], "items": [[2]], "label_token_ids": [3], "group": "x"}, "group: 'x' is none of: g"),
        ({"query": [1], "items": [[2]], "id": {}}, "id: an object; must be a whole number, or a string, or null"),
        ({"query": [1], "items": [[2]], "truncation": "middle"}, "truncation: 'middle'; one of error, left, right"),
        ({"messages": chat}, "messages: one chat; give a list of chats"),
        ({"messages": [[{"role": "user", "content": ["a"]}]]}, "messages[0][0].content: a list; a text"),
        ({"messages": [chat], "chat_template_kwargs": {"a": {}}}, "chat_template_kwargs['a']: a dict; True, False, None, a"),
        (
            {"query": [1], "items": [[2]], "messages": [chat]},
            "needs query and items, or prompts and responses, or messages, and only one of these; got query, items, messages",
        ),
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line, _ in lines))
    assert call("score", source, target, "--connect", daemon.address)[0] == 1
    found = {record["line"]: record["error"]["message"] for record in map(json.loads, target.read_text().splitlines())}
    for number, (_, said) in enumerate(lines, 1):
        assert found[number].startswith(f"line {number}: ") and said in found[number], found[number]


def test_a_prompt_of_logprobs_that_is_too_long_is_called_a_prompt(daemon: Daemon, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompts": [1] * 200, "responses": [[2]]}))
    assert call("logprobs", source, target, "--connect", daemon.address)[0] == 1
    error = json.loads(target.read_text())["error"]
    assert error["message"] == f"line 1: responses[0]: 201 tokens with its prompt; at most {error['limit']}"
