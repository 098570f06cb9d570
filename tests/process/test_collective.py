"""Groups of processes on loopback: they form, broadcast and fail within their time, whichever rank dies or stops.

Those that copy are told apart by nothing but that. What is copied here lies in memory of the host; GPUs share it otherwise.
"""

import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.protocol.messages.weights import SEAL_BYTES, MemoryRegion
from enginepool.transfer import collective, peer_copy, peer_messages, peer_probe
from enginepool.transfer.collective import Rendezvous, TorchGroup, join
from enginepool.transfer.nccl_environment import nccl_environment
from enginepool.transfer.peer_copy import CopyReceiver, CopySource
from enginepool.transfer.process_group import Broadcast, CollectiveError, ProcessGroup
from enginepool.transfer.shared_memory import make_space, open_space
from tests.process import forking

torch: Any = importlib.import_module("torch")

#: for what must happen; never reached
LONG_S = 60.0
#: for a process that imports torch, or SGLang
START_S = 200.0
#: for what must not; waited for in full
SHORT_S = 2.0


def peer(pipe: Connection, address: str, name: str, world: int, rank: int, sglang: bool, stays: bool | None) -> None:
    """A member: receives buckets of the sizes it is sent until it is told to end, and answers what they hold.

    `stays`: whether they stay in its memory; None: it would not copy.
    """
    if sglang:
        from enginepool.workers import cpu_bridge

        cpu_bridge.install()
        utils: Any = importlib.import_module("sglang.srt.utils")
        pipe.send("here")
        theirs = utils.init_custom_process_group(
            backend="gloo", init_method=f"tcp://{address}", world_size=world, rank=rank, group_name=name
        )
        dist: Any = importlib.import_module("torch.distributed")
        dist.broadcast(torch.empty(1, dtype=torch.uint8), src=0, group=theirs)

        def receive(bucket: Any) -> None:
            dist.broadcast(bucket, src=0, group=theirs)
    else:
        pipe.send("here")
        group = join(address, name, world, rank, backend="gloo", timeout_s=LONG_S, copies=stays is not None, stays=bool(stays))

        def receive(bucket: Any) -> None:
            group.broadcast(bucket, LONG_S)

    pipe.send("joined")
    while nbytes := pipe.recv():
        memory = make_space(nbytes, "cpu")
        bucket = memory.tensors[0]
        pipe.send("receiving")
        try:
            receive(bucket)
            pipe.send(int(bucket.sum()))
        except CollectiveError as error:
            pipe.send(error)


class Peer:
    """A member in a process of its own."""

    def __init__(
        self, address: str, name: str, world: int, rank: int, *, sglang: bool = False, stays: bool | None = True
    ) -> None:
        context = forking.server()
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=peer, args=(theirs, address, name, world, rank, sglang, stays))
        self.process.start()
        theirs.close()

    def come(self) -> None:
        """Wait until it is about to join: others wait for it then, and not for a program that starts."""
        assert self.hear(START_S) == "here"

    def hear(self, limit: float = LONG_S) -> Any:
        assert self.pipe.poll(limit), "the peer says nothing"
        return self.pipe.recv()

    def receive(self, nbytes: int) -> None:
        self.pipe.send(nbytes)
        assert self.hear() == "receiving"


@contextmanager
def members(
    rendezvous: Rendezvous,
    name: str,
    world: int,
    *,
    sglang: frozenset[int] = frozenset(),
    copies: bool = False,
    stays: bool | None = True,
) -> Generator[tuple[ProcessGroup, list[Peer]]]:
    """Rank 0 here, the others in processes that are killed at the end."""
    peers = [Peer(rendezvous.address, name, world, rank, sglang=rank in sglang, stays=stays) for rank in range(1, world)]
    group = None
    try:
        for one in peers:
            one.come()
        group = rendezvous.join(name, world, backend="gloo", timeout_s=LONG_S, copies=copies)
        assert [one.hear() for one in peers] == ["joined"] * (world - 1)
        yield group, peers
    finally:
        if group is not None:
            group.abort()
        for one in peers:
            one.process.kill()
            one.process.join()


