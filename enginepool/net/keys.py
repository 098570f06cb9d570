"""CURVE keys, by which peers on TCP prove their identity and encrypt messages; and the files that `enginepool keys` makes.

    DIR/server.key       of the coordinator, secret
    DIR/NAME.key         of one peer, secret; with the coordinator's public key, so that the peer needs this file alone
    DIR/authorized       a line for each key that may connect: ROLE PUBLIC-KEY NAME

A secret file has mode 0600, and is not read where others can read it. The role of a key is the one in `authorized`; the
coordinator reads that file again when it changes.
"""

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import msgspec
import zmq

from enginepool.errors import ConfigError
from enginepool.host.folders import make_private
from enginepool.protocol.roles import INCLUDES, Role

SERVER = "server.key"
AUTHORIZED = "authorized"
#: names the key file of a client
VARIABLE = "ENGINEPOOL_KEYS"
#: the keys that are made at first: one for each role, by its name
FIRST: dict[str, Role] = {role: role for role in get_args(Role)}
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
#: a key as text, in Z85
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ABOUT = "# Secret: a program that can read this file is {name} to the pool. Made by `enginepool keys`.\n"


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key pair in Z85, and the public key of the coordinator that it is for; `name` and `role` are for people."""

    name: str
    role: str
    public: str
    secret: str
    server: str

    def __repr__(self) -> str:
        return f"<Key {self.name} {self.public}>"


def read_key(path: Path) -> Key:
    """One secret file.

    Raises:
        ConfigError: it is missing, can be read by others, or holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(f"keys: others can read {path} (mode {mode:04o}): chmod 600 it, or make new keys")
            key = msgspec.toml.decode(file.read(), type=Key)
    except OSError as error:
        raise ConfigError(f"keys: {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys: {path}: not a file of `enginepool keys`: {error}") from None
    for field in ("public", "secret", "server"):
        if not _KEY.fullmatch(getattr(key, field)):
            raise ConfigError(f"keys: {path}: {field} must be 40 characters of Z85")
    return key


def key_for(address: str, path: "str | os.PathLike[str] | None") -> Key | None:
    """The key of a client that connects to `address`: of the file at `path`, else of the one that ENGINEPOOL_KEYS names; None
    for ipc, and where none is named. A file that is named is read in any case. Raises ConfigError."""
    named = path if path is not None else os.environ.get(VARIABLE, "")
    if not named:
        return None
    try:
        key = read_key(Path(named).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"keys: {os.fspath(named)}: {error}") from None
    return key if address.startswith("tcp://") else None


def no_answer_hint(address: str, key: Key | None) -> str:
    """Why a coordinator that runs at `address` may not answer, as the end of a sentence, or "".

    A peer whose handshake is refused is not told so: it only hears nothing.
    """
    if not address.startswith("tcp://"):
        return ""
    if key is None:
        return "; no keys were given, and TCP needs some unless the pool has insecure_loopback = true"
    return "; perhaps the pool does not know the key that was given, or the key is for another pool"


def read_authorized(path: Path) -> dict[str, Role]:
    """The role of each public key that may connect.

    Raises:
        ConfigError: it is missing, others can write to it, or a line is none; the line is named.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o022:
                raise ConfigError(f"keys: others can write to {path} (mode {mode:04o}): chmod 600 it")
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"keys: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"keys: {path}: not UTF-8") from None
    found: dict[str, Role] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        role, _, rest = line.strip().partition(" ")
        public = rest.strip().partition(" ")[0]
        if role not in INCLUDES or not _KEY.fullmatch(public):
            raise ConfigError(f"keys: {path}, line {number}: expected ROLE PUBLIC-KEY NAME; roles: {', '.join(INCLUDES)}")
        if found.setdefault(public, role) != role:
            raise ConfigError(f"keys: {path}, line {number}: this key has another role, {found[public]}, in a line before")
    return found


def make_keys(folder: Path, names: Mapping[str, Role]) -> list[Path]:
    """Make a key for each name, and that of the coordinator where `folder` has none; returns the files.

    Raises:
        ConfigError: a name is none, or has a key already: nothing is overwritten, and then nothing is written.
    """
    for name in names:
        if not _NAME.fullmatch(name) or f"{name}.key" == SERVER:
            raise ConfigError(f"name: {name!r}: a name has a-z 0-9 _ . - and at most 64 characters, and is not 'server'")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a file; name a directory for the keys")
    server = folder / SERVER
    paths = {name: folder / f"{name}.key" for name in names}
    for path in paths.values():
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: exists already; remove it first to replace that key")
    made: list[Path] = []
    try:
        make_private(folder)
        public = read_key(server).public if server.exists() else _make(server, "server", "server", "", made)
        lines: list[str] = []
        for name, role in names.items():
            lines.append(f"{role} {_make(paths[name], name, role, public, made)} {name}\n")
        # Last: a key that is not in it opens nothing.
        _append(folder / AUTHORIZED, "".join(lines))
    except OSError as error:
        for path in made:  # they open nothing, and would be in the way of the next attempt
            path.unlink(missing_ok=True)
        raise ConfigError(f"{error.filename or folder}: {error.strerror}") from None
    return made


def _make(path: Path, name: str, role: str, server: str, made: list[Path]) -> str:
    """A new key pair, in a file that is one of `made` from then on; returns the public key."""
    public, secret = (half.decode() for half in zmq.curve_keypair())
    key = Key(name, role, public, secret, server or public)
    # Names, roles and Z85 have nothing that TOML would want escaped.
    text = _ABOUT.format(name=name) + "".join(f'{field} = "{getattr(key, field)}"\n' for field in key.__struct_fields__)
    # Never through a link, never into a file that exists, and readable by this user alone from its first byte on.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    made.append(path)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text.encode())
        file.flush()
        os.fsync(descriptor)
    return public


def _append(path: Path, text: str) -> None:
    """Lines of their own, also after a last one that an editor has left without an end; all of them, or none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        size = os.fstat(descriptor).st_size
        cut = size and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" * bool(cut) + text.encode()
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
