"""Answers to tickets: files that the worker reads. They appear under their name whole or not at all."""

import os
from typing import Any

import msgspec


def first_line(error: Exception) -> str:
    """An error as an answer says it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def write_answer(path: str, answer: dict[str, Any]) -> None:
    """Write it, readable at once."""
    with open(f"{path}.part", "wb") as file:
        file.write(msgspec.msgpack.encode(answer))
    os.replace(f"{path}.part", path)
