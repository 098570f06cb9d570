"""`enginepool chat` without a pool: what it makes of lines, answers, errors and Ctrl-C. `test_openai.py` has one with it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from enginepool.cli.chat import Conversation, printable, talk
from enginepool.cli.cli_errors import CommandFailed
from tests.lazy import LazyModule

openai: Any = LazyModule("openai")


class Stream(AbstractContextManager["Stream"]):
    """Texts of an answer, as deltas of `openai`; an exception among them is raised."""

    def __init__(self, deltas: list[str | BaseException]) -> None:
        self._deltas = deltas
        self.closed = False

    def __iter__(self) -> Iterator[Any]:
        for delta in self._deltas:
            if isinstance(delta, BaseException):
                raise delta
            thought, content = (delta[8:], None) if delta.startswith("thought ") else (None, delta)
            yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=content, reasoning_content=thought))])

    def __exit__(self, *exc: object) -> None:
        self.closed = True


class Model:
    """In place of an `openai.OpenAI`."""

    def __init__(self, *answers: list[Any]) -> None:
        self._answers = iter(answers)
        self.asked: list[list[str]] = []
        self.options: dict[str, Any] = {}
        self.streams: list[Stream] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.create))

    def create(self, *, model: str, messages: list[dict[str, str]], stream: bool, **options: Any) -> Stream:
        self.asked.append([message["content"] for message in messages])
        self.options = options
        self.streams.append(Stream(next(self._answers)))
        return self.streams[-1]


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Type these lines, and end the input."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def failed(message: str) -> Exception:
    return openai.APIError("", request=Any, body={"message": message})


def test_each_line_is_a_message_until_one_ends_the_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(["Good ", "day."], ["Yes."], ["Who?"])
    say(monkeypatch, "Hello", "", "And you?", "/clear", "You", "/quit", "never")
    talk(Conversation(model, "Be polite.", {"max_tokens": 9}), terminal=False)
    assert capsys.readouterr() == ("Good day.\nYes.\nWho?\n", "")
    first = ["Be polite.", "Hello"]
    assert model.asked == [first, [*first, "Good day.", "And you?"], ["Be polite.", "You"]]
    assert model.options == {"max_tokens": 9}


def test_an_error_ends_a_run_through_a_pipe_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, "Hello", "never")
    with pytest.raises(CommandFailed, match=r"^the queue is full$"):
        talk(Conversation(Model([failed("the queue\nis full")]), None, {}), terminal=False)


def test_on_a_terminal_an_error_is_a_line_and_the_message_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(["So ", failed("NaN")], ["Yes."])
    say(monkeypatch, "Hello", "Again")
    talk(Conversation(model, None, {}), terminal=True)
    out, err = capsys.readouterr()
    assert out == "So Yes.\n" and err.splitlines()[1:] == ["", "enginepool: NaN"]
    assert model.asked == [["Hello"], ["Again"]]


def test_ctrl_c_ends_an_answer_which_stays_as_far_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(["So ", "it ", KeyboardInterrupt()], ["Yes."])
    say(monkeypatch, "Hello", "Again")
    talk(Conversation(model, None, {}), terminal=True)
    assert capsys.readouterr().out == "So it \nYes.\n"
    assert model.asked == [["Hello"], ["Hello", "So it ", "Again"]]
    assert [stream.closed for stream in model.streams] == [True, True]


def test_thoughts_are_shown_and_are_no_part_of_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(["thought One ", "thought and one.", "Two"], ["Yes."])
    say(monkeypatch, "1+1?", "Really?")
    talk(Conversation(model, None, {}), terminal=False)
    assert capsys.readouterr().out == "[thinking] One and one.\nTwo\nYes.\n"
    assert model.asked[1] == ["1+1?", "Two", "Really?"]


def test_what_a_model_says_commands_no_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\r\n\td 🙂é") == "a\ufffd[2Jb\ufffd\ufffdc\ufffd\n\td 🙂é"
