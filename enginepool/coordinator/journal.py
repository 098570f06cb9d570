"""The journal: what must survive the coordinator. One small file, replaced atomically and synced; one pool at a time.

It holds the epoch and, for each group, the committed weights. Writing it is the commit point of whatever changes it.
The queue is not journalled: clients resend.
"""

import fcntl
import os
from pathlib import Path
from typing import IO

import msgspec

from enginepool.coordinator.events import GroupWeights
from enginepool.errors import ConfigError


class Record(msgspec.Struct, frozen=True):
    """The content of the journal. `weights`: what is committed, by group."""

    epoch: int = 0
    weights: dict[str, GroupWeights] = {}


class Journal:
    """The journal in `directory`, locked for as long as this object lives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "journal.json"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock: IO[str] = open(directory / "lock", "a")  # noqa: SIM115 (held for the life of the process)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"state_dir = {str(directory)!r}: in use by another pool (its lock is held)") from None
        except OSError as error:
            raise ConfigError(f"state_dir = {str(directory)!r}: {error.strerror}") from None
        self.record = self._read()

    def _read(self) -> Record:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return Record()
        try:
            return msgspec.json.decode(data, type=Record)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self._path}: not a journal of this pool: {error}") from None

    def write(self, record: Record) -> None:
        """Replace the content. When this returns, it survives a crash of the machine."""
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self.record = record

    def close(self) -> None:
        self._lock.close()
