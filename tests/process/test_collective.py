"""Groups of processes on loopback: they form, broadcast and fail within their time, whoever dies or stops."""

import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool import collective
from enginepool.collective import Broadcast, CollectiveError, Group, Rendezvous, join

torch: Any = importlib.import_module("torch")

#: for what must happen; never reached
LONG_S = 60.0
#: for what must not; waited for in full
SHORT_S = 2.0


def peer(pipe: Connection, address: str, name: str, world: int, rank: int, sglang: bool) -> None:
    """A member: receives buckets of the sizes it is sent until it is told to end, and answers what they hold."""
    if sglang:
        from enginepool.workers import cpu_bridge

        cpu_bridge.install()
        utils: Any = importlib.import_module("sglang.srt.utils")
        theirs = utils.init_custom_process_group(
            backend="gloo", init_method=f"tcp://{address}", world_size=world, rank=rank, group_name=name
        )
        dist: Any = importlib.import_module("torch.distributed")
        dist.broadcast(torch.empty(1, dtype=torch.uint8), src=0, group=theirs)

        def receive(bucket: Any) -> None:
            dist.broadcast(bucket, src=0, group=theirs)
    else:
        group = join(address, name, world, rank, backend="gloo", timeout_s=LONG_S)

        def receive(bucket: Any) -> None:
            group.broadcast(bucket, LONG_S)

    pipe.send("joined")
    while nbytes := pipe.recv():
        bucket = torch.zeros(nbytes, dtype=torch.uint8)
        pipe.send("receiving")
        try:
            receive(bucket)
            pipe.send(int(bucket.sum()))
        except CollectiveError as error:
            pipe.send(error)


class Peer:
    """A member in a process of its own."""

    def __init__(self, address: str, name: str, world: int, rank: int, *, sglang: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=peer, args=(theirs, address, name, world, rank, sglang))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(LONG_S), "the peer says nothing"
        return self.pipe.recv()

    def receive(self, nbytes: int) -> None:
        self.pipe.send(nbytes)
        assert self.hear() == "receiving"


@contextmanager
def members(
    rendezvous: Rendezvous, name: str, world: int, *, sglang: frozenset[int] = frozenset()
) -> Generator[tuple[Group, list[Peer]]]:
    """Rank 0 here, the others in processes that are killed at the end."""
    peers = [Peer(rendezvous.address, name, world, rank, sglang=rank in sglang) for rank in range(1, world)]
    try:
        group = rendezvous.join(name, world, backend="gloo", timeout_s=LONG_S)
        assert [one.hear() for one in peers] == ["joined"] * (world - 1)
        yield group, peers
        group.abort()
    finally:
        for one in peers:
            one.process.kill()
            one.process.join()


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    opened = Rendezvous()
    yield opened
    opened.close()


def test_what_rank_0_broadcasts_arrives_at_every_rank(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "first", 3) as (group, peers):
        for nbytes in (256, 1 << 20):
            for one in peers:
                one.receive(nbytes)
            group.broadcast(torch.full((nbytes,), 3, dtype=torch.uint8), LONG_S)
            assert [one.hear() for one in peers] == [3 * nbytes] * 2
    with members(rendezvous, "second", 2) as (group, [one]):
        one.receive(256)
        group.broadcast(torch.full((256,), 1, dtype=torch.uint8), LONG_S)
        assert one.hear() == 256


@pytest.mark.engine
def test_sglangs_own_update_group_and_ours_meet(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "mixed", 3, sglang=frozenset({2})) as (group, peers):
        for one in peers:
            one.receive(512)
        group.broadcast(torch.full((512,), 2, dtype=torch.uint8), LONG_S)
        assert [one.hear() for one in peers] == [1024, 1024]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_broadcast_to_a_dead_or_stopped_peer_ends_with_an_error(rendezvous: Rendezvous, how: signal.Signals) -> None:
    with members(rendezvous, "lost", 2) as (group, [one]):
        assert one.process.pid is not None
        os.kill(one.process.pid, how)
        with pytest.raises(CollectiveError, match="group lost"):
            group.broadcast(torch.zeros(256 << 20, dtype=torch.uint8), SHORT_S)  # more than the socket's buffers hold
        group.abort()
        with pytest.raises(CollectiveError, match="given up"):
            group.broadcast(torch.zeros(256, dtype=torch.uint8), SHORT_S)


