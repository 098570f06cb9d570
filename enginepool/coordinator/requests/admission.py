"""Admission: a request that comes in becomes one that waits, or is refused at once.

The order of the checks in `submit` is a promise: who are you (link), have I answered this already (duplicate), can a worker
serve it (group, limits), is there room (window, queue). So a resend is attached to its request even while the pool is full.

Who gets room, in items and in bytes:

1. A request of a client is admitted if the client then has at most as much as is left. Requests of lower priorities do not
   count against what is left. So n clients that want everything get a share of 1/(n + 1) each, and the same share is left for
   the next client. A client with more than that waits until other clients have their share.
2. If the queue is full of lower priorities, requests of lower priorities that were never sent to an engine are shed.
"""

from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.request import Client, Request
from enginepool.coordinator.operations.generate import GenerateWork
from enginepool.coordinator.requests.exact_version import passed
from enginepool.coordinator.requests.fitting import can_be_packed, fitting, refusal
from enginepool.coordinator.requests.generations import answer as answer_generation
from enginepool.coordinator.requests.generations import sent_again
from enginepool.coordinator.requests.lifecycle import RequestLifecycle
from enginepool.coordinator.requests.memory import charge, out_of_memory, too_large
from enginepool.coordinator.requests.reply_cache import KeptReply
from enginepool.coordinator.scheduling.batch_limits import RECENT_S, needs_as_much
from enginepool.protocol.errors import WireError
from enginepool.protocol.messages import ErrorReply


