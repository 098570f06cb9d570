"""Trainer ranks in step, over a real group of two: who fails, who is gone, and who would gather something else."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
import torch

from enginepool.errors import BadRequest
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import ErrorReply
from enginepool.trainer.heartbeats import Heartbeats, RankFailed, Word
from enginepool.trainer.tensors import SendPlan, make_plan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks, follow

dist: Any = torch.distributed
LIMIT_S = 30.0
GIVEN_UP = ErrorReply("update_aborted", "as a test")


class Pair:
    """Two ranks of one group, and the store of their heartbeats."""

    def __init__(self, store: Any, groups: list[Any]) -> None:
        self.store, self.groups = store, groups

    def heartbeats(self, rank: int, version: int, timeout_s: float = LIMIT_S) -> Heartbeats:
        beats = Heartbeats(dist.PrefixStore("beats", self.store), rank, 2, version, timeout_s, lambda error: None)
        beats.start()
        return beats

    def rank0(self, version: int = 0, timeout_s: float = LIMIT_S) -> TrainerRanks:
        return TrainerRanks(self.groups[0], version, self.heartbeats(0, version, timeout_s))


class Rank1:
    """The other rank, on a thread; `outcome` is what `follow` returned or raised, `sent` is set when `follow` says so."""

    def __init__(self, pair: Pair, plan: SendPlan | Exception, version: int = 0) -> None:
        self._outcome: Any = None
        self.sent = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pair, plan, version), daemon=True)
        self._thread.start()

    def _run(self, pair: Pair, plan: SendPlan | Exception, version: int) -> None:
        try:
            self._outcome = follow(pair.groups[1], plan, version, pair.heartbeats(1, version), self.sent.set)
        except RankFailed as error:
            self._outcome = error

    @property
    def outcome(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self._outcome


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of one group."""
    store, made = dist.HashStore(), [None, None]

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    yield Pair(store, made)
    made.clear()


class Sharded(torch.Tensor):
    """As far as a plan can tell, a DTensor."""

    def full_tensor(self) -> torch.Tensor:
        return self


def plan_of(*names: str, dtype: Any = None) -> SendPlan:
    return make_plan({name: torch.zeros(3).as_subclass(Sharded) for name in names}, dtype=dtype)


def raising(error: Exception) -> Callable[[], object]:
    def step() -> object:
        raise error

    return step


def test_a_rank_without_a_plan_ends_the_update_before_anybody_gathers(pair: Pair) -> None:
    wrong = KeyError("no such shard")
    other = Rank1(pair, wrong)
    ranks = pair.rank0()
    with pytest.raises(RankFailed, match="trainer rank 1 failed: KeyError: 'no such shard'"):
        ranks.begin(plan_of("a"))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), wrong)


@pytest.mark.parametrize("plan", [plan_of("a"), KeyError("no such shard")], ids=["with a plan", "without one"])
def test_ranks_that_bring_different_versions_are_all_told_which(pair: Pair, plan: SendPlan | Exception) -> None:
    other = Rank1(pair, plan, MAX_ID)
    ranks = pair.rank0(3)
    story = f"version: 3 on trainer rank 0, {MAX_ID} on rank 1; all ranks make the same calls"
    with pytest.raises(BadRequest) as caught:
        ranks.begin(plan_of("a"))
    ranks.end(GIVEN_UP)
    end, own = other.outcome
    assert end == RoundEnd(GIVEN_UP) and isinstance(own, BadRequest)
    assert str(caught.value) == str(own) == story
    assert caught.value.field == own.field == "version"


@pytest.mark.parametrize(
    "plan", [plan_of("b", "a"), plan_of("a"), plan_of("a", "b", "c"), plan_of("a", "b", dtype=torch.float16)]
)
def test_ranks_that_would_gather_other_tensors_at_the_same_position_fail(pair: Pair, plan: SendPlan) -> None:
    other = Rank1(pair, plan)
    ranks = pair.rank0()
    with pytest.raises(RankFailed):
        ranks.begin(plan_of("a", "b"))
    ranks.end(GIVEN_UP)
    end, own = other.outcome
    assert end == RoundEnd(GIVEN_UP) and isinstance(own, BadRequest)
    assert str(own).startswith("source: its sharded tensors differ from rank 0's in a name, shape, dtype or their order")


def test_ranks_need_not_be_alike_where_the_gather_is_the_callers_own_or_a_manifest_is_given(pair: Pair) -> None:
    tensors = {"z": torch.zeros(1)}
    other = Rank1(pair, make_plan(tensors, gather=lambda name, tensor: tensor))
    ranks = pair.rank0()
    ranks.begin(plan_of("a"))
    ranks.begin(make_plan(iter(tensors.items()), manifest=[("z", "float32", (1,))]))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), None)


def test_all_ranks_hear_that_the_source_is_no_longer_read_before_the_update_ends(pair: Pair) -> None:
    other = Rank1(pair, plan_of("a"))
    ranks = pair.rank0()
    ranks.begin(plan_of("a"))
    ranks.together(2, lambda: None)
    assert not other.sent.is_set()
    ranks.sent()
    assert other.sent.wait(LIMIT_S)
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), None)


def test_a_rank_that_is_gone_is_no_error_of_the_source(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginepool.trainer.heartbeats.BELIEVE_S", 0.1)
    del pair.groups[1:]
    ranks = pair.rank0(timeout_s=4.0)
    with pytest.raises(RankFailed, match=r"a trainer rank is gone: .*closed|trainer rank 1 has not called"):
        ranks.together(1, lambda: None)
    with caplog.at_level(logging.WARNING, "enginepool"):
        ranks.end(GIVEN_UP)
    assert "cannot be told how the update ended: trainer rank 1 has not called `publish` for 4 s" in caplog.text


def test_the_ranks_can_read_that_an_update_is_over_before_its_caller_goes_on(pair: Pair) -> None:
    """A rank that calls for the next update does not begin the one that rank 0 has given up."""
    for turn in range(1, 21):
        pair.heartbeats(0, 7).end("given up")
        word = msgspec.json.decode(dist.PrefixStore("beats", pair.store).get("word/0"), type=Word)
        assert word == Word(turn, 7, word.beat, True, "given up")


def test_a_rank_that_fails_is_named_while_the_others_are_still_in_their_gather(pair: Pair) -> None:
    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()
        raise KeyError("my_index")

    Rank1(pair, SendPlan([], fails))
    named = threading.Event()
    beats = Heartbeats(dist.PrefixStore("beats", pair.store), 0, 2, 0, LIMIT_S, lambda error: named.set())
    beats.start()
    ranks = TrainerRanks(pair.groups[0], 0, beats)
    ranks.begin(SendPlan([], fails))

    def gather() -> None:
        # The collective that the other rank has left: it ends when this rank's caller knows why.
        assert named.wait(LIMIT_S)

    with pytest.raises(RankFailed, match="trainer rank 1 failed: KeyError: 'my_index'"):
        ranks.together(1, gather)


def test_the_tensor_that_the_callers_code_is_busy_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginepool.trainer.trainer_ranks._LONG_S", 0.0)
    ranks = TrainerRanks()
    with ranks.reading("layers.0"):
        assert ranks.stuck_at == "layers.0"
    assert ranks.stuck_at == ""


def test_a_step_that_fails_on_rank_0_is_raised_when_all_have_heard(pair: Pair) -> None:
    other = Rank1(pair, plan_of("a"))
    ranks = pair.rank0()
    with pytest.raises(OSError, match="no room"):
        ranks.together(1, raising(OSError("no room")))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), None)
