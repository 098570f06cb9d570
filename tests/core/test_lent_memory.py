"""What a worker takes for memory that a publisher lends, and what it never opens; which checkpoint directories it reads."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from enginepool.host import unnamed_file
from enginepool.protocol.messages.weights import MemoryRegion
from enginepool.transfer.shared_memory import HostSpace, set_seal
from enginepool.workers.main import located
from enginepool.workers.spec import WorkerSpec
from enginepool.workers.weights.checkpoint import CheckpointError, checkpoint_under
from enginepool.workers.weights.ipc_import import LentMemoryError, pin

SEAL = b"0123456789abcdef"
CONTENT = b"x" * 1008 + SEAL
SHRINK = fcntl.F_SEAL_SHRINK


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def memfd(stack: ExitStack, content: bytes = CONTENT, seals: int = SHRINK) -> MemoryRegion:
    """Memory of this process, which plays the publisher."""
    descriptor = os.memfd_create("m", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return at(descriptor, len(content))


def at(descriptor: int, nbytes: int = len(CONTENT)) -> MemoryRegion:
    return MemoryRegion("file", nbytes, path=f"/proc/{os.getpid()}/fd/{descriptor}", seal=SEAL)


def test_what_a_publisher_lends_is_held_as_it_is() -> None:
    memory = HostSpace(1024, lent=True)
    content = memory.tensors[0]
    content.fill_(7)
    [space] = memory.regions()
    space = msgspec.structs.replace(space, seal=set_seal(content))
    held, own = pin(space)
    try:
        memory.close()
        assert own.path == f"/proc/{os.getpid()}/fd/{held}", "what the publisher does to its descriptor changes nothing"
        assert Path(own.path).read_bytes() == bytes([7]) * 1008 + space.seal
        assert (own.seal, own.nbytes) == (space.seal, space.nbytes)
    finally:
        os.close(held)


def test_other_memory_is_refused_without_a_word_of_what_is_in_it(stack: ExitStack, tmp_path: Path) -> None:
    """A memfd that can be cut off under a reader; another size; another end; files with a name and without; no memory."""
    path = tmp_path / "secret"
    path.write_bytes(CONTENT)
    plain = os.open(path, os.O_RDONLY)
    unnamed = unnamed_file(Path("/dev/shm"))
    os.write(unnamed, CONTENT)
    named = os.open(path, os.O_PATH)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    peer = socket.socket(socket.AF_UNIX)
    stack.callback(peer.close)
    for descriptor in (plain, unnamed, named, pipe):
        stack.callback(os.close, descriptor)
    whole = memfd(stack)
    wrong = {
        "is a memfd without F_SEAL_SHRINK": [memfd(stack, seals=0), memfd(stack, seals=fcntl.F_SEAL_GROW)],
        "has 1024 bytes, not ": [msgspec.structs.replace(whole, nbytes=nbytes) for nbytes in (0, 16, 1023, 1025, 1 << 60, -1)],
        "does not end with its seal": [
            memfd(stack, b"x" * 1024),
            memfd(stack, SEAL + b"x" * 1008),
            msgspec.structs.replace(whole, seal=bytes(16)),
        ],
        "is not a memfd": [at(plain), at(unnamed), at(named), at(pipe), at(peer.fileno())],
        "a path must have the form /proc/PID/fd/N": [
            msgspec.structs.replace(whole, path=name)
            for name in (str(path), "/proc/self/fd/3", f"/proc/{os.getpid()}/root{path}", f"{whole.path}/..", "")
        ],
        "a seal has 16 bytes": [msgspec.structs.replace(whole, seal=seal) for seal in (b"", b"f", SEAL * 2)],
    }
    before = {*os.listdir("/proc/self/fd")}
    for words, regions in wrong.items():
        for space in regions:
            with pytest.raises(LentMemoryError, match=words) as refused:
                pin(space)
            assert "x" * 8 not in str(refused.value) and SEAL.decode() not in str(refused.value)
    assert not {*os.listdir("/proc/self/fd")} - before, "nothing stays open"


def test_memory_that_is_gone_is_an_error_of_the_system(stack: ExitStack) -> None:
    with pytest.raises(OSError, match="No such file"):
        pin(at(987_654))


def test_memory_shorter_than_its_seal_is_refused(stack: ExitStack) -> None:
    with pytest.raises(LentMemoryError, match="has 3 bytes, not 3"):
        pin(memfd(stack, b"abc"))


def test_a_checkpoint_lies_under_a_root_with_all_that_is_in_it(tmp_path: Path) -> None:
    """Links may lead about under the roots, as those of the model hub's cache do."""
    roots = tmp_path / "roots"
    blobs, step = roots / "blobs", roots / "step"
    blobs.mkdir(parents=True)
    step.mkdir()
    (blobs / "b").write_bytes(b"weights")
    (step / "model.safetensors").symlink_to(blobs / "b")
    (roots / "latest").symlink_to(step)
    assert checkpoint_under(str(step), [str(roots)]) == str(step)
    assert checkpoint_under(str(roots / "latest"), ["/nowhere", str(roots)]) == str(step)
    (tmp_path / "alias").symlink_to(roots)
    assert checkpoint_under(str(tmp_path / "alias" / "latest"), [str(tmp_path / "alias")]) == str(step)


def test_a_link_that_leads_out_of_the_roots_is_not_followed(tmp_path: Path) -> None:
    secret, roots = tmp_path / "secret", tmp_path / "roots"
    secret.mkdir()
    (secret / "model.safetensors").write_bytes(b"not yours")
    step = roots / "step"
    step.mkdir(parents=True)
    (roots / "out").symlink_to(secret)
    (step / "model.safetensors").symlink_to(secret / "model.safetensors")
    for path in (secret, roots / "out", step, roots / ".." / "secret", tmp_path / "rootsx", tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"not under checkpoint_roots \(.*roots\) once links are resolved"):
            checkpoint_under(str(path), [str(roots)])
    with pytest.raises(CheckpointError, match=r"not under checkpoint_roots \(none\)"):
        checkpoint_under(str(step), [])
    with pytest.raises(CheckpointError, match="there is no such directory here"):
        checkpoint_under(str(roots / "nothing"), [str(roots)])


def test_a_worker_loads_and_verifies_one_directory_also_where_a_link_to_it_moves_meanwhile(tmp_path: Path) -> None:
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    for step in (first, second):
        step.mkdir()
    latest = tmp_path / "latest"
    latest.symlink_to(first)
    plain = WorkerSpec(endpoint="ipc:///nowhere", group="g", incarnation="g-0.1.1", engine="sim", model="m")
    spec = located(msgspec.structs.replace(plain, checkpoint=str(latest), checkpoint_digest="d"))
    latest.unlink()
    latest.symlink_to(second)
    assert spec.checkpoint == checkpoint_under(spec.checkpoint, [str(tmp_path)]) == str(first)
    assert located(plain) == plain
