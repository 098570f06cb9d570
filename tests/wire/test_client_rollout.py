"""`Pool.rollout` on a real socket: what it asks for, when groups and rewards come, and what becomes of errors."""

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import BlockingPool, Generation, Pool, Rollout, RolloutGroup, errors
from enginepool.protocol.messages import Cancel, ErrorReply, FromClient, Generate, GroupStatus, Message
from enginepool.protocol.messages.status import AdapterStatus, GroupLimits
from tests.wire.generating_coordinator import GeneratingCoordinator, token


class RolloutCoordinator(GeneratingCoordinator):
    """Holds the streams of some prompts, of which `begins` tokens are sent, until it is told to let go."""

    def __init__(self, address: str) -> None:
        #: first tokens of prompts
        self.held: set[int] = set()
        self.begins = 0
        #: first tokens of prompts -> what their requests fail with
        self.fails: dict[int, str] = {}
        self._lock = threading.Lock()
        super().__init__(address)

    def _generate(self, link: bytes, message: FromClient, frames: list[bytes]) -> None:
        with self._lock:
            self._hold(link, message, frames)

    def _hold(self, link: bytes, message: FromClient, frames: list[bytes]) -> None:
        first = int.from_bytes(frames[0][:4], "little") if isinstance(message, Generate) else -1
        if isinstance(message, Generate) and first in self.fails:
            self.write(link, ErrorReply(self.fails[first], "it fails", message.id))
            return
        self.forwards = first not in self.held and first >= 0
        super()._generate(link, message, frames)
        if isinstance(message, Generate) and not self.forwards and self.begins:
            credit, message.credit = message.credit, self.begins
            self._forward(message.id, self._streams[message.id][2], 0)
            message.credit = credit

    def _send(self, link: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        """From any thread."""
        if threading.current_thread() is self._thread:
            super()._send(link, message, frames)
        else:
            self.write(link, message, frames)

    def sent(self) -> list[tuple[bytes, Generate, int]]:
        """Of each stream its link, its request, and how many tokens were sent."""
        with self._lock:
            return [(link, request, sent) for link, request, _, sent in self._streams.values()]

    def stop_none(self) -> None:
        """Later requests get all their tokens. What is being answered now ends as it began."""
        with self._lock:
            self.stops = {}

    def let_go(self, first: int) -> None:
        """The streams of this prompt go on to their end."""
        with self._lock:
            self.held.discard(first)
            for request, (prompt, *_) in zip(self.asked, self.brought, strict=True):
                if int.from_bytes(prompt[:4], "little") == first and request.stream:
                    self._forward(request.id, self._streams[request.id][2], 0)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[RolloutCoordinator]:
    with (fake := RolloutCoordinator(f"ipc://{tmp_path}/c.sock")):
        yield fake


def scene(coordinator: RolloutCoordinator, call: Callable[[Pool], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Pool.connect(coordinator.address) as pool:
            await call(pool)

    asyncio.run(asyncio.wait_for(main(), 60))


async def length(row: Any, sample: Generation) -> float:
    return len(sample.token_ids)


async def taken(rollout: Rollout, count: int) -> list[RolloutGroup]:
    found = await rollout.take(count)
    assert len(found) == count
    return found


def test_groups_come_as_they_are_finished_and_a_slow_prompt_delays_no_other(coordinator: RolloutCoordinator) -> None:
    coordinator.held, coordinator.stops = {11}, {1: 1}

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11], [12], np.array([13])], 2, reward=length, max_new_tokens=3, group="policy")
        groups = await taken(rollout, 2)
        assert sorted(group.index for group in groups) == [1, 2]
        coordinator.let_go(11)
        groups += await taken(rollout, 1)
        assert await rollout.next_group() is None
        for group in groups:
            long, short = group.samples
            assert long.token_ids.tolist() == [token(0, at) for at in range(3)] and short.token_ids.tolist() == [100]
            assert long.logprobs is not None and long.logprobs.dtype == np.float32 and long.spans == ((3, 3),)
            assert (short.finish_reason, short.matched) == ("stop", 7)
            assert group.rewards.dtype == np.float32 and group.rewards.tolist() == [3, 1]
            assert (group.errors, group.dropped) == ((), 0)
        assert groups[-1].prompt == [11]

    scene(coordinator, main)
    assert {(request.group, request.n, request.stream, request.logprobs) for request in coordinator.asked} == {
        ("policy", 2, True, True)
    }


