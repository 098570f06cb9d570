"""The lines of an input: of a file, or of stdin (`-`) as they come."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from enginepool.cli.jsonl import MAX_LINE_BYTES, input_lines, without_mark

#: stands for stdin, or stdout
STREAM = Path("-")
#: bytes that are read at a time
_CHUNK = 1 << 16

#: (number, offset, text)
Line = tuple[int, int, bytes]


async def file_lines(file: BinaryIO) -> AsyncIterator[Line]:
    """The lines of a file. It never waits, so several readers can share it."""
    for line in input_lines(file):
        yield line


class PipeLines(AsyncIterator[Line]):
    """The lines that arrive at a descriptor, for several readers. The loop runs on while none arrives.

    Of a line over MAX_LINE_BYTES the text is its first MAX_LINE_BYTES + 1 bytes, which `read_line` refuses.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = asyncio.Lock()
        self._read = bytearray()
        #: no line ends before this index
        self._searched = 0
        self._ended = False
        self._number = 0
        self._offset = 0

    async def __anext__(self) -> Line:
        async with self._turn:
            while True:
                end = self._read.find(b"\n", self._searched) + 1
                if end or (self._ended and self._read):
                    return self._take(end or len(self._read))
                if self._ended:
                    raise StopAsyncIteration
                self._searched = len(self._read)
                await self._more()

    def _take(self, end: int) -> Line:
        text = bytes(memoryview(self._read)[: min(end, MAX_LINE_BYTES + 1)])
        del self._read[:end]
        self._searched = 0
        self._number += 1
        offset = self._offset
        self._offset += end
        return self._number, offset, without_mark(text) if self._number == 1 else text

    async def _more(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:  # a regular file can always be read
            readable.set()
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
        chunk = os.read(self._descriptor, _CHUNK)
        self._ended = not chunk
        self._read += chunk
        if len(self._read) > MAX_LINE_BYTES + _CHUNK and b"\n" not in chunk:
            # Bytes over the limit are counted, but not kept.
            self._offset += len(chunk)
            del self._read[-len(chunk) :]
