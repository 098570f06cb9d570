"""The valid golden messages of a weight update: its straight path, then what can go otherwise."""

from typing import Any

from tests.wire.golden import Array, Valid, floats, text

EPOCH = 1_700_000_000_000_000
UPDATE = [EPOCH, 12]
DIGEST = "0123456789abcdef0123456789abcdef"
SNAPSHOT = "/dev/shm/enginepool-5f1d7a3c/policy-0123456789abcdef0123456789abcdef"
MANIFEST = text("manifest", '[["w","bfloat16",[2,3]],["b","float32",[3]]]')
TENSOR = floats("tensor", (6,), 0.5, -0.5, 1.0, -1.0, 0.25, 2.0)
#: memory of the host, and of a GPU, that a publisher lends; a handle is made of torch's values, here much shorter ones
SPACE = {"kind": "file", "nbytes": 768, "path": "/proc/4711/fd/12", "seal": bytes(range(16))}
GPU_SPACE = {
    "kind": "cuda",
    "nbytes": 768,
    "handle": bytes.fromhex("9800c40201024d00c4012f00c4010001"),
    "gpu": "8f3f2c5e-0b1d-4c57-9e0a-3d1b2c4d5e6f",
    "seal": bytes(range(16)),
}
RECORD: dict[str, Any] = {
    "version": 4,
    "outcome": "committed",
    "transfer": "direct",
    "message": "all zero: b",
    "at": 1700000000.5,
    "members": 3,
    "committed": 2,
    "sent_bytes": 512,
    "digest": DIGEST,
    "phases": {"open": 900, "join": 200, "transfer": 31000, "drain": 1500, "load": 9000},
    "aborted_batches": 1,
    "publisher": "1adf646e4ebf10c7cc95ef0256448cde",
}


def _specs(*arrays: Array) -> list[Any]:
    return [array.spec() for array in arrays]


def _from_client() -> list[Valid]:
    way = "client-coordinator"
    offer = {"type": "publish", "id": 9, "version": 4, "address": "127.0.0.1:29500", "frames": _specs(MANIFEST)}
    return [
        Valid(
            "publish",
            way,
            "two tensors, to be staged; some encoders write its map of up to 16 fields as map 16",
            offer,
            (MANIFEST,),
            exact=False,
        ),
        Valid(
            "publish-all-fields",
            way,
            "every field differs from its default, so that it makes no sense as a whole",
            {
                "type": "publish",
                "id": 9,
                "version": 4,
                "group": "policy",
                "transfer": "direct",
                "in_flight": "abort",
                "drain_ms": 500,
                "lease_ms": 2000,
                "partial": True,
                "new_run": True,
                "backend": "nccl",
                "bucket_bytes": 256,
                "address": "10.0.0.1:29500",
                "peer": "5f1d7a3c",
                "path": "/models/policy",
                "frames": _specs(MANIFEST),
                "host": "7d0c6f0a-9f4e-4d7b-8f58-2f0a5b6c7d8e/pid:[4026531836]",
                "gpu": "8f3f2c5e-0b1d-4c57-9e0a-3d1b2c4d5e6f",
            },
            (MANIFEST,),
        ),
        Valid(
            "publish-handles",
            way,
            "two tensors in memory of the publisher's host",
            {
                "type": "publish",
                "id": 12,
                "version": 7,
                "transfer": "ipc",
                "frames": _specs(MANIFEST),
                "host": "7d0c6f0a-9f4e-4d7b-8f58-2f0a5b6c7d8e/pid:[4026531836]",
            },
            (MANIFEST,),
            exact=False,
        ),
        Valid(
            "publish-checkpoint",
            way,
            "a directory that every worker can read",
            {"type": "publish", "id": 10, "version": 5, "transfer": "checkpoint", "path": "/models/policy-5"},
            exact=False,
        ),
        Valid(
            "publish-in_place",
            way,
            "generations stay in their engines",
            {
                "type": "publish",
                "id": 12,
                "version": 7,
                "transfer": "checkpoint",
                "path": "/models/policy-7",
                "in_flight": "in_place",
            },
            exact=False,
        ),
        Valid(
            "publish-after_drain",
            way,
            "generations that have not ended within a second are computed again on the new weights",
            {
                "type": "publish",
                "id": 13,
                "version": 8,
                "transfer": "checkpoint",
                "path": "/models/policy-8",
                "drain_ms": 1000,
                "after_drain": "retract",
            },
            exact=False,
        ),
        Valid(
            "publish-set_version",
            way,
            "the weights stay",
            {"type": "publish", "id": 11, "version": 6, "transfer": "set_version"},
            exact=False,
        ),
        Valid("renew", way, "the publisher lives", {"type": "renew", "id": 9, "sent_bytes": 256}),
        Valid("sent", way, "all is broadcast", {"type": "sent", "id": 9, "digest": DIGEST, "sent_bytes": 512}),
        Valid(
            "sent-regions",
            way,
            "all lies there",
            {"type": "sent", "id": 12, "digest": DIGEST, "sent_bytes": 512, "regions": [SPACE]},
        ),
        Valid("commit", way, "it may be handed over", {"type": "commit", "id": 9}),
        Valid("abort", way, "the publisher gives up", {"type": "abort", "id": 9, "reason": "the gather failed"}),
        Valid(
            "abort-broken",
            way,
            "the process group broke under the publisher",
            {"type": "abort", "id": 9, "reason": "connection closed by peer", "broken": True},
        ),
        Valid("weights-question", way, "who holds what?", {"type": "inspect_weights", "id": 3}),
        Valid("control", way, "flush", {"type": "control", "id": 5, "command": "flush", "group": "policy"}),
        Valid(
            "control-sleep",
            way,
            "sleep of one worker",
            {"type": "control", "id": 6, "command": "sleep", "worker": "policy-1", "tags": ["weights", "kv_cache"]},
        ),
        Valid("control-pause", way, "pause", {"type": "control", "id": 8, "command": "pause", "group": "policy"}),
        Valid(
            "control-pause-in_place",
            way,
            "pause, and generations stay in their engines",
            {"type": "control", "id": 11, "command": "pause", "group": "policy", "mode": "in_place"},
        ),
        Valid("control-resume", way, "resume", {"type": "control", "id": 9, "command": "resume", "group": "policy"}),
        Valid("control-abort", way, "abort", {"type": "control", "id": 10, "command": "abort", "group": "policy"}),
        Valid(
            "control-abort-request",
            way,
            "abort one request of a client",
            {"type": "control", "id": 14, "command": "abort", "client": "70756230", "request": 42},
        ),
        Valid(
            "control-start-profile",
            way,
            "twenty forwards of one worker",
            {"type": "control", "id": 11, "command": "start_profile", "worker": "policy-0", "seconds": 2.5, "steps": 20},
        ),
        Valid("control-stop-profile", way, "stop", {"type": "control", "id": 12, "command": "stop_profile"}),
        Valid(
            "control-save",
            way,
            "weights into files",
            {"type": "control", "id": 13, "command": "save", "group": "policy", "path": "/data/saved/step-4"},
        ),
        Valid("control-wake", way, "wake", {"type": "control", "id": 7, "command": "wake", "group": "policy"}),
        Valid(
            "weights-question-tensor",
            way,
            "one weight of one group",
            {"type": "inspect_weights", "id": 4, "group": "policy", "what": "tensor", "name": "w", "offset": 6, "count": 6},
        ),
    ]


