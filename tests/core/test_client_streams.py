"""On which stream of a GPU the source of an update is read, and behind what: nothing is sent that is not computed yet."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from enginepool.protocol.messages import ErrorReply
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.trainer.buffers import Buffers, stand_behind
from enginepool.trainer.ipc_export import IpcExporter
from enginepool.trainer.tensors import SendPlan, make_plan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks
from enginepool.trainer.update_sender import UpdateSender

PATIENCE_S = 60.0


class Reports:
    """The update of a sender: what it was told."""

    def __init__(self) -> None:
        self.answered, self.ended = threading.Event(), threading.Event()

    def planned(self, plan: SendPlan, endpoint: None) -> None:
        self.answered.set()

    def progress(self, sent_bytes: int) -> None:
        """Not awaited."""

    def all_sent(self, digest: str, sent_bytes: int, regions: list[MemoryRegion]) -> None:
        """Not awaited."""

    def failed(self, error: Exception) -> None:
        self.answered.set()

    def left(self) -> None:
        self.ended.set()


def sender(plan: Callable[[], SendPlan], buffers: Buffers, reports: Reports) -> UpdateSender:
    """Its thread calls the reports itself."""

    def post(call: Callable[..., None], *args: Any) -> None:
        call(*args)

    context: Any = SimpleNamespace(
        post=post, buffers=buffers, exporter=IpcExporter(buffers, keep=False), bucket_bytes=4096, collective_timeout=1.0
    )
    update: Any = reports
    return UpdateSender(update, context, plan, TrainerRanks(), ipc=True)


class Watched(Buffers):
    """Buffers that know whether their stream is in use."""

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

    def plan() -> SendPlan:
        def pairs() -> Generator[tuple[str, torch.Tensor]]:
            read.append(buffers.inside)
            yield "a", torch.ones(3)

        return make_plan(pairs())

    reports = Reports()
    running = sender(plan, buffers, reports)
    running.start()
    assert reports.answered.wait(PATIENCE_S)
    running.end(RoundEnd(ErrorReply("update_aborted", "enough")))
    assert reports.ended.wait(PATIENCE_S)
    assert read == [True]


@pytest.mark.parametrize("current", [True, False])
def test_what_the_caller_still_computes_comes_before_what_any_rank_reads_of_it(
    monkeypatch: pytest.MonkeyPatch, current: bool
) -> None:
    """Also on ranks that send nothing, which gather; and where bytes start from the host, and tensors lie on a GPU."""
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            return f"what {self.name} had to do"

        def wait_event(self, event: str) -> None:
            events.append(f"{self.name} waits for {event}")

    def current_stream(gpu: Any) -> Stream:
        return Stream(f"{gpu} aside")

    def default_stream(gpu: Any) -> Stream:
        return Stream(f"{gpu}")

    def plan() -> SendPlan:
        raise AssertionError("no code reads it")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    sender(plan, Buffers(torch.device("cpu")), Reports())
    # As on a rank above 0, and in the blocking publisher, whose device is known.
    stand_behind(torch.device("cpu"))
    first = "cuda:1 waits for what cuda:1 aside had to do"
    assert events == ([first, first] if current else [])
    stand_behind(torch.device("cuda", 2))
    assert events[-1] == "cuda:2 waits for what cuda:2 aside had to do"