def test_a_sample_is_rewarded_while_the_others_of_its_prompt_go_on(coordinator: RolloutCoordinator) -> None:
    coordinator.held, coordinator.begins, coordinator.stops = {11}, 3, {0: 1}
    rewarded = asyncio.Event()

    async def reward(row: Any, sample: Generation) -> float:
        rewarded.set()
        return float(sample.token_ids[0])

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11]], 3, reward=reward, max_new_tokens=4)
        coming = asyncio.ensure_future(rollout.next_group())
        await rewarded.wait()
        assert not coming.done()
        coordinator.let_go(11)
        group = await coming
        assert group is not None and group.rewards.tolist() == [0, 100, 200]

    scene(coordinator, main)


def test_a_reward_group_scores_ids_texts_or_what_to_row_says(coordinator: RolloutCoordinator) -> None:
    class Tokenizer:
        def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return " ".join(str(one) for one in ids)

    async def main(pool: Pool) -> None:
        coordinator.groups = [GroupStatus("judge")]
        asked: dict[str, Any] = {"reward": "judge", "max_new_tokens": 2}
        options: Any = {"label_token_ids": [7], "priority": 5}
        [group] = await pool.rollout([[11, 12]], 2, reward_options=options, **asked).result()
        assert group.rewards.tolist() == [4, 4] and not group.errors, "the lengths of query and item"
        await pool.rollout([[11, 12]], 1, tokenizer=Tokenizer(), **asked).result()
        await pool.rollout([{"prompt": [11], "answer": [21]}], 1, to_row=lambda row, _: ([1], row["answer"]), **asked).result()
        [group] = await pool.rollout(["a text"], 1, **asked).result()
        assert np.isnan(group.rewards).all() and "tokenizer" in str(group.errors[0])

    scene(coordinator, main)
    assert [(one.group, one.priority, one.labels) for one in coordinator.scores[:2]] == [("judge", 5, [7])] * 2
    assert {tuple(np.frombuffer(one[1], np.int32)) for one in coordinator.payloads[:2]} == {(0, 1), (100, 101)}
    assert coordinator.payloads[2][:2] == [b"11 12", b"0 1"]
    assert np.frombuffer(coordinator.payloads[3][1], np.int32).tolist() == [21]


