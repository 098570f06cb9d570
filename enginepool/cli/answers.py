"""The output file of `enginepool score`: what it holds already, and adding to it.

An interrupted run is resumed from the file alone. Each of its lines carries the number and a checksum of the input line that it
answers, so that answers to another input, or made with other options, are noticed before anything is written.
"""

import fcntl
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self

import msgspec

from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed
from enginepool.cli.jsonl import PREFIX, checksum, input_lines
from enginepool.cli.versions import Versions


class _Answer(msgspec.Struct):
    """What is read of an output line: enough to know which input line it answers, and by which weights."""

    line: int
    input_crc: int
    version: int = 0
    group: str | None = None
    error: dict[str, Any] | None = None


class AnswerWriter:
    """The output file, open for appending and locked against a second run.

    Attributes:
        scored: answers in the file, of this run and earlier ones.
        failed: error lines in the file.
        versions: the weight versions of answers in the file.
    """

    #: how a run that stopped is gone on with
    resumed = "the same command goes on"

    def __init__(self, path: Path, source: Path, *, seed: int, retry_errors: bool, mixed_versions: bool) -> None:
        self.path = path
        self.versions = Versions(path, mixed=mixed_versions)
        self.scored = 0
        self.failed = 0
        self._source = source
        self._seed = seed
        #: index: line number of the input; value: checksum + 1, or 0 where the file has no answer
        self._crcs = array("Q", [0])
        new = not path.exists()
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        try:
            self._lock()
            torn_at = self._read()
            #: Where reading the input begins: the first line without an answer, and its place in the file.
            self.start = self._compare()
            if torn_at is not None:
                self._file.truncate(torn_at)
            if retry_errors and self.failed:
                self._drop_errors()
                self.start = (1, 0)
        except BaseException:  # also Ctrl-C: nobody else knows of the file yet; raised again
            self._file.close()
            raise
        self._remove_if_empty = new

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._remove_if_empty and not self.scored and not self.failed:
            self.path.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            # What could not be written is still in the buffer, and cannot be written now: `add` has said so.
            if error is None:
                raise

    def __contains__(self, line: int) -> bool:
        return line < len(self._crcs) and self._crcs[line] != 0

    def add(self, line: bytes, *, failed: bool) -> None:
        """Append a whole output line, so that it outlives this process."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise CommandFailed(f"{self.path}: {error.strerror}; {self.resumed} once that is mended") from None
        if failed:
            self.failed += 1
        else:
            self.scored += 1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommandFailed(f"{self.path}: another run is writing it; wait for that, or name another file") from None

    def _read(self) -> int | None:
        """Take in the lines that are there. Returns where a last line begins that was cut off in writing."""
        decoder = msgspec.json.Decoder(_Answer)
        most = self._source.stat().st_size + 1
        offset = number = 0
        self._file.seek(0)
        while text := self._file.readline():
            number += 1
            if not text.endswith(b"\n"):
                if not (text.startswith(PREFIX) or PREFIX.startswith(text)):
                    self._foreign(number)
                return offset
            try:
                answer = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._foreign(number)
            if not text.startswith(PREFIX) or not 0 < answer.line <= most or answer.line in self:
                self._foreign(number)
            if answer.line >= len(self._crcs):
                self._crcs.extend([0] * (answer.line + 1 - len(self._crcs)))
            self._crcs[answer.line] = answer.input_crc + 1
            if answer.error is None:
                self.scored += 1
                self.versions.note(answer.group, answer.version)
            else:
                self.failed += 1
            offset += len(text)
        return None

    def _foreign(self, number: int) -> NoReturn:
        raise CommandFailed(
            f"{self.path}: line {number} is no answer to {self._source}, so it is left alone; name another output file",
            BAD_USAGE,
        )

    def _compare(self) -> tuple[int, int]:
        """Hold every answer against the input line that it names. Returns the first line without one, and its offset."""
        if len(self._crcs) == 1:
            return 1, 0
        start: tuple[int, int] | None = None
        offset = number = 0
        with open(self._source, "rb") as source:
            for number, offset, text in input_lines(source):
                if number >= len(self._crcs):
                    break
                crc = self._crcs[number]
                if crc == 0:
                    # A blank line has no answer and needs none.
                    if start is None and not text.isspace():
                        start = number, offset
                elif crc != checksum(text, self._seed) + 1:
                    raise CommandFailed(
                        f"{self.path}: its answer to line {number} of {self._source} was made from another line or with other "
                        "options; name another output file, or delete this one",
                        BAD_USAGE,
                    )
            else:
                if number < len(self._crcs) - 1:
                    raise CommandFailed(
                        f"{self.path}: answers line {len(self._crcs) - 1}, but {self._source} has {number} lines; "
                        "name another output file, or delete this one",
                        BAD_USAGE,
                    )
                number, offset = number + 1, source.tell()
        return start or (number, offset)

    def _drop_errors(self) -> None:
        """Rewrite the file without its error lines, so that those requests are made again and answered once."""
        decoder = msgspec.json.Decoder(_Answer)
        beside = self.path.with_name(self.path.name + ".part")
        with open(beside, "wb") as kept:
            self._file.seek(0)
            for text in self._file:
                answer = decoder.decode(text)
                if answer.error is None:
                    kept.write(text)
                else:
                    self._crcs[answer.line] = 0
            kept.flush()
            os.fsync(kept.fileno())
        replaced = open(beside, "a+b")  # noqa: SIM115 (becomes self._file)
        fcntl.flock(replaced, fcntl.LOCK_EX)
        os.replace(beside, self.path)
        self._file.close()
        self._file = replaced
        self.failed = 0
