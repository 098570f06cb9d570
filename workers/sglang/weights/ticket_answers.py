"""Answers to tickets: files that the worker reads. They appear under their name whole or not at all."""

import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

torch: Any = importlib.import_module("torch")


def first_line(error: Exception) -> str:
    """An error as an answer says it."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def write_answer(path: str, answer: dict[str, Any]) -> None:
    """Write it, readable at once."""
    with open(f"{path}.part", "wb") as file:
        file.write(msgspec.msgpack.encode(answer))
    os.replace(f"{path}.part", path)


def answer_later(ticket: dict[str, Any], work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Begin `work` on a thread, on the GPU of this one. What it returns, or why it failed, is the ticket's second answer."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a thread begins on the first one
            answer = work(ticket)
        except Exception as error:  # of any kind: the worker waits for an answer
            answer = {"error": first_line(error)}
        write_answer(ticket["later"], answer)

    threading.Thread(target=run, name=ticket["do"], daemon=True).start()
