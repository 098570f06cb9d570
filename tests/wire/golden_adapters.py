"""The golden messages of adapters that are loaded while engines run, valid and invalid."""

from typing import Any

from tests.wire.golden import Array, Invalid, Valid, pack

EPOCH = 1_700_000_000_000_000
FILES = (Array("config", "uint8", (2,), tuple(b"{}")), Array("tensors", "uint8", (3,), (1, 2, 3)))
#: of these files
DIGEST = "f630ac5c4e131e821d98e47989fc4dff"


def _load(**after: Any) -> dict[str, Any]:
    return {"type": "load_adapter", "id": 6, "name": "french", "version": 2, **after}


def _specs(*arrays: Array) -> list[Any]:
    return [array.spec() for array in arrays]


def _valid() -> list[Valid]:
    ask, say, tell = "client-coordinator", "coordinator-client", "coordinator-worker"
    change = {"type": "change_adapter", "task": [EPOCH, 21], "action": "load", "name": "french@2", "path": "/adapters/fr"}
    return [
        Valid("load-adapter", ask, "from a folder", _load(group="policy", path="/adapters/fr")),
        Valid("load-adapter-tensors", ask, "from tensors", _load(digest=DIGEST, frames=_specs(*FILES)), FILES),
        Valid("unload-adapter", ask, "no longer", {"type": "unload_adapter", "id": 7, "name": "french", "group": "policy"}),
        Valid(
            "adapter-report",
            say,
            "version 2 is committed",
            {"type": "adapter_report", "id": 6, "group": "policy", "name": "french", "version": 2, "digest": DIGEST},
        ),
        Valid("change-adapter", tell, "load it", {**change, "digest": DIGEST, "stored": True}),
        Valid(
            "change-adapter-unload",
            tell,
            "and no longer this one",
            {"type": "change_adapter", "task": [EPOCH, 22], "action": "unload", "name": "french@1"},
        ),
        Valid(
            "adapter-changed",
            "worker-coordinator",
            "it is loaded",
            {"type": "adapter_changed", "task": [EPOCH, 21], "digest": DIGEST},
        ),
        Valid(
            "adapter-changed-failed",
            "worker-coordinator",
            "it is not",
            {"type": "adapter_changed", "task": [EPOCH, 21], "code": "weights_refused", "message": "r is 0"},
        ),
    ]


def _refused(case: str, about: str, code: str, field: str, *arrays: Array, stage: str = "content", **changes: Any) -> Invalid:
    header = {**_load(frames=_specs(*arrays)), **changes} if arrays else {**_load(), **changes}
    frames = [pack(header).hex(), *(array.payload().hex() for array in arrays)]
    return Invalid(f"load-adapter-{case}", "client-coordinator", about, code, field, stage, frames)


def _invalid() -> list[Invalid]:
    bad = "bad_request"
    return [
        _refused("name", "a name is no path", bad, "name", name="../french", path="/adapters/fr"),
        _refused("version", "versions begin at 1", bad, "version", version=0, path="/adapters/fr"),
        _refused("nothing", "load what?", bad, "path"),
        _refused("both", "which of the two?", bad, "path", *FILES, digest=DIGEST, path="/adapters/fr"),
        _refused("no-digest", "tensors have one", bad, "digest", *FILES),
        Invalid(
            "unload-adapter-name", "client-coordinator", "a name is no path", bad, "name", "content",
            [pack({"type": "unload_adapter", "id": 7, "name": "../french"}).hex()],
        ),
        _refused("config-alone", "a configuration without tensors", "malformed", "frames", FILES[0], digest=DIGEST),
    ]  # fmt: skip


VALID, INVALID = _valid(), _invalid()
