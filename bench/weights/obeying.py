"""How the processes of the weights benchmark take orders: a line of JSON each, and a line for its answer.

{"do": NAME, ...} calls `do_NAME` with the rest. An order that fails is answered by {"error": why}; the process goes on.
"""

import asyncio
import json
import sys
import traceback
from typing import IO, Any

import msgspec


def obey(voice: IO[str], servant: object, hello: object) -> None:
    """Take orders from stdin until it ends, one after the other, on this thread."""
    _say(voice, hello)
    for line in sys.stdin:
        name, arguments = _order(line)
        try:
            answer = getattr(servant, name)(**arguments)
        except Exception as error:
            answer = _failure(error)
        _say(voice, answer)


async def obey_awaited(voice: IO[str], servant: object, hello: object) -> None:
    """The same for a servant whose methods are coroutines; its loop lives between orders."""
    stdin = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    _say(voice, hello)
    while line := await stdin.readline():
        name, arguments = _order(line)
        try:
            answer = await getattr(servant, name)(**arguments)
        except Exception as error:
            answer = _failure(error)
        _say(voice, answer)


def _order(line: str | bytes) -> tuple[str, dict[str, Any]]:
    order: dict[str, Any] = json.loads(line)
    return f"do_{order.pop('do')}", order


def _failure(error: Exception) -> dict[str, str]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def _say(voice: IO[str], what: object) -> None:
    voice.write(msgspec.json.encode(what).decode() + "\n")
    voice.flush()