@contextmanager
def pair() -> Generator[tuple[CopySource, CopyReceiver]]:
    """Both sides of a group that copies, in this process."""
    made: list[CopySource] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: made.append(CopySource("pair", 2, "cpu", listener, "token", LONG_S)))
        thread.start()
        taker = CopyReceiver("pair", 2, 1, "cpu", f"127.0.0.1:{listener.getsockname()[1]}", "token", LONG_S)
        thread.join(LONG_S)
    try:
        yield made[0], taker
    finally:
        taker.abort()
        made[0].abort()


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    opened = Rendezvous()
    yield opened
    opened.close()


def filled(nbytes: int, value: int) -> Any:
    """A bucket, in memory that others can copy out of for as long as the bucket is there."""
    memory = make_space(nbytes, "cpu")
    bucket = memory.tensors[0].fill_(value)[:]  # which the memory does not refer to
    bucket.memory = memory
    return bucket


@pytest.mark.parametrize("copies", [False, True])
def test_what_rank_0_broadcasts_arrives_at_every_rank(rendezvous: Rendezvous, copies: bool) -> None:
    with members(rendezvous, "first", 3, copies=copies) as (group, peers):
        assert isinstance(group, CopySource) == copies
        for nbytes in (256, 1 << 20):
            for one in peers:
                one.receive(nbytes)
            group.broadcast(filled(nbytes, 3), LONG_S)
            assert [one.hear() for one in peers] == [3 * nbytes] * 2
    with members(rendezvous, "second", 2, copies=copies) as (group, [one]):
        one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        assert one.hear() == 256


def test_a_rank_whose_buckets_do_not_stay_is_the_last_that_copies(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "two", 2, copies=True, stays=False) as (group, [one]):
        assert isinstance(group, CopySource)
        one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        assert one.hear() == 256
    for name, stays in (("three", False), ("none", None)):
        three_of_torch(rendezvous, name, stays)


def three_of_torch(rendezvous: Rendezvous, name: str, stays: bool | None) -> None:
    with members(rendezvous, name, 3, copies=True, stays=stays) as (group, peers):
        assert isinstance(group, TorchGroup)
        for one in peers:
            one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        assert [one.hear() for one in peers] == [256] * 2


