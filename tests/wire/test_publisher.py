"""`WeightPublisher` on real sockets and gloo, against a coordinator of a few lines and receivers that are processes.

Each fault: the right error, in time, and a further update that succeeds.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from enginepool import BlockingPool, BlockingWeightPublisher, Pool, WeightPublisher, errors
from enginepool.protocol.manifest import Tensor
from enginepool.protocol.messages import GroupStatus
from enginepool.protocol.messages.weight_reports import UpdateRecord, publisher_of
from enginepool.trainer import publisher as publisher_module
from enginepool.trainer import trainer_ranks
from enginepool.trainer import update_handle as update
from enginepool.trainer.publisher_context import PublisherContext
from enginepool.trainer.rank0_endpoint import Rank0Endpoint
from enginepool.trainer.update_handle import UpdateHandle
from enginepool.transfer import threads
from tests.wire.fake_coordinator import PATIENCE_S, FakeCoordinator
from tests.wire.fake_updates import FakeUpdates, Receiver

BUCKET = 4096
#: seconds of an update that meets a fault; generous, but not without end
LIMIT_S = 150.0

Scene = Callable[[Pool, WeightPublisher, FakeUpdates], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Receiver]]:
    """Two receivers for all tests; those that a test has ended are replaced for the next."""
    both = [Receiver(), Receiver()]
    yield both
    for receiver in both:
        receiver.end()


@pytest.fixture
def updates(tmp_path: Path, processes: list[Receiver]) -> Iterator[FakeUpdates]:
    heal(processes)
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield FakeUpdates(fake, processes, [UpdateRecord(0, "committed")])


def heal(processes: list[Receiver]) -> None:
    """Start those again that have ended."""
    for i, receiver in enumerate(processes):
        if not receiver.process.is_alive():
            receiver.end()
            processes[i] = Receiver()


SETTINGS: dict[str, Any] = {"device": "cpu", "bucket_bytes": BUCKET, "collective_timeout": 15.0, "retry_timeout": 0}


def play(updates: FakeUpdates, scene: Scene, **options: Any) -> None:
    """Run a scene with a publisher in it; then publish once more, which has to succeed."""

    async def main() -> None:
        settings = SETTINGS | options
        async with Pool.connect(updates.coordinator.address) as pool, WeightPublisher(pool, **settings) as publisher:
            await scene(pool, publisher, updates)
            heal(updates.receivers)
            last = updates.journal[-1].version + 1
            assert (await publisher.publish(model(last), last)).version == last
            for receiver in updates.receivers:
                assert receiver.sums() == sums(model(last))

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def model(seed: int) -> torch.nn.Module:
    torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return torch.nn.Sequential(torch.nn.Linear(50, 70), torch.nn.Linear(70, 3).to(torch.bfloat16))


def sums(net: torch.nn.Module) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in net.state_dict().items()}


class Gate:
    """A source that stops in the middle until it is opened."""

    manifest = (Tensor("a", "float32", (3000,)), Tensor("b", "float32", (3000,)))

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3000)
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        yield "b", torch.ones(3000)


def loop_threads() -> int:
    """Event loops that run in threads of this process."""
    return sum(thread.name == "enginepool" for thread in threading.enumerate())


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE_S)


# --- the straight way --------------------------------------------------------------------------------------------------


def test_every_receiver_has_the_bytes_of_the_module_and_the_group_is_kept(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        for version in (1, 2):
            record = await publisher.publish(model(version), version)
            assert (record.version, record.outcome) == (version, "committed")
            for receiver in updates.receivers:
                assert receiver.sums() == sums(model(version))

    play(updates, scene)
    assert len({(publish.peer, publish.address) for publish in updates.published}) == 1


def test_a_publisher_that_is_closed_takes_no_update(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        async with WeightPublisher(pool, **SETTINGS) as own:
            await own.publish(model(1), 1)
        for begin in (own.publish, own.start):
            with pytest.raises(errors.PoolClosed, match="the publisher is closed"):
                await begin(model(2), 2)
        assert [publish.version for publish in updates.published] == [1]

    play(updates, scene)


def test_options_arrive_under_their_wire_names(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 5, transfer="direct", in_flight="abort", drain=2.5, partial=True, new_run=True)

    play(updates, scene, group="g", lease=4.0)
    sent = updates.published[0]
    assert (sent.version, sent.group, sent.transfer, sent.in_flight, sent.drain_ms) == (5, "g", "direct", "abort", 2500)
    assert (sent.partial, sent.new_run, sent.lease_ms, sent.backend, sent.bucket_bytes) == (True, True, 4000, "gloo", BUCKET)
    assert sent.frames[0].dtype == "utf8"


def test_a_handle_shows_progress_and_waits_for_its_finish(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        handle = await publisher.start(model(1), 1)
        await handle.sent()
        assert (handle.sent_bytes >= handle.total_bytes > 0, handle.version) == (True, 1)
        while handle.phase != "staged":
            await asyncio.sleep(0.01)
        assert updates.journal[-1].version == 0
        with pytest.raises(errors.Publishing, match="version 1 is not over"):
            await publisher.start(model(2), 2)
        assert (await handle.finish()).version == 1
        assert (handle.phase, handle.members) == ("committed", 2)

    play(updates, scene)


def test_an_update_without_a_version_is_not_named_by_one(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        first = asyncio.ensure_future(publisher.publish(model(1)))
        await asyncio.sleep(0)  # it has begun, and waits to hear which version comes next
        with pytest.raises(errors.Publishing, match=r"^this publisher's update is not over; "):
            await publisher.start(model(2))
        assert (await first).version == 1

    play(updates, scene)


def test_the_lease_is_renewed_while_a_handle_waits(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        handle = await publisher.start(model(1), 1)
        await handle.sent()
        while len(updates.renewed) < 3:
            await asyncio.sleep(0.01)
        assert updates.renewed[-1].sent_bytes == handle.sent_bytes
        await handle.finish()

    play(updates, scene, lease=0.3)


def test_weights_without_a_broadcast_are_a_version_or_a_directory(
    updates: FakeUpdates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        assert (await pool.set_version(3)).transfer == "set_version"
        assert (await pool.publish_checkpoint(Path("some/model"), 4, in_flight="abort")).version == 4
        with pytest.raises(errors.VersionBackwards) as caught:
            await pool.set_version(4)
        assert caught.value.limit == "4"
        await pool.publish_checkpoint("here", 5)
        for path in ("", None, 7, b"some/model", "lone\ud800surrogate"):
            with pytest.raises(errors.BadRequest) as refused:
                await pool.publish_checkpoint(cast("Any", path), 6)
            assert refused.value.field == "path"

    play(updates, scene)
    assert [publish.path for publish in updates.published] == ["", "some/model", str(tmp_path / "here"), ""]


def test_a_publisher_that_comes_later_hears_what_the_pool_has_lost_before(updates: FakeUpdates) -> None:
    updates.coordinator.groups = [
        GroupStatus("another", version=9, needs_weights="lost"),
        GroupStatus("g", version=4, needs_weights="lost"),
    ]

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.wanted.wait()
        assert publisher.wanted_version == 4

    play(updates, scene, group="g")


def test_a_pool_that_is_closed_before_it_says_what_it_needs_needs_nothing(updates: FakeUpdates) -> None:
    async def main() -> None:
        async with Pool.connect(updates.coordinator.address) as pool:
            updates.coordinator.silent = True
            publisher = WeightPublisher(pool, group="g")
            await asyncio.sleep(0)
        await publisher.close()
        assert not publisher.wanted.is_set()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_weights_that_the_pool_lost_are_asked_for_until_an_update_is_committed(updates: FakeUpdates) -> None:
    called: list[int] = []

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 1)
        updates.want("another", 9)
        updates.want("g", 1)
        await publisher.wanted.wait()
        assert (publisher.wanted_version, called) == (1, [1])
        await publisher.publish(model(2), 2)
        assert not publisher.wanted.is_set()

    play(updates, scene, group="g", on_wanted=called.append)


def test_an_update_for_which_there_is_no_room_for_a_thread_leaves_the_next_one_free(
    updates: FakeUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        def start(work: Callable[[], object], name: str) -> threading.Thread:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threads, "start", start)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="new thread"):
                    await publisher.publish(model(1), 1)

    play(updates, scene)


def test_an_update_that_finds_no_room_for_a_thread_on_its_way_ends(
    updates: FakeUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = threads.start

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        def start(work: Callable[[], object], name: str) -> threading.Thread:
            if name in ("weights-join", "weights-abort"):
                raise RuntimeError("can't start new thread")
            return real(work, name)

        with monkeypatch.context() as patch:
            patch.setattr(threads, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                await asyncio.wait_for(publisher.publish(model(1), 1), PATIENCE_S)
        for receiver in updates.receivers:
            receiver.end()  # it waits for a group that never forms

    play(updates, scene)


def test_weights_that_come_back_without_the_publisher_are_no_longer_wanted(
    updates: FakeUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "WANTED_S", 0.05)
    another = GroupStatus("another", version=9, needs_weights="lost")

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 1)
        for _ in range(2):
            updates.coordinator.groups = [another, GroupStatus("g", version=1, needs_weights="lost")]
            updates.want("g", 1)
            await publisher.wanted.wait()
            await pool.status()
            assert publisher.wanted.is_set()
            updates.coordinator.groups = [another, GroupStatus("g", version=1)]
            while publisher.wanted.is_set():
                await asyncio.sleep(0.01)

    play(updates, scene, group="g")


def test_a_host_that_is_not_this_machine_is_named(updates: FakeUpdates) -> None:
    async def main() -> None:
        async with Pool.connect(updates.coordinator.address) as pool:
            for host in ("192.0.2.1", "no-such-host.invalid"):
                async with WeightPublisher(pool, device="cpu", host=host) as publisher:
                    for version in (1, 2):
                        with pytest.raises(errors.BadRequest, match=f"host: '{host}' is no address of this machine") as caught:
                            await publisher.start(model(1), version)
                        assert caught.value.field == "host"

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_a_hook_that_raises_keeps_no_other_publisher_from_hearing_what_the_pool_has_lost(updates: FakeUpdates) -> None:
    told: list[dict[str, Any]] = []

    def broken(version: int) -> None:
        raise ValueError(f"no version {version} here")

    def keep(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        told.append(context)

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        asyncio.get_running_loop().set_exception_handler(keep)
        async with WeightPublisher(pool, device="cpu", group="g") as other:
            await publisher.publish(model(1), 1)
            updates.want("g", 1)
            await asyncio.wait_for(other.wanted.wait(), PATIENCE_S)
        assert publisher.wanted.is_set()
        assert [str(context["exception"]) for context in told] == ["no version 1 here"]

    play(updates, scene, group="g", on_wanted=broken)


def test_a_trainer_that_does_not_await_has_the_same(updates: FakeUpdates) -> None:
    with BlockingPool.connect(updates.coordinator.address) as pool:
        with BlockingWeightPublisher(pool, device="cpu", bucket_bytes=BUCKET) as publisher:
            assert publisher.publish(model(1), 1).version == 1
            handle = publisher.start(model(2), 2)
            handle.sent()
            assert handle.sent_bytes >= handle.total_bytes
            assert handle.finish().version == 2
            publisher.start(model(3), 3).abort("as a test")
            assert pool.set_version(4).version == 4
            assert not publisher.wanted
        assert pool.weights().version == 4
    assert [given.reason for given in updates.aborted] == ["as a test"]


def test_a_blocking_publisher_closes_after_its_pool_too_and_twice_is_once(updates: FakeUpdates) -> None:
    pool = BlockingPool.connect(updates.coordinator.address)
    publisher = BlockingWeightPublisher(pool, device="cpu", bucket_bytes=BUCKET)
    assert publisher.publish(model(1), 1).version == 1
    before = loop_threads()
    pool.close()
    publisher.close()
    assert loop_threads() == before - 1
    publisher.close()
    other = BlockingPool.connect(updates.coordinator.address)
    with other, BlockingWeightPublisher(other, device="cpu") as publisher:
        publisher.close()


# --- trying again ------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_killed_does_not_end_the_run(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        def source() -> Iterator[tuple[str, torch.Tensor]]:
            if len(updates.published) == 2:
                updates.receivers[0].process.kill()
                updates.receivers[0].process.join()
            yield from model(2).state_dict().items()

        await publisher.publish(model(1), 1)
        updates.renew_receivers = True
        manifest = [(name, tensor.dtype, tensor.shape) for name, tensor in model(2).state_dict().items()]
        record = await publisher.publish(source, manifest=manifest)
        assert (record.version, record.outcome) == (2, "committed")
        for receiver in updates.receivers:
            assert receiver.sums() == sums(model(2))

    play(updates, scene, retry_timeout=100.0)
    assert [publish.version for publish in updates.published] == [1, 2, 2, 3]


@pytest.mark.parametrize("code", ["update_aborted", "publishing", "version_backwards"])
def test_a_blocking_publisher_that_names_no_version_tries_again_too(updates: FakeUpdates, code: str) -> None:
    updates.refuse = code
    pool = BlockingPool.connect(updates.coordinator.address)
    with pool, BlockingWeightPublisher(pool, device="cpu", bucket_bytes=BUCKET) as publisher:
        assert [publisher.publish(model(1)).version, publisher.publish(model(2)).version] == [1, 2]


def test_an_iterator_is_tried_once(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        updates.refuse = "update_aborted"
        with pytest.raises(errors.UpdateAborted):
            await publisher.publish(iter(model(1).state_dict().items()), 1)

    play(updates, scene, retry_timeout=100.0)


# --- refusals, which leave the process group alone ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("publishing", errors.Publishing),
        ("weights_refused", errors.WeightsRefused),
        ("unknown_group", errors.UnknownGroup),
        ("version_backwards", errors.VersionBackwards),
    ],
)
def test_a_refusal_is_raised_by_start_and_the_group_stands(updates: FakeUpdates, code: str, error: type[Exception]) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 1)
        updates.refuse = code
        with pytest.raises(error, match=code):
            await publisher.start(model(2), 2)

    play(updates, scene)
    assert len({publish.peer for publish in updates.published}) == 1


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"source": {"a": 1}}, "source[a]"),
        ({"version": -1}, "version"),
        ({"version": 1.5}, "version"),
        ({"transfer": "set_version"}, "transfer"),
        ({"in_flight": "wait"}, "in_flight"),
        ({"drain": -1}, "drain"),
        ({"drain": 3601}, "drain"),
        ({"partial": 1}, "partial"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(updates: FakeUpdates, arguments: Any, field: str) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        given: dict[str, Any] = {"source": model(1), "version": 1, **arguments}
        with pytest.raises(errors.BadRequest) as caught:
            await publisher.start(**given)
        assert caught.value.field == field
        assert updates.published == []

    play(updates, scene)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"bucket_bytes": 1000}, "bucket_bytes"),
        ({"bucket_bytes": 512.0}, "bucket_bytes"),
        ({"bucket_bytes": "1g"}, "bucket_bytes"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"dtype": torch.int8}, "dtype"),
        ({"device": "mps"}, "device"),
        ({"device": "gpu"}, "device"),
        ({"timeout": 0}, "timeout"),
        ({"lease": 3601}, "lease"),
        ({"rename": "model."}, "rename"),
        ({"gather": 3}, "gather"),
        ({"host": None}, "host"),
        ({"host": ""}, "host"),
        ({"host": "\ud800"}, "host"),
    ],
)
def test_a_publisher_that_cannot_work_is_refused(updates: FakeUpdates, options: Any, field: str) -> None:
    async def main() -> None:
        async with Pool.connect(updates.coordinator.address) as pool:
            with pytest.raises(errors.BadRequest) as caught:
                WeightPublisher(pool, **options)
            assert caught.value.field == field
            with pytest.raises(errors.BadRequest, match="rank 0"):
                WeightPublisher(None)

    asyncio.run(main())


# --- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_is_lost_in_the_middle_aborts_the_update(updates: FakeUpdates, sign: signal.Signals) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 1)
        gate = Gate()
        handle = await publisher.start(gate, 2, manifest=gate.manifest)
        await reached(gate.reached)
        victim = updates.receivers[1]
        victim.signal(sign)
        gate.opened.set()
        if sign == signal.SIGSTOP:
            # What the coordinator's own deadline would say.
            await asyncio.sleep(0.2)
            updates.fail("worker 1 is silent")
        began = time.monotonic()
        with pytest.raises(errors.UpdateAborted):
            await handle.finish()
        assert time.monotonic() - began < PATIENCE_S
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene)
    assert updates.published[0].peer == updates.published[1].peer != updates.published[2].peer


def test_a_receiver_that_is_stopped_is_noticed_without_the_coordinator_too(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        gate = Gate()
        handle = await publisher.start(gate, 1, manifest=gate.manifest)
        await reached(gate.reached)
        updates.receivers[0].signal(signal.SIGSTOP)
        gate.opened.set()
        with pytest.raises(errors.UpdateAborted):
            await handle.finish()
        assert updates.aborted
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene, collective_timeout=6.0)


def test_a_receiver_that_never_joins_ends_the_update_in_time(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        updates.receivers[0].signal(signal.SIGSTOP)
        with pytest.raises(errors.UpdateAborted):
            await publisher.publish(model(1), 1)
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene, collective_timeout=5.0)


def test_an_abort_by_the_coordinator_ends_a_transfer_whose_source_still_works(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        gate = Gate()
        handle = await publisher.start(gate, 1, manifest=gate.manifest)
        await reached(gate.reached)
        updates.fail("the lease lapsed")
        with pytest.raises(errors.UpdateAborted, match="the lease lapsed"):
            await handle.sent()
        gate.opened.set()
        with pytest.raises(errors.UpdateAborted, match="the lease lapsed"):
            await handle.finish()
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene)


def test_where_trainer_ranks_go_in_step_no_update_begins_while_the_source_of_the_last_one_is_read(
    updates: FakeUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneRank:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        gate = Gate()
        handle = await publisher.start(gate, 1, manifest=gate.manifest)
        await reached(gate.reached)
        updates.fail("the lease lapsed")
        with monkeypatch.context() as patch:
            patch.setattr(update, "_LEAVE_S", 0.1)
            patch.setattr(trainer_ranks, "_LONG_S", 0.0)
            where = "this publisher waits for .* from its source or gather"
            with pytest.raises(errors.UpdateAborted, match=f"the lease lapsed; {where}"):
                await handle.finish()
            with pytest.raises(errors.Publishing, match=f"version 1 is not over; its thread is still busy; {where}"):
                await publisher.start(model(2), 2)
        gate.opened.set()
        await handle.abort()
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene, trainer_group=OneRank())


@pytest.mark.parametrize(
    ("raised", "reason"),
    [(ZeroDivisionError("in the middle"), "in the middle"), (ValueError("no file a-\udcff"), "no file a-?")],
    ids=["text", "no UTF-8"],
)
def test_an_error_of_the_source_reaches_the_caller_as_it_is(updates: FakeUpdates, raised: Exception, reason: str) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3000)
        raise raised

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        with pytest.raises(type(raised)) as caught:
            await publisher.publish(broken, 1, manifest=Gate.manifest)
        assert caught.value is raised
        assert [given.reason for given in updates.aborted] == [reason]
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene)


@pytest.mark.parametrize("raised", [SystemExit("enough"), StopIteration()])
@pytest.mark.parametrize("place", ["rename", "source", "in the middle"])
def test_any_exception_of_the_callers_code_ends_the_update(updates: FakeUpdates, raised: BaseException, place: str) -> None:
    """Also what is no Exception, and what no asyncio future carries: `next` of nothing in a hook is one of these."""

    def rename(name: str, tensor: torch.Tensor) -> str:
        if place == "rename" and not done:
            raise raised
        return name

    def source() -> Any:
        if place == "source":
            raise raised
        return middle()

    def middle() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(3000)
        raise raised

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        given, manifest = (model(1), None) if place == "rename" else (source, Gate.manifest)
        with pytest.raises(RuntimeError, match=f"raised {type(raised).__name__}"):
            await asyncio.wait_for(publisher.publish(given, 1, manifest=manifest), PATIENCE_S)
        done.append(True)
        if place != "rename":
            for receiver in updates.receivers:
                receiver.end()

    done: list[bool] = []
    play(updates, scene, rename=rename)


def test_a_cancelled_publish_gives_the_update_up(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        gate = Gate()
        task = asyncio.create_task(publisher.publish(gate, 1, manifest=gate.manifest))
        await reached(gate.reached)
        task.cancel()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert updates.aborted
        for receiver in updates.receivers:
            receiver.end()

    play(updates, scene)


def test_closing_the_publisher_ends_an_update_that_has_just_begun(
    updates: FakeUpdates, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_endpoint = PublisherContext.open_endpoint

    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        listening, may = threading.Event(), threading.Event()

        def slow(context: PublisherContext) -> Rank0Endpoint:
            listening.set()
            assert may.wait(PATIENCE_S)
            return open_endpoint(context)

        monkeypatch.setattr(PublisherContext, "open_endpoint", slow)
        own = WeightPublisher(pool, **SETTINGS)
        starting = asyncio.create_task(own.start(model(1), 1))
        await reached(listening)
        closing = asyncio.create_task(own.close())
        await asyncio.sleep(0)
        may.set()
        with pytest.raises(errors.UpdateAborted, match="the publisher closed"):
            await starting
        await closing
        assert [record.version for record in updates.journal] == [0]

    play(updates, scene)


@pytest.mark.parametrize("committed", [True, False])
def test_after_a_restart_of_the_coordinator_its_journal_decides(updates: FakeUpdates, committed: bool) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        await publisher.publish(model(1), 1)
        updates.deaf = True
        task = asyncio.create_task(publisher.publish(model(2), 2))
        while updates.published[-1].version != 2 or not updates.joined.is_set():
            await asyncio.sleep(0.01)
        handle = publisher._context.current  # pyright: ignore[reportPrivateUsage]
        assert isinstance(handle, UpdateHandle)
        await handle.sent()
        while not updates.digest:
            await asyncio.sleep(0.01)
        this = publisher_of(updates.coordinator.client, updates.published[-1].id)
        updates.restart(UpdateRecord(2, "committed", digest=updates.digest, publisher=this if committed else "another"))
        if committed:
            assert (await task).version == 2
        else:
            with pytest.raises(errors.UpdateAborted, match="restarted"):
                await task
            for receiver in updates.receivers:
                receiver.end()

    play(updates, scene)


def test_closing_the_pool_ends_an_update(updates: FakeUpdates) -> None:
    async def main() -> None:
        async with Pool.connect(updates.coordinator.address) as pool:
            publisher = WeightPublisher(pool, device="cpu", bucket_bytes=BUCKET)
            gate = Gate()
            handle = await publisher.start(gate, 1, manifest=gate.manifest)
            await reached(gate.reached)
            await pool.close()
            gate.opened.set()
            with pytest.raises(errors.PoolClosed):
                await handle.finish()
            await publisher.close()

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    for receiver in updates.receivers:
        receiver.end()
