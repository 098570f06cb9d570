"""Workers that generate at a given rate: `python -m bench.streams.worker ADDRESS WORKERS TOKENS_PER_SECOND SLOTS`.

They speak the protocol and have no engines, and share one process, so that two cores are left to the coordinator. In each step
all sequences of a worker get one token. A step takes as long as the rate says where all slots are full. The process ends with
the benchmark, at the end of stdin.
"""

import gc
import os
import sys
import time
import uuid
from array import array
from typing import Any

import msgspec
import zmq

from bench.processes import stdin_ended
from bench.workers import GROUP, ready
from enginepool.protocol.messages import (
    Accept,
    Capabilities,
    FrameSpec,
    GenerationProgress,
    Idle,
    Ping,
    Pong,
    Ready,
    Register,
    Stage,
    StartGeneration,
    StopGeneration,
    ToWorker,
)

#: A step that is late by more is not made up for: the worker was not given its share of a core.
LATE_S = 0.05

_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()


class Worker:
    """The worker's end of one link."""

    def __init__(self, address: str, rate: float, slots: int) -> None:
        self.socket: zmq.Socket[bytes] = _context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._slots, self._step_s = slots, slots / rate
        self._epoch = 0
        #: by (task, sequence): the position of its next token, and after its last one
        self._running: dict[tuple[int, int], list[int]] = {}
        self.due = time.perf_counter()
        self.socket.send(self._encode(Register(group=GROUP, incarnation=uuid.uuid4().hex, pid=os.getpid(), host="localhost")))

    def go_on(self) -> None:
        """Take what was sent, and the step that is due."""
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:  # pyright: ignore[reportOperatorIssue]
            self._take()
        now = time.perf_counter()
        if not self._running:
            self.due = now
        elif now >= self.due:
            self._step()
            self.due = max(self.due + self._step_s, time.perf_counter() - LATE_S)

    @property
    def idle(self) -> bool:
        """It has nothing to generate."""
        return not self._running

    def _take(self) -> None:
        message: ToWorker = self._decode(self.socket.recv_multipart()[0])
        match message:
            case StartGeneration(task=(_, counter), n=n, at=at, sampling=sampling):
                for i in range(n):
                    self._running[counter, i] = [at, at + sampling.max_new_tokens]
            case StopGeneration(tasks=tasks):
                gone = set(tasks)
                self._running = {key: place for key, place in self._running.items() if key[0] not in gone}
            case Ping(at=at):
                self._say(Pong(at=at, stage="ready"))
            case Accept(epoch=epoch):
                self._epoch = epoch
                can = Capabilities(
                    "causal", 50_000, 32_768, batch_tokens=16_384, batch_rows=64, inflight_tokens=1 << 24,
                    inflight_rows=self._slots, model="none", engine="bench", device="none", operations=("generate",),
                )  # fmt: skip
                for said in (Stage("ready"), Ready(can), Idle(epoch)):
                    self._say(said)
            case _:
                pass

    def _say(self, message: object, *frames: bytes) -> None:
        self.socket.send_multipart([self._encode(message), *frames])

    def _step(self) -> None:
        """A token for each sequence."""
        steps: list[Any] = []
        ended: list[tuple[int, int]] = []
        for key, place in self._running.items():
            at = place[0]
            place[0] = after = at + 1
            last = after == place[1]
            if last:
                ended.append(key)
            steps.append((*key, at, 1, "length" if last else "", None))  # a `Step`, and cheaper
        for key in ended:
            del self._running[key]
        tokens = array("i", range(len(steps))).tobytes()
        self._say(GenerationProgress(self._epoch, 0, steps, [FrameSpec("tokens", "int32", (len(steps),))]), tokens)


def main() -> None:
    """Until stdin ends."""
    address, count, rate, slots = sys.argv[1:]
    workers = [Worker(address, float(rate), int(slots)) for _ in range(int(count))]
    poller = zmq.Poller()
    for worker in workers:
        poller.register(worker.socket, zmq.POLLIN)
    ready()
    gc.freeze()
    gc.disable()
    look = time.perf_counter()
    while True:
        now = time.perf_counter()
        if now >= look:
            look = now + 0.5
            if stdin_ended():
                return
        wait = min((worker.due - now for worker in workers if not worker.idle), default=0.1)
        if wait > 0:
            poller.poll(max(1, int(wait * 1000)))
        for worker in workers:
            worker.go_on()


if __name__ == "__main__":
    main()
