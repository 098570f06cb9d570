"""Which LoRA adapters of an engine run at once."""

import asyncio

import pytest

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


def test_names_of_adapters_have_bounds() -> None:
    assert adapter_names({"b": 1, "a": 2}) == ("a", "b")
    with pytest.raises(SettingsError, match="lora_paths: 65 adapters; at most 64"):
        adapter_names(dict.fromkeys(map(str, range(65))))
    with pytest.raises(SettingsError, match="a name of 129 characters; 1 to 128"):
        adapter_names({"a" * 129: 1})
