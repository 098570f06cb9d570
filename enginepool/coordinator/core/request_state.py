"""The phases of a request; `state` tells the story."""

from typing import Final

TEXT: Final = 0
QUEUED: Final = 1
RUNNING: Final = 2
DONE: Final = 3
NAMES: Final = ("TEXT", "QUEUED", "RUNNING", "DONE")
