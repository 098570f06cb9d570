"""Messages about LoRA adapters that are loaded, replaced and unloaded while engines run."""

from typing import Literal

from enginepool.protocol.basis import FrameSpec, Message, TaskId


class LoadAdapter(Message, tag="load_adapter"):
    """Load `version` of the adapter `name` into all workers of `group`, in the place of an earlier version. It lies in
    `path`, a folder, or in the frames `config` and `tensors`, whose `digest` is given. Answered by `adapter_report`."""

    id: int
    name: str
    version: int
    group: str = ""
    path: str = ""
    digest: str = ""
    frames: list[FrameSpec] = []


class UnloadAdapter(Message, tag="unload_adapter"):
    """Unload the adapter `name` from all workers of `group`. Answered by `adapter_report`."""

    id: int
    name: str
    group: str = ""


class AdapterReport(Message, tag="adapter_report"):
    """The adapter `name` is committed: `version` and `digest` of it, or, after `unload_adapter`, none of it (version 0)."""

    id: int
    group: str
    name: str
    version: int = 0
    digest: str = ""


class ChangeAdapter(Message, tag="change_adapter"):
    """Load the adapter `name`, a version of one, from the folder `path`, whose content has this `digest` unless that is empty;
    or unload it. `stored`: the folder is the coordinator's own. Answered by `adapter_changed`."""

    task: TaskId
    action: Literal["load", "unload"]
    name: str
    path: str = ""
    digest: str = ""
    stored: bool = False


class AdapterChanged(Message, tag="adapter_changed"):
    """The answer to `change_adapter`. `digest`: of what was loaded. `code`, `message`: why it was not done."""

    task: TaskId
    digest: str = ""
    code: str = ""
    message: str = ""
