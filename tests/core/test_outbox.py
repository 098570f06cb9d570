"""The bytes that a peer has not read: the sum of what was sent, less what was sent before the questions that it answered."""

from hypothesis import given
from hypothesis import strategies as st

from enginepool.coordinator.shell.outbox import Outbox


@given(
    st.integers(1, 200),
    st.integers(2, 400),
    st.lists(st.tuples(st.sampled_from(["send", "send", "ask", "answer", "guess"]), st.integers(0, 150)), max_size=60),
)
def test_what_is_unread_is_what_was_sent_after_the_last_question_that_was_answered(
    proof: int, most: int, steps: list[tuple[str, int]]
) -> None:
    outbox = Outbox(proof, most)
    sent = asked = read = number = 0
    for what, nbytes in steps:
        if what == "send":
            outbox.unread += nbytes
            sent += nbytes
        elif what == "ask" and not outbox.token:
            number += 1
            outbox.ask(number, 0.0)
            asked = sent
        elif what == "answer":
            expected = asked - read if outbox.token else 0
            assert outbox.proved(outbox.token) == expected
            read += expected
        else:
            assert outbox.proved(number + 1) == outbox.proved(0) == 0
        outbox.check()
        assert outbox.unread == sent - read
        over = outbox.unread > most
        assert not over or outbox.unread >= outbox.mark, "it is looked at"
        assert outbox.token or outbox.mark <= most, "the question comes before the end"
