"""The run behind `enginepool score`: many requests under way, each answer written as it comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from enginepool.cli.answers import AnswerWriter
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed
from enginepool.cli.jsonl import BadLine, Options, answer_line, bad_line, checksum, error_line, read_request
from enginepool.cli.streams import Line, StreamAnswers
from enginepool.errors import EnginepoolError

if TYPE_CHECKING:
    from enginepool.cli.progress import Progress
    from enginepool.client.pool import Pool

#: So many lines that need no asking are dealt with before the connection is served again.
BREATH = 256

#: Errors that say nothing about the line: the run stops, and the line is asked again when it is resumed.
NOT_THE_LINES = {"closed", "forbidden", "superseded", "unauthorized", "protocol_version"}


class Run:
    """One pass over the input."""

    def __init__(self, pool: "Pool", answers: AnswerWriter | StreamAnswers, options: Options, progress: "Progress") -> None:
        self._pool = pool
        self._answers = answers
        self._options = options
        self._progress = progress
        self._seed = options.seed()

    async def all(self, lines: AsyncIterator[Line], concurrency: int) -> None:
        """Answer every line without an answer, `concurrency` of them at a time.

        Raises:
            CommandFailed: the pool cannot go on, or the output cannot be written.
        """
        tasks = [asyncio.create_task(self._take(lines)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, lines: AsyncIterator[Line]) -> None:
        """Answer lines from the iterator that all takers share, until it is empty."""
        unasked = 0
        async for number, offset, text in lines:
            if number in self._answers or text.isspace() or await self._answer(number, text):
                unasked += 1
                if unasked % BREATH == 0:
                    await asyncio.sleep(0)
            self._progress.at(offset + len(text))

    async def _answer(self, number: int, text: bytes) -> bool:
        """Write the answer to one line. Returns whether the pool was not needed for it."""
        crc = checksum(text, self._seed)
        try:
            request = read_request(text)
        except BadLine as error:
            self._answers.add(bad_line(number, crc, error), failed=True)
            return True
        try:
            result = await request.ask(self._pool, self._options)
        except EnginepoolError as error:
            if error.retry or error.code in NOT_THE_LINES:
                raise CommandFailed(f"stopped at line {number}: {error}; {self._answers.resumed} from there") from None
            if error.code == "unknown_group" and request.group is None:
                raise CommandFailed(f"{error}; choose one with --group", BAD_USAGE) from None
            self._answers.add(error_line(number, crc, request, error), failed=True)
        else:
            self._answers.versions.check(number, request.group, result.version)
            self._answers.add(answer_line(number, crc, request, result), failed=False)
            self._answers.versions.note(request.group, result.version)
        return False
