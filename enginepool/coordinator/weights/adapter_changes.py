"""Changes of adapters: a version of a LoRA adapter takes the place of the committed one, or none does.

    store → clear → load → journal → the end       of an adapter that came as tensors
            clear → load → journal → the end       of one in a folder
                           journal → the end       where one is unloaded

A change is clear to be loaded once no engine has anything under its name: an earlier change of the same version may have had
other content. Engines load the new version while they have the old one. Until the journal has taken the change, a failure ends
it: the new version is unloaded again, and the old one answers as before. Afterwards new sequences use the new version.
`worker_adapters` brings workers to what is wanted of them.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from msgspec.structs import replace

from enginepool.coordinator.core.adapter_events import AdapterAsked, AdapterStored, AdaptersWritten
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import DropStored, StoreAdapter, ToClient, WriteAdapters
from enginepool.coordinator.core.events import Event
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_weights import AdapterVersion
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.transitions import commit_adapter
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.fan_out import AGAIN_MS
from enginepool.coordinator.requests.exact_version import end_with_tokens
from enginepool.coordinator.requests.generations import StreamRequests
from enginepool.coordinator.weights.adapter_checks import misfit, why_not_loaded, why_not_unloaded
from enginepool.protocol.messages import ErrorReply, Message, TaskId
from enginepool.protocol.messages.adapters import AdapterReport, LoadAdapter, UnloadAdapter


class AdapterChange:
    """A change that is not committed. `adapter` None: the adapter is unloaded; its digest "": no worker has said what it
    loaded. `nbytes`: of its frames, which are charged until they are stored."""

    def __init__(self, id: TaskId, client: Client, question: int, group: Group, name: str, until: float) -> None:
        self.id = id
        self.client = client
        #: the client's id of it
        self.question = question
        self.group = group
        self.name = name
        self.until = until
        self.adapter: AdapterVersion | None = None
        self.phase: Literal["store", "clear", "load", "journal"] = "journal"
        self.nbytes = 0


class AdapterChanges:
    """At most one change in each group."""

    def __init__(self, core: Context, requests: StreamRequests) -> None:
        self.core = core
        self.requests = requests
        #: by the name of the group
        self.open: dict[str, AdapterChange] = {}
        #: by the type of an event, what takes it
        self.handlers: dict[type[Event], Callable[[Any], None]] = {
            AdapterAsked: self.asked,
            AdapterStored: self.stored,
            AdaptersWritten: self.written,
        }

    def asked(self, e: AdapterAsked) -> None:
        """A client loads an adapter, or unloads one."""
        core, message = self.core, e.message
        client = core.client_of(e.link, message.id)
        group = None if client is None else core.open_group(e.link, message.id, message.group)
        if client is None or group is None:
            return
        change = self.open.get(group.name)
        if change is not None:
            if (change.client, change.question) != (client, message.id):
                text = f"adapter {change.name} of group {group.name} is being changed"
                self._say(client, ErrorReply("busy", text, message.id, field="group", retry_after_ms=AGAIN_MS))
            return  # else it was sent again, on a new link
        known = group.adapters.committed.get(message.name)
        if isinstance(message, UnloadAdapter):
            wrong, done = why_not_unloaded(group, message), known is None
        else:
            done = known is not None and known.version == message.version and known.source == _source(message)
            wrong = None if done else why_not_loaded(core, client, group, e, self._stored())
        if wrong is not None:
            core.refuse(e.link, message.id, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
        elif done:  # by this client, which did not hear the answer
            self._say(client, _report(message.id, group, message.name))
        else:
            self._begin(client, group, e)

    def _stored(self) -> int:
        """Bytes of the adapters on the disk, with those of changes that are not over."""
        committed = (one for group in self.core.groups.values() for one in group.adapters.committed.values())
        candidates = (change.adapter for change in self.open.values() if change.adapter is not None)
        return sum(one.nbytes for one in (*committed, *candidates))

    def _begin(self, client: Client, group: Group, e: AdapterAsked) -> None:
        core, message = self.core, e.message
        until = core.now + 2 * core.config.timing.update_load_s
        change = AdapterChange(core.task_id(), client, message.id, group, message.name, until)
        self.open[group.name] = change
        if isinstance(message, UnloadAdapter):
            self._write(change)
            return
        nbytes = sum(map(len, e.frames))
        change.adapter = AdapterVersion(message.name, message.version, message.digest, message.path, nbytes)
        if not e.frames:
            change.phase = "clear"
            return
        change.phase, change.nbytes = "store", nbytes
        core.live_bytes += nbytes
        core.effects.append(StoreAdapter(change.id, group.name, change.adapter, *e.frames))

    def stored(self, e: AdapterStored) -> None:
        """Tensors lie in a folder that workers of this host can read."""
        change = self._of(e.change)
        self.core.live_bytes -= change.nbytes
        change.nbytes = 0
        assert change.adapter is not None
        if e.misfit:
            self.abort(change, "bad_request", e.misfit, field="digest")
            return
        if e.error:
            self.abort(change, "update_aborted", f"the adapter could not be stored: {e.error}")
            return
        change.adapter = replace(change.adapter, path=e.path)
        change.phase = "clear"

    def clear(self, group: Group) -> None:
        """Let the workers of `group` load the candidate, unless one of them has something else under its name. That is unloaded
        first: until then there is no candidate, and nothing of that name is wanted."""
        change = self.open.get(group.name)
        if change is None or change.adapter is None or change.phase not in ("clear", "load"):
            return
        name, all_ = change.adapter.engine_name, [worker.adapters for worker in group.workers.values()]
        if change.phase == "clear" and not any(one.has(name) for one in all_):
            change.phase = "load"
        elif any(name in one.unasked for one in all_):
            change.phase = "clear"

    def candidate(self, group: Group) -> AdapterVersion | None:
        """The version that workers of `group` load, or have loaded, and that is not committed."""
        change = self.open.get(group.name)
        return None if change is None or change.phase in ("store", "clear") else change.adapter

    def loaded(self, worker: Worker, adapter: AdapterVersion, digest: str) -> str:
        """The engine of a worker has loaded the candidate, what is committed, or a version that was given up meanwhile. Returns
        why the worker has to be lost, or ""."""
        name, group = adapter.engine_name, worker.group
        change, known = self.open.get(group.name), self.candidate(group)
        if known is None or known.engine_name != name:
            known = group.adapters.committed.get(adapter.name)
        elif change is not None and change.phase == "load":
            if not known.digest:
                change.adapter = replace(known, digest=digest)
            elif known.digest != digest:
                text = f"{worker.name} sees other files in {adapter.path} than another worker: copy the same ones to each host"
                self.abort(change, "weights_refused", text, field="path")
            return ""
        if known is None or known.engine_name != name or known.digest == digest:
            return ""
        return f"it has loaded other files as adapter {name} than those that are committed"

    def failed(self, worker: Worker, adapter: AdapterVersion, code: str, why: str) -> bool:
        """A worker did not load `adapter`. Returns whether that was the candidate, whose change ends with it."""
        change = self.open.get(worker.group.name)
        if change is None or change.adapter is None or change.adapter.engine_name != adapter.engine_name:
            return False
        if change.phase == "load":
            source = "tensors" if adapter.nbytes else "path"
            field = source if code == "weights_refused" else ""
            self.abort(change, code, f"{worker.name} did not load {adapter.engine_name}: {why}", field=field)
        return True

    def advance(self, members: Iterable[Worker], group: Group) -> None:
        """Journal the change of `group` once all of `members`, its workers that can load now, have loaded the candidate."""
        change = self.open.get(group.name)
        if change is None or change.phase != "load":
            return
        if wrong := misfit(group, change.name):
            # It began before a worker had said what engines these are.
            self.abort(change, wrong.code, wrong.message, field=wrong.field)
            return
        if change.adapter is None or not change.adapter.digest:
            return
        name = change.adapter.engine_name
        found = [name in worker.adapters.loaded for worker in members]
        if found and all(found):
            self._write(change)

    def watch(self) -> None:
        """A change whose workers never were ready ends."""
        for change in list(self.open.values()):
            if change.phase in ("clear", "load") and self.core.now >= change.until:
                self.abort(change, "update_aborted", "its workers were not ready in time")

    def _write(self, change: AdapterChange) -> None:
        change.phase = "journal"
        adapters = change.group.adapters.committed
        others = [one for one in adapters.values() if one.name != change.name]
        new = [] if change.adapter is None else [change.adapter]
        self.core.effects.append(WriteAdapters(change.id, change.group.name, [*others, *new]))

    def written(self, e: AdaptersWritten) -> None:
        """The journal has taken the change, or could not."""
        change, core = self._of(e.change), self.core
        if e.error:
            self.abort(change, "update_aborted", f"the journal could not be written: {e.error}")
            return
        group, adapter = change.group, change.adapter
        del self.open[group.name]
        commit_adapter(core, group, change.name, adapter)
        what = "unloaded" if adapter is None else f"loaded in version {adapter.version}"
        core.log(f"adapter {change.name} of {group.name} is {what}", "update")
        if adapter is None:
            text = f"adapter: {change.name!r} was unloaded"
            for request in list(group.adapters.requests.get(change.name, ())):
                if not end_with_tokens(self.requests, request):
                    self.requests.fail(request, "bad_request", text, field="adapter")
        self._say(change.client, _report(change.question, group, change.name))
        core.wake(group)

    def abort(self, change: AdapterChange, code: str, why: str, *, field: str = "") -> None:
        """What was committed before stays."""
        group, adapter = change.group, change.adapter
        del self.open[group.name]
        group.adapters.stale = True
        self.core.live_bytes -= change.nbytes
        if adapter is not None and adapter.nbytes:
            self.core.effects.append(DropStored(group.name, adapter))
        self.core.log(f"adapter {change.name} of {group.name} stays as it was: {code}: {why}", "update")
        self._say(change.client, ErrorReply(code, why, change.question, field=field))

    def _of(self, id: TaskId) -> AdapterChange:
        return next(change for change in self.open.values() if change.id == id)

    def _say(self, client: Client, message: Message) -> None:
        if client.link is not None:
            self.core.effects.append(ToClient(client.link, message))


def _source(message: LoadAdapter) -> str:
    return message.path or message.digest


def _report(id: int, group: Group, name: str) -> AdapterReport:
    known = group.adapters.committed.get(name)
    return (
        AdapterReport(id, group.name, name)
        if known is None
        else AdapterReport(id, group.name, name, known.version, known.digest)
    )
