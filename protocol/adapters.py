"""LoRA adapters that are loaded while engines run: their names, their versions, and the digest of their content."""

import hashlib
import re

from enginepool.protocol.basis import MAX_ID
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer

#: of an adapter's folder, as PEFT writes them
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
#: UTF-8 bytes of the text in CONFIG_FILE
MAX_ADAPTER_CONFIG = 65_536
#: versions of adapters that a worker has loaded at once; each is looked at when it says so
MAX_LOADED = 4096
#: what a worker that takes adapters while it runs has among its `features`
LOADS_ADAPTERS = "load_adapters"

#: It is a part of the name of a folder.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_NAMES = "1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or a digit"


def engine_name(name: str, version: int) -> str:
    """What engines call a version of an adapter. Two versions of one adapter are two adapters to an engine."""
    return f"{name}@{version}"


def check_adapter_name(name: str) -> None:
    """Raise WireError `bad_request` for a name that no adapter can be loaded under."""
    if not _NAME.fullmatch(name):
        raise WireError("bad_request", f"name: {name[:80]!r}: expected {_NAMES}", field="name", limit=_NAMES)


def check_adapter_version(version: int) -> None:
    """Raise WireError `bad_request` for a version that no adapter can have."""
    if not 1 <= version <= MAX_ID:
        raise WireError("bad_request", f"version: {version} is outside 1..{MAX_ID}", field="version", limit=str(MAX_ID))


def is_adapter_digest(text: str) -> bool:
    """Whether `adapter_digest` may return `text`."""
    return _DIGEST.fullmatch(text) is not None


def adapter_digest(config: Buffer, tensors: Buffer) -> str:
    """The digest of an adapter: of the bytes of CONFIG_FILE, and of TENSORS_FILE."""
    whole = hashlib.blake2b(digest_size=16)
    for part in (config, tensors):
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()
