"""The floor: `zmq.proxy` between ROUTER and DEALER, which is a loop in C that looks at nothing and decides nothing."""

import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import zmq

from bench.peers import Contestant, Peer, begin
from bench.processes import free_port, tree


def serve(front: str, back: str) -> None:
    """Proxy until stdin ends."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for sock, endpoint in ((router, front), (dealer, back)):
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind(endpoint)

    def end() -> None:
        sys.stdin.read()
        context.term()  # makes zmq.proxy raise, and waits until both sockets are closed

    threading.Thread(target=end).start()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    try:
        zmq.proxy(router, dealer)
    except zmq.ContextTerminated:
        router.close()
        dealer.close()


def start(scratch: Path, stack: ExitStack) -> Contestant:
    """The proxy, two echoing workers behind it, one load generator before it."""
    # The same transports as before and behind the coordinator.
    front, back = f"tcp://127.0.0.1:{free_port()}", f"ipc://{scratch / 'back.sock'}"
    proxy = begin(stack, ["-m", "bench.peers.zmq_proxy", front, back], scratch)
    workers = [begin(stack, ["-m", "bench.workers", "zmq", back], scratch) for _ in range(2)]
    load = begin(stack, ["-m", "bench.load", "zmq", front], scratch)
    return Contestant(load, lambda: tree(proxy.pid), [proxy, *workers, load])


PEER = Peer("zmq_proxy", "zmq.proxy in C", lambda: "", start)

if __name__ == "__main__":
    serve(*sys.argv[1:3])