def test_an_error_of_one_reward_or_one_prompt_is_in_its_group_and_the_first_is_logged(
    coordinator: RolloutCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.fails = {13: "poisoned"}

    def reward(row: Any, sample: Generation) -> float:
        if row == [11] and sample.token_ids[0] == 100:
            raise ZeroDivisionError("no reward")
        return 1

    async def main(pool: Pool) -> None:
        groups = await pool.rollout([[11], [12], [13], []], 2, reward=reward, max_new_tokens=2).result()
        first, second, third, empty = sorted(groups, key=lambda group: group.index)
        np.testing.assert_array_equal(first.rewards, [1, np.nan])
        assert [type(error) for error in first.errors] == [ZeroDivisionError] and len(first.samples) == 2
        assert second.rewards.tolist() == [1, 1] and second.errors == ()
        assert (third.samples, third.rewards.tolist()) == ((), []) and isinstance(third.errors[0], errors.Poisoned)
        assert isinstance(empty.errors[0], errors.BadRequest)

    with caplog.at_level(logging.WARNING, "enginepool"):
        scene(coordinator, main)
    [line] = caplog.messages
    assert line.startswith("rollout: prompt ") and line.endswith("; `errors` of each group has what failed for it")


@pytest.mark.parametrize("kind", [errors.Busy, errors.PoolDown, errors.RequestCancelled])
def test_what_a_pool_raises_in_a_reward_function_is_an_error_of_its_group(
    coordinator: RolloutCoordinator, kind: type[errors.EnginepoolError]
) -> None:
    """The function may ask another pool."""

    async def reward(row: Any, sample: Generation) -> float:
        if row == [11]:
            raise kind("the judge")
        return 1.0

    async def main(pool: Pool) -> None:
        groups = await pool.rollout([[11], [12]], 1, reward=reward, max_new_tokens=2).result()
        first, second = sorted(groups, key=lambda group: group.index)
        assert np.isnan(first.rewards).all() and [type(error) for error in first.errors] == [kind]
        assert second.rewards.tolist() == [1] and second.errors == ()

    scene(coordinator, main)


def test_a_reward_that_is_cancelled_or_ends_its_program_is_an_error_of_its_group(coordinator: RolloutCoordinator) -> None:
    async def cancelled(row: Any, sample: Generation) -> float:
        raise asyncio.CancelledError

    async def left(row: Any, sample: Generation) -> float:
        raise SystemExit(2)

    def ended(row: Any, sample: Generation) -> float:
        raise SystemExit(3)  # as a program does that is run for its reward

    def nothing(row: Any, sample: Generation) -> float:
        return next(iter(list[float]()))

    async def main(pool: Pool) -> None:
        for reward, named in (
            (cancelled, "CancelledError"), (left, "SystemExit(2)"), (ended, "SystemExit(3)"), (nothing, "StopIteration"),
        ):  # fmt: skip
            [group] = await pool.rollout([[11]], 2, reward=reward, max_new_tokens=2).result()
            assert np.isnan(group.rewards).all() and len(group.samples) == len(group.errors) == 2
            assert named in str(group.errors[0])

    scene(coordinator, main)


def test_a_reward_is_one_number_also_in_an_array(coordinator: RolloutCoordinator) -> None:
    given: list[Any] = [2, True, np.float32(2), np.array([2.0]), np.array([[2]])]
    wrong: list[Any] = [None, "2", [2.0], np.ones(2), np.ones(0)]

    async def reward(row: Any, sample: Generation) -> Any:
        return row["reward"]

    async def main(pool: Pool) -> None:
        rows = [{"prompt": [11], "reward": one} for one in [*given, *wrong]]
        groups = await pool.rollout(rows, 1, reward=reward, max_new_tokens=2).result()
        groups.sort(key=lambda group: group.index)
        assert [float(group.rewards[0]) for group in groups[: len(given)]] == [2, 1, 2, 2, 2]
        for group in groups[len(given) :]:
            assert np.isnan(group.rewards[0]) and "must return a number" in str(group.errors[0])

    scene(coordinator, main)


def test_a_row_without_a_prompt_is_an_error_of_its_group(coordinator: RolloutCoordinator) -> None:
    async def main(pool: Pool) -> None:
        groups = await pool.rollout([{"question": "?", "answer": 1}, [11]], 1, reward=length, max_new_tokens=2).result()
        first, second = sorted(groups, key=lambda group: group.index)
        assert len(second.samples) == 1 and not first.samples
        assert str(first.errors[0]) == "prompts: a row without `prompt`; it has question, answer"

    scene(coordinator, main)


def test_prompts_that_are_cancelled_end_the_rollout(coordinator: RolloutCoordinator) -> None:
    async def prompts() -> AsyncIterator[list[int]]:
        yield [11]
        raise asyncio.CancelledError

    async def main(pool: Pool) -> None:
        with pytest.raises(errors.RequestCancelled, match="prompts"):
            await pool.rollout(prompts(), 1, reward=length, max_new_tokens=2).result()

    scene(coordinator, main)


def test_each_row_brings_its_own_media(coordinator: RolloutCoordinator) -> None:
    rows = [{"prompt": [11], "images": [b"one", b"two"], "audio": b"three"}, {"prompt": [12], "images": None}, [13]]

    async def main(pool: Pool) -> None:
        wrong = {"prompt": [14], "images": ["a.png"]}
        groups = await pool.rollout([*rows, wrong], 1, reward=length, max_new_tokens=2).result()
        *right, refused = sorted(groups, key=lambda group: group.index)
        assert [len(group.samples) for group in right] == [1] * 3 and right[0].prompt is rows[0]
        [error] = refused.errors
        assert isinstance(error, errors.BadRequest) and error.field == "images[0]"

    scene(coordinator, main)
    kinds = sorted([one.kind for one in request.media] for request in coordinator.asked)
    assert kinds == [[], [], ["image", "image", "audio"]]


@pytest.mark.parametrize(("code", "kind"), [("pool_down", errors.PoolDown), ("cancelled", errors.RequestCancelled)])
def test_what_concerns_all_prompts_ends_the_rollout_after_the_finished_groups(
    coordinator: RolloutCoordinator, code: str, kind: type[Exception]
) -> None:
    coordinator.held, coordinator.fails = {12}, {13: code}
    reached, rollouts = asyncio.Event(), list[Rollout]()

    async def prompts() -> AsyncIterator[list[int]]:
        yield [11]
        yield [12]
        yield [14]
        await reached.wait()
        while all(draft.index != 2 for draft in rollouts[0]._ready):  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.001)  # its group is to be finished
        yield [13]

    async def rewarded(row: Any, sample: Generation) -> float:
        if row == [14]:
            reached.set()
        return 1.0

    async def main(pool: Pool) -> None:
        rollout = pool.rollout(prompts(), 1, reward=rewarded, max_new_tokens=2)
        rollouts.append(rollout)
        assert [group.index for group in await taken(rollout, 1)] == [0]
        canceled = await asyncio.to_thread(coordinator.wait_for, Cancel)
        assert canceled.id == coordinator.asked[1].id
        assert [group.index for group in await rollout.take(3)] == [2], "it was finished before"
        for _ in range(2):
            with pytest.raises(kind):
                await rollout.next_group()

    scene(coordinator, main)


