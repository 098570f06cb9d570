# pyright: reportIncompleteStub=false
"""Any name has type Any: pyright would read thousands of files for the few that are used here. Tests run what uses them."""

from typing import Any

def __getattr__(name: str) -> Any: ...
