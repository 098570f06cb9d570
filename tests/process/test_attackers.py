"""Attacks on a whole pool over raw sockets: what a peer must not read, name or change."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginepool import BlockingPool
from enginepool.host import host_identity
from tests.process.attackers import Raw, publish, raw
from tests.process.daemons import PATIENCE_S, Daemon, sim_pool
from tests.process.forking import ForkedDaemon
from tests.process.processes import Processes

#: a file that the worker's user can read, as the float32 tensor that the attacker says it is
SECRET = (b"the content of a private key file, which no client may read. " * 20)[:1024]
_DIGEST = re.compile(r"\b[0-9a-f]{32}\b")
TENSORS: list[Any] = [["w", "float32", [len(SECRET) // 4]]]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One worker that takes updates, and is ready."""
    with Processes() as processes:
        config = sim_pool(tmp_path_factory.mktemp("pool"), workers=1, options={"tensors": TENSORS})
        daemon = ForkedDaemon(processes, config).listening()
        with BlockingPool.connect(daemon.address) as client:
            client.ready(PATIENCE_S)
        yield daemon


def lend(link: Raw, id: int, version: int, space: dict[str, Any], digest: str = "0" * 32) -> Any:
    """Publish by handles with this space; the final answer."""
    header, manifest = publish(id, version, TENSORS, transfer="ipc", host=host_identity())
    link.say(header, manifest)
    sent = {"type": "sent", "id": id, "digest": digest, "sent_bytes": len(SECRET), "regions": [space]}
    link.say(sent)
    link.say({"type": "commit", "id": id})
    while True:
        answer = link.wait_for("error", "published")
        if answer.get("id") == id:
            break
    # A refused `sent` does not end the transaction.
    link.say({"type": "abort", "id": id})
    link.say({"type": "ping"})
    link.wait_for("pong")
    return answer


def read(link: Raw) -> bytes:
    """The tensor, as the worker's engine has it."""
    link.say({"type": "inspect_weights", "id": 99, "what": "tensor", "name": "w"})
    return b"".join(link.wait_for("weights_report")["payload"])


def test_a_file_of_the_worker_s_user_cannot_be_read_through_the_pool(pool: Daemon, tmp_path: Path) -> None:
    """Publish a file by handles, learn its digest from the refusal, publish it with that digest, and read it back."""
    path = tmp_path / "id_rsa"
    path.write_bytes(SECRET)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for number, name in enumerate((str(path), f"/proc/{os.getpid()}/fd/{descriptor}")):
            with raw(pool.address) as link:
                link.hello(b"%d" % number)
                space = {"kind": "file", "path": name, "nbytes": len(SECRET), "seal": SECRET[-16:]}
                refused = lend(link, 1, 1, space)
                assert refused["type"] == "error"
                digests = _DIGEST.findall(refused["message"])
                for digest in digests:
                    lend(link, 2, 1, space, digest)
                assert SECRET not in read(link)
                assert not digests, "the refusal names the digest of the file's content"
    finally:
        os.close(descriptor)


def test_memory_of_another_process_is_not_a_publisher_s_to_lend(pool: Daemon, processes: Processes) -> None:
    """Of the same user, with the right seal: the coordinator knows which process is at the other end of an ipc link."""
    code = (
        "import fcntl, os, sys, time\n"
        "fd = os.memfd_create('m', os.MFD_ALLOW_SEALING)\n"
        "os.write(fd, bytes.fromhex(sys.argv[1]))\n"
        "fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)\n"
        "print(fd, flush=True)\n"
        "time.sleep(1000)\n"
    )
    other = processes.start([sys.executable, "-c", code, SECRET.hex()], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    with other.stdout as said, raw(pool.address) as link:
        link.hello(b"o")
        space = {"kind": "file", "path": f"/proc/{other.pid}/fd/{int(said.readline())}", "nbytes": 1024, "seal": SECRET[-16:]}
        refused = lend(link, 1, 1, space)
        assert (refused["code"], refused.get("field")) == ("bad_request", "regions[0].path"), refused
        assert f"/proc/{os.getpid()}/fd/N" in refused["message"]


def test_a_checkpoint_outside_the_roots_is_refused_and_not_looked_for(pool: Daemon, tmp_path: Path) -> None:
    inside = Path(pool.config.groups["g"].checkpoint_roots[0])
    (tmp_path / "out").symlink_to("/etc")
    with raw(pool.address) as link:
        link.hello(b"p")
        asked = {"type": "publish", "version": 1, "transfer": "checkpoint"}
        paths = ("/etc", "/etc/nothing", "etc", f"{inside}/../../etc", "~", "/proc/self/cwd")
        for number, path in enumerate(paths, 1):
            refused = link.ask(asked | {"id": number, "path": path})
            assert (refused["code"], refused["field"]) == ("bad_request", "path"), path
        refused = link.ask(asked | {"id": 50, "path": str(tmp_path / "out")})
        assert refused["code"] == "weights_refused" and "once links are resolved" in refused["message"]
