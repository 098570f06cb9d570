"""What must hold in the state of the coordinator between any two events. Tests and the simulator check it.

Each invariant stands in words next to its attribute in the product, as a `#:` comment.
"""

# pyright: reportPrivateUsage=false

from typing import Any

from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.machine import Machine
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.core.request_state import DONE, QUEUED, RUNNING, TEXT
from enginepool.coordinator.core.states import SlotState, WorkerState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.core.worker_slot import WorkerSlot
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.fitting import can_be_packed
from enginepool.coordinator.requests.reply_cache import ReplyCache
from enginepool.coordinator.requests.shedding import AdmissionLevels, _untouched
from enginepool.coordinator.scheduling.batches import _begin
from enginepool.coordinator.scheduling.cost_model import (
    FIXED_S,
    LEAST_TOKEN,
    MOST_FIXED_S,
    MOST_ROW_S,
    MOST_TOKEN,
    ROW_S,
    ForwardCostModel,
)
from enginepool.coordinator.scheduling.lanes import AWAY
from enginepool.coordinator.scheduling.queue import Queue
from enginepool.coordinator.scheduling.version_queue import VersionQueue
from enginepool.coordinator.weights.update import JOURNAL, PHASES, RESTART, Update
from tests.core.generation_invariants import check_generation, check_preemption

#: of workers that can serve a request


def check_adapters(machine: Machine, group: Group) -> None:
    """What requests, workers and the open change of a group say of adapters."""
    adapters, change = group.adapters, machine.adapters.changes.open.get(group.name)
    named = [(r.work.adapter, r) for r in group.live if isinstance(r.work, GenerateWork) and r.work.adapter]
    assert sorted((name, r.seq) for name, one in adapters.requests.items() for r in one) == sorted((n, r.seq) for n, r in named)
    assert all(adapters.requests.values()), "names without requests are kept"
    if group.capabilities is not None:
        assert group.capabilities.adapters == adapters.names, (group.capabilities.adapters, adapters.names)
    if change is not None and change.adapter is not None:
        known = adapters.committed.get(change.name)
        assert known is None or known.version < change.adapter.version, change
        assert (change.phase == "store") == (change.nbytes > 0), change
    for worker in group.workers.values():
        for batch in worker.batches.values():
            assert not batch.adapter or batch.adapter in {*adapters.configured, *worker.adapters.loaded}, (worker, batch)
        if worker.able:
            assert adapters.lacked(worker.adapters.loaded) is None, f"{worker} has not all adapters"


def check_machine(machine: Machine) -> None:
    """Every invariant of the whole machine."""
    core = machine.core
    assert not machine.requests.unsent._by_kind, "tokens that no client was sent"
    live = [request for client in core.clients.values() for request in client.live.values()]
    assert core.live_rows == sum([r.work.rows for r in live])
    stored = sum(change.nbytes for change in machine.adapters.changes.open.values())
    assert core.live_bytes == sum([r.held for r in live]) + stored
    check_levels(core.levels, live)
    check_replies(core.answers)
    for client in core.clients.values():
        check_client(client)
        assert (client.link is None) or core.links.get(client.link) is client, client
    for request in live:
        check_request(request)
    for link, worker in core.worker_links.items():
        assert worker.link == link and worker.group.workers.get(worker.incarnation) is worker, worker
        check_worker(worker)
    for group in core.groups.values():
        check_group(group)
        check_adapters(machine, group)
        update = core.update_of(group)
        on_hold = core.keep_workers or group.holds.whole or (update is not None and update.holds_group)
        assert group.on_hold == on_hold, (group.name, group.on_hold, update)
        if update is not None:
            assert update.group is group, update
            check_update(update)
        mine = [r for r in live if r.group is group]
        assert set(mine) == group.live.keys(), (group.name, len(mine), len(group.live))
        assert group.waiting + group.running == len(mine), (group.waiting, group.running, len(mine))
        assert group.tokens == sum([r.work.tokens for r in mine])
        assert group.running_tokens == sum([r.work.tokens for r in mine if r.state == RUNNING])
        for slot in group.slots:
            check_slot(slot)
        first = group.blocked
        if first is not None and first.state == QUEUED and first.lane is group.queue and not group.on_hold:
            assert _still_blocked(core, group), first
        check_preemption(core, group)


