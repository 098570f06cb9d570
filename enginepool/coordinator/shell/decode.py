"""From wire messages to events. What cannot become an event raises `WireError`, or is a broken worker; nothing else escapes.

Pure: the shell hands over the frames of one multipart message and the time.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.adapter_events import AdapterAsked
from enginepool.coordinator.core.events import Buffer, Link
from enginepool.coordinator.operations.base import bad, check_request
from enginepool.coordinator.operations.table import OPERATIONS
from enginepool.coordinator.shell.peers import SAME_USER, Peer
from enginepool.coordinator.shell.worker_texts import failed_step, make_readable
from enginepool.coordinator.weights.adapter_checks import open_load
from enginepool.coordinator.weights.publish_validation import check_names, check_regions, open_publish
from enginepool.protocol import messages as m
from enginepool.protocol.adapters import MAX_LOADED, check_adapter_name, is_adapter_digest
from enginepool.protocol.errors import WireError
from enginepool.protocol.frames import check_frames, decode_header
from enginepool.protocol.generated import (
    check_columns,
    expert_shape,
    hidden_size,
    prompt_top,
    read_columns,
    read_experts,
    read_hidden,
    read_prompt_columns,
)
from enginepool.protocol.nesting import Values
from enginepool.protocol.roles import FROM_CLIENT

#: ranks of one worker; their sum over all members is sent to each
_MAX_RANKS = 65_536

_from_client = msgspec.msgpack.Decoder(m.FromClient)
_from_worker = msgspec.msgpack.Decoder(m.FromWorker)


class _Id(msgspec.Struct):
    id: int | None = None


class _Hello(msgspec.Struct):
    type: str = ""
    incarnation: int = 0


_id = msgspec.msgpack.Decoder(_Id)
_hello_number = msgspec.msgpack.Decoder(_Hello)


def client_event(
    now: float,
    link: Link,
    frames: Sequence[Buffer],
    max_bytes: int,
    peer: Peer = SAME_USER,
    pid: Callable[[], int | None] = lambda: None,
    values: Values | None = None,
) -> ev.Event:
    """The event that a client's message is, if `peer` may send it. `pid`: of the peer's process, where the transport tells it.
    `values`: how many its header may have; MAX_VALUES if it is left out.

    Raises:
        WireError: the message is refused; its text is for the client.
    """
    size = sum(map(len, frames))
    if size > max_bytes:
        raise WireError("too_large", f"the message has {size} bytes; at most {max_bytes}", field="frames", limit=str(max_bytes))
    message: m.Message = decode_header(_from_client, frames[0], values or Values(m.MAX_VALUES))
    make = _CLIENT.get(type(message))
    if make is None:
        raise WireError("unsupported", f"type: {type(message).__name__.lower()} is not for a coordinator", field="type")
    peer.may_send(message, FROM_CLIENT)
    if type(message) is m.Publish and message.new_run:
        peer.need("admin", "new_run", "true")
    elif type(message) is m.Control and message.command in m.OF_ADMINS:
        peer.need("admin", "command", message.command)
    elif type(message) is m.Sent:
        check_regions(message.regions, pid())
    return make(now, link, message, frames[1:])


def refusal(frame: Buffer, error: WireError) -> m.ErrorReply:
    """The answer to a client's message that was refused, with what of its frame 0 can be read: the request's id, or of a hello
    its incarnation."""
    id_ = incarnation = None
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        id_ = _id.decode(frame).id
    with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        incarnation = said.incarnation if (said := _hello_number.decode(frame)).type == "hello" else None
    return m.ErrorReply(error.code, error.message, id_, field=error.field, limit=error.limit, incarnation=incarnation)


def worker_event(now: float, link: Link, frames: Sequence[Buffer], peer: Peer = SAME_USER) -> ev.Event:
    """The event that a worker's message is; an invalid message is the event `WorkerBroken`.

    Raises:
        WireError: `protocol_version`: a worker that cannot be talked to; `forbidden`: a peer that is no worker.
    """
    peer.need("worker", "type", "the worker endpoint")
    try:
        message: m.Message = decode_header(_from_worker, frames[0])
        make_readable(message)
        return _WORKER[type(message)](now, link, message, frames[1:])
    except WireError as error:
        if error.code == "protocol_version":
            raise
        return ev.WorkerBroken(now, link, f"it sent an invalid message: {error.message}")


# --- clients -----------------------------------------------------------------------------------------------------------


def _hello(now: float, link: Link, hello: m.Hello, frames: Sequence[Buffer]) -> ev.Event:
    if hello.protocol != m.PROTOCOL_VERSION:
        text = f"protocol: version {hello.protocol} is not spoken here; version {m.PROTOCOL_VERSION} is"
        raise WireError("protocol_version", text, field="protocol", limit=str(m.PROTOCOL_VERSION))
    for field in ("client", "token"):
        value = getattr(hello, field)
        if len(value) != 16:
            raise bad(field, f"{field}: {len(value)} bytes; exactly 16", "16")
    if not 0 <= hello.incarnation <= m.MAX_ID:
        raise bad("incarnation", f"incarnation: {hello.incarnation} is outside 0..{m.MAX_ID}", str(m.MAX_ID))
    most = hello.max_message_bytes
    if most and most < m.MAX_HEADER_BYTES:
        text = f"max_message_bytes: {most}; 0, or at least {m.MAX_HEADER_BYTES}, which is the longest header"
        raise bad("max_message_bytes", text, str(m.MAX_HEADER_BYTES))
    if not 0 <= hello.epoch <= m.MAX_ID:
        raise bad("epoch", f"epoch: {hello.epoch} is outside 0..{m.MAX_ID}", str(m.MAX_ID))
    return ev.ClientHello(now, link, hello.client, hello.token, hello.incarnation, most, hello.epoch)


def _submit(now: float, link: Link, request: Any, frames: Sequence[Buffer]) -> ev.Event:
    check_request(request)
    work = OPERATIONS[type(request)].open(request, frames)
    deadline = None if request.timeout_ms is None else now + request.timeout_ms / 1000
    return ev.Submit(
        now, link, request.id, work, request.priority, deadline, request.min_version, exact_version=request.version
    )


def _restart(now: float, link: Link, restart: m.RestartWorker, frames: Sequence[Buffer]) -> ev.Event:
    check_names(restart, "group", "worker", "incarnation")
    return ev.RestartAsked(now, link, restart.id, group=restart.group, worker=restart.worker, incarnation=restart.incarnation)


def _publish(now: float, link: Link, publish: m.Publish, frames: Sequence[Buffer]) -> ev.Event:
    manifest = open_publish(publish, frames)
    digest = hash((msgspec.msgpack.encode(publish), *frames))
    return ev.PublishAsked(now, link, publish, manifest, tuple(frames), digest)


def _said(now: float, link: Link, message: Any, frames: Sequence[Buffer]) -> ev.Event:
    return ev.PublisherSaid(now, link, message)


def _control(now: float, link: Link, command: m.Control, frames: Sequence[Buffer]) -> ev.Event:
    check_names(command, "group", "worker", "path")
    if not 0 < command.seconds <= m.MAX_PROFILE_S:
        text = f"seconds: {command.seconds:g}; more than 0, at most {m.MAX_PROFILE_S}"
        raise bad("seconds", text, str(m.MAX_PROFILE_S))
    if not 0 <= command.steps <= m.MAX_PROFILE_STEPS:
        text = f"steps: {command.steps} is outside 0..{m.MAX_PROFILE_STEPS}"
        raise bad("steps", text, str(m.MAX_PROFILE_STEPS))
    return ev.ControlAsked(now, link, command)


def _asked(now: float, link: Link, question: m.InspectWeights, frames: Sequence[Buffer]) -> ev.Event:
    check_names(question, "name")
    return ev.WeightsAsked(now, link, question)


def _load_adapter(now: float, link: Link, message: m.LoadAdapter, frames: Sequence[Buffer]) -> ev.Event:
    open_load(message, frames)
    return AdapterAsked(now, link, message, tuple(frames))


def _unload_adapter(now: float, link: Link, message: m.UnloadAdapter, frames: Sequence[Buffer]) -> ev.Event:
    check_adapter_name(message.name)
    return AdapterAsked(now, link, message)


_CLIENT: dict[type, Callable[[float, Link, Any, Sequence[Buffer]], ev.Event]] = {
    m.Hello: _hello,
    **dict.fromkeys(OPERATIONS, _submit),
    m.Cancel: lambda now, link, message, _: ev.CancelAsked(now, link, message.id),
    m.Credit: lambda now, link, message, _: ev.CreditGiven(now, link, message.id, message.taken),
    m.Ack: lambda now, link, message, _: ev.Acked(now, link, message.ids),
    m.Goodbye: lambda now, link, message, _: ev.ClientLeft(now, link),
    m.Status: lambda now, link, message, _: ev.StatusAsked(now, link, message.id),
    m.RestartWorker: _restart,
    m.Publish: _publish,
    m.Renew: _said,
    m.Sent: _said,
    m.Commit: _said,
    m.AbortUpdate: _said,
    m.InspectWeights: _asked,
    m.Control: _control,
    m.LoadAdapter: _load_adapter,
    m.UnloadAdapter: _unload_adapter,
    m.Ping: lambda now, link, message, _: ev.Heard(now, link, message.at),
    m.Pong: lambda now, link, message, _: ev.Heard(now, link, proof=message.at),
}


# --- workers -----------------------------------------------------------------------------------------------------------


def _register(now: float, link: Link, register: m.Register, frames: Sequence[Buffer]) -> ev.Event:
    if register.protocol != m.PROTOCOL_VERSION:
        raise WireError("protocol_version", f"protocol: version {register.protocol} is not spoken here", field="protocol")
    # Status reports have these, and refused incarnations are remembered.
    check_names(register, "group", "incarnation", "host")
    return ev.WorkerRegistered(now, link, register.group, register.incarnation, register.pid, register.host, register.epoch)


def _done(now: float, link: Link, done: m.Done, frames: Sequence[Buffer]) -> ev.Event:
    outcomes: list[ev.Outcome] = []
    at = 0
    for part in done.parts:
        mine = frames[at : at + len(part.frames)]
        at += len(mine)
        check_frames(part.frames, mine)
        outcomes.append(ev.Outcome(part.frames, mine, part.code, part.message))
    if at != len(frames):
        raise WireError("malformed", f"frames: the parts list {at} and {len(frames)} came", field="frames")
    return ev.BatchDone(now, link, done.batch, outcomes, done.version, done.forwards, done.run_us)


def _progress(now: float, link: Link, progress: m.GenerationProgress, frames: Sequence[Buffer]) -> ev.Event:
    check_frames(progress.frames, frames)
    if not 0 <= progress.version <= m.MAX_ID:
        raise WireError("malformed", f"version: {progress.version} is outside 0..{m.MAX_ID}", field="version")
    total, failed = 0, False
    for step in progress.steps:
        if step.count < 0:
            raise WireError("malformed", f"steps: count {step.count} is negative", field="steps")
        if isinstance(step.matched, str):
            if (size := len(step.matched.encode())) > m.MAX_MATCHED:
                text = f"steps: matched has {size} bytes; at most {m.MAX_MATCHED}"
                raise WireError("malformed", text, field="steps")
            failed = failed or step.reason in m.STEP_FAILED
        total += step.count
    if failed:
        progress.steps = [failed_step(step) for step in progress.steps]
    found = [(spec.name, spec.dtype, spec.shape) for spec in progress.frames]
    tokens, logprobs = ("tokens", "int32", (total,)), ("logprobs", "float32", (total,))
    if progress.prompts or progress.experts or found not in ([tokens], [tokens, logprobs]):
        return _detailed(now, link, progress, frames, total)
    views = [memoryview(frame).cast("B") for frame in frames]
    chances = views[1] if len(views) > 1 else memoryview(b"")
    largest = int(np.frombuffer(views[0], np.uint32).max()) if total else -1
    return ev.TokensGenerated(
        now, link, progress.epoch, progress.version, progress.steps, views[0], chances, largest, progress.cached,
        lengths=progress.lengths,
    )  # fmt: skip


def _detailed(now: float, link: Link, progress: m.GenerationProgress, frames: Sequence[Buffer], total: int) -> ev.Event:
    """`progress` that has more than tokens and their logprobs."""
    check_columns(progress.frames, total, progress.prompts, progress.experts)
    columns, top = read_columns(progress.frames, frames)
    ids = np.frombuffer(b"".join((frames[0], frames[2] if top else b"")), np.uint32)
    return ev.TokensGenerated(
        now, link, progress.epoch, progress.version, progress.steps, memoryview(frames[0]).cast("B"),
        memoryview(columns).cast("B"), int(ids.max()) if ids.size else -1, progress.cached, top or prompt_top(progress.frames),
        progress.prompts, read_prompt_columns(progress.frames, frames) if progress.prompts else b"", progress.lengths,
        read_hidden(progress.frames, frames), hidden_size(progress.frames) or 0, progress.experts,
        read_experts(progress.frames, frames), expert_shape(progress.frames, [rows for *_, rows in progress.experts]),
    )  # fmt: skip


def _prefix_blocks(now: float, link: Link, told: m.PrefixBlocks, frames: Sequence[Buffer]) -> ev.Event:
    check_frames(told.frames, frames)
    found = [(spec.name, spec.dtype, spec.shape[1:]) for spec in told.frames]
    if found != [("stored", "uint64", (2,)), ("removed", "uint64", ())]:
        raise WireError("malformed", "frames: expected stored, uint64 [n, 2], and removed, uint64 [m]", field="frames")
    count = sum(spec.shape[0] for spec in told.frames)
    if count > m.MAX_REPORTED_BLOCKS:
        most = str(m.MAX_REPORTED_BLOCKS)
        raise WireError("malformed", f"frames: {count} blocks; at most {most}", field="frames", limit=most)
    stored, removed = (np.frombuffer(frame, "<u8").tolist() for frame in frames)
    if 0 in removed or 0 in stored[1::2]:
        raise WireError("malformed", "frames: block 0; it stands for the block before the first one", field="frames")
    return ev.PrefixesReported(now, link, told.cleared, removed, list(zip(stored[::2], stored[1::2], strict=True)))


def _tokenized(now: float, link: Link, tokenized: m.Tokenized, frames: Sequence[Buffer]) -> ev.Event:
    check_frames(tokenized.frames, frames)
    t = tokenized
    return ev.TextTokenized(now, link, t.task, t.frames, frames, t.message, t.code, t.field, t.limit, t.truncated, t.labels)


def _worker_said(now: float, link: Link, message: Any, frames: Sequence[Buffer]) -> ev.Event:
    return ev.WorkerSaid(now, link, message)


def _inspected(now: float, link: Link, inspected: m.Inspected, frames: Sequence[Buffer]) -> ev.Event:
    check_frames(inspected.frames, frames)
    return ev.WorkerInspected(now, link, inspected, tuple(frames))


def _ready(now: float, link: Link, ready: m.Ready, frames: Sequence[Buffer]) -> ev.Event:
    if not all(0 <= number <= m.MAX_ID for number in ready.committed):
        raise WireError("malformed", f"committed: {list(ready.committed)} is outside 0..{m.MAX_ID}", field="committed")
    if (count := len(ready.adapters)) > MAX_LOADED:
        raise WireError("malformed", f"adapters: {count} are loaded; at most {MAX_LOADED}", field="adapters")
    return ev.WorkerSaid(now, link, ready)


def _prepared(now: float, link: Link, prepared: m.Prepared, frames: Sequence[Buffer]) -> ev.Event:
    if not 0 <= prepared.ranks <= _MAX_RANKS:
        raise WireError("malformed", f"ranks: {prepared.ranks} is outside 0..{_MAX_RANKS}", field="ranks")
    return ev.WorkerSaid(now, link, prepared)


def _adapter_changed(now: float, link: Link, changed: m.AdapterChanged, frames: Sequence[Buffer]) -> ev.Event:
    # The journal and each status report have it.
    if changed.digest and not is_adapter_digest(changed.digest):
        raise WireError("malformed", f"digest: {changed.digest[:80]!r}: expected 32 hexadecimal digits", field="digest")
    return ev.WorkerSaid(now, link, changed)


#: messages without frames and with nothing to check
_SAID = (
    m.Stage, m.Idle, m.Exiting, m.ErrorReply, m.Joined, m.Staged, m.WeightsLoaded, m.Restored, m.Commanded,
)  # fmt: skip
_WORKER: dict[type, Callable[[float, Link, Any, Sequence[Buffer]], ev.Event]] = {
    m.Register: _register,
    m.GetSettings: lambda now, link, message, _: ev.SettingsAsked(now, link, message.group),
    m.Ready: _ready,
    m.Prepared: _prepared,
    m.AdapterChanged: _adapter_changed,
    m.Done: _done,
    m.GenerationProgress: _progress,
    m.PrefixBlocks: _prefix_blocks,
    m.Tokenized: _tokenized,
    **dict.fromkeys(_SAID, _worker_said),
    m.Inspected: _inspected,
    m.Ping: lambda now, link, message, _: ev.WorkerHeard(now, link, message.at),
    m.Pong: lambda now, link, message, _: ev.WorkerHeard(now, link, proof=message.at),
}
