"""What a worker says of an error reaches clients, the status and the log as one bounded line."""

from typing import Any

import pytest

from enginepool.coordinator.shell.decode import worker_event
from enginepool.coordinator.shell.worker_texts import LONGEST
from enginepool.protocol import messages as m
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages.control import Commanded

TASK: m.TaskId = (1, 1)
#: a traceback, a terminal's commands, a line separator of Unicode
TRACE = 'Traceback:\n  File "x.py", line 1\r\n\x1b[31mRuntimeError\x00: no\u2028memory\n'
LINE = 'Traceback: File "x.py", line 1 [31mRuntimeError : no memory'
MESSAGES: dict[Any, dict[str, Any]] = {
    m.Stage: {"stage": "loading"},
    m.Exiting: {},
    m.ErrorReply: {"code": "engine_error", "id": 1},
    m.Tokenized: {"task": TASK},
    m.Prepared: {"update": TASK},
    m.Joined: {"update": TASK},
    m.Staged: {"update": TASK},
    m.WeightsLoaded: {"update": TASK},
    m.Restored: {"version": 1, "code": "engine_error"},
    Commanded: {"task": TASK},
    m.AdapterChanged: {"task": TASK},
    m.Inspected: {"task": TASK},
    m.PartDone: {"frames": [], "code": "engine_error"},
}


def said(kind: Any, text: str) -> str:
    """What the event of such a message has of a text."""
    field = {m.Stage: "detail", m.Exiting: "reason"}.get(kind, "message")
    message = kind(**MESSAGES[kind], **{field: text})
    event: Any = worker_event(0.0, b"w", [encode_header(m.Done(TASK, [message]) if kind is m.PartDone else message)])
    if kind in (m.PartDone, m.Tokenized):
        return event.outcomes[0].message if kind is m.PartDone else event.message
    return getattr(event.message, field)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_an_error_with_many_lines_is_one_line_and_a_long_one_is_cut_off(kind: Any) -> None:
    assert said(kind, TRACE) == LINE
    assert said(kind, "") == ""
    assert said(kind, "x" * 100_000) == "x" * LONGEST + "…"


def test_a_sequence_that_failed_says_why_in_one_line_and_what_stopped_another_one_is_left_as_it_is() -> None:
    steps = [m.Step(1, 0, 0, 0, "error", TRACE), m.Step(1, 1, 0, 0, "stop", "\n\n"), m.Step(1, 2, 0, 0, "stop", 7)]
    progress = m.GenerationProgress(1, 0, steps, [m.FrameSpec("tokens", "int32", (0,))])
    event: Any = worker_event(0.0, b"w", [encode_header(progress), b""])
    assert [step.matched for step in event.steps] == [LINE, "\n\n", 7]
