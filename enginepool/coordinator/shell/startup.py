"""What the daemon derives from its configuration and its host before it starts, and what it refuses there."""

from pathlib import Path

import msgspec

from enginepool.config import PoolConfig
from enginepool.coordinator.requests.memory import misfit
from enginepool.coordinator.shell.authentication import read_keys
from enginepool.coordinator.shell.connections import Shares, raise_open_files, shares
from enginepool.coordinator.shell.host_memory import bounds
from enginepool.coordinator.shell.journal import prepare_state_dir
from enginepool.coordinator.shell.log import log
from enginepool.coordinator.shell.router import try_to_listen
from enginepool.coordinator.shell.socket_files import check_socket_folder
from enginepool.errors import ConfigError
from enginepool.host.folders import lock_file, make_private
from enginepool.net.address import default_address


def fit_to_host(config: PoolConfig) -> tuple[PoolConfig, Shares]:
    """`config` with at most as many clients as this process may have descriptors for, and how they are shared.

    Raises:
        ConfigError: the bounds in bytes do not fit into the memory of this host.
    """
    files = raise_open_files()
    connections = shares(files, config.limits.clients, sum(g.workers for g in config.groups.values()))
    if connections.welcome < (wanted := config.limits.clients):
        log(f"limits.clients = {wanted}: with RLIMIT_NOFILE = {files} at most {connections.welcome} clients can connect")
        if not connections.proven:
            log("a burst of connections can take all descriptors, and end this process: raise RLIMIT_NOFILE to 4096 or more")
        limits = msgspec.structs.replace(config.limits, clients=connections.welcome)
        config = msgspec.structs.replace(config, limits=limits)
    _check_memory(config)
    return config, connections


def listen_address(config: PoolConfig) -> str:
    """Where clients connect. The directory of the default socket is made; any other one is the operator's to make."""
    if config.listen:
        return config.listen
    address = default_address()
    make_private(Path(address.removeprefix("ipc://")).parent)
    return address


def state_directory(state_dir: str) -> Path:
    """Raises ConfigError: there is no home directory."""
    try:
        return Path(state_dir).expanduser()
    except RuntimeError as error:  # no HOME, and a user of no name
        raise ConfigError(f"state_dir = {state_dir!r}: {error}") from None


def workers_endpoint(config: PoolConfig, directory: Path) -> str:
    """Where workers connect. It is derived, not random, so that workers find the successor of a dead coordinator there."""
    return config.listen_workers or f"ipc://{directory / 'workers.sock'}"


def keys_folder(config: PoolConfig) -> Path | None:
    """The directory of the keys, where the pool has any."""
    return Path(config.keys).expanduser() if config.keys else None


def _check_memory(config: PoolConfig) -> None:
    what, impossible = misfit(config.limits, bounds())
    if impossible:
        raise ConfigError(what)
    if what:
        log(what)


def check_host(config: PoolConfig) -> None:
    """Refuse the memory bounds, state directory, keys and socket folders that `daemon.run` would refuse, except those in use.

    Raises:
        ConfigError: one line says what cannot be used.
    """
    _check_memory(config)
    directory = state_directory(config.state_dir)
    prepare_state_dir(directory)
    if folder := keys_folder(config):
        read_keys(folder)
    for endpoint in (listen_address(config), workers_endpoint(config, directory)):
        check_socket_folder(endpoint)


def check_ports(config: PoolConfig) -> None:
    """Refuse TCP addresses on which this host cannot listen now.

    They are not tried while a pool runs with this state directory, because they may be its own.

    Raises:
        ConfigError: one line says why.
    """
    directory = state_directory(config.state_dir)
    lock = directory / "lock"
    try:
        if lock.exists():
            lock_file(lock).close()
    except BlockingIOError:
        return
    for endpoint in (listen_address(config), workers_endpoint(config, directory)):
        if endpoint.startswith("tcp://"):
            try_to_listen(endpoint)
