"""A pool on TCP with keys: each role says each message over a raw link, and a key that is taken away says nothing more."""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import zmq
import zmq.utils.monitor

from enginepool import BlockingPool, Pool, errors
from enginepool.coordinator.shell.authentication import NAMED, Authenticator
from enginepool.net.keys import AUTHORIZED, FIRST, make_keys, read_key
from enginepool.protocol.messages import FromWorker
from enginepool.protocol.roles import FROM_CLIENT, INCLUDES
from enginepool.workers.sim.scores import expected_scores
from tests.process.attackers import Raw, raw
from tests.process.commands import call
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes
from tests.wire.make_vectors import VALID
from tests.wire.test_vectors import mutated

#: the message types of a worker, with the role that they need
FROM_WORKER = dict.fromkeys((str(struct.__struct_config__.tag) for struct in get_args(FromWorker)), "worker")
#: messages, over all the roles that may not send them
MUTATED = 100_000
#: what a role on the wrong endpoint, or a message of another role, is answered
FORBIDDEN = "forbidden"


def keyed(directory: Path, **changes: Any) -> Any:
    """A pool of one sim worker on TCP, and its keys."""
    make_keys(directory / "keys", FIRST)
    config = sim_pool(directory, workers=1, options={"tensors": [["w", "float32", [4]]]})
    tcp = "tcp://127.0.0.1:*"
    return msgspec.structs.replace(config, listen=tcp, listen_workers=tcp, keys=str(directory / "keys"), **changes)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Its own worker connects over TCP, too."""
    with Processes() as processes:
        daemon = ForkedDaemon(processes, keyed(tmp_path_factory.mktemp("pool"))).listening()
        with connect(daemon, "client") as client:
            client.ready(PATIENCE_S)
        yield daemon


def connect(daemon: Daemon, role: str) -> BlockingPool:
    return BlockingPool.connect(daemon.address, keys=f"{daemon.config.keys}/{role}.key")


def curve(daemon: Daemon, name: str, **changes: bytes) -> dict[str, Any]:
    """The options of a raw socket with this key."""
    key = read_key(Path(daemon.config.keys) / f"{name}.key")
    options = {"curve_serverkey": key.server, "curve_publickey": key.public, "curve_secretkey": key.secret}
    return {**{option: value.encode() for option, value in options.items()}, **changes}


def vector(way: str, type_: str) -> list[bytes]:
    found = next(v for v in VALID if v.direction == way and v.header["type"] == type_)
    return [bytes.fromhex(frame) for frame in found.entry()["frames"]]


@pytest.mark.parametrize("role", FIRST)
@pytest.mark.parametrize("type_", FROM_CLIENT)
def test_at_the_client_endpoint_each_role_says_what_it_may(pool: Daemon, role: str, type_: str) -> None:
    with raw(pool.address, **curve(pool, role)) as link:
        frames = vector("client-coordinator", type_)
        allowed = FROM_CLIENT[type_] in INCLUDES[FIRST[role]]
        link.socket.send_multipart(frames)
        link.say({"type": "status", "id": 77})
        refused: list[Any] = []
        while True:
            answer = link.wait_for("error", "status_report")
            if answer.get("id") == 77:
                break
            refused.append(answer)
        codes = [answer.get("code") for answer in refused]
        assert (FORBIDDEN in codes) == (not allowed), (role, type_, refused)
        if role == "worker":
            assert answer["code"] == FORBIDDEN


@pytest.mark.parametrize("role", FIRST)
@pytest.mark.parametrize("type_", FROM_WORKER)
def test_the_worker_endpoint_hears_no_other_role(pool: Daemon, role: str, type_: str) -> None:
    with raw(pool.workers, **curve(pool, role)) as link:
        link.socket.send_multipart(vector("worker-coordinator", type_))
        answer = link.wait_for("error", "pong")
        unknown = "unknown_group" if type_ in ("register", "get_settings") else "hello_required"
        assert answer["code"] == (unknown if role == "worker" else FORBIDDEN), (role, type_, answer)


def silent(address: str, **options: Any) -> bool:
    """Whether a peer with these options gets no answer, although one with a good key that asks after it does."""
    with raw(address, **options) as link:
        monitor = link.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | DISCONNECTED)
        link.socket.setsockopt(zmq.SNDTIMEO, 0)
        # Refused, or cut off: libzmq tries again by itself, so that one such end is enough.
        assert monitor.poll(int(PATIENCE_S * 1000))
        event = zmq.utils.monitor.recv_monitor_message(monitor)["event"]
        link.socket.disable_monitor()
        monitor.close()
        return event != zmq.EVENT_HANDSHAKE_SUCCEEDED


DISCONNECTED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED


@pytest.mark.parametrize("endpoint", ["address", "workers"])
def test_who_has_no_authorized_key_is_not_connected(pool: Daemon, endpoint: str, tmp_path: Path) -> None:
    """No key; a key that is not authorized; a good one, but for another coordinator; a public key without its secret."""
    address = getattr(pool, endpoint)
    good = curve(pool, "admin")
    assert not silent(address, **good)
    public, secret = zmq.curve_keypair()
    assert silent(address)
    assert silent(address, **{**good, "curve_publickey": public, "curve_secretkey": secret})
    pool.wait_for(f"keys: {public.decode()} is not in ")
    assert silent(address, **{**good, "curve_serverkey": public})
    assert silent(address, **{**good, "curve_secretkey": secret})


def test_a_client_without_a_key_is_told_what_may_be_wrong(pool: Daemon, tmp_path: Path) -> None:
    with pytest.raises(errors.ConnectError, match="no keys were given, and TCP needs some"):
        BlockingPool.connect(pool.address, connect_timeout=0.5)
    make_keys(tmp_path, {"stranger": "admin"})
    with pytest.raises(errors.ConnectError, match="does not know the key that was given"):
        BlockingPool.connect(pool.address, keys=tmp_path / "stranger.key", connect_timeout=0.5)


def test_a_worker_command_with_the_key_of_a_client_is_told_its_role(pool: Daemon, tmp_path: Path) -> None:
    keys = Path(pool.config.keys) / "client.key"
    code, _, err = call("worker", "--connect", pool.workers, "--keys", keys, "--state-dir", tmp_path / "outside")
    assert code == 1 and err.endswith("the worker endpoint needs the role worker; this link has: client\n")


def test_strangers_do_not_fill_the_log(tmp_path: Path) -> None:
    """Each key is named once, and only so many of them until the list changes."""
    make_keys(tmp_path / "keys", FIRST)
    listed = tmp_path / "keys" / AUTHORIZED
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Authenticator(tmp_path / "keys", context)
    try:
        keys = [zmq.curve_keypair()[0] for _ in range(NAMED + 4)]
        assert not any(gate.callback("enginepool", key) for key in keys * 2)
        assert [line.split()[1] for line in gate.refused()] == [key.decode() for key in keys[:NAMED]]
        assert not gate.callback("enginepool", keys[-1])
        assert gate.refused() == []
        listed.write_text(listed.read_text() + f"client {keys[0].decode()} late\n")
        assert "5 keys may connect" in gate.reload()
        assert gate.callback("enginepool", keys[0])
        assert not gate.callback("enginepool", keys[-1])
        [line] = gate.refused()
        assert line == f"keys: {keys[-1].decode()} is not in {listed}: its connection was refused"
    finally:
        gate.close()
        context.destroy(linger=0)


def test_clients_of_each_role_may_do_what_their_key_says(pool: Daemon) -> None:
    with connect(pool, "client") as client, connect(pool, "publisher") as publisher, connect(pool, "admin") as admin:
        for each in (client, publisher, admin):
            scores = each.score([1], [[2], [3]], label_token_ids=[4]).scores
            np.testing.assert_array_equal(scores.shape, (2, 1))
        for call in (lambda: client.set_version(5), client.weights, client.weights_digest, lambda: client.weight("w")):
            with pytest.raises(errors.Forbidden, match="needs the role publisher; this link has: client"):
                call()
        version = publisher.weights().version
        assert publisher.set_version(version + 1).outcome == "committed"
        with pytest.raises(errors.Forbidden, match="needs the role admin"):
            publisher.set_version(1, new_run=True)
        assert admin.set_version(version + 2, new_run=True).outcome == "committed"
    with pytest.raises(errors.Forbidden, match="needs the role client; this link has: worker"):
        connect(pool, "worker")


def test_a_key_that_is_taken_away_says_nothing_more_and_a_new_one_is_heard(processes: Processes, tmp_path: Path) -> None:
    """Also on a link that stands; without a restart; the others do not notice. A broken list changes nothing."""
    daemon = ForkedDaemon(processes, keyed(tmp_path)).listening()
    keys = Path(daemon.config.keys)
    listed = keys / AUTHORIZED
    with connect(daemon, "publisher") as stays, raw(daemon.address, **curve(daemon, "client")) as link:
        stays.ready(PATIENCE_S)
        link.hello()
        listed.write_text("nonsense\n")
        daemon.wait_for("the keys of before hold")
        assert link.ask({"type": "status"})["type"] == "status_report"
        make_keys(keys, {"late": "client"})
        lines = [f"{FIRST[name]} {read_key(keys / f'{name}.key').public} {name}" for name in ("publisher", "worker")]
        late = read_key(keys / "late.key").public
        listed.write_text("\n".join([*lines, f"client {late} late"]) + "\n")
        daemon.wait_for("3 keys may connect")
        for message in ({"type": "status"}, {"type": "ping"}, {"type": "goodbye"}):
            assert link.ask(message)["code"] == "unauthorized"
        assert stays.status().clients == 1, "what it had asked for is given up"
        with connect(daemon, "late") as client:
            assert client.score([1], [[2]], label_token_ids=[3]).scores.shape == (1, 1)
        assert silent(daemon.address, **curve(daemon, "client"))
        # A worker without a key loses its place, and its work.
        listed.write_text("\n".join(lines[:1]) + "\n")
        daemon.wait_for("its key is no longer authorized")
        assert stays.status().groups[0].workers[0].stage != "ready"


class Vandal(threading.Thread):
    """Sends mutated golden messages to one endpoint, with a valid key of a role that may not send the most of them."""

    def __init__(self, daemon: Daemon, role: str, way: str, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.address = daemon.address if way == "client-coordinator" else daemon.workers
        self.options = curve(daemon, role)
        table = FROM_CLIENT if way == "client-coordinator" else FROM_WORKER
        forbidden = {type_ for type_, least in table.items() if least not in INCLUDES[FIRST[role]]}
        vectors = [v.entry() for v in VALID if v.direction == way and v.header["type"] in forbidden]
        self.sources = [[bytes.fromhex(frame) for frame in v["frames"]] for v in vectors]
        self.count = count
        self.chance = random.Random(seed)
        self.sent = 0
        self.heard: dict[str, int] = {}

    def run(self) -> None:
        with raw(self.address, **self.options) as link:
            link.socket.setsockopt(zmq.SNDTIMEO, int(PATIENCE_S * 1000))
            for _ in range(self.count):
                link.socket.send_multipart(mutated(list(self.chance.choice(self.sources)), self.chance) or [b""])
                self.sent += 1
                while link.socket.poll(0):
                    self._hear(link)
            link.say({"type": "status", "id": 1 << 40})
            # At the worker endpoint refusals have no id, and there is one for each message.
            while self._hear(link).get("id") != 1 << 40 and sum(self.heard.values()) <= self.sent:
                continue

    def _hear(self, link: Raw) -> dict[str, Any]:
        assert link.socket.poll(int(PATIENCE_S * 1000)), self.heard
        header: dict[str, Any] = msgspec.msgpack.decode(link.socket.recv_multipart()[0])
        what = header["code"] if header["type"] == "error" else header["type"]
        if what == "ping":
            return header  # The coordinator asks whether what it sent has been read.
        self.heard[what] = self.heard.get(what, 0) + 1
        return header


#: of a client, because a mutation may make a message of another type, which it may send
MAY = {"pong", "status_report", "welcome", "hello_required", "protocol_version"}
#: the answers to a peer that may send none of these messages: never that it was done
HARMLESS = {FORBIDDEN, "malformed", "bad_request", "unsupported", "too_large"}


def test_mutated_messages_with_valid_keys_of_the_wrong_role_change_nothing(pool: Daemon) -> None:
    """Each is refused, with any content; others are served meanwhile, and on the same weights as before."""
    part = MUTATED // 5
    vandals = [
        Vandal(pool, "client", "client-coordinator", MUTATED - 4 * part, 1),
        Vandal(pool, "worker", "client-coordinator", part, 2),
        Vandal(pool, "client", "worker-coordinator", part, 3),
        Vandal(pool, "publisher", "worker-coordinator", part, 4),
        Vandal(pool, "admin", "worker-coordinator", part, 5),
    ]

    async def scenario() -> None:
        async with Pool.connect(pool.address, keys=f"{pool.config.keys}/publisher.key") as client:
            before = await client.weights()
            for vandal in vandals:
                vandal.start()
            served = 0
            while any(vandal.is_alive() for vandal in vandals):
                items = [[served % 1000, 1], [2]]
                result = await asyncio.wait_for(client.score([1], items, label_token_ids=[3]), PATIENCE_S)
                expected = expected_scores([1], items, labels=[3], version=before.version)["scores"]
                np.testing.assert_array_equal(result.scores, expected)
                served += 1
            assert served
            after = await client.weights()
            assert (after.version, len(after.history), after.workers) == (before.version, len(before.history), before.workers)

    asyncio.run(scenario())
    assert sum(vandal.sent for vandal in vandals) == MUTATED
    for vandal in vandals:
        heard = vandal.heard
        allowed: set[str] = (
            {"pong", "status_report", "welcome", "hello_required", "protocol_version"} if vandal is vandals[0] else set()
        )
        assert heard.keys() <= HARMLESS | allowed, heard
        assert heard[FORBIDDEN] > vandal.count // 10, heard
    assert pool.process.poll() is None
    assert not any("Traceback" in line for line in pool.lines), pool.lines
