"""The weights of an engine, saved on command in a folder or in Redis, from where engines start: whole, or not at all."""

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from enginepool.protocol.messages import TaskId
from enginepool.protocol.messages.control import Command
from enginepool.protocol.redis_url import below_redis, is_redis, parse_redis
from enginepool.workers.engine import Engine, EngineError
from enginepool.workers.engine_weights import LOST_WEIGHTS
from enginepool.workers.redis_model import RECORD, NewModel, files_of

#: files of a model that hold weights, or name those that do
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json"),
    *(".h5", ".msgpack", ".onnx"),
)


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
        roots: directories and servers of Redis under which weights may be saved.
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
        EngineError: nothing is there then; EngineDied."""
        running = self._work is not None and not self._work.done()
        if running and command.path != self._path:
            raise EngineError(f"weights are being saved in {self._path}; one at a time")
        if self._work is None or (not running and command.task != self._task):
            self._work = asyncio.ensure_future(self._save(command.path))
        self._task, self._path = command.task, command.path
        return await asyncio.shield(self._work)

    async def _save(self, path: str) -> str:
        target = await asyncio.to_thread(_new_place, path, self._roots)
        weights = self._engine.weights
        version, digest = weights.version, weights.digest
        try:
            if digest == LOST_WEIGHTS:
                raise EngineError("the engine has no weights: they were lost with their memory")
            form = await weights.save(target.place)
            saved = SavedWeights(self._group, self._model, version, digest, form)
            record = (json.dumps(asdict(saved), indent=1) + "\n").encode()
            files = _files_of(self._model, self._revision)
            return f"version {version}: {await asyncio.to_thread(target.complete, files, record)}"
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror}") from None
        finally:
            await asyncio.to_thread(target.close)


class NewFolder:
    """A folder that has its name only when it is complete.

    Raises EngineError: it exists, or cannot be made.
    """

    def __init__(self, path: str, roots: Sequence[str]) -> None:
        tops = [os.path.realpath(root) for root in roots if not is_redis(root)]
        target = Path(os.path.realpath(path))
        if not any(str(target).startswith(top.rstrip("/") + "/") for top in tops):
            raise EngineError(f"{path}: not under save_roots ({_known(roots)}) once links are resolved")
        try:
            if target.exists():
                raise EngineError(f"{path}: exists already; name a new folder")
            partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
            partial.mkdir(parents=True)
        except OSError as error:
            raise EngineError(f"{path}: {error.strerror}") from None
        self.place, self._target, self._partial = str(partial), target, partial

    def complete(self, files: Iterable[tuple[str, bytes]], record: bytes) -> str:
        """As `NewModel.complete`. Raises OSError."""
        for file, content in files:
            (self._partial / file).parent.mkdir(exist_ok=True)
            (self._partial / file).write_bytes(content)
        (self._partial / RECORD).write_bytes(record)
        sizes = [file.stat().st_size for file in self._partial.rglob("*") if file.is_file()]
        self._partial.rename(self._target)
        return f"{len(sizes)} files, {sum(sizes)} bytes"

    def close(self) -> None:
        """Remove what is not complete."""
        shutil.rmtree(self._partial, ignore_errors=True)


def _new_place(path: str, roots: Sequence[str]) -> NewFolder | NewModel:
    """Raises EngineError: it is not under `roots`, or not new."""
    if not is_redis(path):
        return NewFolder(path, roots)
    at = below_redis(path, roots)
    if at is None:
        raise EngineError(f"{path}: not under save_roots ({_known(roots)})")
    return NewModel(path, at)


def _known(roots: Sequence[str]) -> str:
    return f"those of this worker since its start: {', '.join(roots) or 'none'}"


def _files_of(model: str, revision: str | None) -> Iterator[tuple[str, bytes]]:
    """What an engine needs of a model besides weights: (name, content) of each file. Raises OSError, EngineError."""
    if (at := parse_redis(model)) is not None:
        yield from ((name, content) for name, content in files_of(at) if "/" not in name and name != RECORD)
        return
    folder = _folder_of(model, revision)
    for file in folder.iterdir() if folder is not None else ():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS) and file.name != RECORD:
            yield file.name, file.read_bytes()
    for behind in _modules_of(folder) if folder is not None else ():
        yield from ((f"{behind.name}/{file.name}", file.read_bytes()) for file in behind.glob("[!.]*") if file.is_file())


def _modules_of(folder: Path) -> list[Path]:
    """The folders of what an embedding model does behind its transformer, with weights that engines do not change."""
    try:
        modules: Any = json.loads((folder / "modules.json").read_bytes())
        names = [Path(module["path"]).name for module in modules]
        return [folder / name for name in names if name not in ("", "..")]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _folder_of(model: str, revision: str | None) -> Path | None:
    """Where the model's files are, here or in the model hub's cache; None: nowhere."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    with contextlib.suppress(Exception):  # of the hub's client, which the sim engine has not: there are no files to add
        hub: Any = importlib.import_module("huggingface_hub")
        return Path(hub.snapshot_download(model, revision=revision, local_files_only=True))
    return None