def test_a_receiver_whose_rank_0_gives_up_hears_of_it(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "left", 2) as (group, [one]):
        one.receive(256)
        group.abort()
        assert isinstance(one.hear(), CollectiveError)


def test_a_group_that_nobody_else_joins_is_given_up_in_time(rendezvous: Rendezvous) -> None:
    with pytest.raises(CollectiveError, match="group alone, rank 0 of 2"):
        rendezvous.join("alone", 2, backend="gloo", timeout_s=SHORT_S)
    with members(rendezvous, "next", 2) as (group, [one]):
        one.receive(256)
        group.broadcast(torch.zeros(256, dtype=torch.uint8), LONG_S)
        assert one.hear() == 0


def test_a_rendezvous_that_is_not_there_is_given_up_in_time(rendezvous: Rendezvous) -> None:
    rendezvous.close()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="group none, rank 1 of 2"):
        join("127.0.0.1:1", "none", 2, 1, backend="gloo", timeout_s=SHORT_S)
    assert time.monotonic() - began < LONG_S


def test_a_broadcast_whose_error_cannot_be_told_in_python_ends_well() -> None:
    class Work:
        """As NCCL's: torch cannot convert what `exception` returns."""

        def is_completed(self) -> bool:
            return True

        def wait(self, _limit: object) -> None:
            pass

        def exception(self) -> None:
            raise TypeError("Unable to convert function return value to a Python type!")

    Broadcast(Work(), Group(None, "g", 2, 0, "nccl", "cpu")).wait(SHORT_S)


def test_what_torch_is_told_of_nccl_is_for_this_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    calm = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with collective._environment("nccl"):  # pyright: ignore[reportPrivateUsage]
        assert [os.environ.get(name) for name in calm] == ["0", "0", "0"]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    with collective._environment("gloo"):  # pyright: ignore[reportPrivateUsage]
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_an_nccl_group_comes_first_on_its_gpu_and_is_not_split_off_from_the_group_of_a_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Options:
        """As torch's, of which there is none where torch has no NCCL."""

        is_high_priority_stream = False
        split_from: Any = None
        _timeout: Any = None

    class Made:
        def set_timeout(self, limit: timedelta) -> None:
            pass

    told: list[Any] = []

    def helper(*_arguments: object, backend_options: Any, timeout: timedelta, **_more: object) -> tuple[Any, Any]:
        """As torch's, in a process whose default group is bound to a device."""
        if backend_options is not None:
            assert isinstance(backend_options, Options)
            assert backend_options._timeout == timeout, "torch warns of another one"  # pyright: ignore[reportPrivateUsage]
            backend_options.split_from = object()
        told.append(backend_options)
        return Made(), None

    fake = SimpleNamespace(
        ProcessGroupNCCL=SimpleNamespace(Options=Options),
        Backend=str,
        _new_process_group_helper=helper,
        _world=SimpleNamespace(pg_group_ranks={}),
    )
    monkeypatch.setattr(collective, "c10d", fake)
    for backend in ("nccl", "gloo"):
        collective._form(None, "g", 2, 0, backend, SHORT_S)  # pyright: ignore[reportPrivateUsage]
    options, none = told
    assert none is None
    assert options.is_high_priority_stream and options.split_from is None


def test_what_a_gpu_does_next_is_ordered_behind_a_broadcast_without_waiting_for_it() -> None:
    class Work:
        """As NCCL's: with a limit, torch would block and abort the group at its end."""

        waits = 0

        def is_completed(self) -> bool:
            raise AssertionError("nobody asks")

        def wait(self) -> None:
            self.waits += 1

    work = Work()
    Broadcast(work, Group(None, "g", 2, 0, "nccl", "cpu")).order(SHORT_S)
    assert work.waits == 1
