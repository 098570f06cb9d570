"""The file of an ipc socket: where it may lie, and the lock next to it."""

from pathlib import Path
from typing import IO

from enginepool.coordinator.shell.journal import HostFault
from enginepool.errors import ConfigError
from enginepool.host.folders import exposed, lock_file


def check_socket_folder(endpoint: str) -> None:
    """Refuse an ipc socket in a directory that is missing or that other users can reach: every process that can open the socket
    counts as this user's. Raises ConfigError."""
    if not endpoint.startswith("ipc://"):
        return
    try:
        why = exposed(Path(endpoint.removeprefix("ipc://")).parent)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise ConfigError(f"{endpoint}: cannot listen: {why}")


def lock_socket_file(endpoint: str) -> IO[str]:
    """Lock the path of an ipc socket until the returned file is closed, because a second bind would take over its traffic.

    Raises:
        ConfigError: another pool holds the lock, or the folder is not safe.
        HostFault: the lock cannot be made.
    """
    check_socket_folder(endpoint)
    path = endpoint.removeprefix("ipc://") + ".lock"
    try:
        return lock_file(Path(path))
    except BlockingIOError:
        raise ConfigError(f"{endpoint}: in use by another pool (its lock {path} is held)") from None
    except OSError as error:
        raise HostFault(f"{endpoint}: cannot lock {path}: {error.strerror}", error) from None
