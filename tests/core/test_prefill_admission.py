"""Prompts are handed to SGLang in rounds, so that prefills and decodes take turns, and none waits for a lower priority."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginepool.workers.sglang.generate import prefill_admission
from enginepool.workers.sglang.generate.prefill_admission import MOST_STEPS, SHORT, Prefill, PrefillAdmission

ROOM = 100


@dataclass
class Sequences:
    """Sequences on one engine, in the order in which they came."""

    admission: PrefillAdmission = field(default_factory=lambda: PrefillAdmission(ROOM))
    all: list[Prefill] = field(default_factory=list[Prefill])

    def arrive(self, count: int, tokens: int = 25, priority: int = 0) -> None:
        self.all += [Prefill(self.admission, tokens, priority) for _ in range(count)]

    def prefill(self) -> None:
        """A forward that computes what is inside."""
        for one in self.all:
            one.began()
        self.admission.forward_done()

    def decode(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.admission.forward_done()

    def states(self) -> str:
        """The first letter of each state: waits, inside, decodes, over."""
        return "".join(one.state[0] for one in self.all)


def check(test: Callable[[Sequences], None]) -> None:
    """Run a test on a loop, which it needs."""

    async def run() -> None:
        test(Sequences())

    asyncio.run(run())


def test_an_idle_engine_is_given_two_forwards_of_prompts() -> None:
    def test(on: Sequences) -> None:
        on.arrive(12)
        assert on.states() == "iiiiiiiiwwww"

    check(test)


def test_while_sequences_decode_each_round_is_one_forward_and_the_next_follows_it() -> None:
    def test(on: Sequences) -> None:
        on.arrive(1)
        on.prefill()
        on.arrive(10)
        assert on.states() == "diwwwwwwwww"  # the first one found the engine without a prefill
        on.decode()  # that was launched before
        assert on.states() == "diwwwwwwwww"
        on.prefill()
        assert on.states() == "ddiiiiwwwww"
        on.prefill()
        assert on.states() == "ddddddiiiiw"

    check(test)


@pytest.mark.parametrize("decodes", [True, False])
def test_no_prompt_waits_long_for_one_whose_media_or_grammar_are_prepared(
    decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_admission, "PREPARED_S", 0.01)

    async def run() -> None:
        on = Sequences()
        if decodes:
            on.arrive(1)
            on.prefill()
        slow, quick, ended = (Prefill(on.admission, 3 * ROOM, 0, prepared=True) for _ in range(3))
        assert [one.state for one in (slow, quick, ended)] == ["inside", "waits", "waits"]  # in rounds, as others
        plain = Prefill(on.admission, ROOM, 0)
        on.decode(MOST_STEPS)
        assert plain.state == "waits"
        for one in (quick, ended):
            one.over()
        async with asyncio.timeout(10):
            while not plain.turn.done():  # once it is known that it takes long
                on.decode()
                await asyncio.sleep(0)
        assert slow.state == "inside"
        slow.began()
        assert slow.state == "decodes"
        slow.over()
        on.all.append(plain)
        on.prefill()
        assert set(on.states()) == {"d"}

    asyncio.run(run())


def test_a_prompt_alone_waits_for_a_few_decodes_after_the_last_prefill() -> None:
    def test(on: Sequences) -> None:
        on.arrive(8 * MOST_STEPS, tokens=1)
        on.prefill()
        on.arrive(1)
        on.decode(MOST_STEPS - 1)
        assert on.states().endswith("dw")
        on.decode()
        assert on.states().endswith("di")

    check(test)


def test_a_prompt_alone_waits_for_nothing_where_the_last_prefill_is_long_ago() -> None:
    def test(on: Sequences) -> None:
        on.arrive(50, tokens=1)
        on.prefill()
        on.decode(MOST_STEPS)
        on.arrive(1)
        assert on.states().endswith("di")

    check(test)


def test_prompts_that_fill_a_forward_wait_for_no_decode() -> None:
    def test(on: Sequences) -> None:
        on.arrive(50, tokens=1)
        on.prefill()
        on.arrive(3)
        assert on.states().endswith("dwww")
        on.arrive(1)
        assert on.states().endswith("diiii")

    check(test)


def test_lower_priorities_delay_no_prompt() -> None:
    def test(on: Sequences) -> None:
        on.arrive(50, tokens=1)
        on.prefill()
        on.arrive(4)
        on.arrive(2)
        on.arrive(1, priority=1)
        assert on.states().endswith("iiiiwwi")

    check(test)


def test_while_a_higher_priority_decodes_rounds_of_a_lower_one_are_short_and_seldom() -> None:
    def test(on: Sequences) -> None:
        on.arrive(1, priority=5)
        on.prefill()
        on.arrive(6, tokens=ROOM // SHORT, priority=-1)
        assert on.states() == "dwwwwww", "they would fill a forward"
        on.decode(MOST_STEPS - 1)
        assert on.states() == "dwwwwww"
        on.decode()
        assert on.states() == "diwwwww"
        on.prefill()
        on.arrive(1, tokens=3 * ROOM, priority=0)
        on.decode(MOST_STEPS)
        assert on.states() == "ddwwwwwi", "one prompt goes alone, however long it is"
        on.prefill()
        on.arrive(1, priority=5)
        assert on.states() == "ddiiiwwdi", "they delay no prompt of the higher priority, and fill its forward"
        on.prefill()
        for at in (0, 7, 8):
            on.all[at].over()
        assert on.states() == "oddddiioo", "nothing of a higher priority decodes"

    check(test)


def test_the_highest_priority_that_waits_is_next() -> None:
    def test(on: Sequences) -> None:
        on.arrive(1, priority=5)
        on.prefill()
        on.arrive(4, priority=5)
        on.arrive(4)
        on.arrive(1, priority=1)
        on.arrive(1, priority=-1)
        on.prefill()
        assert on.states() == "ddiiiwwwwiw"

    check(test)


def test_a_prompt_larger_than_a_forward_is_alone() -> None:
    def test(on: Sequences) -> None:
        on.arrive(1)
        on.prefill()
        on.arrive(2, tokens=5 * ROOM)
        assert on.states() == "diw"
        on.prefill()
        assert on.states() == "ddi"

    check(test)


@pytest.mark.parametrize("place", [0, 4, 5, 6])
def test_a_sequence_that_is_given_up_leaves_its_room_to_others(place: int) -> None:
    def test(on: Sequences) -> None:
        on.arrive(1)
        on.prefill()
        on.arrive(6)
        on.all[place].over()
        on.all[place].over()
        for one in on.all[1:5]:
            one.over()
        assert on.states()[5:].replace("o", "") in ("ii", "i")

    check(test)


def test_two_that_are_cancelled_at_the_same_time_both_end() -> None:
    """As the sequences of a generation that a pause or an update ends."""
    left: list[int] = []

    async def sequence(admission: PrefillAdmission, tokens: int) -> None:
        prefill = Prefill(admission, tokens, 0)
        try:
            await prefill.turn
            await asyncio.Event().wait()
        finally:
            prefill.over()
            left.append(tokens)

    async def run() -> None:
        admission = PrefillAdmission(ROOM)
        tasks = [asyncio.create_task(sequence(admission, tokens)) for tokens in (2 * ROOM, ROOM + 50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True, True]

    asyncio.run(run())
    assert left == [2 * ROOM, ROOM + 50]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), st.integers(1, 2 * ROOM), st.integers(-1, 1)),
            st.tuples(st.just("prefill"), st.just(0), st.just(0)),
            st.tuples(st.just("decode"), st.just(0), st.just(0)),
            st.tuples(st.sampled_from(["over", "cancel"]), st.integers(0, 50), st.just(0)),
        ),
        max_size=60,
    )
)
def test_no_prompt_waits_for_nothing_and_no_engine_is_given_too_much(moves: list[tuple[str, int, int]]) -> None:
    def test(on: Sequences) -> None:
        cancelled: list[Prefill] = []
        for what, number, priority in moves:
            cancelled, before = [], cancelled
            if what == "arrive":
                on.arrive(1, number, priority)
            elif what == "prefill":
                on.prefill()
            elif what == "decode":
                on.decode()
            elif number < len(on.all) and what == "over":
                on.all[number].over()
            elif number < len(on.all) and on.all[number].turn.cancel():
                cancelled = [on.all[number]]  # a task that is cancelled says so a turn of the loop later
            for one in before:
                one.over()
            if cancelled:
                continue
            for one in on.all:
                inside = [other.tokens for other in on.all if other.state == "inside" and other.priority == one.priority]
                assert len(inside) <= 1 or sum(inside) <= 2 * ROOM
            if "w" in on.states():
                assert "i" in on.states() or "d" in on.states()
        for one in cancelled:
            one.over()
        while "w" in on.states():  # prefills and decodes alone hand over all of them
            before = on.states()
            on.prefill()
            on.decode(MOST_STEPS)
            assert on.states() != before

    check(test)
