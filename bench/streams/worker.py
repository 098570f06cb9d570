"""A worker that generates at a given rate: `python -m bench.streams.worker ADDRESS TOKENS_PER_SECOND SLOTS`.

It speaks the protocol and has no engine, so that two cores are left to the coordinator. In each step all its sequences get one
token. A step takes as long as the rate says where all slots are full. It ends with the benchmark, at the end of stdin.
"""

import gc
import os
import sys
import time
import uuid
from array import array

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
    Step,
    StopGeneration,
    ToWorker,
)

#: A step that is late by more is not made up for: the worker was not given its share of a core.
LATE_S = 0.05


class Worker:
    """The worker's end of one link."""

    def __init__(self, address: str, rate: float, slots: int) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorker).decode
        self._slots, self._step_s = slots, slots / rate
        self._epoch = 0
        #: by (task, sequence): the position of its next token, and after its last one
        self._running: dict[tuple[int, int], list[int]] = {}
        self._socket.send(self._encode(Register(group=GROUP, incarnation=uuid.uuid4().hex, pid=os.getpid(), host="localhost")))

    def run(self) -> None:
        """Until stdin ends."""
        due = look = time.perf_counter()
        while True:
            now = time.perf_counter()
            if now >= look:
                look = now + 0.5
                if stdin_ended():
                    return
            wait = due - now if self._running else 0.1
            if wait > 0 and self._socket.poll(max(1, int(wait * 1000))):
                self._take()
                continue
            while self._socket.poll(0):
                self._take()
            if not self._running:
                due = time.perf_counter()
                continue
            self._step()
            due = max(due + self._step_s, time.perf_counter() - LATE_S)

    def _take(self) -> None:
        message: ToWorker = self._decode(self._socket.recv_multipart()[0])
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
        self._socket.send_multipart([self._encode(message), *frames])

    def _step(self) -> None:
        """A token for each sequence."""
        steps: list[Step] = []
        ended: list[tuple[int, int]] = []
        for key, place in self._running.items():
            at = place[0]
            place[0] = after = at + 1
            last = after == place[1]
            if last:
                ended.append(key)
            steps.append(Step(*key, at, 1, "length" if last else ""))
        for key in ended:
            del self._running[key]
        tokens = array("i", range(len(steps))).tobytes()
        self._say(GenerationProgress(self._epoch, 0, steps, [FrameSpec("tokens", "int32", (len(steps),))]), tokens)


def main() -> None:
    worker = Worker(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    ready()
    gc.freeze()
    gc.disable()
    worker.run()


if __name__ == "__main__":
    main()
