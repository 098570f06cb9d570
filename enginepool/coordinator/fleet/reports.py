"""What workers report: their stage, that they are ready, and the outcomes of their work."""

from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import KeepHistory, ToWorker
from enginepool.coordinator.core.secondary import WorkerLoaded
from enginepool.coordinator.core.transitions import confirm_epoch, end_batch, end_text, report_stage
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.checks import alone, differs, impossible, misfit, stranger, usual
from enginepool.coordinator.fleet.workers import WorkerRegistry, failed_to_start, put_text_back
from enginepool.coordinator.requests import exact_version, generations, texts
from enginepool.coordinator.requests.cached_prompts import count_cached
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.prompt_logprobs import take_prompts
from enginepool.coordinator.requests.routed_experts import take_experts
from enginepool.coordinator.scheduling.cost_model import ForwardCostModel
from enginepool.coordinator.scheduling.next_batch import count_done
from enginepool.coordinator.scheduling.oom_backoff import shrink
from enginepool.protocol.capabilities import halved
from enginepool.protocol.messages import Capabilities, ErrorReply, Idle, Pong, Ready, Stage


class WorkerReports:
    """Handles what registered workers report."""

    def __init__(self, core: Context, requests: RequestLifecycle, workers: WorkerRegistry) -> None:
        self.core = core
        self.requests = requests
        self.workers = workers

    def stage(self, worker: Worker, message: Stage) -> None:
        """A worker says what it does; a new stage has a new deadline."""
        if message.stage == "ready":  # only the message `ready` makes it so
            self._snapshot(worker, message.detail)
            return
        worker.detail = message.detail
        if worker.stage != message.stage:
            report_stage(self.core, worker, message.stage)

    def _snapshot(self, worker: Worker, missing: str) -> None:
        """A worker says why the committed weights have no snapshot, or "": they have one after all. Stagers of one host write
        the same file: what several of them say is logged once."""
        before, worker.missing_snapshot = worker.missing_snapshot, missing
        others = {other.missing_snapshot for other in worker.group.workers.values() if other is not worker}
        if missing not in ("", before, *others):
            self.workers.log(worker, f"worker {worker.name} could not save the committed weights: {missing}")
        elif before and not missing and not any(others):
            version = worker.group.version
            self.workers.log(worker, f"worker {worker.name}: the snapshot of weight version {version} is written")

    def ready(self, worker: Worker, message: Ready) -> None:
        """A worker's engine is ready. The first one of a group sets its limits."""
        group, can = worker.group, message.capabilities
        if not impossible(can):
            can = halved(can, max(0, group.halvings - can.halvings))
        configured, can = can.adapters, replace(can, adapters=tuple(sorted({*can.adapters, *group.adapters.committed})))
        if wrong := stranger(worker, can):
            failed_to_start(worker, wrong)
            self.workers.lose(worker, f"it does not fit: {wrong}", kill=True)
            return
        if can.halvings > group.halvings:
            # It was halved under an earlier coordinator.
            shrink(group, can.halvings)
            self.requests.refit(group)
        first = alone(worker)
        if worker.capabilities is None:
            where = f"process {worker.pid} on {worker.host}, weight version {message.version}"
            self.workers.log(worker, f"worker {worker.name} is ready: incarnation {worker.incarnation}, {where}")
        if worker.declared is None or _costs(worker.declared) != _costs(can):
            overlaps = group.config.forwards_in_flight > 1
            worker.pace, worker.packed_pace = (
                _model(known, costs, overlaps) for known, costs in zip(group.learned, _costs(can), strict=True)
            )
        worker.declared, worker.capabilities = message.capabilities, can
        worker.version, worker.digest, worker.committed = message.version, message.digest, message.committed
        worker.asleep = frozenset(message.asleep)
        worker.detail = ""
        group.adapters.configured = configured
        worker.adapters.say(message.adapters)
        group.adapters.stale = group.adapters.stale or bool(message.adapters or group.adapters.committed)
        report_stage(self.core, worker, "ready")
        known = group.capabilities
        if first:
            group.capabilities = can
            group.label_ids.clear()  # of another model, perhaps
        if worker.slot is not None:
            worker.slot.previous_end = ""
            worker.slot.was_ready, worker.slot.same_failures = True, 0
        group.down = ""
        if first and (known is None or differs(known, can)):
            self.requests.recheck(group)
        if not worker.holds:
            # It was loading weights of an earlier coordinator, and got work meanwhile, which it drops when it restores.
            self.workers.recall(worker)
        self.core.wake(group)
        self.core.secondary.append(WorkerLoaded(worker))

    def idle(self, worker: Worker, message: Idle) -> None:
        """A worker has dropped everything of earlier epochs."""
        if message.epoch == self.core.epoch:
            confirm_epoch(self.core, worker)

    def heard(self, e: ev.WorkerHeard) -> None:
        """A worker is alive, and may have read what it was sent."""
        worker = self.workers.of(e.link)
        if worker is None:
            return
        if e.at is not None:
            self.core.effects.append(ToWorker(e.link, Pong(e.at, self.core.epoch)))
        if e.unread < worker.unread_media:
            worker.unread_media = e.unread
            self.core.wake(worker.group)

    def done(self, e: ev.BatchDone) -> None:
        """A batch is finished. Unknown ids are of an earlier attempt, and dropped."""
        worker = self.workers.of(e.link)
        if worker is None:
            return
        batch = worker.batches.get(e.batch)
        if batch is None:
            return
        if wrong := misfit(batch, e):
            self.workers.lose(worker, f"its answer does not fit: {wrong}", kill=True)
            return
        group = worker.group
        end_batch(self.core, batch)
        worker.done += 1
        group.counts.batches += 1
        group.counts.forwards += e.forwards
        if e.forwards != 1:
            group.counts.split_batches += 1
        if batch.packed:
            group.counts.packed_batches += 1
        if group.first_answer is not None and worker.holds:
            record, since = group.first_answer
            record.phases["first_answer"] = int((e.now - since) * 1e6)
            group.first_answer = None
            self.core.effects.append(KeepHistory(group.name, list(group.history)))
        pace, other = (worker.packed_pace, worker.pace) if batch.packed else (worker.pace, worker.packed_pace)
        group.speed.add(e.run_us / 1e6, batch.cost, 0.0 if pace is None else pace.seconds(batch.cost, batch.rows))
        if pace is not None:
            # Next to sequences a batch also takes the time of their steps, which no number of the model stands for.
            fits = not worker.generations and usual(batch, e)
            pace.done(e.now, e.run_us / 1e6, batch.cost, batch.rows, fits=fits)
        if other is not None:
            # It learns nothing, and knows that the engine has computed something else until now.
            other.done(e.now, 0.0, 0, 0, fits=False)
        count_done(worker, e.now)
        self.requests.outcome(batch, e)

    def generated(self, e: ev.TokensGenerated) -> None:
        """A worker generated tokens. Those of its tasks are progress, which gives the oldest of its tasks more time."""
        worker = self.workers.of(e.link)
        if worker is None:
            return
        progress = any((e.epoch, step.task) in worker.batches and (step.count or step.reason) for step in e.steps)
        if e.version != worker.group.version:
            self.requests.unsent.send()
            exact_version.take_back(self.requests, worker, e)
        if wrong := self._details(worker, e) or generations.generated(self.requests, worker, e):
            self.requests.unsent.send()
            self.workers.lose(worker, wrong, kill=True)
            return
        if not progress:
            return
        worker.time_left = None
        if worker.generations:
            oldest, allowed = worker.oldest()[-1], self.core.config.timing.forward_s
            oldest.deadline, oldest.late = e.now + allowed, e.now + allowed / 2

    def _details(self, worker: Worker, e: ev.TokensGenerated) -> str:
        """What a worker says of prompts, with their first tokens, and of experts, with the last ones. Returns why no engine
        could have said it, or ""."""
        if (not e.cached and not e.prompts and not e.experts) or e.epoch != self.core.epoch:
            return ""
        self.requests.unsent.send()
        return count_cached(worker, e) or take_prompts(self.requests, worker, e) or take_experts(worker, e)

    def prefixes(self, e: ev.PrefixesReported) -> None:
        """A worker says what its engine has in its prefix cache."""
        worker = self.workers.of(e.link)
        if worker is not None:
            worker.group.prefixes.report(worker, cleared=e.cleared, removed=e.removed, stored=e.stored)

    def tokenized(self, e: ev.TextTokenized) -> None:
        """A worker answered a tokenizing task."""
        worker = self.workers.of(e.link)
        if worker is not None:
            texts.tokenized(self.requests, worker, e)

    def refused(self, worker: Worker, message: ErrorReply) -> None:
        """A worker did not take the batch or text with this number of this epoch, because it drains or is not ready. The work
        goes elsewhere, and a worker that does not drain registers again before it gets more."""
        if message.id is None:
            return
        task, draining = (self.core.epoch, message.id), message.code == "shutting_down"
        batch = worker.batches.get(task)
        text = end_text(self.core, worker, task)
        if batch is None and text is None:
            return
        report_stage(self.core, worker, "draining" if draining else "starting")
        if not draining:
            self.workers.refuse(worker.link, "hello_required", "register again: work was refused")
        if batch is not None:
            end_batch(self.core, batch)
            self.requests.returned(batch)
        if text is not None:
            put_text_back(text)


#: what a worker declares of batches of one kind: its pace, the milliseconds of such a forward, and those of the smallest one
_Costs = tuple[int, int, int]


def _costs(can: Capabilities) -> tuple[_Costs, _Costs]:
    """Of plain batches and of packed ones; a pace of 0: they do not matter."""
    packed_pace = (can.packed_pace or can.pace) if can.packs else 0
    return (can.pace, can.forward_ms, can.fixed_ms), (packed_pace, can.forward_ms, can.packed_fixed_ms)


def _model(learned: ForwardCostModel | None, costs: _Costs, overlaps: bool) -> ForwardCostModel | None:
    """The cost model of a worker. It begins with what was `learned` of the one before, if that was like what it declares."""
    if not costs[0]:
        return None
    declared = ForwardCostModel.declared(*costs, overlaps=overlaps)
    return learned.again() if learned is not None and learned.like(declared) else declared