def test_samples_of_old_weights_are_dropped_and_generated_again(coordinator: RolloutCoordinator) -> None:
    coordinator.groups = [GroupStatus("policy", version=3), GroupStatus("other", version=9)]

    async def main(pool: Pool) -> None:
        asked: Any = {"reward": length, "max_new_tokens": 2, "group": "policy", "sampling_seed": 5}
        rollout = pool.rollout([[11], [12]], 2, max_staleness=1, **asked)
        [group] = await taken(rollout, 1)
        assert group.samples[0].spans == ((3, 2),) and group.dropped == 0
        coordinator.groups[0].version = coordinator.version = 5
        [group] = await taken(rollout, 1)
        assert group.dropped == 2 and all(sample.spans == ((5, 2),) for sample in group.samples)
        assert await rollout.next_group() is None
        # Of any age.
        coordinator.version = 0
        [group] = await pool.rollout([[13]], 1, **asked).result()
        assert group.samples[0].spans == ((0, 2),) and group.dropped == 0

    scene(coordinator, main)
    seeds = [request.sampling.sampling_seed for request in coordinator.asked]
    assert seeds == [5, 5, 7, 5], "not the same samples again"


def test_groups_that_became_too_old_while_a_take_waited_for_others_are_generated_again(coordinator: RolloutCoordinator) -> None:
    coordinator.groups = [GroupStatus("g", version=3)]

    async def prompts() -> AsyncIterator[list[int]]:
        yield [11]
        yield [12]  # there is room for it once the first group was taken
        coordinator.groups[0].version = coordinator.version = 5
        yield [13]

    async def main(pool: Pool) -> None:
        rollout = pool.rollout(prompts(), 2, reward=length, max_staleness=0, max_new_tokens=2, max_in_flight=1)
        groups = await taken(rollout, 3)
        assert sorted((group.index, group.dropped) for group in groups) == [(0, 2), (1, 2), (2, 0)]
        assert {sample.spans for group in groups for sample in group.samples} == {((5, 2),)}
        assert await rollout.next_group() is None

    scene(coordinator, main)


def test_a_rollout_that_is_left_while_a_take_looks_at_ages_generates_nothing_more(
    coordinator: RolloutCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.groups = [GroupStatus("g", version=3)]
    look, looks = Rollout._look, list[Rollout]()  # pyright: ignore[reportPrivateUsage]

    async def leave(rollout: Rollout) -> None:
        looks.append(rollout)
        if len(looks) == 3:  # both groups are held
            coordinator.groups[0].version = 5
            await look(rollout)
            rollout.cancel()

    monkeypatch.setattr(Rollout, "_look", leave)

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11], [12]], 2, reward=length, max_staleness=0, max_new_tokens=2)
        with pytest.raises(errors.RequestCancelled):
            await rollout.take(2)

    scene(coordinator, main)
    assert len(looks) == 3 and len(coordinator.asked) == 2


