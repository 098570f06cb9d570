"""The calls of a `Pool` that load, replace and unload LoRA adapters."""

import json
import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, cast

import numpy as np

from enginepool.client.arguments import bad, check_group, check_int, check_path, check_timeout, kind
from enginepool.client.connection import Connection
from enginepool.client.readiness import named_group
from enginepool.errors import BadRequest
from enginepool.protocol.adapters import adapter_digest, check_adapter_name
from enginepool.protocol.basis import MAX_ID, FrameSpec
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import Buffer
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter, UnloadAdapter
from enginepool.protocol.messages.status import Status, StatusReport

#: tensors by name, of torch or NumPy, or the content of a safetensors file
AdapterTensors: TypeAlias = Mapping[str, Any] | bytes
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class AdapterCalls:
    """Base of `Pool`."""

    _connection: Connection

    async def load_adapter(
        self,
        name: str,
        path: str | PathLike[str] | None = None,
        *,
        tensors: AdapterTensors | None = None,
        config: Mapping[str, Any] | None = None,
        version: int | None = None,
        group: str = "",
        timeout: float | None = 300.0,  # noqa: ASYNC109 (the error says what is known)
    ) -> AdapterReport:
        """Load a LoRA adapter into all workers of a group, or a newer version of one; needs the role `publisher`.

        When this returns, calls with `adapter=name` generate with this version, also after a restart of workers or of the
        coordinator. Sequences that run keep the version that they have as long as they stay at their worker. When it raises,
        the version before is as it was, or none is loaded.

        Args:
            path: of its folder, as PEFT writes it, on the hosts of the workers, under `adapter_roots` of the group.
            tensors: or its tensors, by PEFT's names; or the content of its safetensors file.
            config: with `tensors`, PEFT's configuration: at least `peft_type`, `r`, `lora_alpha` and `target_modules`.
            version: above the present one; by default the next one.

        Raises:
            BadRequest, TooLarge: an argument cannot be served; `field` names it.
            VersionBackwards: `version` is not above the present one, which `limit` names.
            WeightsRefused: the adapter does not fit the model, or cannot be read; the message names the worker.
            Unsupported: the engines of the group load no adapters while they run.
            UpdateAborted: a worker was lost meanwhile, none is ready, or the journal could not be written; try again.
            EngineFailed: an engine did not load it; the message names the worker, and says why.
            Busy: another adapter of the group is being changed.
        """
        group, seconds = check_group(group), check_timeout(timeout)
        _check_name(name)
        if version is not None:
            version = check_int("version", version, 1, MAX_ID)
        if (path is None) == (tensors is None) or (tensors is None) != (config is None):
            raise bad("tensors", "tensors: give a path, or tensors and config", "")
        message, frames = LoadAdapter(0, name, version or 1, group), list[bytes]()
        if path is not None:
            message.path = check_path(path, "the folder of an adapter")
        else:
            frames = [_config_text(config), _packed(tensors)]
            message.digest = adapter_digest(*frames)
            message.frames = [FrameSpec(*spec) for spec in _specs(frames)]
        left = self._connection.within(seconds)
        if version is None:
            report = (await self._connection.ask(Status(), StatusReport, left()))[0]
            present = named_group(report, group).adapters
            message.version = max((one.version + 1 for one in present if one.name == name), default=1)
        return (await self._connection.ask(message, AdapterReport, left(), frames))[0]

    async def unload_adapter(
        self,
        name: str,
        group: str = "",
        *,
        timeout: float | None = 60.0,  # noqa: ASYNC109 (as in `load_adapter`)
    ) -> AdapterReport:
        """Unload a LoRA adapter that was loaded by `load_adapter`, if there is one of that name; needs the role `publisher`.

        Calls that generate with it end: with their tokens so far, `interrupted`, or as BadRequest where they have none.

        Raises:
            BadRequest: engines start with an adapter of that name.
            UpdateAborted, Busy: as in `load_adapter`; it is still loaded.
        """
        _check_name(name)
        question = UnloadAdapter(0, name, check_group(group))
        return (await self._connection.ask(question, AdapterReport, check_timeout(timeout)))[0]


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise bad("name", f"name: {kind(name)}; the name of an adapter")
    try:
        check_adapter_name(name)
    except WireError as error:
        raise BadRequest(error.message, field=error.field, limit=error.limit) from None


def _specs(frames: Sequence[Buffer]) -> list[tuple[str, Any, tuple[int, ...]]]:
    return [(name, "uint8", (len(frame),)) for name, frame in zip(("config", "tensors"), frames, strict=True)]


def _config_text(config: Any) -> bytes:
    if not isinstance(config, Mapping):
        raise bad("config", f"config: {kind(config)}; a mapping, such as LoraConfig.to_dict() of PEFT", "")
    try:
        # PEFT has sets, and enumerations of texts.
        return json.dumps(dict(cast("Mapping[str, Any]", config)), default=_plain, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise bad("config", f"config: {error}; values that JSON has", "") from None


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(cast("set[str]", value))
    raise TypeError(f"{type(value).__name__} is no value of JSON")


def _packed(tensors: Any) -> bytes:
    """The content of a safetensors file with these tensors."""
    if isinstance(tensors, bytes):
        return tensors
    if not isinstance(tensors, Mapping) or not tensors:
        shown = "none" if isinstance(tensors, Mapping) else kind(cast("object", tensors))
        raise bad("tensors", f"tensors: {shown}; tensors by name, or the bytes of a safetensors file", "")
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for name, tensor in cast("Mapping[str, Any]", tensors).items():
        found = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        dtype = _DTYPES.get(found)
        if dtype is None:
            shown = f"{kind(tensor)} of {found}" if found else kind(tensor)
            raise bad("tensors", f"tensors: {name!r:.80} is {shown}; tensors of {', '.join(_DTYPES)}", "")
        parts.append(_bytes_of(tensor))
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end := end + len(parts[-1])]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _bytes_of(tensor: Any) -> bytes:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).tobytes()