def check_group(group: Group) -> None:
    for queue in group.queues:
        check_queue(queue)
    check_version_queue(group.version_queue)
    entries = [request for queue in group.queues for lane in queue._lanes.values() for request in lane.requests()]
    entries += [request for _, _, request in group.version_queue._heap]
    tokenized = {worker.texts[task] for worker in group.workers.values() for task in worker.texts}
    answered = [request for request in entries if request.state == DONE and not request.flying]
    kept = [request for request in answered if request.work.frames and request not in tokenized]
    assert not kept, f"answered, and not charged: {kept}"
    batches = [batch for worker in group.workers.values() for batch in worker.batches.values()]
    for request in (request for request in entries if request.state == DONE):
        rows = sum(end - start for batch in batches for mine, start, end in batch.slices if mine is request)
        assert request.flying == rows, (request, rows)
    assert group.cut.keys() <= group.live.keys(), group.cut
    arrivals = [request.seq for request in group.live]
    assert arrivals == sorted(arrivals), group.name
    assert group.version == group.weights.version, group.name
    if group.weights_lost:
        assert not any(worker.able for worker in group.workers.values()), group.weights_lost
    for worker in group.workers.values():
        idle = worker.open and not worker.batches and not group.resume_at
        head = group.queue.head() if idle else None
        assert head is None, (group.name, worker, head)
        if worker.open and worker.capabilities is not None and worker.capabilities.mixed and not group.resume_at:
            kinds = {batch.slices[0][0].generation is not None for batch in worker.batches.values()}
            for sequences in {False, True} - kinds:
                lane = group.queue.head(sequences=sequences)
                assert lane is None, (group.name, worker, lane, "it waits for work of the other kind")
    if group.reserved_worker is not None:
        assert group.reserved_worker.state is WorkerState.RESERVED and group.trial is None, (group.reserved_worker, group.trial)
    if group.trial is not None:
        assert not group.trial.worker.open, group.trial
        assert group.trial.id in group.trial.worker.batches or group.trial.id in group.trial.worker.texts, group.trial
    if group.down:
        assert not any(queue.head() for queue in group.queues), group.down


def check_worker(worker: Worker) -> None:
    _check_sums(worker)
    assert (worker.stamp != 0) == worker.open, (worker, worker.stamp)
    if worker.pace is not None:
        check_cost_model(worker.pace)
    if worker.able or worker.state is WorkerState.LATE:
        assert worker.capabilities is not None and worker.stage == "ready" and worker.epoch_confirmed, worker
        assert worker.holds and not worker.missing_weights, worker
    if worker.asleep or worker.group.holds.wanted(worker.name):
        assert not worker.able and not worker.open, worker
    if worker.lost:
        assert not worker.batches and not worker.texts, worker
    assert worker.state is not WorkerState.RESTORING or not worker.generations, f"{worker} drops what it has"
    if worker.batches:
        assert worker.declared is not None and worker.epoch_confirmed, worker
        can = worker.declared
        assert worker.within(can), worker
    for batch in worker.batches.values():
        assert batch.worker is worker and batch.slices, batch
        if batch.trial:
            assert len(worker.batches) == 1 and len(batch.slices) == 1 and worker.group.trial is batch, batch
        if batch.slices[0][0].generation is not None:
            continue  # what one forward takes does not bound it
        if len(batch.slices) > 1 or batch.rows > 1:
            assert worker.declared is not None, batch
            [(request, _, _), *more] = batch.slices
            cached = not more and 0 < worker.declared.cached_query <= request.work.shared
            most = worker.declared.cached_tokens if cached else worker.declared.batch_tokens
            assert batch.cost <= most, batch
        assert worker.declared is not None and batch.rows <= worker.declared.batch_rows, batch
        if batch.packed:
            assert all(request.work.operation.packs(request.work, worker.declared) for request, _, _ in batch.slices), batch


def _check_sums(worker: Worker) -> None:
    if not worker.batches:
        assert worker.cost == worker.rows == 0 and not worker.priorities, worker
        assert worker.sequences == worker.sequence_tokens == worker.generations == 0, worker
    else:
        batches = worker.batches.values()
        assert worker.cost == sum([b.cost for b in batches]), worker
        assert worker.rows == sum([b.rows for b in batches]), worker
        tasks = [b for b in batches if b.slices[0][0].generation is not None]
        assert worker.generations == len(tasks), worker
        assert worker.sequence_tokens == sum([b.cost for b in tasks]), worker
        assert worker.sequences == sum([b.rows for b in tasks]), worker
        generating = [b.slices[0][0].priority for b in tasks]
        assert worker.priorities == {priority: generating.count(priority) for priority in generating}, worker
    assert worker.texts.nbytes == sum([request.work.nbytes for request, _ in worker.texts.short.values()]), worker
    assert all(request.long_text == long for long in (False, True) for request, _ in worker.texts.lanes[long].values()), worker
    assert len(worker.texts.long) <= 1, worker