def _to_client() -> list[Valid]:
    way = "coordinator-client"
    return [
        Valid(
            "join-to-client",
            way,
            "rank 0 of four",
            {"type": "join", "rendezvous": "policy-a-12", "world": 4, "address": "127.0.0.1:29500", "id": 9},
        ),
        Valid("phase", way, "send now", {"type": "phase", "id": 9, "phase": "transfer", "members": 3}),
        Valid(
            "phase-done", way, "two of three have joined", {"type": "phase", "id": 9, "phase": "join", "members": 3, "done": 2}
        ),
        Valid("published", way, "version 4 is committed", {"type": "published", "id": 9, "version": 4, "record": RECORD}),
        Valid("weights-wanted", way, "committed weights are lost", {"type": "weights_needed", "group": "policy", "version": 4}),
        Valid(
            "control-report-abort",
            way,
            "how many requests were ended",
            {"type": "control_report", "id": 10, "group": "policy", "command": "abort", "aborted": 3},
        ),
        Valid(
            "control-report",
            way,
            "one of two workers flushed",
            {
                "type": "control_report",
                "id": 5,
                "group": "policy",
                "command": "flush",
                "workers": [{"name": "policy-0"}, {"name": "policy-1", "code": "pool_down", "message": "not ready: loading"}],
            },
        ),
        Valid(
            "weights-report",
            way,
            "two workers and one transaction",
            {
                "type": "weights_report",
                "id": 3,
                "group": "policy",
                "version": 4,
                "digest": DIGEST,
                "workers": [
                    {
                        "name": "policy-0",
                        "version": 4,
                        "digest": DIGEST,
                        "findings": [{"name": "b", "kind": "zero", "count": 3}],
                    },
                    {"name": "policy-1", "version": 3, "code": "needs_weights", "message": "no snapshot"},
                ],
                "history": [RECORD],
                "publisher": RECORD["publisher"],
            },
        ),
        Valid(
            "weights-report-tensor",
            way,
            "one weight",
            {
                "type": "weights_report",
                "id": 4,
                "group": "policy",
                "version": 4,
                "workers": [{"name": "policy-0", "version": 4}],
                "dtype": "bfloat16",
                "frames": _specs(TENSOR),
                "shape": [6, 2],
            },
            (TENSOR,),
        ),
        Valid(
            "error-publishing",
            way,
            "another client is publishing",
            {
                "type": "error",
                "code": "publishing",
                "message": "client 5f1d7a3c is publishing version 4",
                "id": 9,
                "limit": "5f1d7a3c",
            },
        ),
    ]


