"""Questions about weights: what each worker holds, and what is in its engine, put together into one report."""

from collections.abc import Sequence

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.fan_out import FanOut, ready_workers
from enginepool.protocol.basis import MAX_CHUNK, MAX_FINDINGS, MAX_ID
from enginepool.protocol.manifest import worst
from enginepool.protocol.messages import Message, TaskId
from enginepool.protocol.messages.weight_reports import Inspect, Inspected, InspectWeights, WeightsReport, WorkerWeights


def inspect_weights(core: Context, fan_out: FanOut, e: ev.WeightsAsked) -> None:
    """A peer asks about weights. Needs no hello, like `status`."""
    message = e.message
    group = core.group_of(message.group)
    if group is None:
        core.unknown_group(e.link, message.id, message.group)
        return
    if message.what == "versions":
        report = report_of(group, message.id)
        report.workers = [_of(worker) for worker in group.workers.values()]
        core.effects.append(ToClient(e.link, report))
        return
    for field in ("offset", "count"):
        if not 0 <= (value := getattr(message, field)) <= MAX_ID:
            core.refuse(e.link, message.id, "bad_request", f"{field}: {value} is outside 0..{MAX_ID}", field=field)
            return
    ready, client = [worker for worker in ready_workers(group) if not worker.weights_asleep], core.links.get(e.link)
    if message.what == "tensor":
        ready = [worker for worker in ready if worker.holds][:1] or ready[:1]
    # Half of the longest message leaves room for everything else in it.
    most = (core.config.limits.max_message_bytes if client is None else client.max_message) // 8
    fan_out.ask(e.link, Inspection(group, message, most), ready, e.now + core.config.timing.update_inspect_s)


class Inspection:
    """A question about the weights in engines. `most`: elements of a tensor in one answer."""

    answer: type[Message] = Inspected
    settles = False

    def __init__(self, group: Group, message: InspectWeights, most: int) -> None:
        self.id = message.id
        self._message = message
        self._most = most
        self._report = report_of(group, message.id)
        self._frames: Sequence[Buffer] = ()

    def ask(self, task: TaskId, worker: Worker) -> Message:
        """The question to one worker."""
        asked = self._message
        if asked.what != "tensor":
            return Inspect(task, "validate" if asked.what == "validate" else "digest", asked.name)
        return Inspect(task, "tensor", asked.name, asked.offset, min(asked.count or MAX_CHUNK, MAX_CHUNK, self._most))

    def take(self, worker: Worker, answer: Inspected, frames: Sequence[Buffer]) -> None:
        """What its engine has."""
        row, report = _of(worker), self._report
        row.digest, row.findings, row.code, row.message = answer.digest, answer.findings, answer.code, answer.message
        report.workers.append(row)
        if answer.frames:
            report.dtype, report.frames, report.shape = answer.dtype, answer.frames, answer.shape
            self._frames = frames

    def give_up(self, worker: Worker, code: str, message: str) -> None:
        """It did not say."""
        row = _of(worker)
        row.digest, row.code, row.message = "", code, message
        self._report.workers.append(row)

    def settle(self) -> int:
        """Nothing follows from a look."""
        return 0

    def report(self) -> tuple[Message, Sequence[Buffer]]:
        """All rows, with as many findings as one message has room for."""
        workers = self._report.workers
        if sum(len(worker.findings) for worker in workers) > MAX_FINDINGS:
            for worker in workers:
                worker.findings = worst(worker.findings, max(1, MAX_FINDINGS // len(workers)))
        return self._report, self._frames


def report_of(group: Group, id: int) -> WeightsReport:
    """What the coordinator knows by itself."""
    weights = group.weights
    report = WeightsReport(id, group.name, group.committed_version, history=list(group.history))
    if not group.journal_behind:
        report.digest, report.publisher = weights.digest, weights.publisher
    return report


def _of(worker: Worker) -> WorkerWeights:
    if worker.capabilities is None:
        return WorkerWeights(worker.name, message=worker.stage)
    why = worker.missing_weights
    return WorkerWeights(worker.name, worker.version, worker.digest, code="needs_weights" if why else "", message=why)