def check_slot(slot: WorkerSlot) -> None:
    assert not slot.retired_reason or slot.state is SlotState.RETIRED, (slot.state, slot.retired_reason)
    assert slot.planned_restart in ("", "draining", "ending"), slot.planned_restart
    assert not slot.planned_restart or slot.incarnation, (slot.planned_restart, slot.state)
    assert not slot.was_ready or not slot.same_failures, (slot.was_ready, slot.same_failures)
    assert (slot.incarnation != "") == (slot.state in (SlotState.UP, SlotState.ENDING)), (slot.state, slot.incarnation)


def check_client(client: Client) -> None:
    assert client.nbytes == sum([r.held for r in client.live.values()]), client
    assert client.rows == sum([r.work.rows for r in client.live.values()]), client
    for id_, request in client.live.items():
        assert request.id == id_ and request.client is client and request.state != DONE, (client, request)


def check_request(request: Request) -> None:
    rows, state, group = request.work.rows, request.state, request.group
    left, flying, first, back = request.left, request.flying, request.next, request.back
    assert 0 <= first <= rows, request
    live = request.client.live.get(request.id) is request
    if state == DONE:
        assert not live, request
        return
    assert live, request
    waiting = rows - first
    if back:
        waiting += sum([end - start for start, end in back])
        holes = [row for range_ in back for row in range_]
        assert holes == sorted(set(holes)), (request, back)
    assert left == flying + waiting, (request, left, flying, first, back)
    assert left > 0, request
    if request.generation is not None:
        check_generation(request)
    assert request.packs == can_be_packed(request.work, group.capabilities), request
    if state == RUNNING:
        assert flying == left and not waiting, request
    else:
        assert waiting > 0, request
    assert (request.version is not None) == bool(request.pieces), (request, request.version)
    if state == QUEUED or (state == TEXT and request.lane is not None):
        assert request.lane is request.queue, request
    assert request in group.live, request
    if flying < left and (flying or request.pieces):
        assert request in group.cut, request


def check_update(update: Update) -> None:
    assert update.phase in PHASES, update
    assert update.members or update.phase == RESTART, update
    assert update.pending.keys() <= update.members.keys(), update
    members = update.members.values()
    if update.by_restart:
        for member in members:
            assert member.worker.slot is not None, update
            assert member.loaded == (member.restart == "ready"), (update, member)
            assert (member.worker.slot.uncommitted_weights is None) == (member.restart in ("", "leaving")), (update, member)
            assert member.restart != "leaving" or update.phase == RESTART, (update, member)
    elif not update.loading:
        assert not any(member.worker.lost for member in members), f"{update}: a member is lost and it goes on"
        assert not any(member.loaded or member.failure for member in members), update
    else:
        alive = [member.worker for member in members if not member.worker.lost]
        kept = {worker: worker.generations if update.keeps_generations else 0 for worker in alive}
        assert all(len(worker.batches) == kept[worker] for worker in alive), f"{update}: work during a load"
    if update.holds_group:
        assert update.commit_asked, f"{update}: held without a commit of the publisher"
    if update.holds_group and update.sends_bytes and not update.direct:
        digests = {member.digest for member in members}
        assert digests == {update.sent_digest}, f"{update}: {digests} were staged, {update.sent_digest} was sent"
        assert not any(finding.kind != "zero" for member in members for finding in member.findings), update
    if update.phase == JOURNAL:
        assert any(member.loaded for member in members) and not update.pending, update
        assert not update.direct or all(member.loaded for member in members), update
    assert (update.weights is not None) == (update.phase == JOURNAL), update


