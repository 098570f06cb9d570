"""A module that is imported when a test first uses it: each process of `pytest -n` collects all tests, and runs only some."""

import importlib
from typing import Any


class LazyModule:
    """Has what the module of this name has, without what is private there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks whether it is a test
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
