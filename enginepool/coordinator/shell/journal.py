"""The journal: what must survive the coordinator. One small file of two slots, written in turn; one pool at a time.

It holds the epoch and, for each group, the committed weights and adapters, and what publishers have stopped. To write it is to
commit: a held group waits until it is written. The queue is not journaled: clients resend.

`journal.json` has two lines of equal length, a record in each, as JSON. A write goes over the older one, in place, and is
synced: nothing but these bytes has to reach the disk, no directory and no new file. One that a crash has torn shows in its
checksum, and the other line holds. What does not fit in a line goes into a new file, which takes the old one's name.

Before each write the open file, its lock and its folder are compared with what their paths lead to. A path that was removed,
renamed or replaced is made again: a successor looks there. A folder on another file system is refused, because it would be
hidden when the first file system is mounted again.
"""

import contextlib
import errno
import os
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec

from enginepool.coordinator.core.group_holds import GroupHolds
from enginepool.coordinator.core.group_weights import AdapterVersion, GroupWeights
from enginepool.errors import ConfigError
from enginepool.host import DISK_ERRORS
from enginepool.host.folders import exposed, lock_file, make_private
from enginepool.host.restart_policy import CANNOT_WRITE, HOST_FAULT

#: the file in the state directory of a pool
JOURNAL = "journal.json"
#: what one update adds at most to the text of the record
ROOM = 8192
#: Bytes of a slot at least, and what its size is a multiple of: no write to one slot touches a block of the other.
BLOCK = 4096


class HostFault(ConfigError):
    """The host cannot do now what the configuration asks for, and may later: a disk is full, for example.

    Attributes:
        errno: of the error that says so.
        exit_code: of a coordinator that cannot start for it.
    """

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.errno = error.errno
        self.exit_code = HOST_FAULT if error.errno in DISK_ERRORS else CANNOT_WRITE


def prepare_state_dir(directory: Path) -> None:
    """Make the state directory where it is missing, and try to write there. It is locked by nothing.

    Raises:
        HostFault: it cannot be made or written to.
        ConfigError: it is no directory, or other users can reach it. Besides the journal it has the sockets of workers and of
            stagers.
    """
    try:
        make_private(directory)
        why = exposed(directory)
        if not why:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
                probe.write(bytes(BLOCK))
    except OSError as error:
        if not (isinstance(error, FileExistsError | NotADirectoryError) and directory.exists()):
            raise HostFault(f"state_dir = {str(directory)!r}: cannot be written: {error.strerror}", error) from None
        why = "a file, not a directory"
    if why:
        raise ConfigError(f"state_dir = {str(directory)!r}: {why}")


class Record(msgspec.Struct, frozen=True):
    """The content of the journal. `weights`: what is committed, by group. `raises`: how often peers have raised the epoch.
    `holds`: what publishers have stopped, by group.
    `adapters`: what is committed of those that were loaded while engines ran, by group."""

    epoch: int = 0
    weights: dict[str, GroupWeights] = {}
    raises: int = 0
    holds: dict[str, GroupHolds] = {}
    adapters: dict[str, list[AdapterVersion]] = {}


class _Slot(msgspec.Struct, frozen=True):
    """One line. `sequence`: the highest one holds. `checksum`: over it and the text of the record."""

    sequence: int
    checksum: str
    record: msgspec.Raw


