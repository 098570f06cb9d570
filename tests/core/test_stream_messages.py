"""Messages of streams: what is generated in one turn of the coordinator goes in one message to each client, and before anything
else that it is told about these requests."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.requests import stream_messages
from enginepool.protocol.messages import ErrorReply, Generated, Tokens
from tests.core.generations import CAN, GeneratingPool, generate, outputs, streamed
from tests.core.machines import Sent

NAN = float("nan")


class TwoSteps:
    """A client with a stream at each of two workers, and what comes in one turn: a token of the first stream, then more."""

    def __init__(self, **asked: Any) -> None:
        self.pool = GeneratingPool()
        self.client = self.pool.client()
        self.links = [self.pool.worker(name, can=CAN) for name in "ab"]
        for id_ in (1, 2):
            self.pool.submit(self.client, id_, generate(3, stream=True, **asked))
        tasks = {task.link: task for task in self.pool.tasks()}
        self.first, self.second = (tasks[link] for link in self.links)

    def progress(self, task: Sent, at: int, tokens: list[int], reason: str = "", **more: Any) -> ev.TokensGenerated:
        return self.pool.progress(task.link, (task, 0, at, tokens, reason), **more)

    def together(self, *events: ev.Event) -> list[Any]:
        """Messages to the client."""
        return [one for one in self.pool.do(*events) if one.link == self.client]


def test_steps_of_several_workers_that_come_together_are_one_message_to_each_client() -> None:
    two = TwoSteps()
    other = two.pool.client()
    two.pool.submit(other, 1, generate(3, stream=True))
    third = two.pool.tasks()[-1]
    sent = two.pool.do(
        two.progress(two.first, 0, [1]),
        two.progress(two.second, 0, [5]),
        two.progress(two.first, 1, [2, 3]),
        two.progress(third, 0, [9]),
    )
    assert [(one.link, type(one.message)) for one in sent] == [(two.client, Tokens), (other, Tokens)]
    assert streamed(sent[:1]) == [(1, 0, 0, 0, [1]), (2, 0, 0, 0, [5]), (1, 0, 1, 0, [2, 3])]
    assert streamed(sent[1:]) == [(1, 0, 0, 0, [9])]


def test_the_tokens_of_a_stream_come_before_its_answer() -> None:
    two = TwoSteps()
    sent = two.together(
        two.progress(two.first, 0, [1]), two.progress(two.first, 1, [2], "stop"), two.progress(two.second, 0, [5])
    )
    assert [type(one.message) for one in sent] == [Tokens, Generated, Tokens]
    assert streamed(sent[:1]) == [(1, 0, 0, 0, [1]), (1, 0, 1, 0, [2])] and outputs(sent)[1][1] == [[1, 2]]
    assert streamed(sent[2:]) == [(2, 0, 0, 0, [5])]


#: what is asked, what follows the token in the turn, and the last message
CASES: list[tuple[dict[str, Any], Callable[[TwoSteps], ev.Event], type | None]] = [
    ({}, lambda two: two.progress(two.first, 1, [], "error"), ErrorReply),
    ({"credit": 2}, lambda two: two.progress(two.first, 1, [2, 3, 4]), Tokens),
    ({"partial": True}, lambda two: two.progress(two.first, 7, [2]), Generated),
    ({"partial": True}, lambda two: ev.WorkerBroken(0, two.first.link, "it broke"), Generated),
    ({}, lambda two: ev.CreditGiven(0, two.client, 1, 1), None),
    (
        {"prompt_logprobs": True},
        lambda two: two.progress(two.first, 1, [2], prompts=[(two.first, [NAN, NAN, NAN])]),
        ErrorReply,
    ),
]


@pytest.mark.parametrize(("asked", "then", "said"), CASES)
def test_what_was_generated_is_sent_before_anything_else_is_said_of_the_request(
    asked: dict[str, Any], then: Callable[[TwoSteps], ev.Event], said: type | None
) -> None:
    two = TwoSteps(**asked)
    sent = two.together(two.progress(two.first, 0, [1]), then(two))
    assert isinstance(sent[0].message, Tokens)
    assert streamed(sent)[0] == (1, 0, 0, 0, [1]) and streamed(sent)[1:] in ([], [(1, 0, 1, 0, [2])])
    assert len(sent) == 1 if said is None else type(sent[-1].message) is said


@pytest.mark.parametrize(
    ("asked", "more"),
    [
        ({}, {}),
        ({"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "top": 2}),
        ({"hidden_states": True}, {"hidden": 4}),
    ],
)
@pytest.mark.parametrize("plain_first", [False, True])
def test_an_end_without_a_token_does_not_come_before_the_tokens(
    asked: dict[str, Any], more: dict[str, Any], plain_first: bool
) -> None:
    pool = GeneratingPool()
    client = pool.client()
    link = pool.worker(can=replace(CAN, hidden=4, features=(*CAN.features, "hidden_states")))
    pool.submit(client, 1, generate(3, n=2, stream=True, **asked))
    pool.submit(client, 2, generate(3, stream=True))
    task, plain = pool.tasks()
    events = [pool.progress(link, (plain, 0, 0, [5], ""))] if plain_first else []
    events.append(pool.progress(link, (task, 0, 0, [1, 2], ""), **more))
    events.append(pool.progress(link, (task, 0, 2, [], "stop")))
    had = 0
    for one in pool.do(*events):
        assert isinstance(one.message, Tokens)
        had += sum(run.count for run in one.message.runs if run.id == 1)
        assert had == 2 or not one.message.ended
    assert had == 2


def test_what_is_sent_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_messages, "MOST_BYTES", 8)
    two = TwoSteps()
    sent = two.together(*(two.progress(two.first, at, [at]) for at in range(5)))
    assert [len(one.frames[0]) for one in sent] == [8, 8, 4]
    assert [at for _, _, at, _, _ in streamed(sent)] == [*range(5)]


def test_a_client_whose_link_was_lost_in_the_turn_is_sent_nothing_and_others_are() -> None:
    two = TwoSteps()
    other = two.pool.client()
    two.pool.submit(other, 1, generate(3, stream=True))
    third = two.pool.tasks()[-1]
    sent = two.pool.do(
        two.progress(third, 0, [9]), ev.LinkCut(0, two.client, "it does not read"), two.progress(two.first, 0, [1])
    )
    assert [one.link for one in sent if isinstance(one.message, Tokens)] == [other]
