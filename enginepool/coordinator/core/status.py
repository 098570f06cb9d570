"""The status report: what the pool is doing, read off the machine's state."""

from collections import Counter
from heapq import nlargest
from itertools import islice
from math import inf
from typing import Any

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.events import StatusAsked
from enginepool.coordinator.core.group import LOST_S, Group
from enginepool.coordinator.core.group_holds import ALL
from enginepool.coordinator.core.request_state import QUEUED
from enginepool.coordinator.core.states import SlotState, WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.operations.limits import limits_of
from enginepool.protocol.errors import brief
from enginepool.protocol.messages import AdapterStatus, ClientStatus, GroupStatus, StatusReport, WorkerStatus

#: clients that are listed
_LISTED = 32
#: states of workers that get no work before they have what is committed
_WAITING = frozenset({WorkerState.RESTORING, WorkerState.MISSING_WEIGHTS, WorkerState.MISSING_ADAPTERS})


def report(core: Context, asked: StatusAsked) -> StatusReport:
    """The whole pool at this moment."""
    return StatusReport(
        epoch=core.epoch,
        id=asked.id,
        uptime_s=round(core.now - core.started, 3),
        clients=len(core.clients),
        answers_kept=len(core.answers),
        answers_bytes=core.answers.nbytes,
        client_unread_bytes=asked.client_unread_bytes,
        worker_unread_bytes=asked.worker_unread_bytes,
        pauses=asked.pauses,
        draining=core.draining,
        groups=[_group(core, group) for group in core.groups.values()],
        busiest=_busiest_in_turn(core),
    )


def _busiest_in_turn(core: Context) -> list[ClientStatus]:
    """The busiest clients, as they were at the first report of the events that came together: any peer may ask for the status
    in a few bytes, and many times in one turn."""
    if core.busiest is None:
        core.busiest = _busiest(core)
    return core.busiest


def _busiest(core: Context) -> list[ClientStatus]:
    """The clients with the most requests, which are in the order in which they were asked for."""
    # Thousands of clients without requests may be remembered.
    busy = [client for client in core.clients.values() if client.live]
    if not busy:
        return []
    clients = nlargest(_LISTED, busy, key=lambda client: len(client.live))
    # Clients choose their ids, and two may begin alike. The rest of an id is not shown: a peer that knows it could say hello
    # with it while the coordinator has forgotten the client.
    begins = Counter(id_[:4] for id_ in core.clients)
    return [
        ClientStatus(
            client.id.hex()[:8] + (f"-{client.number}" if begins[client.id[:4]] > 1 else ""),
            len(client.live),
            client.rows,
            first.id,
            round(core.now - first.arrival, 3),
        )
        for client in clients
        for first in islice(client.live.values(), 1)
    ]


def _group(core: Context, group: Group) -> GroupStatus:
    update = core.update_of(group)
    own = [_worker(core, slot.worker) if slot.worker is not None else _absent(slot) for slot in group.slots]
    external = [_worker(core, worker) for worker in group.workers.values() if worker.slot is None]
    items = core.config.limits.queue_items // 2
    return GroupStatus(
        name=group.name,
        queued=group.waiting,
        running=group.running,
        queued_tokens=group.tokens - group.running_tokens,
        oldest_s=round(core.now - min(core.now, _oldest(group)), 3),
        version=group.committed_version,
        answered=group.counts.answered,
        failed=group.counts.failed,
        batches=group.counts.batches,
        forwards=group.counts.forwards,
        split_batches=group.counts.split_batches,
        packed_batches=group.counts.packed_batches,
        lost_batches=group.counts.lost_batches,
        prompt_tokens=group.counts.prompt_tokens,
        cached_tokens=group.counts.cached_tokens,
        poisoned=group.counts.poisoned,
        model=group.config.model,
        down=group.down,
        digest=group.weights.digest,
        early=len(group.version_queue),
        update=f"{update.phase} of version {update.offer.version}" if update is not None else "",
        needs_weights=group.weights_lost,
        halvings=group.halvings,
        no_worker=group.no_worker,
        asleep=sorted(group.holds.asleep.get(ALL, ())),
        paused=group.holds.paused,
        workers=own + external + _lost(core, group),
        adapters=[
            AdapterStatus(one.name, one.version, one.digest, "" if one.nbytes else brief(one.path), one.nbytes)
            for one in sorted(group.adapters.committed.values(), key=lambda one: one.name)
        ],
        limits=limits_of(group.capabilities, items),
    )


