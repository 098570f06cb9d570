"""Which LoRA adapters of an engine run at once."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.workers.sglang.generate.adapter_slots import AdapterSlots, adapter_names
from enginepool.workers.sglang.host.settings import SettingsError


def test_a_sequence_of_a_further_adapter_waits_and_delays_no_other() -> None:
    async def scene() -> None:
        slots = AdapterSlots(2)
        await slots.enter("")
        await slots.enter("a")
        waiting = [asyncio.create_task(slots.enter("b")) for _ in range(2)]
        await asyncio.sleep(0)
        await slots.enter("a")
        slots.leave("a")
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        slots.leave("a")
        await asyncio.gather(*waiting)
        again = asyncio.create_task(slots.enter("a"))
        await asyncio.sleep(0)
        again.cancel()  # it was not wanted any more, and holds no place
        slots.leave("b")
        slots.leave("b")
        await slots.enter("c")

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_a_pinned_adapter_has_a_place_of_its_own() -> None:
    async def scene() -> None:
        slots = AdapterSlots(3, ["p"])
        for adapter in ("", "a", "p"):
            await slots.enter(adapter)
        slots.leave("p")
        waiting = asyncio.create_task(slots.enter("b"))
        await asyncio.sleep(0)
        assert not waiting.done()
        slots.leave("")
        await waiting

    asyncio.run(asyncio.wait_for(scene(), 30))


async def entered(slots: AdapterSlots, *wanted: tuple[str, int]) -> "list[asyncio.Task[None]]":
    tasks = [asyncio.create_task(slots.enter(adapter, priority)) for adapter, priority in wanted]
    await asyncio.sleep(0)
    return tasks


def names(tasks: "list[asyncio.Task[None]]") -> list[bool]:
    return [task.done() for task in tasks]


def test_a_further_adapter_gets_the_place_of_the_one_that_has_run_for_longest() -> None:
    async def scene() -> None:
        slots = AdapterSlots(2)
        assert names(await entered(slots, ("a", 0), ("b", 0), ("a", 0))) == [True, True, True]
        (further,) = await entered(slots, ("c", 0))
        # a gets no more sequences; b does.
        held = await entered(slots, ("a", 0), ("b", 0))
        assert names([further, *held]) == [False, False, True]
        for left in range(2):
            assert not further.done(), left
            slots.leave("a")
            await asyncio.sleep(0)
        assert further.done() and not held[0].done()
        # Now b has run for longest, and a waits for it.
        for _ in range(2):
            slots.leave("b")
        await asyncio.sleep(0)
        assert held[0].done()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_an_adapter_that_goes_on_because_of_a_higher_priority_keeps_no_other_from_leaving_its_place() -> None:
    async def scene() -> None:
        slots = AdapterSlots(2)
        for adapter in ("a", "b"):
            await slots.enter(adapter)
        (further,) = await entered(slots, ("c", 0))
        assert names(await entered(slots, ("a", 1), ("b", 0), ("a", 0))) == [True, False, True], "now b leaves its place"
        slots.leave("b")
        await asyncio.sleep(0)
        assert further.done()

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_all_sequences_of_an_adapter_that_wait_get_its_place_together() -> None:
    async def scene() -> None:
        slots = AdapterSlots(1)
        await slots.enter("a")
        waiting = await entered(slots, *((adapter, 0) for adapter in "babab"))
        slots.leave("a")
        await asyncio.sleep(0)
        assert names(waiting) == [True, False, True, False, True]
        for _ in range(3):
            slots.leave("b")
        await asyncio.sleep(0)
        assert all(names(waiting))

    asyncio.run(asyncio.wait_for(scene(), 30))


def test_the_highest_priority_gets_the_next_place_and_one_that_is_cancelled_none() -> None:
    async def scene() -> None:
        slots = AdapterSlots(1)
        await slots.enter("a")
        low, cancelled, high, higher = await entered(slots, ("b", 0), ("c", 5), ("d", 3), ("a", 4))
        assert names([low, cancelled, high, higher]) == [False] * 4, "a leaves its place to c"
        cancelled.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert names([low, high, higher]) == [False, False, True], "and not to d, which has a lower priority"
        slots.leave("a")
        slots.leave("a")
        await asyncio.sleep(0)
        assert names([low, high]) == [False, True]
        # It has got its place, and is cancelled before it knows.
        slots.leave("d")
        low.cancel()
        await asyncio.wait([low])
        await slots.enter("e")

    asyncio.run(asyncio.wait_for(scene(), 30))


@given(
    st.lists(st.tuples(st.sampled_from("abcdp"), st.integers(0, 2), st.sampled_from(["enter", "leave", "cancel"])), max_size=50)
)
def test_adapters_have_no_more_places_than_there_are_and_every_sequence_gets_its_turn(
    moves: list[tuple[str, int, str]],
) -> None:
    async def scene() -> None:
        slots = AdapterSlots(3, ["p"])
        tasks: list[tuple[str, asyncio.Task[None]]] = []

        def running() -> list[str]:
            return [adapter for adapter, task in tasks if task.done()]

        async def leave(place: int) -> None:
            inside = [entry for entry in tasks if entry[1].done()]
            if inside:
                entry = inside[place % len(inside)]
                tasks.remove(entry)
                slots.leave(entry[0])
                await asyncio.sleep(0)

        for number, (adapter, priority, move) in enumerate(moves):
            if move == "enter":
                tasks.append((adapter, (await entered(slots, (adapter, priority)))[0]))
            elif move == "leave":
                await leave(number)
            elif waits := [entry for entry in tasks if not entry[1].done()]:
                entry = waits[number % len(waits)]
                tasks.remove(entry)
                entry[1].cancel()
                await asyncio.wait([entry[1]])
                await asyncio.sleep(0)
            assert len({adapter for adapter in running() if adapter != "p"}) <= 2
            assert running() or not tasks
        for _ in range(len(tasks)):
            await leave(0)
        assert not tasks

    asyncio.run(scene())


def test_names_of_adapters_have_bounds() -> None:
    assert adapter_names({"b": 1, "a": 2}) == ("a", "b")
    with pytest.raises(SettingsError, match="lora_paths: 65 adapters; at most 64"):
        adapter_names(dict.fromkeys(map(str, range(65))))
    with pytest.raises(SettingsError, match="a name of 129 characters; 1 to 128"):
        adapter_names({"a" * 129: 1})
