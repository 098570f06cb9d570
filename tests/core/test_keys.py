"""The files of keys: who can read them, what is never overwritten, and what is refused in them."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginepool.errors import ConfigError
from enginepool.net.keys import AUTHORIZED, FIRST, Key, key_for, make_keys, read_authorized, read_key
from tests.process.commands import call


@pytest.fixture(params=[0o000, 0o077, 0o022])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_their_owner_s_alone_for_any_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "keys"
    made = make_keys(folder, FIRST)
    assert [path.name for path in made] == ["server.key", "client.key", "publisher.key", "admin.key", "worker.key"]
    assert mode(folder) == 0o700 and all(mode(path) == 0o600 for path in folder.iterdir())
    keys = [read_key(path) for path in made]
    assert len({key.public for key in keys} | {key.secret for key in keys}) == 10
    assert {key.server for key in keys} == {keys[0].public}
    assert read_authorized(folder / AUTHORIZED) == {key.public: key.role for key in keys[1:]}
    assert keys[0].secret not in repr(keys[0])


def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path: Path) -> None:
    make_keys(tmp_path, {"one": "client"})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for names in ({"one": "admin"}, {"new": "client", "one": "client"}):
        with pytest.raises(ConfigError, match=r"one\.key: exists already"):
            make_keys(tmp_path, names)  # pyright: ignore[reportArgumentType]
    (tmp_path / "link.key").symlink_to("/etc/nothing")
    with pytest.raises(ConfigError, match=r"link\.key: exists already"):
        make_keys(tmp_path, {"link": "client"})
    (tmp_path / "link.key").unlink()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    make_keys(tmp_path, {"two": "worker"})
    assert read_key(tmp_path / "two.key").server == read_key(tmp_path / "one.key").server


@pytest.mark.parametrize("fails", ["key", "list"])
def test_a_full_disk_leaves_nothing_that_is_in_the_way_of_the_next_attempt(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, {"one": "client"})
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = os.write

    def write_some(file: int, data: bytes) -> int:
        return write(file, data[:10])

    with monkeypatch.context() as patch:
        if fails == "key":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(os, "write", write_some)
        with pytest.raises(ConfigError, match="No space left on device"):
            make_keys(folder, {"two": "worker", "three": "admin"})
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert len(make_keys(folder, {"two": "worker", "three": "admin"})) == 2


@pytest.mark.parametrize("name", [" one", ""])
def test_a_key_has_a_line_of_its_own_also_after_one_without_an_end(tmp_path: Path, name: str) -> None:
    """As an editor may leave it."""
    _, one = make_keys(tmp_path, {"one": "client"})
    first = f"client {read_key(one).public}{name}"
    (tmp_path / AUTHORIZED).write_text(first)
    [two] = make_keys(tmp_path, {"two": "worker"})
    assert read_authorized(tmp_path / AUTHORIZED) == {read_key(one).public: "client", read_key(two).public: "worker"}
    assert (tmp_path / AUTHORIZED).read_text() == f"{first}\nworker {read_key(two).public} two\n"


@pytest.mark.parametrize("name", ["", "server", "a/b", "..", "A", "x" * 65, "a b", "a\nadmin"])
def test_a_name_that_could_lead_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: "):
        make_keys(tmp_path, {name: "client"})
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    make_keys(tmp_path, {"one": "client"})
    for bits in (0o640, 0o604, 0o620):
        (tmp_path / "one.key").chmod(bits)
        with pytest.raises(ConfigError, match=r"others can read .*chmod 600"):
            read_key(tmp_path / "one.key")


def test_a_list_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    make_keys(tmp_path, {"one": "client"})
    (tmp_path / AUTHORIZED).chmod(0o660)
    with pytest.raises(ConfigError, match="others can write to"):
        read_authorized(tmp_path / AUTHORIZED)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("client", "line 1: expected ROLE PUBLIC-KEY NAME"),
        ("# a comment\n\nroot KEY x", "line 3: expected ROLE"),
        ("client short x", "line 1: expected"),
        ("client KEY x\nadmin KEY x", "line 2: this key has another role, client"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_line_that_says_no_role_or_no_key_is_named(tmp_path: Path, text: str | bytes, words: str) -> None:
    make_keys(tmp_path, {"one": "client"})
    data = text if isinstance(text, bytes) else text.replace("KEY", read_key(tmp_path / "one.key").public).encode()
    (tmp_path / AUTHORIZED).write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_authorized(tmp_path / AUTHORIZED)


@pytest.mark.parametrize("text", ["", "x = 1", 'name = "a"', "\xff", "[" * 3000])
def test_a_file_that_is_no_key_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.key"
    path.write_text(text, "latin-1")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"^keys: .*a\.key: not a file of") as refused:
        read_key(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "none.key")


def test_the_key_of_a_client_is_the_one_that_is_given_else_the_environment_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path, {"a": "client", "b": "admin"})
    a, b = (read_key(tmp_path / f"{name}.key") for name in "ab")
    assert key_for("tcp://h:1", None) is None
    monkeypatch.setenv("ENGINEPOOL_KEYS", str(tmp_path / "a.key"))
    assert key_for("tcp://h:1", None) == a
    assert key_for("tcp://h:1", tmp_path / "b.key") == b
    assert key_for("ipc:///p", tmp_path / "b.key") is None
    for address in ("ipc:///p", "tcp://h:1"):
        with pytest.raises(ConfigError, match=r"^keys: .*/none\.key: No such file or directory$"):
            key_for(address, tmp_path / "none.key")
    assert isinstance(a, Key)


def test_the_command_makes_keys_and_refuses_to_make_them_again(tmp_path: Path) -> None:
    folder = tmp_path / "k"
    code, out, _ = call("keys", folder)
    assert code == 0 and out.split() == [str(folder / f"{name}.key") for name in ("server", *FIRST)]
    code, out, err = call("keys", folder)
    assert (code, out, err.count("\n")) == (2, "", 1) and "exists already" in err
    assert call("keys", folder, "--name", "t2", "--role", "publisher")[0] == 0
    assert read_authorized(folder / AUTHORIZED)[read_key(folder / "t2.key").public] == "publisher"
    file = tmp_path / "pool.toml"
    file.touch()
    code, _, err = call("keys", file)
    assert (code, err) == (2, f"enginepool: {file}: a file; name a directory for the keys\n")
    code, _, err = call("keys", folder, "--name", "t3")
    assert code == 2 and "--role" in err
