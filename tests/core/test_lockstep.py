"""Trainer ranks in step, over a real group of two: who fails, who is gone, and who would gather something else."""

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from enginepool.errors import BadRequest
from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.messages import ErrorReply
from enginepool.trainer.heartbeats import RankFailed
from enginepool.trainer.tensors import SendPlan, make_plan
from enginepool.trainer.trainer_ranks import RoundEnd, TrainerRanks, follow

dist: Any = torch.distributed
LIMIT_S = 30.0
GIVEN_UP = ErrorReply("update_aborted", "as a test")


class Rank1:
    """The other rank, on a thread; `outcome` is what `follow` returned or raised."""

    def __init__(self, group: Any, plan: SendPlan | Exception, version: int = 0) -> None:
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, args=(group, plan, version), daemon=True)
        self._thread.start()

    def _run(self, group: Any, plan: SendPlan | Exception, version: int) -> None:
        try:
            self._outcome = follow(group, plan, version)
        except RankFailed as error:
            self._outcome = error

    @property
    def outcome(self) -> Any:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self._outcome


@pytest.fixture
def groups() -> Iterator[list[Any]]:
    """The two ends of one group."""
    store, made = dist.HashStore(), [None, None]

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    yield made
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


def test_a_rank_without_a_plan_ends_the_update_before_anybody_gathers(groups: list[Any]) -> None:
    wrong = KeyError("no such shard")
    other = Rank1(groups[1], wrong)
    ranks = TrainerRanks(groups[0])
    with pytest.raises(RankFailed, match="another trainer rank"):
        ranks.begin(plan_of("a"))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), wrong)


@pytest.mark.parametrize("plan", [plan_of("a"), KeyError("no such shard")], ids=["with a plan", "without one"])
def test_ranks_that_bring_different_versions_are_all_told_which(groups: list[Any], plan: SendPlan | Exception) -> None:
    other = Rank1(groups[1], plan, MAX_ID)
    ranks = TrainerRanks(groups[0], 3)
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
def test_ranks_that_would_gather_other_tensors_at_the_same_place_are_told_so(groups: list[Any], plan: SendPlan) -> None:
    other = Rank1(groups[1], plan)
    ranks = TrainerRanks(groups[0])
    with pytest.raises(RankFailed):
        ranks.begin(plan_of("a", "b"))
    ranks.end(GIVEN_UP)
    end, own = other.outcome
    assert end == RoundEnd(GIVEN_UP) and isinstance(own, BadRequest)
    assert str(own).startswith("source: its sharded tensors differ from rank 0's in a name, shape, dtype or their order")


def test_ranks_need_not_be_alike_where_the_gather_is_the_callers_own_or_a_manifest_is_given(groups: list[Any]) -> None:
    tensors = {"z": torch.zeros(1)}
    other = Rank1(groups[1], make_plan(tensors, gather=lambda name, tensor: tensor))
    ranks = TrainerRanks(groups[0])
    ranks.begin(plan_of("a"))
    ranks.begin(make_plan(iter(tensors.items()), manifest=[("z", "float32", (1,))]))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), None)


def test_a_rank_that_is_gone_is_no_error_of_the_source(groups: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    del groups[1:]
    ranks = TrainerRanks(groups[0])
    with pytest.raises(RankFailed, match=r"a trainer rank is gone: .*closed"):
        ranks.together(1, lambda: None)
    with caplog.at_level(logging.WARNING, "enginepool"):
        ranks.end(GIVEN_UP)
    assert "cannot be told how the update ended: a trainer rank is gone" in caplog.text


def test_what_failed_is_in_the_log_while_the_others_are_still_in_their_gather(
    groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()
    monkeypatch.setattr("enginepool.trainer.trainer_ranks._LONG_S", 0.0)
    told: list[str] = []

    def tell(text: str, *arguments: object) -> None:
        told.append(text % arguments)
        said.set()

    monkeypatch.setattr("enginepool.trainer.trainer_ranks.log.error", tell)

    def fails() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()
        raise KeyError("my_index")

    other = Rank1(groups[1], SendPlan([], fails))
    ranks = TrainerRanks(groups[0])

    def gather() -> None:
        with ranks.reading("layers.0"):
            # The collective that the other rank has left: it ends when the test does not wait any more.
            assert said.wait(LIMIT_S)
            assert ranks.stuck_at == "layers.0"

    with pytest.raises(RankFailed):
        ranks.together(1, gather)
    assert ranks.stuck_at == ""
    ranks.end(GIVEN_UP)
    assert [line[line.index("may be in") :] for line in told] == ["may be in a gather: KeyError: 'my_index'"]
    assert isinstance(other.outcome[1], KeyError)


def test_a_step_that_fails_on_rank_0_is_raised_when_all_have_heard(groups: list[Any]) -> None:
    other = Rank1(groups[1], plan_of("a"))
    ranks = TrainerRanks(groups[0])
    with pytest.raises(OSError, match="no room"):
        ranks.together(1, raising(OSError("no room")))
    ranks.end(GIVEN_UP)
    assert other.outcome == (RoundEnd(GIVEN_UP), None)
