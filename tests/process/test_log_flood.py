"""Peers that cause lines of the log on purpose: they fill no disk, and take no place of the lines about the pool."""

import asyncio
import os
from pathlib import Path

import msgspec
import zmq

from enginepool import Pool
from enginepool.coordinator.shell.log import BUDGETS
from tests.process.attackers import Raw, Socket, raw
from tests.process.daemons import PATIENCE_S, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

MESSAGES, CONNECTIONS, INCARNATIONS = 100_000, 1000, 5000
BAD = (b"\xc1", b"", b"\x81\xa4type\xa5hello", msgspec.msgpack.encode({"type": "no such type", "id": 1}))


def settled(peer: Raw) -> None:
    """All that was sent on this link has been handled."""
    peer.say({"type": "status", "id": 77})
    while peer.wait_for("status_report")["id"] != 77:
        pass


def send_bad_messages(address: str) -> None:
    """And read the answers, as a peer does that wants its connection to last."""
    with raw(address, SNDHWM=0, RCVHWM=0) as peer:
        for number in range(MESSAGES):
            peer.socket.send(BAD[number % len(BAD)])
            if number % 100 == 0:
                drain(peer.socket)
        settled(peer)


def drain(socket: Socket) -> None:
    while socket.poll(0, zmq.POLLIN):
        socket.recv_multipart()


def connect_and_disconnect(address: str) -> None:
    for number in range(CONNECTIONS):
        with raw(address) as peer:
            peer.hello(bytes([number % 256]))


def register_and_replace(workers: str, group: str) -> None:
    """One link, on which one incarnation after the other registers."""
    with raw(workers, SNDHWM=0) as peer:
        for number in range(INCARNATIONS):
            peer.say({"type": "register", "group": group, "incarnation": f"x-{number}", "host": "h" * 900})
        peer.say({"type": "ping", "at": 77})
        while peer.wait_for("pong", "error").get("code", "hello_required") != "hello_required":
            pass


def test_peers_that_cause_lines_fill_no_disk_and_the_pool_is_still_heard(processes: Processes, tmp_path: Path) -> None:
    daemon = ForkedDaemon(processes, sim_pool(tmp_path, workers=1)).listening()

    async def scene() -> None:
        async with Pool.connect(daemon.address) as pool:
            await pool.ready()
            before = len(daemon.lines)
            await asyncio.to_thread(send_bad_messages, daemon.address)
            await asyncio.to_thread(connect_and_disconnect, daemon.address)
            await asyncio.to_thread(register_and_replace, daemon.workers, "g")
            await asyncio.to_thread(register_and_replace, daemon.workers, "no such group")
            own = [one for one in (await pool.status()).groups[0].workers if one.name == "g-0"]
            os.kill(own[0].pid, 9)
            await asyncio.to_thread(daemon.wait_for, "starting worker")
            flood = daemon.lines[before:]
            written = sum(len(line) + 1 for line in flood)
            print(f"{len(flood)} lines, {written} bytes")  # noqa: T201 (shown where the test fails)
            assert written < 250_000
            kinds = BUDGETS["external"][0] + BUDGETS["refused"][0] + BUDGETS["client"][0]
            assert len(flood) < 2 * kinds
            await pool.score([1], [[2]], label_token_ids=[3], timeout=PATIENCE_S)

    asyncio.run(scene())
    assert daemon.process.poll() is None
