"""The load of the wire benchmark: `python -m bench.load {enginepool,zmq,http} ADDRESS` runs the phases named on its stdin.

A command is a JSON line: {"phase": "closed", "in_flight": 64, "seconds": 2} keeps so many requests unanswered;
{"phase": "open", "rate": 70, "seconds": 3} sends them at random moments (Poisson), without waiting for answers. What
comes back is a `Phase`.
"""

import argparse
import gc
import os
import random
import select
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np

from bench.links import HttpLink, Link, ZmqLink
from bench.workers import GROUP

#: An answer that takes longer than this is taken for lost.
PATIENCE_S = 20.0
CONNECTIONS = 64


class Command(msgspec.Struct, tag_field="phase", forbid_unknown_fields=True):
    """What both phases have."""

    seconds: float


class Closed(Command, tag="closed"):
    """As many requests in flight as `in_flight`, a new one for each answer."""

    in_flight: int


class Open(Command, tag="open"):
    """Requests at `rate` a second on average."""

    rate: float


class Phase(msgspec.Struct, frozen=True):
    """The outcome of a phase: all its requests were answered. Latencies in milliseconds; `seconds` ends at the last answer."""

    answered: int
    seconds: float
    p50_ms: float
    p99_ms: float


class Load:
    """Runs phases over one link; request numbers go on from phase to phase."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._next = 0

    def run(self, command: Closed | Open) -> Phase:
        """One phase.

        Raises:
            RuntimeError: an answer did not come, or was not a result.
        """
        return self._closed(command) if isinstance(command, Closed) else self._open(command)

    def _closed(self, command: Closed) -> Phase:
        link, clock = self._link, time.perf_counter
        sent: dict[int, float] = {}
        took: list[float] = []
        number = self._next
        begin = clock()
        end = begin + command.seconds
        for _ in range(command.in_flight):
            sent[number] = clock()
            link.send(number)
            number += 1
        while sent:
            answered = self._receive(PATIENCE_S)
            now = clock()
            for one in answered:
                took.append(now - sent.pop(one))
                if now < end:
                    sent[number] = clock()
                    link.send(number)
                    number += 1
        self._next = number
        return _phase(took, clock() - begin)

    def _open(self, command: Open) -> Phase:
        """Latency counts from the moment at which the request was due, so that a slow peer cannot slow the questions down."""
        clock = time.perf_counter
        chance = random.Random(self._next)
        due: dict[int, float] = {}
        took: list[float] = []
        begin = at = clock()
        end = begin + command.seconds
        while True:
            at += chance.expovariate(command.rate)
            last = at >= end
            while True:
                left = (end if last else at) - clock()
                if left <= 0:
                    break
                self._collect(self._link.receive(left), due, took)
            if last:
                break
            due[self._next] = at
            self._link.send(self._next)
            self._next += 1
        while due:
            self._collect(self._receive(PATIENCE_S), due, took)
        return _phase(took, clock() - begin)

    def _collect(self, answered: list[int], due: dict[int, float], took: list[float]) -> None:
        now = time.perf_counter()
        took.extend(now - due.pop(one) for one in answered)

    def _receive(self, wait_s: float) -> list[int]:
        answered = self._link.receive(wait_s)
        if not answered:
            raise RuntimeError(f"no answer within {wait_s:g} s")
        return answered


def _phase(took: list[float], seconds: float) -> Phase:
    if not took:
        return Phase(0, seconds, 0.0, 0.0)
    p50, p99 = (float(value) * 1000 for value in np.percentile(took, (50, 99)))
    return Phase(len(took), seconds, p50, p99)


def commands(link: Link) -> Iterator[Closed | Open]:
    """The commands on stdin, until it ends; the link stays alive meanwhile."""
    decode = msgspec.json.Decoder(Closed | Open).decode
    unread = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.5)
        if not ready:
            link.idle()
            continue
        more = os.read(0, 65536)
        if not more:
            return
        *lines, unread = (unread + more).split(b"\n")
        for line in lines:
            yield decode(line)


def open_link(kind: str, address: str) -> Link:
    """The link of this kind of peer."""
    if kind == "http":
        return HttpLink(address, CONNECTIONS)
    return ZmqLink(address, GROUP if kind == "enginepool" else None)


def main() -> None:
    """Say {} when connected, then answer each command with its phase."""
    options = argparse.ArgumentParser(prog="python -m bench.load", description="a load generator with prepared messages")
    options.add_argument("kind", choices=("enginepool", "zmq", "http"))
    options.add_argument("address", help="ZeroMQ endpoint, or host:port")
    chosen = options.parse_args()
    link = open_link(chosen.kind, chosen.address)
    load = Load(link)
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    gc.freeze()
    gc.disable()
    try:
        for command in commands(link):
            sys.stdout.write(msgspec.json.encode(load.run(command)).decode() + "\n")
            sys.stdout.flush()
    finally:
        link.close()


if __name__ == "__main__":
    main()
