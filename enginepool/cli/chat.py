"""`enginepool chat`: a conversation with the model of a running pool, on a terminal or through pipes."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, cast
from unicodedata import category

import typer

from enginepool.cli.cli_errors import CommandFailed
from enginepool.cli.connect import CONNECT_S, DEFAULT_ADDRESS, Address

_HELP = "/clear begins a new conversation, /quit ends"


def chat(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", help="A group; a pool of one group needs no name.")] = "",
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A folder or a name with tokenizer and template; default: that of the group."),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="What the model is told first.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens of an answer, at most.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", min=0.0, help="0 takes the likeliest token.")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For one answer.")] = None,
    connect: Address = DEFAULT_ADDRESS,
) -> None:
    """Talk with the model of a running pool.

    Each line is a message, whose answer appears as it is generated. /clear begins a new conversation; /quit or Ctrl-D ends;
    Ctrl-C ends an answer. Where lines come through a pipe, the first error ends it, with exit code 1.

    \b
    Examples:
      enginepool chat
      enginepool chat policy --system "Answer in one sentence." --temperature 0
    """
    from enginepool.client.blocking import BlockingPool

    options = {"max_tokens": max_tokens, "temperature": temperature, "timeout": timeout}
    with BlockingPool.connect(connect, connect_timeout=CONNECT_S) as pool:
        client = pool.openai(group, model=model)
        conversation = Conversation(client, system, {name: value for name, value in options.items() if value is not None})
        talk(conversation, sys.stdin.isatty())


def talk(conversation: "Conversation", terminal: bool) -> None:
    """Take lines and print answers until the input ends. Raises CommandFailed for an error, unless it is a terminal."""
    if terminal:
        typer.echo(f"{_HELP}; the first answer takes seconds more.", err=True)
        with suppress(ImportError):
            import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]  (lines can be edited then)
    while (line := _line(terminal)) not in (None, "/quit"):
        if line == "/clear":
            conversation.clear()
            continue
        if not line:
            continue
        try:
            for piece in conversation.answer(line):
                typer.echo(printable(piece), nl=False)
            typer.echo()
        except KeyboardInterrupt:
            if not terminal:
                raise
            typer.echo()
        except CommandFailed as error:
            if not terminal:
                raise
            typer.echo(f"\nenginepool: {error}" if conversation.begun else f"enginepool: {error}", err=True)


def _line(terminal: bool) -> str | None:
    """The next line; None at the end."""
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None


class Conversation:
    """Messages to and from a model.

    Args:
        client: an `openai.OpenAI`.
        system: the first message of each conversation, or None.
        options: of each request.

    Attributes:
        begun: a part of the newest answer was given out.
    """

    def __init__(self, client: Any, system: str | None, options: dict[str, Any]) -> None:
        self._client = client
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._options = options
        self.begun = False
        self.clear()

    def clear(self) -> None:
        """Begin a new conversation."""
        self._messages = list(self._first)

    def answer(self, text: str) -> Iterator[str]:
        """The pieces of the answer to a message. An answer that is left stays as far as it was given out.

        Raises:
            CommandFailed: there is none, and the message is as if it had not been said.
        """
        import openai

        said, thoughts = "", False
        self.begun = False
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            with self._client.chat.completions.create(model="", messages=messages, stream=True, **self._options) as stream:
                for chunk in stream:
                    delta = chunk.choices[0].delta if chunk.choices else None
                    if thought := getattr(delta, "reasoning_content", None):
                        yield from ("[thinking] " * (not thoughts), thought)
                        thoughts = self.begun = True
                    elif delta is not None and delta.content:
                        yield "\n" * (thoughts and not said) + delta.content
                        said += delta.content
                        self.begun = True
        except openai.OpenAIError as error:
            said = ""
            raise CommandFailed(reason(error)) from error
        finally:
            if said:
                self._messages = [*messages, {"role": "assistant", "content": said}]


def reason(error: Exception) -> str:
    """An error of `openai` in one line."""
    body: Any = getattr(error, "body", None)
    named = cast("dict[str, Any]", body if isinstance(body, dict) else {}).get("message")
    text = str(named or error.__cause__ or error)
    return " ".join(text.split())


def printable(text: str) -> str:
    """Without what would command a terminal. A model can be made to say anything."""
    return "".join("\ufffd" if category(one) == "Cc" and one not in "\n\t" else one for one in text)