def test_a_call_for_a_group_ends_where_another_take_has_the_last_ones_and_looks_at_their_age(
    coordinator: RolloutCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.groups = [GroupStatus("g", version=3)]
    look, looks = Rollout._look, list[Rollout]()  # pyright: ignore[reportPrivateUsage]
    others: list[asyncio.Task[RolloutGroup | None]] = []

    async def ask(rollout: Rollout) -> None:
        looks.append(rollout)
        if len(looks) == 3:  # both groups are held
            others.append(asyncio.create_task(rollout.next_group()))
        await look(rollout)

    monkeypatch.setattr(Rollout, "_look", ask)

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11], [12]], 2, reward=length, max_staleness=0, max_new_tokens=2)
        await taken(rollout, 2)
        assert await asyncio.wait_for(others[0], 10) is None

    scene(coordinator, main)


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"reward": "judgee"}, errors.UnknownGroup, "reward: 'judgee' is none of the groups: policy, judge"),
        ({"reward": "policy"}, errors.BadRequest, "reward: group 'policy' does not score; its operations: generate"),
        ({"adapter": "frnech"}, errors.BadRequest, "adapter: 'frnech' is not loaded; there are: french, german"),
    ],
)
def test_what_no_prompt_could_use_is_said_before_any_is_generated(
    coordinator: RolloutCoordinator, asked: dict[str, Any], kind: type[errors.EnginepoolError], said: str
) -> None:
    limits = GroupLimits("causal", 300, 100, 10, operations=("generate",), adapters=("german",))
    adapters = [AdapterStatus("french", 1, "00" * 16)]
    coordinator.groups = [GroupStatus("policy", limits=limits, adapters=adapters), GroupStatus("judge")]

    async def main(pool: Pool) -> None:
        options: dict[str, Any] = {"reward": length, **asked}
        with pytest.raises(kind, match=f"^{said}$") as refused:
            await pool.rollout([[11]], 2, group="policy", **options).next_group()
        assert refused.value.field == said.partition(":")[0]

    scene(coordinator, main)
    assert not coordinator.asked


@pytest.mark.parametrize("begins", [0, 1])
def test_samples_of_a_new_run_are_not_too_old(coordinator: RolloutCoordinator, begins: int) -> None:
    coordinator.groups = [GroupStatus("g", version=3)]
    coordinator.held, coordinator.begins = {12}, begins

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11], [12]], 2, reward=length, max_staleness=0, max_new_tokens=4)
        await taken(rollout, 1)
        coordinator.groups[0].version = coordinator.version = 1
        coordinator.let_go(12)
        [group] = await taken(rollout, 1)
        assert {sample.spans[-1][0] for sample in group.samples} == {1}

    scene(coordinator, main)


def test_a_stream_whose_samples_are_all_too_old_is_left(coordinator: RolloutCoordinator) -> None:
    coordinator.groups = [GroupStatus("g", version=3)]
    coordinator.held, coordinator.begins = {11}, 2

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11]], 2, reward=length, max_staleness=0, max_new_tokens=4)
        coming = asyncio.ensure_future(rollout.next_group())
        while not (sent := coordinator.sent()):
            await asyncio.sleep(0)
        coordinator.version, coordinator.held = 4, set[int]()
        # One more token of the first sample, by the new weights.
        [(link, request, count)] = sent
        assert count == 2
        coordinator.tokens(link, request, [(0, 1, 1)])
        group = await coming
        assert group is not None and group.dropped == 2
        assert [sample.spans for sample in group.samples] == [((4, 4),)] * 2
        assert (await asyncio.to_thread(coordinator.wait_for, Cancel)).id == coordinator.asked[0].id

    scene(coordinator, main)


def test_interrupted_samples_are_generated_again(coordinator: RolloutCoordinator) -> None:
    coordinator.stops, coordinator.reason = {1: 1}, "interrupted"
    seen: list[int] = []

    async def reward(row: Any, sample: Generation) -> float:
        coordinator.stop_none()
        seen.append(int(sample.token_ids[0]))
        return 1

    async def main(pool: Pool) -> None:
        rollout = pool.rollout([[11]], 2, reward=reward, max_new_tokens=3)
        [group] = await rollout.result()
        assert [sample.finish_reason for sample in group.samples] == ["length"] * 2 and group.dropped == 1
        assert group.rewards.tolist() == [1, 1] and not group.errors

    scene(coordinator, main)
    assert [request.n for request in coordinator.asked] == [2, 1] and seen == [0, 0]


