"""What is an address here is one to ZeroMQ, and what is none gets told in a line what one looks like."""

import pytest
import zmq

from enginepool.host import LONGEST_PATH
from enginepool.net.address import FORM, wrong_address

GOOD = [
    "tcp://127.0.0.1:5755", "tcp://host-1.example:1", "tcp://a_b:65535", "tcp://[::1]:5", "tcp://[fe80::1%lo]:5", "tcp://::1:5",
    "tcp://127.0.0.1:0;127.0.0.1:5755", "ipc://pool.sock", "ipc:///tmp/a b/ü.sock", "ipc://@abstract",
    f"ipc://{'x' * LONGEST_PATH}",
]  # fmt: skip

#: what is wrong -> what is said of it
BAD = {
    **dict.fromkeys(
        ["", "x", "tcp:127.0.0.1:5755", "tcp://", "tcp://x", "tcp://:5", "tcp://a b:5", "tcp://x/y:5", "tcp://*:5",
         "tcp://ü:5", "TCP://x:5", "http://x:5", "inproc://x", "ipc://", " tcp://x:5", "tcp://tcp://x:5"],
        f"write {FORM}",
    ),
    **dict.fromkeys(
        ["tcp://x:", "tcp://x:abc", "tcp://x:0", "tcp://x:*", "tcp://x:-1", "tcp://x:+1", "tcp://x:65536", "tcp://x:\u0665",
         f"tcp://x:{'9' * 5000}", "tcp://x:5/"],
        f"write {FORM}; a port is 1 to 65535",
    ),
    "127.0.0.1:5755": "write tcp://127.0.0.1:5755",
    "localhost:5755": "write tcp://localhost:5755",
    f"ipc://{'x' * (LONGEST_PATH + 1)}": "an ipc path has at most 107 bytes",
    f"ipc://{'ü' * 54}": "an ipc path has at most 107 bytes",
    "ipc://\ud800": "an ipc path is UTF-8",
}  # fmt: skip


@pytest.mark.parametrize("address", GOOD)
def test_what_is_an_address_can_be_connected_to(address: str) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.IPV6, 1)
        peer.connect(address)
    assert wrong_address(address) == ""


@pytest.mark.parametrize(("address", "said"), BAD.items(), ids=[ascii(address)[:40] for address in BAD])
def test_what_is_none_is_told_what_to_write(address: str, said: str) -> None:
    assert wrong_address(address) == said


@pytest.mark.parametrize(
    "address", ["tcp://*:5755", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://eth0:5755", "ipc://pool.sock"]
)
def test_who_listens_may_do_so_everywhere_and_at_any_port(address: str) -> None:
    assert wrong_address(address, listens=True) == ""


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://h:99999", f"write {FORM}; a port is 1 to 65535, or * for a free one"),
        ("tcp://h:abc", f"write {FORM}; a port is 1 to 65535, or * for a free one"),
        ("h:5755", f"write {FORM}"),
        ("tcp:// :5755", f"write {FORM}"),
    ],
)
def test_who_listens_is_told_too(address: str, said: str) -> None:
    assert wrong_address(address, listens=True) == said
