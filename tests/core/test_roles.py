"""Roles: each message with each role, and what of lent memory and of paths is refused before anything is opened."""

from typing import Any

import msgspec
import pytest

from enginepool.coordinator.shell.decode import client_event, worker_event
from enginepool.coordinator.shell.peers import Peer
from enginepool.coordinator.weights.publish_validation import check_regions, outside
from enginepool.protocol.basis import Message
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import encode_header
from enginepool.protocol.messages import FromClient, FromWorker
from enginepool.protocol.messages.control import Control
from enginepool.protocol.messages.weight_reports import InspectWeights
from enginepool.protocol.messages.weights import MemoryRegion, Publish, Sent
from enginepool.protocol.roles import FROM_CLIENT, INCLUDES, Role
from tests.wire.make_vectors import VALID

SEAL = b"0123456789abcdef"
ROLES: list[Role] = ["client", "publisher", "admin", "worker"]


def tags(union: Any) -> set[str]:
    return {str(struct.__struct_config__.tag) for struct in union.__args__}


def test_every_message_of_a_client_has_a_role() -> None:
    assert FROM_CLIENT.keys() == tags(FromClient)
    assert all(least in INCLUDES[least] for least in INCLUDES)


def frames_of(way: str, type_: str) -> list[bytes]:
    """A valid message of this type, with its payload."""
    vector = next(v for v in VALID if v.direction == way and v.header["type"] == type_)
    return [bytes.fromhex(frame) for frame in vector.entry()["frames"]]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("type_", FROM_CLIENT)
def test_a_client_s_message_becomes_an_event_for_its_roles_alone(role: Role, type_: str) -> None:
    frames = frames_of("client-coordinator", type_)
    peer = Peer(INCLUDES[role])
    if FROM_CLIENT[type_] in peer.roles:
        client_event(0, b"l", frames, 1 << 20, peer)
        return
    with pytest.raises(WireError) as refused:
        client_event(0, b"l", [frames[0], b"a payload that nobody looks at"], 1 << 20, peer)
    assert (refused.value.code, refused.value.field, refused.value.limit) == ("forbidden", "type", FROM_CLIENT[type_])
    assert f"{type_} needs the role {FROM_CLIENT[type_]}; this link has: " in refused.value.message


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("type_", sorted(tags(FromWorker)))
def test_a_worker_s_message_becomes_an_event_for_workers_alone(role: Role, type_: str) -> None:
    frames = frames_of("worker-coordinator", type_)
    if role == "worker":
        worker_event(0, b"l", frames, Peer(INCLUDES[role]))
        return
    with pytest.raises(WireError) as refused:
        worker_event(0, b"l", [b"nonsense"], Peer(INCLUDES[role]))
    assert refused.value.code == "forbidden"


def test_a_link_without_a_role_is_unauthorized_for_every_message() -> None:
    for type_ in FROM_CLIENT:
        with pytest.raises(WireError) as refused:
            client_event(0, b"l", frames_of("client-coordinator", type_), 1 << 20, Peer())
        assert refused.value.code == "unauthorized"


def to_coordinator(message: Message, peer: Peer, *frames: bytes) -> Any:
    return client_event(0, b"l", [encode_header(message), *frames], 1 << 20, peer)


def test_to_abort_the_requests_of_others_is_an_operator_s() -> None:
    with pytest.raises(WireError, match="command: abort needs the role admin; this link has: client, publisher") as refused:
        to_coordinator(Control(1, "abort"), Peer(INCLUDES["publisher"]))
    assert (refused.value.code, refused.value.field) == ("forbidden", "command")
    to_coordinator(Control(1, "abort"), Peer(INCLUDES["admin"]))
    to_coordinator(Control(1, "pause"), Peer(INCLUDES["publisher"]))


def test_a_new_run_is_an_operator_s() -> None:
    publish = Publish(1, 1, transfer="set_version", new_run=True)
    to_coordinator(publish, Peer(INCLUDES["admin"]))
    with pytest.raises(WireError, match="new_run: true needs the role admin; this link has: client, publisher") as refused:
        to_coordinator(publish, Peer(INCLUDES["publisher"]))
    assert refused.value.code == "forbidden"
    to_coordinator(msgspec.structs.replace(publish, new_run=False), Peer(INCLUDES["publisher"]))


