"""Requests prefer the worker that has computed the beginning of their prompt, and the load stays even."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.operations.generate import GENERATE, GenerateWork
from enginepool.coordinator.scheduling import generation_slots
from enginepool.coordinator.scheduling.prefix_affinity import PrefixIndex, bound
from enginepool.coordinator.shell.decode import worker_event
from enginepool.coordinator.shell.peers import SAME_USER, Peer
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import (
    MAX_REPORTED_BLOCKS,
    FrameSpec,
    Generate,
    PrefixBlocks,
    Sampling,
    StartGeneration,
)
from enginepool.protocol.prefix_blocks import BLOCK, MOST_BLOCKS, REMEMBERED, blocks_of
from enginepool.protocol.roles import INCLUDES
from tests.core.generations import CAN, GeneratingPool, generate, outputs

#: 64 slots, and room for long conversations
ROOMY = msgspec.structs.replace(
    CAN, vocab=1 << 20, context=1 << 20, batch_tokens=1 << 22, inflight_tokens=1 << 22, batch_rows=64, inflight_rows=64
)
SHORT = Sampling(max_new_tokens=8)


def ask(prompt: list[int], sampling: Sampling = SHORT) -> GenerateWork:
    specs = [FrameSpec("items", "int32", (len(prompt),)), FrameSpec("item_lengths", "uint32", (1,))]
    frames = [np.array(prompt, np.int32).tobytes(), np.array([len(prompt)], np.uint32).tobytes()]
    return GENERATE.open(Generate(1, specs, sampling=sampling), frames)


def test_blocks_tell_a_beginning_from_others() -> None:
    prompt = np.arange(10 * BLOCK, dtype=np.int32)
    other = prompt.copy()
    other[3 * BLOCK] += 1
    ours, theirs = blocks_of(memoryview(prompt.tobytes())), blocks_of(memoryview(other.tobytes()))
    assert len(ours) == 10 and ours[:3] == theirs[:3] and not set(ours[3:]) & set(theirs[3:])
    assert blocks_of(memoryview(prompt[: BLOCK - 1].tobytes())) == []
    assert blocks_of(prompt.tobytes(), ours[:4]) == ours
    adapted = blocks_of(prompt.tobytes(), adapter="a")
    assert not set(ours) & set(adapted) and blocks_of(prompt.tobytes(), adapted[:4], "a") == adapted
    assert len(blocks_of(memoryview(bytes(4 * BLOCK * (MOST_BLOCKS + 5))))) == MOST_BLOCKS


def test_the_longest_beginning_counts_and_memory_is_bounded() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add([1, 2], "a")
    index.add([1, 2, 3], "b")
    assert index.find([1, 2, 3, 4]) == ("b", 0) and index.find([7]) is None
    index.add([1, 5], "a")
    assert index.find([1, 2, 9]) == ("b", 2) and index.find([1, 9]) == ("a", 1), "they went on differently"
    for block in range(REMEMBERED + 10):
        index.add([100 + block], "c")
    assert len(index) == REMEMBERED and index.find([1, 2, 3]) is None


def test_conversations_of_many_users_stay_where_they_were_and_the_load_is_even() -> None:
    """64 users, 20 turns each, over two workers: the tokens that are found at the worker of the turn before."""
    pool = GeneratingPool()
    client = pool.client()
    for name in ("a", "b"):
        pool.worker(name, can=ROOMY)
    chance = np.random.default_rng(1)
    talks = [chance.integers(0, 1 << 20, 200).tolist() for _ in range(64)]
    last: dict[int, bytes] = {}
    hits = possible = request = 0
    given = {b"a": 0, b"b": 0}
    for _turn in range(20):
        for user in chance.permutation(64).tolist():
            request += 1
            [task] = pool.tasks(pool.submit(client, request, ask(talks[user])))
            assert isinstance(task.message, StartGeneration)
            given[task.link] += 1
            if user in last:
                possible += 1
                hits += last[user] == task.link
            last[user] = task.link
            talks[user] += chance.integers(0, 1 << 20, 150).tolist()
        for task in pool.tasks()[-64:]:
            pool.step(task.link, (task, 0, 0, [1], "stop"))
    assert hits / possible >= 0.9, f"{hits} of {possible}"
    assert max(given.values()) <= 1.2 * min(given.values()), given


def test_users_who_share_a_system_prompt_are_spread_also_where_one_worker_could_do_it_all() -> None:
    pool = GeneratingPool()
    client = pool.client()
    for name in ("a", "b"):
        pool.worker(name, can=ROOMY)
    chance = np.random.default_rng(2)
    system = chance.integers(0, 1 << 20, 10 * BLOCK).tolist()
    talks = [[*system, *chance.integers(0, 1 << 20, 100).tolist()] for _ in range(64)]
    last: dict[int, bytes] = {}
    given = {b"a": 0, b"b": 0}
    hits = 0
    for turn in range(10):
        for user, talk in enumerate(talks):
            [task] = pool.tasks(pool.submit(client, 64 * turn + user + 1, ask(talk)))
            hits += last.get(user) == task.link
            last[user] = task.link
            given[task.link] += 1
            pool.step(task.link, (task, 0, 0, [1], "stop"))
            talk += chance.integers(0, 1 << 20, 100).tolist()
    assert hits == 64 * 9, "no turn moved"
    assert max(given.values()) <= 1.2 * min(given.values()), given


def test_the_next_turn_goes_to_the_worker_that_generated_the_turn_before_also_after_a_short_prompt() -> None:
    pool = GeneratingPool()
    client = pool.client()
    for name in ("a", "b"):
        pool.worker(name, can=ROOMY)
    long = Sampling(max_new_tokens=2 * BLOCK)
    pool.submit(client, 1, ask([1, 2, 3], long))
    pool.submit(client, 2, ask([4, 5, 6], long))
    first, second = pool.tasks()
    assert (first.link, second.link) == (b"a", b"b")
    output = list(range(2 * BLOCK))
    pool.step(first.link, (first, 0, 0, [9], "stop"))
    pool.step(second.link, (second, 0, 0, output, "length"))
    [third] = pool.tasks(pool.submit(client, 3, ask([4, 5, 6, *output, 7])))
    pool.step(third.link, (third, 0, 0, [9], "stop"))
    [fourth] = pool.tasks(pool.submit(client, 4, ask([4, 5, 6, *output, 8])))
    assert (third.link, fourth.link) == (b"b", b"b")


def test_a_worker_with_much_more_to_do_is_not_preferred() -> None:
    pool = GeneratingPool()
    client = pool.client()
    pool.worker("a", can=ROOMY)
    prompt = list(range(4 * BLOCK))
    pool.submit(client, 1, ask(prompt))
    pool.worker("b", can=ROOMY)
    links = [task.link for i in range(60) for task in pool.tasks(pool.submit(client, 2 + i, ask(prompt)))]
    rows = [links.count(b"a") + 1, links.count(b"b")]
    assert max(rows) <= bound(min(rows)) + 1, rows
    assert links[0] == b"a"


def test_a_short_beginning_that_others_share_outweighs_no_sequence_and_a_long_one_some() -> None:
    assert [bound(3, shared) for shared in (1, 16, 32, 1000)] == [3, 4, 5, 7]
    assert bound(3) == 7 and bound(100) == 112


def test_a_lost_worker_is_not_preferred() -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker("a", can=ROOMY)
    pool.submit(client, 1, ask(list(range(4 * BLOCK))))
    pool.worker("b", can=ROOMY)
    pool.do(ev.WorkerBroken(0, link, "it broke"))
    assert [task.link for task in pool.tasks()] == [b"a", b"b"]


def test_blocks_have_the_numbers_of_the_specification() -> None:
    tokens = np.arange(2 * BLOCK, dtype="<i4").tobytes()
    assert blocks_of(tokens) == [0x330CB2B9FAB0737B, 0x13BA2DA821941827], "see `prefix_blocks` in GENERATION.md"
    assert not {*blocks_of(tokens)} & {*blocks_of(tokens, adapter="a")} and blocks_of(tokens, (), "") == blocks_of(tokens)


def test_what_an_engine_evicts_leaves_the_index_and_what_others_have_stays() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add([1, 2, 3], "a")
    index.add([7], "b")
    index.report("b", cleared=False, removed=[3], stored=[])
    assert index.find([1, 2, 3]) == ("a", 0), "not of b"
    index.report("a", cleared=False, removed=[3, 99], stored=[])
    assert index.find([1, 2, 3]) == ("a", 0) and len(index) == 3, "a beginning without a continuation is a history"
    index.report("a", cleared=False, removed=[], stored=[(2, 4), (4, 5)])
    assert index.find([1, 2, 3]) == ("a", 2) and index.find([1, 2, 4, 5]) == ("a", 0)
    index.report("b", cleared=False, removed=[], stored=[(0, 1)])
    assert index.find([1]) == ("b", 1), "the latest counts"
    index.report("a", cleared=True, removed=[], stored=[(0, 8)])
    assert index.find([1, 2, 4, 5]) == ("b", 0) and index.find([8]) == ("a", 0) and len(index) == 3
    index.clear("b")
    assert index.find([1]) is None and index.find([8]) == ("a", 0)
    index.clear("c")
    index.clear()
    assert len(index) == 0 and index.find([8]) is None


def test_a_worker_that_reports_without_end_takes_no_more_than_the_bound() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add([1, 2], "a")
    for first in range(0, 2 * REMEMBERED, 4096):
        index.report("b", cleared=False, removed=[], stored=[(0, 10 + first + i) for i in range(4096)])
        assert len(index) <= REMEMBERED
    assert index.find([1, 2]) is None
    index.clear("b")
    assert len(index) == 0


def told(index: bytes, *, cleared: bool = False, removed: Sequence[int] = (), stored: Sequence[int] = ()) -> ev.Event:
    """The worker on this link reports a prompt of the blocks `stored`."""
    return ev.PrefixesReported(0, index, cleared, removed, [*pairwise([0, *stored])])


def test_a_turn_goes_to_the_worker_that_reports_its_history_also_to_a_new_coordinator() -> None:
    pool = GeneratingPool()
    client = pool.client()
    links = [pool.worker(name, can=ROOMY) for name in ("a", "b")]
    prompt = list(range(4 * BLOCK))
    blocks = blocks_of(np.array(prompt, np.int32).tobytes())
    pool.do(told(links[1], cleared=True, stored=blocks))
    [task] = pool.tasks(pool.submit(client, 1, ask(prompt)))
    assert task.link == b"b", "a has as little to do, and comes first"
    pool.step(task.link, (task, 0, 0, [1], "stop"))
    pool.do(told(links[1], removed=blocks[::-1]))
    [task] = pool.tasks(pool.submit(client, 2, ask(prompt)))
    assert task.link == b"a", "b has evicted it"
    pool.do(ev.WorkerBroken(0, links[0], "it broke"))
    [group] = pool.machine.core.groups.values()
    assert len(group.prefixes) == 4 and group.prefixes.find(blocks) is not None, "it runs at b now"
    pool.do(ev.WorkerBroken(0, links[1], "it broke"))
    assert len(group.prefixes) == 0


def test_reports_that_are_no_reports_break_the_worker_and_no_client_or_stranger_may_send_one() -> None:
    def event(*specs: FrameSpec, peer: Peer = SAME_USER, frames: Sequence[bytes] | None = None) -> ev.Event:
        sizes = [8 * int(np.prod(spec.shape)) for spec in specs]
        payload = [b"\1" * size for size in sizes] if frames is None else frames
        return worker_event(0.0, b"w", [encode_header(PrefixBlocks([*specs])), *payload], peer)

    def stored(n: int, dtype: Any = "uint64", side: int = 2) -> FrameSpec:
        return FrameSpec("stored", dtype, (n, side))

    none = FrameSpec("removed", "uint64", (0,))
    assert isinstance(event(stored(1), none), ev.PrefixesReported)
    most = FrameSpec("removed", "uint64", (MAX_REPORTED_BLOCKS - 1,))
    assert isinstance(event(stored(1), most), ev.PrefixesReported)
    for specs in (
        (stored(2), most), (stored(1),), (none, stored(1)), (stored(1, side=3), none), (stored(1, "int32"), none),
        (stored(1), FrameSpec("removed", "uint64", (0, 2))), (stored(1 << 40), none),
    ):  # fmt: skip
        frames = [b""] * len(specs) if specs[0].shape[0] > MAX_REPORTED_BLOCKS else None
        assert isinstance(event(*specs, frames=frames), ev.WorkerBroken), specs
    for first, second, gone in ((0, 0, 5), (3, 0, 5), (0, 7, 0)):
        numbers = [np.array(row, np.uint64).tobytes() for row in ([first, second], [gone])]
        assert isinstance(event(stored(1), FrameSpec("removed", "uint64", (1,)), frames=numbers), ev.WorkerBroken)
    with pytest.raises(WireError, match="worker"):
        event(stored(1), none, peer=Peer(INCLUDES["admin"]))
    pool = GeneratingPool()
    pool.do(told(b"stranger", stored=[5]))
    assert len(next(iter(pool.machine.core.groups.values())).prefixes) == 0


def test_samples_of_a_prompt_that_end_one_after_the_other_have_its_blocks_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(tokens: bytes | memoryview, known: Sequence[int] = (), adapter: str = "") -> list[int]:
        found = blocks_of(tokens, known, adapter)
        counted.append(len(found) - len(known))
        return found

    monkeypatch.setattr(generation_slots, "blocks_of", counting)
    pool, n = GeneratingPool(), 8
    link = pool.worker(can=ROOMY)
    pool.submit(pool.client(), 1, generate(BLOCK * 10, BLOCK * 10, n=n))
    tasks = pool.tasks()
    pool.step(link, *((task, i, 0, [1], "stop") for task in tasks for i in range(n)))
    assert len(tasks) == 2 and sum(counted) <= 4 * 10


def test_of_many_samples_that_end_together_a_bounded_number_of_blocks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_slots, "MOST_REMEMBERED", 10)
    pool, n, length = GeneratingPool(), 8, 4 * BLOCK
    link = pool.worker(can=ROOMY)
    pool.submit(pool.client(), 1, generate(BLOCK, n=n, max_new_tokens=length))
    [task] = pool.tasks()
    pool.step(link, *((task, i, 0, [i] * length, "stop") for i in range(n)))
    [group] = pool.machine.core.groups.values()
    assert len(group.prefixes) == 1 + 2 * 4, "those of two samples, which with the prompt are ten blocks"
    assert 1 in outputs(pool.sent)
