"""`WeightPublisher` with memory that it lends, on real sockets, against a small coordinator and receivers that look at it."""

import asyncio

import pytest

from enginepool import BlockingPool, BlockingWeightPublisher, Pool, WeightPublisher, errors
from enginepool.host import host_identity
from tests.open_files import lent_here
from tests.wire.fake_updates import FakeUpdates
from tests.wire.test_publisher import BUCKET, Gate, model, play, processes, reached, sums, updates

__all__ = ["processes", "updates"]


def test_every_receiver_finds_the_bytes_of_the_module_and_no_process_group_forms(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        before = lent_here()
        for version in (1, 2):
            record = await publisher.publish(model(version), version, transfer="ipc")
            assert (record.version, record.outcome) == (version, "committed")
            assert lent_here() <= before
            for receiver in updates.receivers:
                assert receiver.sums() == sums(model(version))
        handle = await publisher.start(model(3), 3, transfer="ipc")
        await handle.sent()
        assert (handle.sent_bytes >= handle.total_bytes > 0, len(lent_here() - before)) == (True, 1)
        while handle.phase != "staged":
            await asyncio.sleep(0.01)
        await handle.finish()

    play(updates, scene)
    offers = updates.published[:3]
    assert {(offer.host, offer.gpu, offer.address, offer.peer) for offer in offers} == {(host_identity(), "", "", "")}


def test_a_trainer_that_does_not_await_lends_too_and_keeps_its_memory_if_it_likes(updates: FakeUpdates) -> None:
    before = lent_here()
    with (
        BlockingPool.connect(updates.coordinator.address) as pool,
        BlockingWeightPublisher(pool, device="cpu", bucket_bytes=BUCKET, keep_memory=True) as publisher,
    ):
        for version in (1, 2):
            assert publisher.publish(model(version), version, transfer="ipc").version == version
            assert len(lent_here() - before) == 1
    assert lent_here() <= before


def test_an_update_that_is_given_up_stops_lending(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        before, gate = lent_here(), Gate()
        handle = await publisher.start(gate, 1, manifest=gate.manifest, transfer="ipc")
        await reached(gate.reached)
        updates.fail("the lease lapsed")
        gate.opened.set()
        with pytest.raises(errors.UpdateAborted, match="the lease lapsed"):
            await handle.finish()
        handle = await publisher.start(model(2), 2, transfer="ipc")
        await handle.sent()
        await handle.abort("thought better of it")
        with pytest.raises(errors.UpdateAborted, match="thought better of it"):
            await handle.finish()
        assert lent_here() <= before

    play(updates, scene)


def test_an_update_that_is_refused_lays_nothing_out(updates: FakeUpdates) -> None:
    async def scene(pool: Pool, publisher: WeightPublisher, updates: FakeUpdates) -> None:
        updates.refuse = "unsupported"
        gate = Gate()
        with pytest.raises(errors.Unsupported):
            await publisher.start(gate, 1, manifest=gate.manifest, transfer="ipc")
        assert not gate.reached.is_set()

    play(updates, scene)


@pytest.mark.parametrize("value", [1, "yes"])
def test_keep_memory_is_a_flag(updates: FakeUpdates, value: object) -> None:
    async def main() -> None:
        async with Pool.connect(updates.coordinator.address) as pool:
            with pytest.raises(errors.BadRequest) as caught:
                WeightPublisher(pool, device="cpu", keep_memory=value)  # pyright: ignore[reportArgumentType]
            assert caught.value.field == "keep_memory"

    asyncio.run(main())