class Admission:
    """The way in."""

    def __init__(self, core: Context, requests: RequestLifecycle) -> None:
        self.core = core
        self.requests = requests

    def submit(self, e: ev.Submit) -> None:
        core = self.core
        work = e.work
        client = core.client_of(e.link, e.id)
        if client is None or self._known_already(client, e):
            return
        group = core.open_group(e.link, e.id, work.group)
        if group is None:
            return
        if work.text or work.truncation:
            try:
                work = fitting(work, group)
            except WireError as error:
                core.refuse(e.link, e.id, error.code, error.message, field=error.field, limit=error.limit)
                return
            except MemoryError:
                core.effects.append(ToClient(e.link, out_of_memory(e.id)))
                return
            e = replace(e, work=work)
        can = group.capabilities
        if wrong := refusal(work, can):
            core.refuse(e.link, e.id, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
            return
        if group.weights_lost:
            core.refuse(e.link, e.id, "needs_weights", group.weights_lost)
            return
        if e.exact_version is not None and e.exact_version < group.version:
            why, limit = passed(e.exact_version, group), str(group.version)
            core.refuse(e.link, e.id, "version_passed", why, field="version", limit=limit)
            return
        limits = core.config.limits
        answer, held = work.charge or charge(work, can)
        if 2 * work.rows > limits.queue_items:
            # Waiting would not help: it is more than an empty queue takes of one client.
            most = str(limits.queue_items // 2)
            text = f"items: {work.rows}; at most {most} in one request"
            core.refuse(e.link, e.id, "bad_request", text, field="items", limit=most)
        elif (answer > client.max_message or held > limits.window_bytes or work.text) and (
            wrong := too_large(work, can, client.max_message, limits)
        ):
            core.refuse(e.link, e.id, wrong.code, wrong.message, field=wrong.field, limit=wrong.limit)
        elif len(client.live) >= limits.window_requests:
            self._busy(e, group, "window_requests", "1 more request")
        elif client.nbytes + e.unread + held > limits.window_bytes:
            self._busy(e, group, "window_bytes", f"{held} more bytes")
        elif (
            client.rows + 2 * work.rows + core.live_rows > limits.queue_items
            or client.nbytes + e.unread + 2 * held + core.live_bytes + e.outboxes > limits.buffer_bytes
        ) and (bound := self._full(client, e, held)):
            self._busy(e, group, bound, f"{work.rows} more items" if bound == "queue_items" else f"{held} more bytes")
        else:
            core.make_room(held, e.outboxes)
            self._accept(client, group, e, answer, held)

    def _full(self, client: Client, e: ev.Submit, held: int) -> str:
        """A client would have more than is left. The bound without room, or "" where lower priorities make room."""
        core, rows = self.core, e.work.rows
        limits = core.config.limits
        free_rows = limits.queue_items - core.live_rows - rows
        free_bytes = limits.buffer_bytes - core.live_bytes - e.outboxes - held
        my_rows, my_bytes = client.rows + rows, client.nbytes + e.unread + held
        lower_rows, lower_bytes = core.levels.below(e.priority)
        if my_rows > free_rows + lower_rows:
            return "queue_items"
        if my_bytes > free_bytes + lower_bytes:
            return "buffer_bytes"
        if free_rows < 0 or free_bytes < 0:
            for request in core.levels.take(e.priority, -free_rows, -free_bytes):
                free_rows += request.work.rows
                free_bytes += request.held
                bound = "queue_items" if free_bytes >= 0 else "buffer_bytes"
                text = f"{bound}: a request of a higher priority has taken the room of this one"
                self.requests.shed(request, _busy(request.id, request.group, bound, getattr(limits, bound), text))
                self.core.refuse_for_room(bound, getattr(limits, bound))
        return "queue_items" if free_rows < 0 else "buffer_bytes" if free_bytes < 0 else ""

    def _known_already(self, client: Client, e: ev.Submit) -> bool:
        """Attach a resend to its request or its answer; refuse another content under the same id."""
        core = self.core
        live = client.live.get(e.id)
        kept = None if live is not None else core.answers.get(client, e.id)
        if live is not None:
            digest = live.work.digest
        elif kept is not None:
            digest = kept.digest
        elif core.updates and any(u.client is client and u.offer.id == e.id for u in core.updates.values()):
            digest = None
        else:
            return False
        if digest != e.work.digest:
            core.refuse(e.link, e.id, "id_reused", f"id: {e.id} was used before for another content", field="id")
        elif kept is not None and sum(map(len, kept.frames)) > client.max_message:
            limit = str(client.max_message)
            core.refuse(e.link, e.id, "too_large", f"the answer is longer than {limit} bytes", field="items", limit=limit)
        elif kept is not None and (group := core.group_of(e.work.group)) is not None and _must_read_first(core, e, kept):
            self._busy(e, group, "buffer_bytes", "an answer that is sent again")
        elif kept is not None:
            core.effects.append(ToClient(e.link, kept.message, kept.frames))
        elif live is not None and live.generation is not None and isinstance(e.work, GenerateWork):
            if not live.generation.continues(e.work):
                self.requests.withdraw(live)
                return False
            sent_again(core, live, e.work)
        return True

    def _busy(self, e: ev.Submit, group: Group, field: str, more: str) -> None:
        whose = "of this client" if field.startswith("window") else "of all clients"
        limit: int = getattr(self.core.config.limits, field)
        text = f"{field}: no room for {more} within the {limit} {whose}"
        self.core.effects.append(ToClient(e.link, _busy(e.id, group, field, limit, text)))
        if field in ("queue_items", "buffer_bytes"):
            self.core.refuse_for_room(field, limit)

    def _accept(self, client: Client, group: Group, e: ev.Submit, answer: int, held: int) -> None:
        core = self.core
        work = e.work
        core.seq += 1
        request = Request(client, group, e, answer, held, core.seq)
        client.live[e.id] = request
        group.live[request] = None
        request.packs = can_be_packed(work, group.capabilities)
        client.nbytes += held
        client.rows += work.rows
        core.live_rows += work.rows
        core.live_bytes += held
        level = core.levels.by_priority[e.priority]
        level.rows += work.rows
        level.nbytes += held
        level.requests[request] = None
        group.waiting += 1
        group.tokens += work.tokens
        if e.priority >= group.peak or core.now - group.peak_at > RECENT_S:
            group.peak, group.peak_at = e.priority, core.now
        if e.deadline is not None:
            core.deadlines.add(request, e.deadline)
        if e.exact_version is not None:
            group.exact.add(request, e.exact_version)
        if isinstance(work, GenerateWork) and work.adapter:
            group.adapters.add(request, work.adapter)
        if not request.left:
            answer_generation(self.requests, request)  # its client has every token, and not the answer
        elif work.text:
            request.queue.push(request)
        else:
            queue = group.version_queue if request.min_version > group.version else group.queue
            heads = queue.push(request)
            blocked = group.blocked
            # The common cases under load need no look at the workers: the head stays, or the new one needs as much. A head that
            # can be packed may fit now: whether it is follows from how many wait.
            if blocked is not None and blocked.lane is group.queue and not blocked.packs:
                if not heads:
                    return
                if needs_as_much(request, blocked, group.routing.least()):
                    group.blocked = request
                    return
        core.wake(group)


def _must_read_first(core: Context, e: ev.Submit, kept: KeptReply) -> bool:
    """Whether there is no room to send a kept answer again: no request is charged for it. Unread bytes may fill half of
    `buffer_bytes` this way. Once a quarter is full, an answer is sent only where as much as it, and as its client has not read,
    stays free for others."""
    nbytes, half = sum(map(len, kept.frames)), core.config.limits.buffer_bytes // 2
    return e.outboxes > half // 2 and e.unread + 2 * nbytes + e.outboxes > half


def _busy(id: int, group: Group, field: str, limit: int, text: str) -> ErrorReply:
    """To be sent again when about half of what waits is done, in 20 ms at the earliest and 5 s at the latest."""
    wait = group.speed.token_s * group.tokens / max(1, group.routing.open) / 2
    retry_after_ms = round(1000 * min(max(wait, 0.02), 5.0))
    return ErrorReply("busy", text, id, field=field, limit=str(limit), retry_after_ms=retry_after_ms)