def _from_worker() -> list[Valid]:
    way = "worker-coordinator"
    no = {"code": "weights_refused", "message": "unknown names: x"}
    return [
        Valid(
            "prepared",
            way,
            "two GPUs, room on both",
            {"type": "prepared", "update": UPDATE, "peer": "77aa", "ranks": 2, "staging": "device"},
        ),
        Valid(
            "prepared-restart",
            way,
            "by starting on the checkpoint alone",
            {"type": "prepared", "update": UPDATE, "restart": True, "digest": DIGEST},
        ),
        Valid(
            "prepared-in_place",
            way,
            "generations may stay in its engine",
            {"type": "prepared", "update": UPDATE, "generations": "in_place"},
        ),
        Valid(
            "prepared-on-host",
            way,
            "its GPU has no room, and its host has",
            {"type": "prepared", "update": UPDATE, "staging": "host", "message": "GPU 0 has 9 MiB left for 64 MiB of weights"},
        ),
        Valid(
            "prepared-no-staging",
            way,
            "it has no memory for a staged transfer, and the others go on without it",
            {"type": "prepared", "update": UPDATE, **no, "no_staging": True},
        ),
        Valid("prepared-refused", way, "the names do not fit", {"type": "prepared", "update": UPDATE, **no, "field": "x"}),
        Valid("joined", way, "the group stands", {"type": "joined", "update": UPDATE}),
        Valid(
            "joined-failed",
            way,
            "or not",
            {"type": "joined", "update": UPDATE, "code": "engine_error", "message": "no route to 127.0.0.1:29500"},
        ),
        Valid(
            "staged",
            way,
            "all bytes are here; a tensor of them is zero",
            {
                "type": "staged",
                "update": UPDATE,
                "digest": DIGEST,
                "findings": [
                    {"name": "b", "kind": "zero", "count": 3},
                    {"name": "w", "kind": "nan", "count": 1},
                    {"name": "w", "kind": "overflow", "count": 2},
                ],
            },
        ),
        Valid(
            "staged-failed",
            way,
            "the broadcast broke",
            {"type": "staged", "update": UPDATE, "code": "engine_error", "message": "connection reset", "broken": True},
        ),
        Valid(
            "handed-over",
            way,
            "the engine runs on them",
            {
                "type": "loaded",
                "update": UPDATE,
                "version": 4,
                "digest": DIGEST,
                "copy_us": 6500,
                "flush_us": 900,
                "prepare_us": 5200,
            },
        ),
        Valid(
            "handed-over-failed",
            way,
            "the engine kept the old ones",
            {"type": "loaded", "update": UPDATE, "code": "engine_error", "message": "the load failed"},
        ),
        Valid(
            "restored",
            way,
            "they are nowhere to be had",
            {"type": "restored", "version": 4, "code": "needs_weights", "message": "no stager, no snapshot"},
        ),
        Valid("commanded", way, "it is flushed", {"type": "commanded", "task": [EPOCH, 16]}),
        Valid(
            "commanded-profile",
            way,
            "where the traces are",
            {"type": "commanded", "task": [EPOCH, 18], "message": "/profiles/policy/policy-0.1a/20260102T030405"},
        ),
        Valid(
            "commanded-failed",
            way,
            "it is not",
            {"type": "commanded", "task": [EPOCH, 16], "code": "engine_error", "message": "the engine refused"},
        ),
        Valid(
            "inspected",
            way,
            "a digest, and what is odd",
            {
                "type": "inspected",
                "task": [EPOCH, 13],
                "digest": DIGEST,
                "findings": [{"name": "b", "kind": "zero", "count": 3}],
            },
        ),
        Valid(
            "inspected-tensor",
            way,
            "one weight",
            {"type": "inspected", "task": [EPOCH, 14], "dtype": "bfloat16", "frames": _specs(TENSOR), "shape": [6, 2]},
            (TENSOR,),
        ),
        Valid(
            "inspected-failed",
            way,
            "no such weight",
            {"type": "inspected", "task": [EPOCH, 15], "code": "bad_request", "message": "name: no weight is called x"},
        ),
    ]