def test_leaving_a_rollout_takes_all_its_requests_back(coordinator: RolloutCoordinator) -> None:
    coordinator.held = {12, 13}

    async def main(pool: Pool) -> None:
        async for group in pool.rollout([[11], [12], [13]], 2, reward=length, max_new_tokens=2):
            assert group.index == 0
            break
        back = {(await asyncio.to_thread(coordinator.wait_for, Cancel)).id for _ in range(2)}
        assert back == {request.id for request in coordinator.asked[1:]}
        async with pool.rollout([[11]], 1, reward=length) as rollout:
            pass
        with pytest.raises(errors.RequestCancelled):
            await rollout.next_group()

    scene(coordinator, main)


def test_a_prompt_is_taken_when_there_is_room_for_it(coordinator: RolloutCoordinator) -> None:
    given: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for i in itertools.count():
            given.append(i)
            yield [i]

    async def main(pool: Pool) -> None:
        async with pool.rollout(prompts(), 1, reward=length, max_new_tokens=1, max_in_flight=3) as rollout:
            for count in range(1, 20):
                await taken(rollout, 1)
                assert len(given) <= 3 + count

    scene(coordinator, main)


def test_a_take_that_is_cancelled_takes_no_group(coordinator: RolloutCoordinator) -> None:
    coordinator.held = {13}
    third, read = asyncio.Event(), 0

    async def prompts() -> AsyncIterator[list[int]]:
        nonlocal read
        for i in range(1, 5):
            read = i
            if i == 3:
                third.set()
            yield [10 + i]

    async def main(pool: Pool) -> None:
        async with pool.rollout(prompts(), 1, reward=length, max_new_tokens=1, max_in_flight=1) as rollout:
            taking = asyncio.ensure_future(rollout.take(3))
            await third.wait()  # two groups were taken: else there would be no room for this prompt
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            groups = await taken(rollout, 2)
            await asyncio.to_thread(coordinator.let_go, 13)
            assert read == 3, "a group makes room once"
            groups += await taken(rollout, 2)
            assert [group.index for group in groups] == [0, 1, 2, 3] and await rollout.next_group() is None

    scene(coordinator, main)


def test_a_rollout_without_await_rewards_in_threads(coordinator: RolloutCoordinator) -> None:
    with BlockingPool.connect(coordinator.address) as pool:

        def reward(row: Any, sample: Generation) -> np.float32:
            # It may wait for the pool, in whose thread it is not.
            return pool.score(row["prompt"], [sample.token_ids], label_token_ids=[1]).scores[0, 0]

        rows = [{"prompt": [11]}, {"prompt": [12]}]
        with pool.rollout(itertools.cycle(rows), 1, reward=reward, max_new_tokens=2) as rollout:
            assert [len(rollout.take(count)) for count in (2, 1, 0)] == [2, 1, 0]
            with pytest.raises(errors.BadRequest, match="count: -1"):
                rollout.take(-1)
        groups = list(pool.rollout(rows, 2, reward=reward, max_new_tokens=2))
        assert sorted(group.index for group in groups) == [0, 1]
        assert all(group.rewards.tolist() == [3, 3] and group.prompt is rows[group.index] for group in groups)
        assert len(pool.rollout([[1], [2]], 1, reward=reward, max_new_tokens=1).result()) == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"temperature": -1.0}, "temperature"),
        ({"partial": True}, "partial"),
        ({"continue_from": None}, "continue_from"),
        ({"images": []}, "images"),
        ({"reward": 5}, "reward"),
        ({"tokenizer": object()}, "tokenizer"),
        ({"prompts": "a text"}, "prompts"),
        ({"prompts": None}, "prompts"),
        ({"prompts": {"train": [[1]]}}, "prompts"),
    ],
)
def test_an_argument_that_is_wrong_is_named_at_once(
    coordinator: RolloutCoordinator, options: dict[str, Any], field: str
) -> None:
    async def main(pool: Pool) -> None:
        asked: dict[str, Any] = {"prompts": [[1]], "n": 2, "reward": length, **options}
        with pytest.raises(errors.BadRequest) as caught:
            pool.rollout(asked.pop("prompts"), asked.pop("n"), **asked)
        assert caught.value.field == field
        with pytest.raises(TypeError, match="temperature"):
            pool.rollout([[1]], 1, reward=length, temprature=1)  # pyright: ignore[reportCallIssue]

    scene(coordinator, main)
