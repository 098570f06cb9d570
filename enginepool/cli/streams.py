"""`-` in place of a file of `enginepool score`: requests from stdin as they come, answers to stdout. Neither can be resumed."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from enginepool.cli.cli_errors import CommandFailed
from enginepool.cli.jsonl import MAX_LINE_BYTES
from enginepool.cli.versions import Versions

#: stands for stdin, or stdout
STREAM = Path("-")
#: bytes that are read at a time
_CHUNK = 1 << 16

#: (number, offset, text)
Line = tuple[int, int, bytes]


class FileLines(AsyncIterator[Line]):
    """The lines of a file. Reading one never waits."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines

    async def __anext__(self) -> Line:
        for line in self._lines:
            return line
        raise StopAsyncIteration


class PipeLines(AsyncIterator[Line]):
    """The lines that come in at a descriptor, for several readers: the loop goes on while none comes.

    Of a line over MAX_LINE_BYTES the text is that much and one byte, which `read_request` refuses.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = asyncio.Lock()
        self._read = bytearray()
        #: up to here there is no end of a line
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
        return self._number, offset, text

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
            # What is over the limit is not kept, and still counts.
            self._offset += len(chunk)
            del self._read[-len(chunk) :]


class StreamAnswers:
    """Answers that are written once, in the order in which they come, to stdout or a new file.

    Attributes:
        path: what to call it.
        scored, failed: answers and error lines so far.
        start, versions: as of `Answers`.
    """

    #: how a run that stopped is gone on with
    resumed = "a run through a pipe cannot be resumed"

    def __init__(self, path: Path, file: IO[bytes], *, mixed_versions: bool) -> None:
        self.path = path
        self.versions = Versions(path, mixed=mixed_versions)
        self.scored = 0
        self.failed = 0
        self.start = (1, 0)
        self._file = file

    def __contains__(self, line: int) -> bool:
        return False

    def add(self, line: bytes, *, failed: bool) -> None:
        """Write a whole output line."""
        try:
            self._file.write(line)
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandFailed(f"{self.path}: {error.strerror}; {self.resumed}") from None
        if failed:
            self.failed += 1
        else:
            self.scored += 1
