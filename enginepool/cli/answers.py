"""The output of `enginepool score` and the like: what the file holds already, and adding to it.

An interrupted run is resumed from the file alone. Each line carries the number and a checksum of its input line. So answers to
another input, or made with other options, are noticed before anything is written.
"""

import fcntl
import itertools
import os
import stat
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Annotated, Any, NoReturn, Self, TypeAlias

import msgspec

from enginepool.cli.answer_versions import AnswerVersions
from enginepool.cli.cli_errors import BAD_USAGE, CommandFailed
from enginepool.cli.jsonl import PREFIX, input_lines

#: of the text of an input line: 32 bits that tell it, asked with the options of this run, from another
Checksum: TypeAlias = Callable[[bytes], int]

#: marks the checksum of a line whose answer is an error
_ERROR = 1 << 33


class _Answer(msgspec.Struct):
    """What is read of an output line: enough to know which input line it answers, and by which weights."""

    line: int
    input_crc: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    version: int = 0
    group: str | None = None
    error: dict[str, Any] | None = None


class Answers:
    """Answers that are written once, in the order in which they come, to stdout or to a new file.

    Attributes:
        path: how errors name the file.
        answered, failed: answers and error lines in the file.
        versions: the weight versions of answers in the file.
    """

    #: how a run that stopped is continued
    resumed = "a run through a pipe cannot be resumed"

    def __init__(self, path: Path, file: IO[bytes], *, mixed_versions: bool) -> None:
        self.path = path
        self.versions = AnswerVersions(path, mixed=mixed_versions)
        self.answered: int = 0
        self.failed: int = 0
        self._file = file

    @property
    def count(self) -> int:
        """Lines in the file."""
        return self.answered + self.failed

    def __contains__(self, line: int) -> bool:
        return False

    def withdraw_errors(self) -> None:
        """Take back what this run wrote, which is errors alone: with other options these lines may have none."""

    def add(self, line: bytes, *, failed: bool) -> None:
        """Append a whole output line, so that it outlives this process."""
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
            self.answered += 1


class AnswerFile(Answers):
    """The output file, open for appending and locked against a second run. Enter it to close it."""

    resumed = "run the same command again to continue"

    def __init__(self, path: Path, source: Path, *, checksum: Checksum, retry_errors: bool, mixed_versions: bool) -> None:
        self._remove_if_empty = not path.exists()
        super().__init__(path, open(path, "a+b"), mixed_versions=mixed_versions)  # noqa: SIM115 (closed by __exit__)
        self._source = source
        self._checksum = checksum
        self._retry_errors = retry_errors
        #: index: line number of the input; value: checksum + 1, with _ERROR for an error, or 0 where the line is to be asked
        self._crcs = array("Q", [0])
        try:
            self._lock()
            torn_at = self._read()
            self._compare()
            if torn_at is not None:
                self._file.truncate(torn_at)
            if retry_errors and self.failed:
                self._drop_errors()
            #: what it holds when the run begins: bytes, errors
            self._before = os.fstat(self._file.fileno()).st_size, self.failed
        except BaseException:  # also Ctrl-C: __exit__ is not called then; raised again
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._remove_if_empty and not self.count:
            self.path.unlink(missing_ok=True)
        try:
            self._file.close()
        except OSError:
            # The buffer still holds what could not be written. `add` has raised for it.
            if error is None:
                raise

    def __contains__(self, line: int) -> bool:
        return line < len(self._crcs) and self._crcs[line] != 0

    def withdraw_errors(self) -> None:
        size, self.failed = self._before
        self._file.truncate(size)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CommandFailed(f"{self.path}: another run is writing it; wait for that, or name another file") from None

    def _read(self) -> int | None:
        """Read the lines that are there. Returns the offset of a last line that was cut off in writing."""
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
            if answer.error is None:
                self.answered += 1
                self.versions.note(answer.group, answer.version)
            else:
                self.failed += 1
            if answer.error is None or not self._retry_errors:
                if answer.line >= len(self._crcs):
                    self._crcs.extend([0] * (answer.line + 1 - len(self._crcs)))
                self._crcs[answer.line] = answer.input_crc + 1 + (_ERROR if answer.error is not None else 0)
            offset += len(text)
        return None

    def _foreign(self, number: int) -> NoReturn:
        raise CommandFailed(
            f"{self.path}: line {number} is no answer to {self._source}; the file is not changed; name another output file",
            BAD_USAGE,
        )

    def _compare(self) -> None:
        """Compare every answer that stays with the input line that it names."""
        last = len(self._crcs) - 1
        number = 0
        with open(self._source, "rb") as source:
            for number, _, text in itertools.islice(input_lines(source), last):
                found = self._crcs[number]
                if found and found & ~_ERROR != self._checksum(text) + 1:
                    retry = "; add --retry-errors to ask lines with an error again" if found & _ERROR else ""
                    raise self._other_input(
                        f"its answer to line {number} of {self._source} was made from another line or with other options{retry}"
                    )
        if number < last:
            raise self._other_input(f"answers line {last}, but {self._source} has {number} lines")

    def _other_input(self, why: str) -> CommandFailed:
        return CommandFailed(f"{self.path}: {why}; name another output file, or delete this one", BAD_USAGE)

    def _drop_errors(self) -> None:
        """Rewrite the file without its error lines, so that those requests are made again and answered once."""
        decoder = msgspec.json.Decoder(_Answer)
        path = Path(os.path.realpath(self.path))  # a link stays one
        part = path.with_name(path.name + ".part")
        try:
            with open(part, "wb") as kept:
                os.fchmod(kept.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
                self._file.seek(0)
                for text in self._file:
                    answer = decoder.decode(text)
                    if answer.error is None:
                        kept.write(text)
                kept.flush()
                os.fsync(kept.fileno())
        except OSError as error:
            part.unlink(missing_ok=True)  # it takes up the room that is left
            raise CommandFailed(f"{part}: {error.strerror}; {self.path} is not changed") from None
        replaced = open(part, "a+b")  # noqa: SIM115 (becomes self._file)
        fcntl.flock(replaced, fcntl.LOCK_EX)
        os.replace(part, path)
        self._file.close()
        self._file = replaced
        self.failed = 0