def test_ranks_that_do_not_reach_each_others_memory_do_not_copy(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    def another(_content: Any) -> bytes:
        return b"x" * SEAL_BYTES

    # Every rank finds out for itself. This one's card leads to other memory.
    monkeypatch.setattr(peer_probe, "set_seal", another)
    with members(rendezvous, "apart", 2, copies=True) as (group, [one]):
        assert isinstance(group, TorchGroup)
        one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        assert one.hear() == 256


def test_a_rank_whose_rank_0_does_not_copy_waits_for_no_card(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    def formed(*_arguments: object, **_options: object) -> ProcessGroup:
        return TorchGroup(None, "at once", 2, 0, "gloo", "cpu")

    monkeypatch.setattr(collective, "_formed", formed)
    monkeypatch.setattr(peer_probe, "PROBES_S", 2 * LONG_S)
    rendezvous.join("at once", 2, backend="gloo", timeout_s=SHORT_S)
    assert isinstance(join(rendezvous.address, "at once", 2, 1, backend="gloo", timeout_s=SHORT_S, copies=True), TorchGroup)


@pytest.mark.engine
def test_a_rank_of_another_program_is_waited_for_and_then_served_as_it_expects(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_probe, "PROBES_S", 0.5)
    with members(rendezvous, "stranger", 2, sglang=frozenset({1}), copies=True) as (group, [one]):
        assert isinstance(group, TorchGroup)
        one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        assert one.hear() == 256


def test_a_rank_0_of_another_program_has_a_group_of_torch() -> None:
    dist: Any = importlib.import_module("torch.distributed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    one = Peer(f"127.0.0.1:{store.port}", "plain", 2, 1)
    try:
        one.come()
        made = collective._form(dist.PrefixStore("plain", store), "plain", 2, 0, "gloo", LONG_S)  # pyright: ignore[reportPrivateUsage]
        dist.broadcast(torch.zeros(1, dtype=torch.uint8), src=0, group=made)
        assert one.hear() == "joined"
        one.receive(256)
        dist.broadcast(filled(256, 1), src=0, group=made)
        assert one.hear() == 256
    finally:
        one.process.kill()
        one.process.join()


def test_rank_0_stays_until_the_last_rank_has_what_it_heard_of_by_way_of_rank_0(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "chain", 3, copies=True) as (group, [one, two]):
        one.receive(256)
        group.broadcast(filled(256, 1), LONG_S)
        with pytest.raises(CollectiveError, match="took more than"):
            group.finish(SHORT_S)
        two.receive(256)
        group.finish(LONG_S)
        group.abort()
        assert [one.hear(), two.hear()] == [256, 256]


def test_a_connection_without_the_token_takes_no_rank(rendezvous: Rendezvous) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        made: list[CopySource] = []
        thread = threading.Thread(target=lambda: made.append(CopySource("t", 2, "cpu", listener, "right", LONG_S)))
        thread.start()
        wrong = CopyReceiver("t", 2, 1, "cpu", address, "wrong", LONG_S)
        with pytest.raises(CollectiveError, match="group t has lost rank 0"):
            wrong.broadcast(filled(256, 0), LONG_S)
        assert not made
        right = CopyReceiver("t", 2, 1, "cpu", address, "right", LONG_S)
        thread.join(LONG_S)
        into = filled(256, 0)
        way = right.begin(into)
        made[0].broadcast(filled(256, 7), LONG_S)
        way.wait(LONG_S)
        assert int(into.sum()) == 7 * 256
        # Both sides have to mean the same bucket.
        way = right.begin(filled(512, 0))
        with pytest.raises(CollectiveError, match="lost rank 1"):
            made[0].broadcast(filled(256, 7), LONG_S)
        with pytest.raises(CollectiveError, match="256 bytes at one rank and 512 at another"):
            way.wait(LONG_S)
        wrong.abort()
        right.abort()
        made[0].abort()


def test_a_bucket_is_copied_when_it_is_asked_for_and_not_before_it_is_there(rendezvous: Rendezvous) -> None:
    with pair() as (origin, taker):
        first, second = filled(256, 1), filled(256, 2)
        gone = [origin.begin(first), origin.begin(second)]
        assert origin._have[1] == 0, "no rank has asked"  # pyright: ignore[reportPrivateUsage]
        targets = [filled(256, 0), filled(256, 0), filled(256, 0)]
        came = [taker.begin(into) for into in targets]
        for way in (*gone, *came[:2]):
            way.wait(LONG_S)
        with pytest.raises(CollectiveError, match="took more than"):
            came[2].wait(0.05)
        first.fill_(3)
        origin.broadcast(first, LONG_S)
        came[2].order(LONG_S)
        assert [int(into[0]) for into in targets] == [1, 2, 3]


def test_a_peer_that_sends_invalid_messages_or_none_delays_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_messages, "HELLO_S", 1.5)  # for the one that says nothing, and for the taker too
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), socket.create_connection(address) as other:
            other.sendall(b"\x03\x00\x00\x00GET")
            made: list[CopySource] = []
            thread = threading.Thread(target=lambda: made.append(CopySource("g", 2, "cpu", listener, "token", LONG_S)))
            thread.start()
            taker = CopyReceiver("g", 2, 1, "cpu", f"127.0.0.1:{address[1]}", "token", LONG_S)
            thread.join(LONG_S)
            [origin] = made
            # A rank that waits hears of invalid messages later, too.
            taker._origin.sendall(b"\x01\x00\x00\x00\xc1")  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(CollectiveError, match="has lost rank 1"):
                origin.broadcast(filled(256, 1), LONG_S)
            origin.abort()
            taker.abort()


def test_the_rank_that_cannot_be_told_is_the_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    say = peer_messages.send
    made: list[CopySource] = []

    def deaf(peer: socket.socket, message: Any) -> None:
        if made and peer is made[0]._peers[2]:  # pyright: ignore[reportPrivateUsage]
            raise BrokenPipeError("Broken pipe")
        say(peer, message)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: made.append(CopySource("g", 3, "cpu", listener, "token", LONG_S)))
        thread.start()
        takers = [CopyReceiver("g", 3, rank, "cpu", address, "token", LONG_S) for rank in (1, 2)]
        thread.join(LONG_S)
    monkeypatch.setattr(peer_copy, "send", deaf)
    way = takers[0].begin(filled(256, 0))
    with pytest.raises(CollectiveError, match="group g has lost rank 2: Broken pipe"):
        made[0].broadcast(filled(256, 1), LONG_S)
    way.wait(LONG_S)
    for one in (*takers, *made):
        one.abort()


