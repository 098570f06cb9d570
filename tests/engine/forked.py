"""Engines and pools whose processes are forked from one that has imported SGLang. Each would import it for seven seconds.

A test of `test_sglang_whole_life.py` starts a pool as users do.
"""

import sys
import tempfile
from typing import Any

from tests.process import forking

PRELOADED = "tests.engine.preloaded"
#: seconds for a piece of code
RUN_S = 280


def server() -> Any:
    """As `forking.server`."""
    return forking.server(PRELOADED)


def run_code(code: str, *arguments: str) -> tuple[int, str]:
    """Run Python code in a process of its own, which has SGLang: the exit code, and what the process has written."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-c", code, *arguments]
        process = forking.ForkedProcess(command, PRELOADED, stdout=output, stderr=output)
        status = process.wait(RUN_S)
        output.seek(0)
        return status, output.read()


class ForkedDaemon(forking.ForkedDaemon):
    """A coordinator process whose workers have SGLang."""

    preloaded = PRELOADED
