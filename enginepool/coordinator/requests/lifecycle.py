"""Requests that were admitted, to their one final answer: outcomes, cancel, deadlines; `texts` has those of text."""

from collections.abc import Sequence

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.participants import with_worker
from enginepool.coordinator.core.request import Request, RunningBatch
from enginepool.coordinator.core.request_state import DONE, QUEUED, RUNNING
from enginepool.coordinator.core.transitions import enter_request
from enginepool.coordinator.requests.fitting import can_be_packed, refusal, sizes, too_late_to_truncate, truncate_waiting
from enginepool.coordinator.requests.generations import interrupted, stop
from enginepool.coordinator.requests.memory import charge, out_of_memory, too_large
from enginepool.coordinator.requests.parts import join_pieces, join_ranges
from enginepool.coordinator.requests.stream_messages import UnsentTokens
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import ErrorReply, FrameSpec, Message, Result, Timings, Usage

#: codes of a failed part that clients are told; all others become `engine_error`. Some of the others are about the link or the
#: whole pool: a client that gets one of these greets again, or pauses its requests to all groups.
_TOLD = frozenset({"malformed", "bad_request", "too_large", "unsupported"})


class RequestLifecycle:
    """The requests without an answer."""

    def __init__(self, core: Context) -> None:
        self.core = core
        self.unsent = UnsentTokens(core)

    def check(self, request: Request) -> bool:
        """Whether its group can serve it, as far as is known now. When it cannot, that is the answer."""
        group = request.group
        try:
            if request.work.truncation:
                truncate_waiting(request)
        except WireError as wrong:
            self.fail(request, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
            return False
        except MemoryError:
            self.no_memory(request)
            return False
        can = group.capabilities
        if again := too_late_to_truncate(request):
            self.shed(request, again)
        elif wrong := refusal(request.work, can):
            self.fail(request, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
        elif group.down:
            self.fail(request, "pool_down", group.down)
        elif group.weights_lost:
            self.fail(request, "needs_weights", group.weights_lost)
        elif wrong := too_large(request.work, can, request.client.max_message, self.core.config.limits):
            self.fail(request, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
        else:
            request.packs = can_be_packed(request.work, can)
            self._charge(request)
            return True
        return False

    def _charge(self, request: Request) -> None:
        """What the request and its answer take is known better now."""
        request.answer, held = charge(request.work, request.group.capabilities)
        more = held - request.held
        request.client.nbytes += more
        self.core.live_bytes += more
        self.core.levels.recharge(request, more)
        request.held = held

    # --- outcomes ------------------------------------------------------------------------------------------------------

    def outcome(self, batch: RunningBatch, e: ev.BatchDone) -> None:
        """Give each part of a finished batch to its request."""
        for (request, start, end), outcome in zip(batch.slices, e.outcomes, strict=True):
            rows = end - start
            if request.rows_back(rows):
                continue
            request.left -= rows
            if outcome.code:
                code = outcome.code if outcome.code in _TOLD else "engine_error"
                self.fail(request, code, outcome.message)
                continue
            if request.exact_version is not None and request.exact_version != e.version:
                self.put_back(request, [(start, end)])
                continue
            if isinstance(request.forwards, list):
                request.forwards.append(e.forwards)
            else:
                request.forwards = [e.forwards]
            if e.run_us > request.run_us:
                request.run_us = e.run_us
            if rows == request.work.rows:
                request.workers = batch.worker.named
                self._answer(request, e.version, outcome.specs, outcome.frames)
                continue
            if request.version is not None and request.version != e.version:
                self._start_over(request)
            request.version = e.version
            request.workers = with_worker(request.workers, batch.worker.name)
            piece = (start, outcome.specs, outcome.frames)
            if isinstance(request.pieces, list):
                request.pieces.append(piece)
            else:
                request.pieces = [piece]
            if not request.left:
                try:
                    specs, frames = join_pieces(request)
                except MemoryError:
                    self.no_memory(request)
                    continue
                self._answer(request, e.version, specs, frames)

    def _start_over(self, request: Request) -> None:
        """A part came from other weights than the earlier ones: those run again. One answer is of one version."""
        again = [(start, start + specs[0].shape[0]) for start, specs, _ in request.pieces]
        request.pieces, request.workers, request.version = (), [], None
        self.put_back(request, again)

    def put_back(self, request: Request, ranges: list[tuple[int, int]]) -> None:
        """Rows of a live request wait again, in their old place. The caller has taken flying rows off `flying`."""
        request.back = join_ranges([*request.back, *ranges])
        request.left = request.flying + request.waiting_rows()
        if request.state == RUNNING:
            enter_request(request, QUEUED)
        request.queue.push(request)

    def lost(self, batch: RunningBatch, reason: str) -> None:
        """Dissolve a batch whose worker is lost: its requests wait again, and run alone from now on. A generation does so only
        after a second loss."""
        for request, start, end in batch.slices:
            if request.generation is not None:
                interrupted(self, batch, lost=True)
                if batch.trial and request.state != DONE:
                    self.died_alone(request, reason)
                continue
            if request.rows_back(end - start):
                continue
            request.suspect = True
            self.put_back(request, [(start, end)])
            if batch.trial:
                self.died_alone(request, reason)

    def returned(self, batch: RunningBatch) -> None:
        """A worker did not take a batch: its rows wait again, and no request becomes a suspect."""
        for request, start, end in batch.slices:
            if request.generation is not None:
                interrupted(self, batch, lost=False)
            elif not request.rows_back(end - start):
                self.put_back(request, [(start, end)])

    def blame(self, recalled: list[tuple[Request, bool]], reason: str) -> None:
        """Requests that a worker ran when it was to empty its engine, and did not: they run alone from now on."""
        for request, alone in recalled:
            if request.state == DONE:
                continue
            if request.generation is not None and not alone:
                continue  # hundreds ran there, and one of them may have been the cause
            if not request.suspect:
                request.suspect = True
                # It was taken back and its group is held: it waits, and for no later version.
                request.group.suspects.push(request)
            if alone:
                self.died_alone(request, reason)

    def died_alone(self, request: Request, reason: str) -> None:
        """A worker died while it had nothing but this request: after `max_attempts` of them it is poisoned."""
        request.attempts += 1
        request.evidence = (*request.evidence, reason)
        if request.attempts >= self.core.config.restart.max_attempts:
            request.group.counts.poisoned += 1
            text = f"workers died {request.attempts} times while this request ran alone: {sizes(request)}"
            self.fail(request, "poisoned", text, evidence=request.evidence)

    # --- final answers -------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, version: int, specs: Sequence[FrameSpec], frames: Sequence[Buffer]) -> None:
        work = request.work
        queued_us = int((request.started - request.arrival) * 1e6)
        message = Result(
            request.id,
            version,
            request.forwards if isinstance(request.forwards, list) else list(request.forwards),
            Usage(work.rows, work.tokens),
            Timings(queued_us, request.run_us),
            list(specs),
            truncated=work.truncated,
            workers=request.workers,
        )
        self.finish_with(request, message, frames)

    def finish_with(self, request: Request, message: Message, frames: Sequence[Buffer]) -> None:
        """The final answer of a live request is this one, which is no error."""
        if (size := sum(map(len, frames))) > (limit := request.client.max_message):
            # Its client takes less than when it asked.
            self.fail(request, "too_large", f"the answer has {size} bytes; at most {limit}", limit=str(limit))
            return
        request.group.counts.answered += 1
        self._finish(request, message, frames)

    def fail(
        self, request: Request, code: str, message: str, *, field: str = "", limit: str = "", evidence: Sequence[str] = ()
    ) -> None:
        """The final answer of a live request is an error."""
        request.group.counts.failed += 1
        failure = ErrorReply(code, message, request.id, field=field, limit=limit, evidence=list(evidence))
        self._finish(request, failure, ())

    def shed(self, request: Request, failure: ErrorReply) -> None:
        """Take back the admission of a request: its client is told to send it again, and nothing of it is kept."""
        self._release(request)
        if request.client.link is not None:
            self.core.effects.append(ToClient(request.client.link, failure))
        self.core.wake(request.group)

    def withdraw(self, request: Request) -> None:
        """Forget a live request: what its client has sent now takes its place."""
        self._release(request)
        self.core.wake(request.group)

    def no_memory(self, request: Request) -> None:
        """The process has no memory for what this request needs now; its client sends it again."""
        self.shed(request, out_of_memory(request.id))

    def _finish(self, request: Request, message: Message, frames: Sequence[Buffer]) -> None:
        core = self.core
        client = request.client
        self._release(request)
        core.answers.add(client, request.id, request.work.digest, message, frames, core.now)
        if core.live_bytes + core.outboxes + core.answers.nbytes > core.config.limits.buffer_bytes:
            core.make_room(0, core.outboxes)
        if client.link is not None:
            core.effects.append(ToClient(client.link, message, frames))

    def _release(self, request: Request) -> None:
        """A live request leaves every list that it is in, and its charge is given back."""
        core = self.core
        client = request.client
        group = request.group
        work = request.work
        waited = request.state != RUNNING
        if request.generation is not None:
            stop(core, request)
            group.adapters.discard(request)
        enter_request(request, DONE)
        if waited and request.lane is not None:
            request.lane.forget()
        group.tokens -= work.tokens
        del client.live[request.id]
        del group.live[request]
        if group.cut:
            group.cut.pop(request, None)
        if request.exact_version is not None:
            group.exact.discard(request, request.exact_version)
        held = request.held
        client.nbytes -= held
        client.rows -= work.rows
        core.live_rows -= work.rows
        core.live_bytes -= held
        level = core.levels.by_priority[request.priority]
        level.rows -= work.rows
        level.nbytes -= held
        level.requests.pop(request, None)
        if request.deadline is not None:
            core.deadlines.forget()
        # A suspect may have an entry in the queue where it waited before. A tokenizer or an engine may be sent its rows again.
        if not request.flying and (request.lane is not None if waited else request.suspect):
            request.drop_payload()

    def cancel(self, e: ev.CancelAsked) -> None:
        """First handled wins: a request that has its answer keeps it."""
        client = self.core.client_of(e.link, e.id)
        if client is None:
            return
        request = client.live.get(e.id)
        if request is not None:
            self.fail(request, "cancelled", "the caller cancelled")
            self.core.wake(request.group)

    def acked(self, e: ev.Acked) -> None:
        """The client has these answers."""
        client = self.core.links.get(e.link)
        if client is None:
            return
        client.heard = self.core.now
        for id_ in e.ids:
            self.core.answers.drop(client, id_)

    def overdue(self) -> None:
        """Answer requests whose deadline has passed, wherever they are."""
        core = self.core
        for request in core.deadlines.due(core.now):
            if request.state != DONE:
                text = f"timeout_ms: no answer after {core.now - request.arrival:.3f} s{request.unmet}"
                self.fail(request, "deadline_exceeded", text, field="timeout_ms")
                core.wake(request.group)

    def fail_all(self, group: Group, code: str, message: str) -> None:
        """Every live request of a group gets this error."""
        for request in list(group.live):
            self.fail(request, code, message)

    def recheck(self, group: Group) -> None:
        """The capabilities of the group have changed: check the waiting requests against them."""
        moved = False
        for request in list(group.live):
            before = request.packs
            if request.state != RUNNING:
                self.check(request)
            else:
                request.packs = can_be_packed(request.work, group.capabilities)
            moved = moved or request.packs != before
        if moved:
            for queue in group.queues:
                queue.sort()

    def refit(self, group: Group) -> None:
        """Budgets are smaller than they were: a request that no worker takes any more is refused, also while it runs. It would
        wait without end if it came back to the queue."""
        self.recheck(group)
        for request in [request for request in group.live if request.state == RUNNING]:
            self.check(request)

    def reweigh(self, group: Group, before: int) -> None:
        """Other weights than those of version `before` are committed: requests that waited for them may run.

        Parts of earlier weights run again, which their version tells; but for where versions began again. Then every request
        is looked at: some wait for their version a second time.
        """
        if group.version <= before:
            for request in [request for request in group.cut if request.pieces]:
                self._start_over(request)
            held, version = group.version_queue, group.version
            again = [r for r in group.live if r.state == QUEUED and r.min_version > version and r.lane is not held]
            for request in again:
                held.push(request)
            if again:
                # Their entries leave at once: they may come back here, and no request stands in a queue twice.
                group.queue.sort()
                group.suspects.sort()
        for request in group.version_queue.due(group.version):
            request.queue.push(request)
