"""What a checkpoint directory holds, read from its safetensors files without any library of tensors."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from enginepool.protocol.layout import ALIGNMENT
from enginepool.protocol.manifest import Tensor

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_LONGEST_HEADER = 100 << 20


class CheckpointError(Exception):
    """There is no such directory, or nothing in it that can be read. The message is one line."""


def checkpoint_files(path: str) -> list[Path]:
    """The files with weights, in order. Raises CheckpointError."""
    try:
        folder = Path(path).expanduser()
        found = folder.is_dir()
        files = sorted(folder.glob("*.safetensors"))
    except OSError as error:  # a name that is too long, a directory that this user may not look into
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except RuntimeError as error:  # `~name` of a user that this host does not have
        raise CheckpointError(f"{path}: {error}") from None
    if not found:
        raise CheckpointError(f"{path}: there is no such directory here")
    if not files:
        raise CheckpointError(f"{path}: no safetensors files in it")
    return files


def checkpoint_under(path: str, roots: Sequence[str], setting: str = "checkpoint_roots") -> str:
    """The directory without symbolic links, if it and all that is in it lie under one of `roots` once links are resolved.

    Raises:
        CheckpointError: it does not, or cannot be looked at. What lies elsewhere is not looked at, nor whether it exists.
    """
    tops = [os.path.realpath(root) for root in roots]

    def resolved(at: str) -> str:
        real = os.path.realpath(at)
        if not any(real == top or real.startswith(top.rstrip("/") + "/") for top in tops):
            raise CheckpointError(f"{path}: not under {setting} ({', '.join(roots) or 'none'}) once links are resolved")
        return real

    folder = resolved(path)
    try:
        for name in os.listdir(folder):
            resolved(os.path.join(folder, name))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: there is no such directory here") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    return folder


def checkpoint_digest(path: str) -> str:
    """The digest of what an engine starts with: name, size and content of each safetensors and JSON file of the directory.

    Raises:
        CheckpointError: a file cannot be read, or is truncated; or there is no config.json.
    """
    weights = checkpoint_files(path)
    folder = weights[0].parent
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json in it, so no engine can start on it")
    for file in weights:
        safetensors_entries(file)
    files = sorted([*weights, *folder.glob("*.json")])
    with ThreadPoolExecutor(min(len(files), 8)) as threads:
        digests = list(threads.map(_digest_of_file, files))
    whole = hashlib.blake2b(digest_size=16)
    for file, digest in zip(files, digests, strict=True):
        whole.update(msgspec.json.encode([file.name, digest]))
    return whole.hexdigest()


def refuse_damaged(folder: Path) -> None:
    """Look at the header and the length of each safetensors file of a model that is to be loaded: those that its index names,
    or all.

    Raises:
        CheckpointError: a file is truncated, or is not a safetensors file. The message names it.
    """
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_bytes())
        named = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        named = None  # without an index that can be read, all files are loaded
    for file in sorted(folder.glob("*.safetensors")):
        if named is None or file.name in named:
            safetensors_entries(file)


def _digest_of_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None


def checkpoint_tensors(path: str) -> list[Tensor]:
    """The tensors of all files, in the order in which they lie there. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for file in checkpoint_files(path):
        for tensor in _header(file)[0]:
            if tensor.name in tensors:
                raise CheckpointError(f"{file}: {tensor.name} is in another file too")
            tensors[tensor.name] = tensor
    return list(tensors.values())


def checkpoint_space(path: str) -> bytes:
    """The bytes of all tensors as `protocol.layout` lays `checkpoint_tensors` out. Raises CheckpointError."""
    space = bytearray()
    for file in checkpoint_files(path):
        tensors, begin = _header(file)
        try:
            with file.open("rb") as opened:
                opened.seek(begin)
                for tensor in tensors:
                    space += opened.read(tensor.nbytes)
                    space += bytes(-len(space) % ALIGNMENT)
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from None
    return bytes(space)


def _header(file: Path) -> tuple[list[Tensor], int]:
    """The tensors in the order of their bytes, and where those begin."""
    entries, begin = safetensors_entries(file)
    try:
        return [Tensor(name, DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries], begin
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from None


def safetensors_entries(file: Path) -> tuple[list[tuple[str, Any]], int]:
    """What the header says of each tensor, in the order of their bytes, and where those begin: also of dtypes that no update
    has."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            text = opened.read(length) if length <= _LONGEST_HEADER else b""
        header: dict[str, Any] = json.loads(text)
        size = file.stat().st_size
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda item: item[1]["data_offsets"])
        said = 8 + length + entries[-1][1]["data_offsets"][1] if entries else size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file ({error})") from None
    if size != said:
        raise CheckpointError(f"{file}: {'truncated: ' if size < said else ''}{size} bytes, but its header says {said}")
    return entries, 8 + length
