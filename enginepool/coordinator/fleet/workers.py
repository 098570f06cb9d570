"""The registered workers, and what happens to the work of a worker that is lost.

A lost worker never returns: the coordinator refuses its incarnation and kills its process group. Its slot starts the next
process only when the launcher has seen the whole process group end.

Another program started an external worker, so the pool cannot kill it. The coordinator tells it to end. If only its link was
silent, the coordinator tells it to register again under a new incarnation, with the model that it has loaded.

`deadlines` decides when a worker is so late that it is lost.
"""

from collections import deque
from collections.abc import Iterable

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToWorker
from enginepool.coordinator.core.events import Link
from enginepool.coordinator.core.request import Request
from enginepool.coordinator.core.request_state import TEXT
from enginepool.coordinator.core.transitions import end_batch, end_text, lose_worker
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.slots import WorkerSlots
from enginepool.coordinator.requests.generations import stop_tasks
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.texts import texts_lost
from enginepool.coordinator.scheduling.oom_backoff import back_off, halve
from enginepool.protocol.messages import Drain, ErrorReply, Exiting, Expired

#: how many refused incarnations are remembered
REFUSED = 65_536
#: seconds within which a worker that said goodbye must end, before it is killed
GOODBYE_S = 30.0


class WorkerRegistry:
    """The workers that have registered."""

    def __init__(self, core: Context, requests: RequestLifecycle, slots: WorkerSlots) -> None:
        self.core = core
        self.requests = requests
        self.slots = slots
        #: refused incarnations, and whether a silent link was the only reason
        self._refused: dict[str, bool] = {}
        self._refused_order: deque[str] = deque()

    def refuse(self, link: Link, code: str, message: str) -> None:
        self.core.effects.append(ToWorker(link, ErrorReply(code, message)))

    def is_refused(self, incarnation: str) -> bool:
        """Whether the incarnation is refused."""
        return incarnation in self._refused

    def give_up(self, link: Link, incarnation: str, reason: str) -> None:
        """Tell a process that its incarnation is refused, and whether it may register under another one."""
        if self._refused.get(incarnation):
            self.core.effects.append(ToWorker(link, Expired(incarnation, reason)))
        else:
            self.refuse(link, "superseded", f"incarnation {incarnation} was given up: {reason}")

    def of(self, link: Link) -> Worker | None:
        """The worker on `link`, which has just sent a message. A link without a registration is told so."""
        worker = self.core.worker_links.get(link)
        if worker is None:
            self.refuse(link, "hello_required", "this link has not registered with this coordinator")
            return None
        worker.heard = self.core.now
        return worker

    def recall(self, worker: Worker, *, streams: bool = True) -> list[tuple[Request, bool]]:
        """Take back all work from a worker, or all but the sequences that it generates. Late answers have unknown ids then. No
        request becomes a suspect.

        Returns the requests that the worker had, and whether each of them ran alone there.
        """
        found: list[tuple[Request, bool]] = []
        if streams:
            self.recall_streams(worker)
        for batch in list(worker.batches.values()):
            if batch.slices[0][0].generation is not None:
                continue
            found += [(request, batch.trial) for request, _, _ in batch.slices]
            end_batch(self.core, batch)
            self.requests.returned(batch)
        trial = worker.group.trial
        for task in worker.texts:
            alone = trial is not None and trial.id == task
            text = end_text(self.core, worker, task)
            if text is not None:
                found.append((text, alone))
                put_text_back(text)
        return found

    def recall_streams(self, worker: Worker) -> None:
        """Take back all sequences from a worker, which stops them. They go on elsewhere, or there, after their last token."""
        tasks = [batch for batch in worker.batches.values() if batch.slices[0][0].generation is not None]
        for batch in tasks:
            end_batch(self.core, batch)
            self.requests.returned(batch)
        worker.time_left = None  # whether its engine works shows what it is asked next
        stop_tasks(self.core, tasks)

    def give_time(self, worker: Worker) -> None:
        """Its engine stood still: the work that it has begins to be late from now on."""
        allowed, worker.time_left = self.core.config.timing.forward_s, None
        for batch in worker.batches.values():
            batch.deadline, batch.late = self.core.now + allowed, self.core.now + allowed / 2

    # --- loss ----------------------------------------------------------------------------------------------------------

    def broken(self, e: ev.WorkerBroken) -> None:
        """A worker sent an invalid message, or does not read its messages."""
        worker = self.of(e.link)
        if worker is not None:
            self.lose(worker, e.reason, kill=True, silent=e.silent)

    def bye(self, worker: Worker, message: Exiting) -> None:
        """A worker ends. A worker that failed is killed with all its processes. A drained worker gets GOODBYE_S to end."""
        slot = worker.slot
        if message.out_of_memory:
            self._out_of_memory(worker)
        if message.failed:
            failed_to_start(worker, message.reason)
        self.lose(worker, message.reason, kill=message.failed, own=True)
        if slot is not None and not message.failed:
            slot.end_reason = message.reason
            slot.due = self.core.now + GOODBYE_S
        if slot is not None:
            slot.unstartable = message.permanent

    def _out_of_memory(self, worker: Worker) -> None:
        """The engine of `worker` ran out of memory in a batch. If smaller batches may help, the loss counts neither against
        requests nor against the slot."""
        smaller = halve(worker, self.core.now)
        back_off(self.core, worker)
        if smaller:
            worker.group.counts.lost_batches += len(worker.batches)
            self.recall(worker)
            self.requests.refit(worker.group)
            if worker.slot is not None:
                worker.slot.loss_excused = True

    def lose(
        self, worker: Worker, reason: str, *, kill: bool, own: bool = False, silent: bool = False, tell: bool = True
    ) -> None:
        """Lose a worker: its requests leave its batches, and its process is killed unless it has ended.

        Args:
            reason: a clause about the worker; with `own`, the reason that the worker itself gave.
            silent: only its link failed.
            tell: tell an external worker that it is lost.
        """
        core, group = self.core, worker.group
        count = len(worker.batches)
        said = f"incarnation {worker.incarnation}, {count} batch{'' if count == 1 else 'es'} in flight"
        if worker.slot is None:
            said += f", process {worker.pid} on {worker.host}, connected for {core.now - worker.joined:.0f} s"
        planned = (own and not kill) or (worker.slot is not None and worker.slot.planned_restart == "ending")
        self.log(worker, f"worker {worker.name} {'ends' if planned else 'is lost'}: {reason} ({said})")
        if planned:
            self.recall_streams(worker)  # they take longer than a drain, and are no cause of this end
        lose_worker(core, worker, reason)
        if worker.pace is not None:
            group.learned = worker.pace, worker.packed_pace
        batches = list(worker.batches.values())
        group.counts.lost_batches += len(batches)
        texts_lost(self.requests, worker, reason)
        for batch in batches:
            end_batch(core, batch)
            self.requests.lost(batch, reason)
        self._remember(worker.incarnation, silent=silent and worker.slot is None)
        if worker.slot is None:
            group.lost_external.append((core.now, worker, reason))
            if group.no_worker and not core.draining:
                self.log(worker, f"group {group.name}: {group.no_worker}; requests that wait: {group.waiting}")
            if tell:
                self.give_up(worker.link, worker.incarnation, reason)
            self.slots.maybe_down(group)
        elif kill:
            self.slots.end(worker.slot, reason, own=own)

    def log(self, worker: Worker, text: str) -> None:
        """Log a line about a worker. External workers can connect and leave at any rate: their lines have a budget."""
        self.core.log(text, "external" if worker.slot is None else "")

    def _remember(self, incarnation: str, *, silent: bool = False) -> None:
        if incarnation in self._refused:
            return
        self._refused[incarnation] = silent
        self._refused_order.append(incarnation)
        if len(self._refused_order) > REFUSED:
            del self._refused[self._refused_order.popleft()]

    def ended_before(self, incarnations: Iterable[str]) -> None:
        """Refuse workers that had ended when this coordinator began: what they sent it before may be read now."""
        for incarnation in incarnations:
            self._remember(incarnation)

    def exited(self, e: ev.WorkerExited) -> None:
        """The whole process group of a worker has ended. Its slot may start the next process."""
        slot = next((slot for slot in self.core.slots if slot.incarnation == e.incarnation), None)
        if slot is None:
            return
        worker = slot.worker
        if e.failed and not slot.start_failure and (worker is None or worker.capabilities is None):
            slot.start_failure = e.reason
        if worker is not None:
            if e.out_of_memory:
                self._out_of_memory(worker)
            self.lose(worker, e.reason, kill=False)
        # The last message of a worker may be read after its end was seen.
        self._remember(e.incarnation)
        if not slot.end_reason:
            slot.end_reason = e.reason
        if e.unstarted and not self.core.draining:
            self.slots.postpone(slot)
        else:
            self.slots.vacate(slot, e.permanent or slot.unstartable)

    # --- the end -------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Ask every worker that this pool started to end."""
        for worker in self.core.worker_links.values():
            if worker.slot is not None:
                self.core.effects.append(ToWorker(worker.link, Drain()))
        self.slots.drain()


def failed_to_start(worker: Worker, reason: str) -> None:
    """Record why a worker ended before it was ready."""
    if worker.slot is not None and worker.capabilities is None:
        worker.slot.start_failure = reason


def put_text_back(text: Request) -> None:
    """Put a text back into the queue for tokenizers."""
    if text.state == TEXT:
        text.queue.push(text)
