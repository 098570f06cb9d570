"""How a command fails: one line on stderr and an exit code, never a traceback.

Exit codes: 2 the command or a configuration cannot be used as written; 1 the run failed; 130 and 143 it was interrupted.
"""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer
from typer.core import TyperGroup

BAD_USAGE = 2
RUN_FAILED = 1
INTERRUPTED = 130
TERMINATED = 143

# The base of all usage errors is click's; typer has its own copy of click or not, depending on its version.
_UsageError: Any = typer.BadParameter.__mro__[1]


class CommandFailed(Exception):
    """A command cannot go on. The message is one line for the user: what, where, and what to do."""

    def __init__(self, message: str, code: int = RUN_FAILED) -> None:
        super().__init__(message)
        self.code = code


T = TypeVar("T")


def run_interruptible(main: Callable[[], Coroutine[Any, Any, T]], said: Callable[[], str]) -> T:
    """Run a coroutine that SIGTERM and Ctrl-C cancel. Raises CommandFailed with `said()` after one of them."""
    terminated = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        return await main()

    try:
        return asyncio.run(run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise CommandFailed(said(), TERMINATED if terminated else INTERRUPTED) from None


class OneLineGroup(TyperGroup):
    """A group of commands whose errors, of every kind, are one line."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the arguments name, and end the process with its exit code."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:
            # The reader of the output has ended (`| head`). Nothing may be flushed to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = RUN_FAILED
        except Exception as error:
            # Every exception: the user gets one line, and a traceback only with ENGINEPOOL_TRACEBACK.
            if os.environ.get("ENGINEPOOL_TRACEBACK"):
                traceback.print_exception(error)
            line, code = describe(error)
            typer.echo(line, err=True)
        sys.exit(code if isinstance(code, int) else 0)


def describe(error: Exception) -> tuple[str, int]:
    """The line and the exit code for `error`."""
    from enginepool.errors import ConfigError, EnginepoolError
    from enginepool.net import descriptors

    if isinstance(error, _UsageError):
        return _usage(error), BAD_USAGE
    text = "; ".join(line.strip() for line in str(error).splitlines())
    if isinstance(error, CommandFailed):
        return f"enginepool: {text}", error.code
    if isinstance(error, EnginepoolError):
        return f"enginepool: {text}", BAD_USAGE if isinstance(error, ConfigError) else RUN_FAILED
    if descriptors.is_short(error):
        return f"enginepool: {text}; {descriptors.advice()}", RUN_FAILED
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"enginepool: {where}{error.strerror}", RUN_FAILED
    return (
        f"enginepool: internal error: {type(error).__name__}: {text} (with ENGINEPOOL_TRACEBACK=1 set it shows where)",
        RUN_FAILED,
    )


def _usage(error: Any) -> str:
    path = error.ctx.command_path if error.ctx is not None else "enginepool"
    # typer's own word before what is wrong with a choice says nothing to a user
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    # Newer versions of typer check values with pydantic, whose messages leave the value out.
    cause: Any = error.__cause__
    if hasattr(cause, "errors") and (given := repr(cause.errors()[0]["input"])) not in text:
        text += f", got {given}"
    return f"{path}: {text[:1].lower()}{text[1:]} ({path} --help shows how)"