def check_queue(queue: Queue[Any]) -> None:
    assert queue.size == sum(len(lane.requests()) for lane in queue._lanes.values()), queue.size
    for signature, lane in queue._lanes.items():
        _check_heap(lane)
        listed = {line.priority: key for key, _, line in lane}
        assert listed == {p: line.listed for p, line in lane.lines.items() if line.listed is not None}, signature
        assert len(listed) == len(lane), signature
        assert lane.head is (lane[0][2][0][2][0] if lane else None), lane.head
        for key, priority, line in lane:
            assert priority == -line.priority and (not line.flows or key <= line.first()), (key, priority, line.keys)
        assert not lane or (lane[0][2].flows and lane[0][0] == lane[0][2].first()), lane[0]
        for priority, line in lane.lines.items():
            _check_heap(line)
            assert not line or line[0][2], priority
            turns = [id(flow) for _, _, flow in line if flow]
            assert sorted(turns) == sorted(id(flow) for flow in line.flows.values()), priority
            assert all(line.flows.values()) and (not line.flows or line.listed is not None), priority
            keys = len(line.keys) + len(line.late) - len(line.gone)
            assert keys == sum(map(len, line.flows.values())), priority
            assert list(line.keys) == sorted(line.keys), priority
            assert not line.gone or line.gone[0] > line.first(), (priority, line.gone[0])
            assert line.virtual <= line.level.virtual and line.level is queue._levels[priority], priority
            for client, flow in line.flows.items():
                order = [request.seq for request in flow]
                assert order == sorted(order), (priority, order)
                for request in flow:
                    if request.lane is queue and request.state <= QUEUED:
                        mine = AWAY if client.away else request.priority
                        assert request.client is client and priority == mine, (priority, request)
                        assert signature == request.work.signature | request.packs, (signature, request)
        assert lane.size == len(lane.requests()), (signature, lane.size)
    seen = [request.seq for request in queue.waiting()]
    assert len(seen) == len(set(seen)), "a request stands twice in a queue"


def check_version_queue(queue: VersionQueue[Any]) -> None:
    waiting = queue.waiting()
    assert len(queue) == len(waiting), (len(queue), len(waiting))
    assert all(request.lane is queue and request.state == QUEUED for request in waiting), waiting
    assert len({request.seq for request in waiting}) == len(waiting), "a request waits twice for its version"


def check_cost_model(model: ForwardCostModel) -> None:
    assert LEAST_TOKEN <= model._token <= MOST_TOKEN, model
    assert 0.0 <= model._row <= MOST_ROW_S / ROW_S and 0.0 <= model._fixed <= MOST_FIXED_S / FIXED_S, model
    assert 1 <= model.tokens <= model.said / LEAST_TOKEN and model.row >= 0.0, model
    assert 1 <= model.short <= model.tokens and model.idle_s >= -model.fixed_s, model


def check_replies(cache: ReplyCache) -> None:
    for client, shelf in cache._shelves.items():
        assert shelf.nbytes == sum([kept.nbytes for kept in shelf.kept.values()]), client
        assert shelf.nbytes < shelf.top == 1 << shelf.listed, client
        assert not shelf.listed or client in cache._by_size[shelf.listed], client
    listed = sum(map(len, cache._by_size))
    assert listed == sum(shelf.listed > 0 for shelf in cache._shelves.values()), "a client is listed twice"
    assert cache.nbytes == sum(shelf.nbytes for shelf in cache._shelves.values()), cache.nbytes
    assert cache.nbytes <= cache._max_bytes, cache.nbytes


def check_levels(levels: AdmissionLevels, live: list[Request]) -> None:
    for key, level in levels.by_priority.items():
        mine = [request for request in live if request.priority == key]
        assert level.rows == sum([request.work.rows for request in mine]), key
        assert level.nbytes == sum([request.held for request in mine]), key
        assert level.requests.keys() <= set(mine), key
        assert {request for request in mine if _untouched(request)} <= level.requests.keys(), key


def _still_blocked(core: Context, group: Group) -> bool:
    """Whether the head of the queue fits no worker, as `group.blocked` says."""
    kind = None if group.blocked is None or not group.mixed else group.blocked.generation is not None
    lane, worker = group.queue.head(sequences=kind), group.routing.least()
    if lane is None or lane.head is not group.blocked or group.suspects.size:
        return False
    if worker is None:
        return True
    assert lane.head is not None
    return _begin(core, group.queue, lane, worker) is None


def _check_heap(heap: list[Any]) -> None:
    for i in range(1, len(heap)):
        assert heap[(i - 1) // 2][:2] <= heap[i][:2], (i, heap[i])
