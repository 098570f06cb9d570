"""What workers say of errors becomes one bounded line, before clients, the status and the log have it.

An engine's own text may have many lines, or repeat what a client sent. Pure.
"""

import msgspec

from enginepool.protocol import messages as m
from enginepool.protocol.errors import brief

#: characters of what a worker says of an error; a line of the log has as many
LONGEST = 1000
#: by the type of a message, its field for people
_FIELDS: dict[type, str] = {
    m.Stage: "detail",
    m.Exiting: "reason",
    **dict.fromkeys((m.ErrorReply, m.Tokenized, m.Prepared, m.Joined, m.Staged, m.WeightsLoaded), "message"),
    **dict.fromkeys((m.Restored, m.Commanded, m.AdapterChanged, m.Inspected), "message"),
}


def make_readable(message: m.Message) -> None:
    """Each text for people in the message of a worker is one line from now on."""
    if type(message) is m.Done:
        for part in message.parts:
            if part.message:
                part.message = one_line(part.message)
    elif (field := _FIELDS.get(type(message))) is not None and (text := getattr(message, field)):
        setattr(message, field, one_line(text))
    if type(message) is m.Prepared and message.field:
        message.field = one_line(message.field)


def failed_step(step: m.Step) -> m.Step:
    """With one line about its error, if it has one."""
    failed = step.reason in m.STEP_FAILED and isinstance(step.matched, str)
    return msgspec.structs.replace(step, matched=one_line(str(step.matched))) if failed else step


def one_line(text: str) -> str:
    """No letter of it makes two lines of one, or commands a terminal."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * LONGEST])
    return brief(" ".join(printable.split()), LONGEST)
