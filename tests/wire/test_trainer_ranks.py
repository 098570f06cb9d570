"""Trainers of several ranks: the gathers run in step, and an update that ends early ends on every rank, before the next one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool.protocol.messages.weight_reports import UpdateRecord
from tests.wire.fake_coordinator import FakeCoordinator
from tests.wire.fake_updates import FakeUpdates, Receiver
from tests.wire.forked import fork
from tests.wire.trainer import GONE, main

LIMIT_S = 200.0
NAMES = ["0.weight", "1.weight", "2.weight", "3.weight"]


@pytest.fixture
def updates(tmp_path: Path) -> Iterator[FakeUpdates]:
    receivers = [Receiver()]
    with FakeCoordinator(f"ipc://{tmp_path}/c.sock") as fake:
        yield FakeUpdates(fake, receivers, [UpdateRecord(0, "committed")])
    for receiver in receivers:
        receiver.end()


def train(updates: FakeUpdates, fault: str = "") -> list[dict[str, Any]]:
    """What each of two ranks says at its end, and nothing where it leaves without a word; neither may hang."""
    meeting = f"{updates.coordinator.address.removeprefix('ipc://')}-{len(updates.published)}-ranks"
    files = [Path(f"{meeting}-{rank}.stderr") for rank in range(2)]
    address = updates.coordinator.address
    ranks = [fork(main, rank, meeting, address, fault, str(file)) for rank, file in enumerate(files)]
    said: list[dict[str, Any]] = []
    try:
        for rank, ((process, connection), file) in enumerate(zip(ranks, files, strict=True)):
            assert connection.poll(LIMIT_S), f"rank {rank} hangs"
            try:
                said.append(connection.recv())
            except EOFError:
                said.append({})
            process.join(LIMIT_S)
            assert process.exitcode == (GONE if fault == "gone" and rank == 1 else 0), file.read_text()
            if fault == "stopped":
                return said
            assert "Traceback" not in file.read_text(), file.read_text()
    finally:
        for process, connection in ranks:
            process.kill()
            process.join()
            connection.close()
    return said


@pytest.mark.parametrize("way", ["", "lent"])
def test_all_ranks_gather_every_tensor_in_step_and_hear_the_outcome(updates: FakeUpdates, way: str) -> None:
    said = train(updates, way)
    assert said == [{"done": {"1": "committed", "2": "committed"}, "gathered": NAMES * 2}] * 2
    sums = updates.receivers[0].sums()
    assert sums == {name: float(2 * (2 + i) * 1600) for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("way", ["trains", "trains, lent"])
def test_all_ranks_train_on_once_all_is_sent_before_any_of_them_finishes(updates: FakeUpdates, way: str) -> None:
    assert train(updates, way) == [{"done": {"1": "committed", "2": "committed"}, "gathered": NAMES * 2}] * 2


@pytest.mark.parametrize(
    ("way", "own"),
    [
        ("trains, aborts", "UpdateAborted: the update to version 1 was aborted: no memory"),
        ("trains, late", "DeadlineExceeded: the update did not end in 0.1 s; whether it was committed is unknown"),
        ("trains, waits", "DeadlineExceeded: the update did not end in 0.7 s; whether it was committed is unknown"),
    ],
)
def test_a_rank_that_leaves_after_all_is_sent_ends_the_update_on_all(updates: FakeUpdates, way: str, own: str) -> None:
    updates.renew_receivers = True
    first, second = train(updates, way)
    assert f"trainer rank 1 failed: {own}" in first["done"]["1"]
    assert second["done"]["1"] == own
    assert [rank["done"]["2"] for rank in (first, second)] == ["committed"] * 2


def test_sharded_tensors_are_made_whole_and_tied_ones_sent_once_on_all_ranks(updates: FakeUpdates) -> None:
    said = train(updates, "sharded")
    assert [rank["done"] for rank in said] == [{"1": "committed", "2": "committed"}] * 2
    assert updates.receivers[0].sums() == {"embed": 2 * 1500.0, "norm": 2.0, "bias": 3.0}


def test_a_refused_update_is_heard_by_all_before_anything_is_gathered(updates: FakeUpdates) -> None:
    updates.refuse = "weights_refused"
    said = train(updates)
    for rank in said:
        assert rank["done"] == {"1": "WeightsRefused: refused: weights_refused (limit: 0)", "2": "committed"}
        assert rank["gathered"] == NAMES


def test_a_source_that_fails_on_rank_0_ends_the_update_on_all(updates: FakeUpdates) -> None:
    first, second = train(updates, "source")
    assert first["done"] == {"1": "RuntimeError: nothing here", "2": "committed"}
    assert second["done"]["1"].startswith("UpdateAborted: ")
    assert second["done"]["2"] == "committed"


def test_a_tensor_that_rank_0_did_not_announce_holds_up_no_gather_of_those_after_it(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    first, second = train(updates, "manifest")
    assert first["done"]["1"].startswith("BadRequest: source: 1.weight: expected the announced shape [40, 41], got [40, 40]")
    assert second["done"]["1"].startswith("UpdateAborted: ")
    assert [rank["done"]["2"] for rank in (first, second)] == ["committed"] * 2
    assert [rank["gathered"] for rank in (first, second)] == [NAMES * 2] * 2


def test_an_update_that_rank_0_cannot_even_begin_ends_on_all(updates: FakeUpdates) -> None:
    first, second = train(updates, "host")
    wrong = "BadRequest: host: '192.0.2.1' is no address of this machine: "
    assert first["done"]["1"].startswith(wrong)
    assert second["done"]["1"].startswith(
        f"UpdateAborted: the update to version 1 was aborted: {wrong.removeprefix('BadRequest: ')}"
    )
    assert [rank["done"]["2"] for rank in (first, second)] == ["committed"] * 2


def test_a_rank_that_fails_makes_all_give_up(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    first, second = train(updates, "rank 1")
    assert "trainer rank 1 failed: RuntimeError: rank 1 has lost its shard" in first["done"]["1"]
    assert second["done"]["1"] == "RuntimeError: rank 1 has lost its shard"
    assert [rank["done"]["2"] for rank in (first, second)] == ["committed"] * 2


def test_ranks_that_bring_different_versions_are_told_so_before_anything_is_gathered(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    for said in train(updates, "ahead"):
        wrong = "BadRequest: version: 1 on trainer rank 0, 2 on rank 1; all ranks make the same calls"
        assert said == {"done": {"1": wrong, "2": "committed"}, "gathered": NAMES}


def test_of_a_rank_that_dies_the_others_hear_which(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    first, second = train(updates, "gone")
    assert not second
    assert "UpdateAborted: " in first["done"]["1"] and "trainer rank 1 is gone: it has said nothing for" in first["done"]["1"]
    assert "UpdateAborted: " in first["done"]["2"] and "trainer rank 1 has not called `publish`" in first["done"]["2"]


def test_a_rank_that_stands_still_in_a_gather_is_named(updates: FakeUpdates) -> None:
    (first,) = train(updates, "stopped")
    assert first["done"]["1"].startswith("UpdateAborted: ")
    assert "trainer rank 1 is gone: it has said nothing for" in first["done"]["1"]


def test_a_rank_that_fails_while_the_others_gather_is_named_to_all(updates: FakeUpdates) -> None:
    first, second = train(updates, "torn 1")
    assert first["done"]["1"].startswith("UpdateAborted: ")
    assert "trainer rank 1 failed: RuntimeError: no such shard" in first["done"]["1"]
    assert second["done"]["1"] == "RuntimeError: no such shard"


def test_a_rank_0_that_fails_while_the_others_gather_hears_its_own_error(updates: FakeUpdates) -> None:
    first, second = train(updates, "torn 0")
    assert first["done"]["1"] == "RuntimeError: no such shard"
    assert second["done"]["1"].startswith("UpdateAborted: ")
    assert "trainer rank 0 failed: RuntimeError: no such shard" in second["done"]["1"]


def test_a_rank_that_does_not_call_publish_is_named_and_is_in_step_again_with_its_next_call(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    for rank in train(updates, "late 1"):
        assert rank["done"]["1"].startswith("UpdateAborted: ")
        assert "trainer rank 1 has not called `publish` for 6 s; all ranks make the same calls" in rank["done"]["1"]
        assert rank["done"]["2"] == "committed"


def test_a_rank_0_that_does_not_call_publish_is_named_too(updates: FakeUpdates) -> None:
    updates.renew_receivers = True
    first, second = train(updates, "late 0")
    assert "UpdateAborted: " in second["done"]["1"]
    assert "trainer rank 0 has not called `publish` for 6 s" in second["done"]["1"]
    assert "trainer rank 1 has not called `publish` for 6 s" in first["done"]["1"]
    assert [rank["done"]["2"] for rank in (first, second)] == ["committed"] * 2


def test_all_ranks_try_again_what_the_pool_gave_up(updates: FakeUpdates) -> None:
    updates.refuse = "update_aborted"
    assert train(updates) == [{"done": {"1": "committed", "2": "committed"}, "gathered": NAMES * 2}] * 2


def test_ranks_that_name_no_version_bring_the_next_one(updates: FakeUpdates) -> None:
    assert train(updates, "next") == [{"done": {"1": "committed", "2": "committed"}, "gathered": NAMES * 2}] * 2
    assert [record.version for record in updates.journal] == [0, 1, 2]
