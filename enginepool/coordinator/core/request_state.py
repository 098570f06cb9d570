"""The states of a request, and which state may follow which. Data; `transitions` alone changes a state."""

from typing import Final

TEXT: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
DONE: Final = 3
NAMES: Final = ("TEXT", "QUEUED", "RUNNING", "DONE")

#: what a state means
REQUEST_MEANING: Final = {
    TEXT: "Its text is with the tokenizer of a worker, or waits for a worker that is ready.",
    QUEUED: "Some of its rows were given to no worker yet, or came back from one.",
    RUNNING: "All rows that are left are with workers.",
    DONE: "It has its one final answer.",
}
#: which states may follow a state
REQUEST_TRANSITIONS: Final = {
    TEXT: frozenset({QUEUED, DONE}),
    QUEUED: frozenset({RUNNING, DONE}),
    RUNNING: frozenset({QUEUED, DONE}),
    DONE: frozenset[int](),
}