def test_no_word_waits_for_an_answer_to_the_one_before() -> None:
    with pair() as (origin, taker):
        ends = [origin._peers[1], taker._origin]  # pyright: ignore[reportPrivateUsage]
        assert [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends] == [1, 1]


def test_memory_that_replaced_other_memory_is_copied() -> None:
    with pair() as (origin, taker):
        into = filled(256, 0)
        for value in (1, 2):
            way = taker.begin(into)
            # The second one has the first one's file descriptor, and so its path.
            origin.broadcast(filled(256, value), LONG_S)
            way.wait(LONG_S)
            assert int(into[0]) == value


def test_nothing_is_copied_after_a_group_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, may = threading.Event(), threading.Event()

    def slow(space: MemoryRegion, **options: Any) -> Any:
        opening.set()
        assert may.wait(LONG_S)
        return open_space(space, **options)

    monkeypatch.setattr(peer_copy, "open_space", slow)
    with pair() as (origin, taker):
        source, into = filled(256, 1), filled(256, 0)
        taker.begin(into)
        origin.begin(source)
        assert opening.wait(LONG_S)
        taker.abort()
        # From now on its memory is another update's.
        may.set()
        for thread in threading.enumerate():
            if thread.name == "copied":
                thread.join(LONG_S)  # the last of the two that a rank has
        assert int(into.sum()) == 0


def test_a_bucket_that_cannot_be_shared_is_refused() -> None:
    with pair() as (origin, _), pytest.raises(CollectiveError, match="does not lie in memory that can be shared"):
        origin.begin(torch.zeros(256, dtype=torch.uint8))


@pytest.mark.engine
def test_sglangs_own_update_group_and_ours_meet(rendezvous: Rendezvous) -> None:
    with members(rendezvous, "mixed", 3, sglang=frozenset({2})) as (group, peers):
        for one in peers:
            one.receive(512)
        group.broadcast(torch.full((512,), 2, dtype=torch.uint8), LONG_S)
        assert [one.hear() for one in peers] == [1024, 1024]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_broadcast_to_a_dead_or_stopped_peer_ends_with_an_error(
    rendezvous: Rendezvous, how: signal.Signals, copies: bool
) -> None:
    with members(rendezvous, "lost", 2, copies=copies) as (group, [one]):
        assert one.process.pid is not None
        os.kill(one.process.pid, how)
        with pytest.raises(CollectiveError, match="group lost"):
            group.broadcast(filled(256 << 20, 0), SHORT_S)  # more than the socket's buffers hold
        group.abort()
        with pytest.raises(CollectiveError, match=r"group lost (was given up|has lost rank 1)"):
            group.broadcast(filled(256, 0), SHORT_S)


