"""Committed weights in a file: the bytes of the space, then a JSON footer that says what they are, then its length.

A snapshot appears under its name whole or not at all, and is never changed. No torch here: every engine can read one.

The digest is a checksum, which an attacker can match. A snapshot is trusted because of its folder: other users can neither
enter it nor put another folder in its place.
"""

import contextlib
import glob
import os
import secrets
from pathlib import Path

import msgspec
import numpy as np

from enginepool.host import check_room
from enginepool.host.folders import OWNER, exposed, make_private
from enginepool.protocol.layout import layout
from enginepool.protocol.manifest import Tensor
from enginepool.transfer.checksum import digest_of_bytes

_MAGIC = b"enginepool-weights-1\n"
_TAIL = 8 + len(_MAGIC)
_CHUNK = 16 << 20


class SnapshotError(Exception):
    """There is no such snapshot, or the file is not a snapshot. The message is one line."""


class Footer(msgspec.Struct, frozen=True):
    """What a snapshot holds."""

    version: int
    digest: str
    manifest: list[Tensor]


def write_footer(fd: int, nbytes: int, footer: Footer) -> None:
    """Complete the file `fd`, whose first `nbytes` bytes are the space. Raises OSError."""
    text = msgspec.json.encode(footer)
    data = text + len(text).to_bytes(8, "little") + _MAGIC
    os.ftruncate(fd, nbytes)
    written = 0
    while written < len(data):
        # On a full disk, pwrite may write a part first, and fail at the next call.
        written += os.pwrite(fd, data[written:], nbytes + written)


def make_folder(path: str) -> None:
    """The folder of the snapshot `path`, for this user alone. Raises OSError, also where others can reach what is there."""
    folder = Path(path).parent
    make_private(folder)
    if why := exposed(folder):
        raise PermissionError(why)


def check_folder(path: str) -> None:
    """Raises SnapshotError where others could have put the snapshot there, or where there is no such folder."""
    try:
        why = exposed(Path(path).parent)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise SnapshotError(f"{path}: {why}")


def read_footer(path: str) -> Footer:
    """What the snapshot at `path` holds. Raises SnapshotError."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - _TAIL))
            tail = file.read()
            length = int.from_bytes(tail[:8], "little")
            if len(tail) != _TAIL or tail[8:] != _MAGIC or length > size - _TAIL:
                raise SnapshotError(f"{path}: not a snapshot of weights")
            file.seek(size - _TAIL - length)
            footer = msgspec.json.decode(file.read(length), type=Footer)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"{path}: {error}") from None
    if layout(footer.manifest).nbytes != size - _TAIL - length:
        raise SnapshotError(f"{path}: not as long as its tensors")
    return footer


def name_snapshot(fd: int, path: str) -> None:
    """Give the unnamed, complete file `fd` the name `path`; on another file system its copy gets it. A file of that name stays.

    Raises OSError.
    """
    try:
        # With `src_dir_fd`, which an absolute path makes no use of, Python follows the link in /proc; without, it does not.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return
    except OSError:
        copy_snapshot(fd, path)


def remove_older(path: str) -> None:
    """Remove snapshots of earlier versions and runs of the same group, in the folder of `path`, and unfinished files of stagers
    that died."""
    run, newest = _group(path)[1], read_footer(path).version
    for other in _of_group(path):
        with contextlib.suppress(SnapshotError, FileNotFoundError):
            if (_group(other)[1], read_footer(other).version) < (run, newest):
                os.unlink(other)
    for part in _of_group(path, ".[0-9]*"):
        if not os.path.exists(f"/proc/{part.rpartition('.')[2]}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)


def remove_all(path: str) -> None:
    """Remove all snapshots of the group to which `path` belongs, also where that is not written yet, and an empty folder.

    Files in a folder that other users can reach stay.
    """
    try:
        check_folder(path)
    except SnapshotError:
        return
    for other in _of_group(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(other)
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [OWNER]:
            os.unlink(os.path.join(folder, OWNER))
        os.rmdir(folder)


def _of_group(path: str, more: str = "") -> list[str]:
    """The files in the folder of `path` with names as snapshots of its group have them, and `more`."""
    name = glob.escape(os.path.join(os.path.dirname(path), _group(path)[0]))
    return [one for run in ("", "+[0-9]*") for one in glob.glob(f"{name}{run}-" + "[0-9a-f]" * 32 + more)]


def _group(path: str) -> tuple[str, int]:
    """(group, run) of a snapshot, by its name: GROUP-DIGEST, or GROUP+RUN-DIGEST, for versions begin again with each run."""
    group, _, run = os.path.basename(path).rpartition("-")[0].partition("+")
    return group, int(run or 0)


def copy_snapshot(fd: int, path: str) -> None:
    """Copy the complete file `fd` to `path`, on any file system, and flush it to the disk. Raises OSError.

    It is written under another name first. Another stager may do the same at the same time, in another container perhaps, with
    the same pid: either file is whole.
    """
    size, at = os.fstat(fd).st_size, 0
    check_room(Path(path).parent, size)
    part = f"{path}.{secrets.randbits(32)}.{os.getpid()}"
    copy = os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        while at < size:
            at += os.pwrite(copy, os.pread(fd, min(_CHUNK, size - at), at), at)
        os.fsync(copy)
        os.replace(part, path)
    finally:
        os.close(copy)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def digest_of_file(path: str, nbytes: int) -> str:
    """The digest of the first `nbytes` bytes, which are a space. Raises SnapshotError."""
    try:
        return digest_of_bytes(np.memmap(path, np.uint8, "r", shape=(nbytes,)))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: {error}") from None