def _to_worker() -> list[Valid]:
    way = "coordinator-worker"
    return [
        Valid(
            "prepare",
            way,
            "can you take these?",
            {"type": "prepare", "update": UPDATE, "version": 4, "transfer": "staged", "frames": _specs(MANIFEST)},
            (MANIFEST,),
        ),
        Valid(
            "prepare-partial",
            way,
            "some of the tensors, in small buckets",
            {
                "type": "prepare",
                "update": UPDATE,
                "version": 4,
                "transfer": "direct",
                "partial": True,
                "bucket_bytes": 256,
                "frames": _specs(MANIFEST),
            },
            (MANIFEST,),
        ),
        Valid(
            "prepare-checkpoint",
            way,
            "and this directory?",
            {"type": "prepare", "update": UPDATE, "version": 5, "transfer": "checkpoint", "path": "/models/policy-5"},
        ),
        Valid(
            "prepare-in_place",
            way,
            "and may generations stay in your engine?",
            {
                "type": "prepare",
                "update": UPDATE,
                "version": 7,
                "transfer": "checkpoint",
                "path": "/models/policy-7",
                "generations": "in_place",
            },
        ),
        Valid(
            "prepare-handles",
            way,
            "can you open what lies there?",
            {
                "type": "prepare",
                "update": UPDATE,
                "version": 7,
                "transfer": "ipc",
                "frames": _specs(MANIFEST),
                "host": "7d0c6f0a-9f4e-4d7b-8f58-2f0a5b6c7d8e/pid:[4026531836]",
                "gpu": "8f3f2c5e-0b1d-4c57-9e0a-3d1b2c4d5e6f",
            },
            (MANIFEST,),
        ),
        Valid("verify", way, "look at it", {"type": "verify", "update": UPDATE, "regions": [GPU_SPACE]}),
        Valid(
            "join-to-worker",
            way,
            "ranks 2 and 3 of four",
            {
                "type": "join",
                "rendezvous": "policy-a-12",
                "world": 4,
                "rank": 2,
                "address": "127.0.0.1:29500",
                "backend": "nccl",
                "update": UPDATE,
            },
        ),
        Valid("hand-over", way, "take them", {"type": "load", "update": UPDATE, "version": 4}),
        Valid(
            "committed",
            way,
            "keep them",
            {"type": "committed", "update": UPDATE, "version": 4, "digest": DIGEST, "snapshot": SNAPSHOT},
        ),
        Valid(
            "committed-new-run",
            way,
            "versions have begun again once",
            {"type": "committed", "update": UPDATE, "version": 0, "digest": DIGEST, "snapshot": SNAPSHOT, "run": 1},
        ),
        Valid("release", way, "forget them", {"type": "release", "update": UPDATE, "reason": "policy-1 was lost"}),
        Valid(
            "restore",
            way,
            "become what the group is",
            {"type": "restore", "version": 4, "digest": DIGEST, "snapshot": SNAPSHOT, "path": "/models/policy-4"},
        ),
        Valid(
            "restore-new-run",
            way,
            "versions have begun again once",
            {"type": "restore", "version": 0, "digest": DIGEST, "snapshot": SNAPSHOT, "path": "/models/policy-4", "run": 1},
        ),
        Valid("command", way, "flush", {"type": "command", "task": [EPOCH, 16], "command": "flush"}),
        Valid(
            "command-pause",
            way,
            "pause, and free the keys and values of generations",
            {"type": "command", "task": [EPOCH, 18], "command": "pause", "mode": "retract"},
        ),
        Valid(
            "command-sleep",
            way,
            "sleep",
            {"type": "command", "task": [EPOCH, 17], "command": "sleep", "tags": ["weights", "kv_cache", "cuda_graph"]},
        ),
        Valid(
            "command-start-profile",
            way,
            "record twenty forwards",
            {"type": "command", "task": [EPOCH, 18], "command": "start_profile", "seconds": 2.5, "steps": 20},
        ),
        Valid("command-stop-profile", way, "stop", {"type": "command", "task": [EPOCH, 19], "command": "stop_profile"}),
        Valid(
            "command-save",
            way,
            "weights into files",
            {"type": "command", "task": [EPOCH, 20], "command": "save", "path": "/data/saved/step-4"},
        ),
        Valid("inspect", way, "what is in your engine?", {"type": "inspect", "task": [EPOCH, 13], "what": "digest"}),
        Valid(
            "inspect-tensor",
            way,
            "and this one?",
            {"type": "inspect", "task": [EPOCH, 14], "what": "tensor", "name": "w", "offset": 6, "count": 6},
        ),
    ]


UPDATES = [*_from_client(), *_to_client(), *_from_worker(), *_to_worker()]
