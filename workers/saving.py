"""The weights of a worker's engine, saved on command in a folder that an engine can start from: whole, or not at all."""

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command
from enginepool.workers.engine import Engine, EngineError
from enginepool.workers.engine_weights import LOST_WEIGHTS

#: says which weights are in a folder
RECORD = "enginepool.json"
#: files of a model that hold weights, or name those that do
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """What `RECORD` says. load_format: of the engine that starts from the folder; digest: "" for those of the checkpoint."""

    group: str
    model: str
    version: int
    digest: str
    load_format: str


def form_of(folder: Path) -> str:
    """The `load_format` that engines need to start on weights which were saved in this folder; "": none were."""
    try:
        return str(json.loads((folder / RECORD).read_bytes())["load_format"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class WeightSaving:
    """Performs `save`, one at a time.

    Args:
        roots: directories under which weights may be saved.
        model: as the engine was started with it; `revision`: of the model hub.
    """

    def __init__(self, engine: Engine, roots: Sequence[str], group: str, model: str, revision: str | None = None) -> None:
        self._engine, self._roots, self._group = engine, roots, group
        self._model, self._revision = model, revision
        #: the last one, its command and its path
        self._work: asyncio.Future[str] | None = None
        self._task: TaskId = (0, 0)
        self._path = ""

    async def over(self) -> None:
        """Wait until nothing is being saved."""
        if self._work is not None:
            await asyncio.wait([self._work])

    async def run(self, command: Command) -> str:
        """What was saved, in one line. A command that comes twice, or again from another coordinator, saves once. Raises
        EngineError: there is no such folder then; EngineDied."""
        running = self._work is not None and not self._work.done()
        if running and command.path != self._path:
            raise EngineError(f"weights are being saved in {self._path}; one folder at a time")
        if self._work is None or (not running and command.task != self._task):
            self._work = asyncio.ensure_future(self._save(command.path))
        self._task, self._path = command.task, command.path
        return await asyncio.shield(self._work)

    async def _save(self, path: str) -> str:
        target, partial = await asyncio.to_thread(_new_folder, path, self._roots)
        weights = self._engine.weights
        version, digest = weights.version, weights.digest
        try:
            if digest == LOST_WEIGHTS:
                raise EngineError("the engine has no weights: they were lost with their memory")
            form = await weights.save(str(partial))
            saved = SavedWeights(self._group, self._model, version, digest, form)
            return await asyncio.to_thread(self._complete, partial, target, saved)
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _complete(self, partial: Path, target: Path, saved: SavedWeights) -> str:
        """Add what an engine needs besides weights, and give the folder its name. Raises OSError."""
        folder = _folder_of(self._model, self._revision)
        for file in folder.iterdir() if folder is not None else ():
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, partial / file.name)
        (partial / RECORD).write_text(json.dumps(asdict(saved), indent=1) + "\n")
        sizes = [file.stat().st_size for file in partial.iterdir()]
        partial.rename(target)
        return f"version {saved.version}: {len(sizes)} files, {sum(sizes)} bytes"


def _new_folder(path: str, roots: Sequence[str]) -> tuple[Path, Path]:
    """(the folder that is to be, an empty one next to it). Raises EngineError."""
    tops = [os.path.realpath(root) for root in roots]
    target = Path(os.path.realpath(path))
    if not any(str(target).startswith(top.rstrip("/") + "/") for top in tops):
        known = f"those of this worker since its start: {', '.join(roots) or 'none'}"
        raise EngineError(f"{path}: not under save_roots ({known}) once links are resolved")
    try:
        if target.exists():
            raise EngineError(f"{path}: exists already; name a new folder")
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        partial.mkdir(parents=True)
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror}") from None
    return target, partial


def _folder_of(model: str, revision: str | None) -> Path | None:
    """Where the model's files are, here or in the model hub's cache; None: nowhere."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    with contextlib.suppress(Exception):  # of the hub's client, which the sim engine has not: there are no files to add
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    return None