@pytest.mark.parametrize(
    "space",
    [
        MemoryRegion("file", 768, path="/proc/7/fd/3"),
        MemoryRegion("file", 768, path="/proc/7/fd/3", seal=b"short"),
        MemoryRegion("file", 768, path="/etc/shadow", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/7/fd/../../../etc/shadow", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/7/fd/3/x", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/self/fd/3", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/7/root/fd/3", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/7/fd/3\0", seal=SEAL),
        MemoryRegion("file", 768, path="/proc/8/fd/3", seal=SEAL),
        MemoryRegion("file", 768, path="", seal=SEAL),
        MemoryRegion("cuda", 768, handle=b"h"),
        MemoryRegion("cuda", 768, handle=bytes(5000), seal=SEAL),
    ],
)
def test_memory_that_is_not_the_publisher_s_own_is_refused_before_a_worker_hears_of_it(space: MemoryRegion) -> None:
    check_regions([MemoryRegion("file", 768, path="/proc/7/fd/3", seal=SEAL)], 7)
    with pytest.raises(WireError, match=r"^regions\[1\]\.") as refused:
        check_regions([MemoryRegion("file", 1, path="/proc/7/fd/3", seal=SEAL), space], 7)
    assert refused.value.code == "bad_request"
    with pytest.raises(WireError, match="regions"):
        client_event(0, b"l", [encode_header(Sent(1, "d" * 32, 1, [space]))], 1 << 20, pid=lambda: 7)


def test_where_the_transport_names_no_process_the_form_of_the_path_is_checked_alone() -> None:
    check_regions([MemoryRegion("file", 768, path="/proc/8/fd/3", seal=SEAL)], None)


def test_more_regions_than_workers_have_ranks_are_refused() -> None:
    sent = Sent(1, "d" * 32, 1, [MemoryRegion("file", 768, path="/proc/7/fd/3", seal=SEAL)] * 1025)
    with pytest.raises(WireError, match=r"^regions: expected at most 1024 entries, got more$"):
        client_event(0, b"l", [encode_header(sent)], 1 << 20, pid=lambda: 7)


@pytest.mark.parametrize("path", ["/data/a", "/data/a/", "/data/a//b", "/data/a/b/c", "/m"])
def test_a_path_under_a_root_may_be_opened(path: str) -> None:
    assert outside(path, ["/data/a", "/m"]) == ""
    assert outside(path, ["/"]) == ""


@pytest.mark.parametrize(
    "path", ["", "data/a", "/data", "/data/ab", "/data/a/../b", "/data/a/b/..", "/etc", "~/a", "/data/a/\0", "//data/a"]
)
def test_a_path_elsewhere_may_not(path: str) -> None:
    assert outside(path, ["/data/a", "/m"]).startswith(f"path: {path!r}: must ")
    assert outside("/data/a", []).endswith("must lie under one of the group's checkpoint_roots, and its configuration has none")
    assert outside("/etc", ["/data", "/m"]).endswith("must lie under one of the group's checkpoint_roots: /data, /m")
    assert outside("step-400", ["/data"]).endswith("must be absolute, or a directory that exists on the client's host")
    assert "must be absolute, or redis://HOST:PORT/NAME" in outside("step-400", ["/data"], "save_roots")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (InspectWeights(1, what="tensor", name="é" * 2049), "name"),
        (Publish(1, 1, transfer="checkpoint", path="/" + "a" * 4096), "path"),
        (Publish(1, 1, transfer="staged", address="a" * 5000), "address"),
        (Sent(1, "d" * 32, 1, [MemoryRegion("cuda", 768, handle=b"h", gpu="g" * 5000, seal=SEAL)]), "regions[0].gpu"),
    ],
)
def test_a_name_that_is_too_long_to_be_sent_on_is_refused(message: Any, field: str) -> None:
    with pytest.raises(WireError, match=r": expected at most 4096 bytes, got ") as refused:
        to_coordinator(message, Peer(INCLUDES["admin"]))
    assert (refused.value.code, refused.value.field) == ("bad_request", field)
