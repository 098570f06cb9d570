"""What clients and workers have in common when they connect: one function sets the options of both sockets."""

import asyncio
from typing import Any

import pytest
import zmq

from enginepool.client.link import ClientLink as ClientLink
from enginepool.net import dealer
from enginepool.workers.link import WorkerLink as WorkerLink

ADDRESS = "tcp://127.0.0.1:1"


@pytest.mark.parametrize("peer", ["client", "worker"])
def test_an_attempt_to_connect_is_given_up_before_the_kernel_waits_long_to_repeat_it(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SYN that is lost in a partition is repeated after 1, 2, 4, 8 … seconds: an outage of 45 s lasted 61."""
    timeouts: list[int] = []

    def connect(self: "zmq.Socket[Any]", address: str) -> None:
        if address == ADDRESS:  # a monitor connects, too
            timeouts.append(int(self.getsockopt(zmq.CONNECT_TIMEOUT)))
        zmq.backend.Socket.connect(self, address)

    async def open_link() -> None:
        if peer == "client":
            client = ClientLink(ADDRESS, lambda message, frames: None, print)
            client.open()
            client.close(0)
        else:
            worker = WorkerLink(ADDRESS, lambda event: None, lambda: None)
            worker.start()
            worker.stop(0)

    monkeypatch.setattr(zmq.Socket, "connect", connect)
    asyncio.run(open_link())
    assert timeouts == [dealer.CONNECT_MS] == [2000]
