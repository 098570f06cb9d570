"""Clients that stream: `python -m bench.streams.load ADDRESS` runs the phases on its stdin, and says how many tokens came.

They are raw sockets of one process. A phase keeps so many streams going, shared out among so many clients.
"""

import gc
import os
import sys
import time
from array import array

import msgspec
import zmq

from bench.processes import stdin_ended
from bench.workers import GROUP
from enginepool.protocol.messages import (
    Ack,
    Credit,
    ErrorReply,
    FrameSpec,
    Generate,
    Generated,
    Goodbye,
    Hello,
    Ping,
    Pong,
    Sampling,
    Tokens,
    Welcome,
)

PROMPT = 16
_NOBLOCK = int(zmq.NOBLOCK)


class Phase(msgspec.Struct, forbid_unknown_fields=True):
    """So many streams of so many tokens each, for so many seconds, after a ramp that does not count."""

    clients: int
    streams: int
    tokens: int
    credit: int
    ramp_s: float
    seconds: float


class Counted(msgspec.Struct):
    """Received in the seconds that count: tokens, messages, streams that ended; and the CPU seconds of this process."""

    tokens: int
    messages: int
    ended: int
    seconds: float
    cpu_s: float


class _Tokens(msgspec.Struct, tag_field="type", tag="tokens", gc=False):
    """Of tokens, what is counted: [id, sequence, at, count, version]."""

    runs: list[tuple[int, int, int, int, int]]


class _Answer(msgspec.Struct, tag_field="type", tag="generated", gc=False):
    id: int


_decode = msgspec.msgpack.Decoder(_Tokens | _Answer | ErrorReply | Welcome | Ping | Pong).decode
_encode = msgspec.msgpack.Encoder().encode
assert Tokens.__struct_config__.tag == "tokens" and Generated.__struct_config__.tag == "generated"


class Client:
    """One client and its streams. It reads and gives credit."""

    gives_credit = True
    #: messages that ZeroMQ takes before they are read; 0: any number
    unread = 0

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, phase: Phase) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 500)
        self.socket.setsockopt(zmq.RCVHWM, self.unread)
        self.socket.connect(address)
        self._phase, self._id = phase, 0
        #: tokens of each stream that came, and that the coordinator was told of
        self._came: dict[int, list[int]] = {}
        specs = [FrameSpec("items", "int32", (PROMPT,)), FrameSpec("item_lengths", "uint32", (1,))]
        sampling = Sampling(max_new_tokens=phase.tokens, ignore_eos=True)
        self._request = Generate(0, specs, GROUP, sampling=sampling, stream=True, credit=phase.credit)
        self._payload = array("i", range(PROMPT)).tobytes(), PROMPT.to_bytes(4, "little")
        self.say(Hello(client=os.urandom(16), token=os.urandom(16), agent="bench"))
        self.tokens = self.messages = self.ended = 0

    def say(self, message: object, *frames: bytes) -> None:
        self.socket.send_multipart([_encode(message), *frames])

    def ask(self) -> None:
        self._id += 1
        self._came[self._id] = [0, 0]
        self._request.id = self._id
        self.say(self._request, *self._payload)

    def read(self) -> None:
        """All that is there."""
        credit, socket = self._phase.credit, self.socket
        while True:
            try:
                frames = socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self.messages += 1
            message = _decode(frames[0])
            if type(message) is _Tokens:
                for id_, _, _, count, _ in message.runs:
                    came = self._came[id_]
                    came[0] += count
                    self.tokens += count
                    if self.gives_credit and came[0] - came[1] >= credit // 2:
                        came[1] = came[0]
                        self.say(Credit(id_, came[0]))
            elif type(message) is _Answer:
                # The answer has all tokens, also those at the end for which there was no credit.
                came, _ = self._came.pop(message.id)
                if (count := len(frames[1]) // 4) != self._phase.tokens or came > count:
                    raise RuntimeError(f"a stream of {self._phase.tokens} tokens had {came}, and {count} in its answer")
                self.tokens += count - came
                self.ended += 1
                self.say(Ack([message.id]))
                self.ask()
            elif type(message) is Ping:
                self.say(Pong(at=message.at))
            elif type(message) is ErrorReply:
                raise RuntimeError(f"the coordinator said {message.code}: {message.message}")


def run_phase(context: "zmq.Context[zmq.Socket[bytes]]", address: str, phase: Phase) -> Counted:
    """Connect the clients, stream, leave."""
    clients = [Client(context, address, phase) for _ in range(phase.clients)]
    for i in range(phase.streams):
        clients[i % phase.clients].ask()
    poller = zmq.Poller()
    by_socket = {client.socket: client for client in clients}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    _read_until(time.perf_counter() + phase.ramp_s, poller, by_socket)
    before, began, cpu = _sums(clients), time.perf_counter(), time.process_time()
    _say("counting")
    _read_until(began + phase.seconds, poller, by_socket)
    tokens, messages, ended = (now - then for now, then in zip(_sums(clients), before, strict=True))
    found = Counted(tokens, messages, ended, time.perf_counter() - began, time.process_time() - cpu)
    _say("counted")
    for client in clients:
        client.say(Goodbye())
        client.socket.close()
    return found


def _read_until(end: float, poller: zmq.Poller, by_socket: "dict[zmq.Socket[bytes], Client]") -> None:
    while time.perf_counter() < end:
        for socket, _ in poller.poll(100):
            by_socket[socket].read()


def _sums(clients: list[Client]) -> tuple[int, int, int]:
    return sum(one.tokens for one in clients), sum(one.messages for one in clients), sum(one.ended for one in clients)


def _say(message: object) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Say {} first, then for each phase when it begins to count, when it has, and what it counted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    _say({})
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        _say(run_phase(context, sys.argv[1], msgspec.json.decode(line, type=Phase)))
    assert stdin_ended()
    context.term()


if __name__ == "__main__":
    main()
