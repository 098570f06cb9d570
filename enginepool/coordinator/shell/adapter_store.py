"""LoRA adapters that came as tensors: a folder for each version in the state directory, which workers of this host read.

    adapters/GROUP/NAME@VERSION/adapter_config.json, adapter_model.safetensors

Only this user can read them. What the journal does not name is removed.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from enginepool.coordinator.core.effects import StoreAdapter
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.protocol.adapters import CONFIG_FILE, TENSORS_FILE, adapter_digest

#: of the state directory
STORE = "adapters"


class AdapterStore:
    """The folders under `directory`, the state directory. Its methods run in the thread of the journal; they raise OSError."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / STORE

    def folder(self, group: str, adapter: AdapterVersion) -> Path:
        """Where an adapter lies."""
        return self._root / group / adapter.engine_name

    def write(self, path: Path, effect: StoreAdapter) -> None:
        """Write an adapter, whole and synced. ValueError: it has another digest than was said."""
        if adapter_digest(effect.config, effect.tensors) != effect.adapter.digest:
            raise ValueError(f"digest: {effect.adapter.digest} is not that of the frames config and tensors")
        self.remove(path)
        for folder in (self._root, path.parent, path):
            folder.mkdir(mode=0o700, exist_ok=True)
        for name, data in ((CONFIG_FILE, effect.config), (TENSORS_FILE, effect.tensors)):
            with open(os.open(path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for folder in (path, path.parent, self._root, self._root.parent):
            _sync(folder)

    def remove(self, path: Path) -> None:
        """Remove an adapter, if it is there."""
        if path.exists():
            shutil.rmtree(path)

    def keep_only(self, committed: Mapping[str, Sequence[AdapterVersion]], group: str = "*") -> None:
        """Remove what none of these lies in: of all groups, or of one."""
        kept = {self.folder(group, one) for group, adapters in committed.items() for one in adapters if one.nbytes}
        for path in list(self._root.glob(f"{group}/*")):
            if path not in kept:
                shutil.rmtree(path)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