def _oldest(group: Group) -> float:
    """When the request arrived that has waited longest, wherever it waits; infinity when none does. Before it are only those
    that run."""
    return next((request.arrival for request in group.live if request.state <= QUEUED), inf)


def _worker(core: Context, worker: Worker) -> WorkerStatus:
    slot = worker.slot
    return WorkerStatus(
        name=worker.name,
        incarnation=worker.incarnation,
        stage=_stage(worker),
        pid=worker.pid,
        host=worker.host,
        version=worker.version if worker.capabilities is not None else None,
        batches=len(worker.batches),
        tokens=worker.cost,
        sequences=worker.sequences,
        done=worker.done,
        prompt_tokens=worker.prompt_tokens,
        cached_tokens=worker.cached_tokens,
        silent_s=round(core.now - worker.heard, 3),
        detail=_detail("; ".join(filter(None, (worker.detail, worker.missing_snapshot))), slot),
        restarts=slot.restarts if slot is not None else 0,
        pace=worker.pace.tokens if worker.pace is not None else 0,
        forward_row_tokens=round(worker.pace.row) if worker.pace is not None else 0,
        asleep=sorted(worker.asleep),
        **_engine(worker),
    )


def _engine(worker: Worker) -> dict[str, Any]:
    """What it says of its engine, once it is loaded."""
    can = worker.capabilities
    if can is None:
        return {}
    return {"engine": can.engine, "device": can.device, "dtype": can.dtype, "parallel": can.parallel, "packed": can.packs}


def _lost(core: Context, group: Group) -> list[WorkerStatus]:
    """External workers that were lost a while ago."""
    return [
        WorkerStatus(
            name=worker.name,
            incarnation=worker.incarnation,
            stage="lost",
            pid=worker.pid,
            host=worker.host,
            done=worker.done,
            silent_s=round(core.now - worker.heard, 3),
            detail=reason,
        )
        for at, worker, reason in group.lost_external
        if core.now - at < LOST_S
    ]


def _stage(worker: Worker) -> str:
    """What it says, unless it waits for committed weights or adapters, or is to be restarted: nothing is served by it then."""
    if worker.stage == "ready" and worker.slot is not None and worker.slot.planned_restart:
        return "draining"
    if worker.state is WorkerState.ASLEEP:
        return "asleep"
    waits = worker.state in _WAITING or worker.group.journal_behind
    return "restoring" if worker.stage == "ready" and waits else worker.stage


def _detail(now: str, slot: WorkerSlot | None) -> str:
    """What it is doing, and what it is up against."""
    before = (
        f"the last one ended: {slot.previous_end}"
        if slot is not None and slot.previous_end and slot.previous_end != now
        else ""
    )
    plan = "it finishes its work, and is restarted then" if slot is not None and slot.planned_restart == "draining" else ""
    return "; ".join(filter(None, (now, plan, before)))


def _absent(slot: WorkerSlot) -> WorkerStatus:
    stage = "starting" if slot.state is SlotState.UP else slot.state.value
    if slot.state is SlotState.BACKOFF and slot.group.holds.wanted(slot.name):
        stage = "asleep"  # it is started when it is woken
    return WorkerStatus(
        name=slot.name,
        incarnation=slot.incarnation,
        stage=stage,
        detail=slot.retired_reason or _detail(slot.end_reason, slot),
        restarts=slot.restarts,
    )