@pytest.mark.parametrize("copies", [False, True])
def test_a_receiver_whose_rank_0_gives_up_hears_of_it(rendezvous: Rendezvous, copies: bool) -> None:
    with members(rendezvous, "left", 2, copies=copies) as (group, [one]):
        one.receive(256)
        group.abort()
        assert isinstance(one.hear(), CollectiveError)


@pytest.mark.parametrize("copies", [False, True])
def test_a_group_that_no_other_rank_joins_is_given_up_in_time(
    rendezvous: Rendezvous, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_probe, "PROBES_S", 0.5)
    with pytest.raises(CollectiveError, match="group alone, rank 0 of 2"):
        rendezvous.join("alone", 2, backend="gloo", timeout_s=SHORT_S, copies=copies)
    with members(rendezvous, "next", 2) as (group, [one]):
        one.receive(256)
        group.broadcast(torch.zeros(256, dtype=torch.uint8), LONG_S)
        assert one.hear() == 0


def test_a_group_that_forms_after_its_waiters_left_is_left(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    may, left = threading.Event(), threading.Event()

    class Late(TorchGroup):
        def abort(self) -> None:
            left.set()

    def formed(*_arguments: object, **_options: object) -> ProcessGroup:
        assert may.wait(LONG_S)
        return Late(None, "late", 2, 0, "gloo", "cpu")

    monkeypatch.setattr(collective, "_formed", formed)
    with pytest.raises(CollectiveError, match="group late, rank 0 of 2: no answer within"):
        rendezvous.join("late", 2, backend="gloo", timeout_s=0.1)
    assert not left.is_set()
    may.set()
    assert left.wait(LONG_S)


def test_a_rendezvous_that_is_not_there_is_given_up_in_time(rendezvous: Rendezvous) -> None:
    rendezvous.close()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="group none, rank 1 of 2"):
        join("127.0.0.1:1", "none", 2, 1, backend="gloo", timeout_s=SHORT_S)
    assert time.monotonic() - began < LONG_S


def begun(work: object, monkeypatch: pytest.MonkeyPatch) -> Broadcast:
    """A broadcast of NCCL, which torch answers with `work`."""

    def broadcast(*args: object, **options: object) -> object:
        return work

    monkeypatch.setattr(collective.dist, "broadcast", broadcast)
    return TorchGroup(None, "g", 2, 0, "nccl", "cpu").begin(None)


def test_a_broadcast_whose_error_cannot_be_told_in_python_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        """As NCCL's: torch cannot convert what `exception` returns."""

        def is_completed(self) -> bool:
            return True

        def wait(self, _limit: object) -> None:
            pass

        def exception(self) -> None:
            raise TypeError("Unable to convert function return value to a Python type!")

    begun(Work(), monkeypatch).wait(SHORT_S)


def test_what_torch_is_told_of_nccl_is_for_this_group_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    calm = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with nccl_environment("nccl"):
        assert [os.environ.get(name) for name in calm] == ["0", "0", "0"]
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
    with nccl_environment("gloo"):
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_two_groups_that_form_at_once_leave_the_trainers_settings_of_nccl_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two pools, or of two groups of a pool, published to in two threads; one is through before the other."""
    key = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    for own in (None, "1"):
        monkeypatch.delenv(key, raising=False) if own is None else monkeypatch.setenv(key, own)
        first, second = (nccl_environment("nccl") for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert os.environ[key] == "0"
        second.__exit__(None, None, None)
        assert os.environ.get(key) == own


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


def test_what_a_gpu_does_next_is_ordered_behind_a_broadcast_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        """As NCCL's: with a limit, torch would block and abort the group at its end."""

        waits = 0

        def is_completed(self) -> bool:
            raise AssertionError("no rank asks")

        def wait(self) -> None:
            self.waits += 1

    work = Work()
    begun(work, monkeypatch).order(SHORT_S)
    assert work.waits == 1
