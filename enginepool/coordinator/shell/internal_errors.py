"""An internal error ends the coordinator at once, because what the machine was about to do is lost."""

import os
from typing import Any, NoReturn

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.story import story
from enginepool.coordinator.shell.log import log
from enginepool.host.restart_policy import INTERNAL_ERROR


def on_loop_error(context: dict[str, Any], core: Context) -> None:
    """The handler of exceptions on the event loop."""
    error = context.get("exception")
    if error is None:
        log(f"event loop: {context.get('message', '')}")
    else:
        end_on_internal_error(error, core)


def end_on_internal_error(error: BaseException, core: Context) -> NoReturn:
    """Log the story of the error and end the process, as SIGKILL would.

    The machine must not decide anything more. A successor adopts the workers, and clients resend requests without an answer.
    """
    try:
        for line in story(error, core):
            log(line, "error")
        log(f"the coordinator ends with exit code {INTERNAL_ERROR}, because of this internal error", "error")
    finally:
        os._exit(INTERNAL_ERROR)
