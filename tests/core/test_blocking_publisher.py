"""What a publisher that blocks its caller takes over from the caller's thread, in which the pool's loop does not run."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from enginepool.client.pool import Pool
from enginepool.errors import BadRequest, PoolClosed
from enginepool.trainer import blocking_publisher
from enginepool.trainer.blocking_publisher import BlockingWeightPublisher
from enginepool.trainer.publisher import WeightPublisher, device_of


class Stream:
    """One of a GPU, which notes what it waits for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def record_event(self) -> str:
        return f"what {self.name} had to do"

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")


def test_a_publisher_of_a_rank_without_a_pool_leaves_no_thread_whether_it_could_be_made_or_not() -> None:
    before = threading.active_count()
    with pytest.raises(BadRequest, match="bucket_bytes"):
        BlockingWeightPublisher(None, device="cpu", bucket_bytes=3)
    assert threading.active_count() == before

    class Group:
        """A trainer's, in which this is another rank than the first."""

        def rank(self) -> int:
            return 1

    publisher = BlockingWeightPublisher(None, device="cpu", trainer_group=Group())
    publisher.close()
    publisher.close()
    assert threading.active_count() == before
    with pytest.raises(PoolClosed):
        publisher.publish({"w": torch.zeros(2)}, 1)


def test_a_pool_of_the_other_kind_and_a_gpu_that_is_not_there_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = Pool.connect("ipc:///nobody/is/here")
    with pytest.raises(BadRequest, match="pool: an Opening; a BlockingPool; WeightPublisher takes a Pool"):
        BlockingWeightPublisher(awaited, device="cpu")  # type: ignore[arg-type]

    async def make(pool: Any, device: str) -> None:
        WeightPublisher(pool, device=device)

    with pytest.raises(BadRequest, match="pool: an Opening; a Pool, awaited or entered; BlockingWeightPublisher takes a Blo"):
        asyncio.run(make(awaited, "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(BadRequest, match=f"device: {device}; torch finds no GPU here"):
            device_of(device)


def test_a_group_that_does_not_have_this_rank_and_a_misspelt_option_are_named() -> None:
    outside: Any = -100  # what torch.distributed.new_group returns there
    with pytest.raises(
        BadRequest, match="trainer_group: an int; a torch process group that has this rank as a member, or None"
    ):
        BlockingWeightPublisher(None, device="cpu", trainer_group=outside)

    class Group:
        """A trainer's, in which this is another rank than the first."""

        def rank(self) -> int:
            return 1

    wrong: Any = {"verison": 3}
    publisher = BlockingWeightPublisher(None, device="cpu", trainer_group=Group())
    with publisher, pytest.raises(TypeError, match=r"^publish\(\) has no argument 'verison'; did you mean version\?$"):
        publisher.publish({"w": torch.zeros(2)}, **wrong)


def test_the_gpu_and_the_stream_are_those_of_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    caller = threading.current_thread()

    class Publisher:
        """In the thread of the loop."""

        def __init__(self, _pool: None, *, device: Any = "auto", **_options: Any) -> None:
            assert threading.current_thread() is not caller
            events.append(f"made for {device}")

        async def start(self, _source: object, version: int) -> None:
            events.append(f"start {version}")

        async def publish(self, _source: object, version: int) -> None:
            events.append(f"publish {version}")

        async def close(self) -> None:
            pass

    def current_device() -> int:
        return 3 if threading.current_thread() is caller else 0

    def current_stream(device: Any) -> Stream:
        return Stream(f"{device} aside", events)

    def default_stream(device: Any) -> Stream:
        return Stream(f"{device}", events)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", default_stream)
    monkeypatch.setattr(blocking_publisher, "WeightPublisher", Publisher)
    with BlockingWeightPublisher(None) as publisher:
        publisher.start({}, 1)
        publisher.publish({}, 2)
    waits = "cuda:3 waits for what cuda:3 aside had to do"
    assert events == ["made for cuda:3", waits, "start 1", waits, "publish 2"]
