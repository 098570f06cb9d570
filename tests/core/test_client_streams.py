"""On which stream of a GPU the source of an update is read, and behind what: nothing is sent that is not computed yet."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from enginepool.client.buffers import Buffers
from enginepool.client.courier import Courier, Notes
from enginepool.client.lending import Lender, Loan
from enginepool.client.lockstep import Lockstep
from enginepool.client.tensors import Plan, make_plan
from enginepool.protocol.messages import Failure

PATIENCE_S = 60.0


class Watched(Buffers):
    """Buffers that know whether somebody is on their stream."""

    inside = False

    @contextmanager
    def aside(self, after: Any = None) -> Generator[None]:
        self.inside = True
        with super().aside(after):
            yield
        self.inside = False


def test_a_source_that_is_read_at_once_is_computed_on_the_stream_that_sends_it() -> None:
    buffers = Watched(torch.device("cpu"))
    read: list[bool] = []
    planned, ended = threading.Event(), threading.Event()

    def plan() -> Plan:
        def pairs() -> Generator[tuple[str, torch.Tensor]]:
            read.append(buffers.inside)
            yield "a", torch.ones(3)

        return make_plan(pairs())

    notes = Notes(lambda _: planned.set(), lambda _: None, lambda *_: None, lambda _: planned.set(), ended.set)
    side = Loan(Lender(buffers, keep=False))
    courier = Courier(plan, side, buffers, Lockstep(), notes, bucket_bytes=4096, timeout_s=1.0)
    courier.start()
    assert planned.wait(PATIENCE_S)
    courier.end(Failure("update_aborted", "enough"))
    assert ended.wait(PATIENCE_S)
    assert read == [True]
