"""Which trainer rank keeps an update from going on, and when a publisher tries again: decided without threads or clocks."""

from enginepool.protocol.messages import ErrorReply
from enginepool.trainer.heartbeats import BELIEVE_S, SUSPECT_S, RankWatch, Word
from enginepool.trainer.retries import Retries

TIMEOUT_S = 10.0
FAILED = "trainer rank 2 failed: OSError: no such shard"


def rank_0(last: int = 0) -> RankWatch:
    return RankWatch(0, 4, Word(last), 7, TIMEOUT_S, 0.0)


def follower(last: int = 0, version: int | None = 7) -> RankWatch:
    return RankWatch(1, 4, Word(last), version, TIMEOUT_S, 0.0)


def test_ranks_that_have_not_begun_are_named_when_the_time_is_over() -> None:
    watch = rank_0(last=4)
    words = {1: Word(5, beat=1), 2: Word(4, beat=99)}
    assert watch.hear(TIMEOUT_S, words) == "" and not watch.here
    words[1] = Word(5, beat=2)
    said = watch.hear(TIMEOUT_S + 1, words)
    assert said == "trainer ranks 2, 3 have not called `publish` for 10 s; all ranks make the same calls"


def test_a_silent_rank_is_lost_after_the_timeout_and_sooner_when_a_collective_broke() -> None:
    for broken, limit_s in ((False, TIMEOUT_S), (True, SUSPECT_S)):
        watch = rank_0()
        assert watch.hear(0.0, {rank: Word(1, beat=1) for rank in (1, 2, 3)}) == "" and watch.here
        later = {1: Word(1, beat=2), 2: Word(1, beat=1), 3: Word(1, beat=2)}
        assert watch.hear(limit_s, later, broken=broken) == ""
        assert watch.hear(limit_s + 0.1, later, broken=broken).startswith("trainer rank 2 is gone: it has said nothing for")


def test_a_failure_is_believed_when_no_rank_turns_out_to_be_gone() -> None:
    for third_lives in (True, False):
        watch, said, now = rank_0(), "", 0.0
        beat = 0
        while not said:
            beat, now = beat + 1, now + 0.5
            words = {1: Word(1, beat=beat), 2: Word(1, beat=beat), 3: Word(1, beat=beat if third_lives else 1)}
            if beat > 1:
                words[2].failure = FAILED
            said = watch.hear(now, words)
        assert watch.failures == {2: FAILED}
        assert said == FAILED if third_lives else said.startswith("trainer rank 3 is gone")
        assert now <= 2 * BELIEVE_S


def test_a_rank_begins_the_update_that_rank_0_is_in() -> None:
    watch = follower(last=4)
    assert watch.hear(1.0, {0: Word(4, 6, beat=30, over=True)}) == "" and not watch.here and watch.word.turn == 0
    assert watch.hear(2.0, {0: Word(9, 7, beat=1)}) == "" and watch.here and watch.word.turn == 9
    assert watch.hear(3.0, {0: Word(10, 7, beat=1)}).startswith("trainer rank 0 has begun a later update")


def test_a_late_rank_hears_why_rank_0_gave_up_what_it_comes_for_and_nothing_of_other_updates() -> None:
    over = {0: Word(5, 7, 30, True, "trainer rank 1 has not called `publish`")}
    watch = follower(last=4)
    assert watch.hear(1.0, over) == over[0].failure and watch.word.turn == 5
    assert follower(last=5).hear(1.0, over) == ""
    assert follower(last=4, version=8).hear(1.0, over) == ""
    assert follower(last=4, version=None).hear(1.0, over) == ""


def test_a_publish_is_tried_again_within_its_time_and_less_and_less_often() -> None:
    now = 0.0
    retries = Retries(20.0, lambda: now, next_version=False)
    pauses: list[float] = []
    while (pause := retries.again(ErrorReply("update_aborted", "a worker was lost"))) is not None:
        pauses.append(pause)
        now += pause + 1.0
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0]


def test_only_what_can_help_is_tried_again() -> None:
    def again(code: str, limit_s: float = 20.0, next_version: bool = False) -> bool:
        return Retries(limit_s, lambda: 0.0, next_version=next_version).again(ErrorReply(code, "")) is not None

    assert again("update_aborted") and again("publishing") and again("pool_down")
    assert not again("update_aborted", limit_s=0.0)
    assert not again("weights_refused") and not again("version_backwards") and not again("a code of tomorrow")
    assert again("version_backwards", next_version=True)
