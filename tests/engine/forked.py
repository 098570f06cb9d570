"""Engines and pools whose processes are forked from one that has imported SGLang. Each would import it for seven seconds.

`test_sglang_whole_life.py` and `test_hub.py` start their engines as users do.
"""

from typing import Any

from tests.process import forking

PRELOADED = "tests.engine.preloaded"


def server() -> Any:
    """As `forking.server`."""
    return forking.server(PRELOADED)


class ForkedDaemon(forking.ForkedDaemon):
    """A coordinator process whose workers have SGLang."""

    preloaded = PRELOADED