class Journal:
    """The journal in `directory`, which `prepare_state_dir` made, locked for as long as this object lives.

    Attributes:
        path: of the file.
        record: what it holds.
        moved: the path that was removed, renamed or replaced before a write, and that the write made again; "" is set by the
            caller that has told the operator.
        torn: one of its lines is damaged, as by a crash in the middle of a write; the other one holds.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.path = directory / JOURNAL
        self._file: int | None = None
        self._slot_bytes = BLOCK
        #: the line that holds, and the highest number that was ever written
        self._newest = 0
        self._sequence = 0
        self.torn = False
        self.moved = ""
        #: The last one is at its path. Those before it lie in folders that were renamed, and keep other pools out of them.
        self._locks: list[IO[str]] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            try:
                self._device = os.stat(directory).st_dev
                self._lock()
            except OSError as error:
                text = f"state_dir = {str(directory)!r}: {error.strerror}"
                raise (ConfigError(text) if isinstance(error, BlockingIOError) else HostFault(text, error)) from None
            try:
                self.record = self._read()
            except OSError as error:
                raise HostFault(f"{self.path}: {error.strerror}", error) from None
            stack.pop_all()

    def _lock(self) -> None:
        """Lock the folder for this pool. Raises OSError."""
        for held in self._locks:
            if _leads_to(self._directory / "lock", held.fileno()):  # a folder that was renamed has its name again
                self._locks.remove(held)
                self._locks.append(held)
                return
        try:
            self._locks.append(lock_file(self._directory / "lock"))
        except OSError as error:
            why = "in use by another pool (its lock is held)" if isinstance(error, BlockingIOError) else error.strerror
            raise OSError(error.errno, why, str(self._directory)) from None

    def keep(self) -> None:
        """Write what holds again where a successor would not find it.

        Raises:
            OSError: it could not be written. The error names the file.
        """
        if self._file is None or self._lost_path():
            self.write(self.record)

    def check(self) -> None:
        """Write what holds again, with room for one more update: whether an update that opens now could be journaled.

        Raises:
            OSError: it could not. The error names the file.
        """
        self.write(self.record, ROOM)

    def _lost_path(self) -> str:
        """The path that was removed, renamed or replaced, or ""."""
        if not _leads_to(self._directory / "lock", self._locks[-1].fileno()):
            return str(self._directory)
        if self._file is not None and not _leads_to(self.path, self._file):
            return str(self.path)
        return ""

    def _return(self) -> None:
        """Be at the paths again. Raises OSError."""
        lost = self._lost_path()
        if lost == str(self._directory):
            with contextlib.suppress(FileExistsError):
                self._directory.mkdir(mode=0o700)
            if os.stat(self._directory).st_dev != self._device:
                why = "it is on another file system than when the pool was started; mount that one again"
                raise OSError(errno.EXDEV, why, lost)
            if why := exposed(self._directory):
                raise OSError(errno.EPERM, why, lost)
            self._lock()
            for lock in [lock for lock in self._locks[:-1] if os.fstat(lock.fileno()).st_nlink == 0]:
                self._locks.remove(lock)
                lock.close()
        if lost and self._file is not None and not _leads_to(self.path, self._file):
            self._leave()
        self.moved = lost or self.moved

    def _read(self) -> Record:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Record()
        half = len(data) // 2
        found = [(slot.sequence, at, slot.record) for at in (0, 1) if (slot := _whole(data[at * half : (at + 1) * half]))]
        if not found:
            raise ConfigError(
                f"{self.path}: not a journal of this pool, or damaged: neither of its two lines is a whole record; "
                "restore the file, or move it away: the pool then does not know which weights were committed"
            )
        self._sequence, self._newest, text = max(found, key=lambda one: one[0])
        self._slot_bytes = half
        other = data[half:] if self._newest == 0 else data[:half]
        self.torn = len(found) == 1 and bool(other.strip())
        try:
            record = msgspec.json.decode(text, type=Record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.path}: not a journal of this pool: {error}") from None
        self._file = os.open(self.path, os.O_RDWR)
        return record

    def write(self, record: Record, room: int = 0) -> None:
        """Replace the content. When this returns, it survives a crash of the machine.

        Args:
            room: bytes that the next record may be longer without a new file.

        Raises:
            OSError: it could not be written, and the entry before it holds. The error names the file.
        """
        try:
            self._return()
            self._replace(record, room)
        except OSError as error:
            raise OSError(error.errno, error.strerror, error.filename or str(self.path)) from None
        self.record = record

    def _replace(self, record: Record, room: int) -> None:
        line = self._line(record)
        try:
            if self._file is None or len(line) + room > self._slot_bytes:
                self._begin(line, room)
            else:
                self._overwrite(self._file, line)
        except OSError:
            # It may have reached the file nevertheless, and a successor must not find what no publisher was told: what holds is
            # written again, elsewhere. If that fails, too, nothing can be promised, and the next write begins a new file.
            with contextlib.suppress(OSError):
                self._leave()
                self._begin(self._line(self.record))
            raise

    def _line(self, record: Record) -> bytes:
        self._sequence += 1
        text = msgspec.json.encode(record)
        return msgspec.json.encode(_Slot(self._sequence, _checksum(self._sequence, text), msgspec.Raw(text))) + b"\n"

    def _overwrite(self, file: int, line: bytes) -> None:
        """Write over the older line. The other one stays as it is until this one is on the disk."""
        older = 1 - self._newest
        _put(file, _padded(line, self._slot_bytes), older * self._slot_bytes)
        os.fdatasync(file)
        self._newest = older

    def _begin(self, line: bytes, room: int = 0) -> None:
        """A new file, whose lines have room for this one. All its blocks are written now, and not allocated later."""
        if len(line) + room > self._slot_bytes:
            self._slot_bytes = -(-2 * (len(line) + room) // BLOCK) * BLOCK
        fresh = self.path.with_suffix(".new")
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _put(file, _padded(line, self._slot_bytes) + _padded(b"\n", self._slot_bytes), 0)
            os.fsync(file)
            os.replace(fresh, self.path)
            self._leave()
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError:
            # A file whose name is no longer on the disk is not written.
            os.close(file)
            raise
        self._file, self._newest = file, 0

    def _leave(self) -> None:
        """Stop writing to this file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def close(self) -> None:
        """Close the file and release the locks."""
        self._leave()
        while self._locks:
            self._locks.pop().close()


def _leads_to(path: Path, file: int) -> bool:
    """Whether `path` is a name of the open file."""
    try:
        at, open_ = os.stat(path), os.fstat(file)
    except FileNotFoundError:
        return False
    return (at.st_dev, at.st_ino) == (open_.st_dev, open_.st_ino)


def _checksum(sequence: int, text: bytes) -> str:
    return blake2b(b"%d %b" % (sequence, text), digest_size=16).hexdigest()


def _whole(line: bytes) -> _Slot | None:
    """What a line holds, unless it is empty or damaged."""
    try:
        slot = msgspec.json.decode(line, type=_Slot)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return slot if slot.checksum == _checksum(slot.sequence, bytes(slot.record)) else None


def _padded(line: bytes, size: int) -> bytes:
    """The line with blanks before its end."""
    return line[:-1].ljust(size - 1) + b"\n"


def _put(file: int, data: bytes, at: int) -> None:
    """All of `data`; the system may write less at a time."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
