"""The operation `control`: a command to all workers of a group, and one answer with the outcome of each."""

import re
from collections.abc import Sequence
from typing import get_args

from msgspec.structs import replace

from enginepool.coordinator.core import events as ev
from enginepool.coordinator.core.context import Context
from enginepool.coordinator.core.effects import ToClient
from enginepool.coordinator.core.events import Buffer
from enginepool.coordinator.core.group import Group
from enginepool.coordinator.core.group_holds import ALL
from enginepool.coordinator.core.request import Client
from enginepool.coordinator.core.states import SlotState
from enginepool.coordinator.core.worker import Worker
from enginepool.coordinator.fleet.fan_out import FanOut, ready_workers
from enginepool.coordinator.fleet.holding import GroupHolding
from enginepool.coordinator.weights.publish_validation import outside
from enginepool.protocol.errors import CODES
from enginepool.protocol.messages import Message, TaskId
from enginepool.protocol.messages.control import Command, Commanded, Control, ControlReport, MemoryTag, WorkerOutcome

#: names of workers that an error lists
_LISTED = 8
#: a worker may take so long to write its weights into files
SAVE_S = 1800.0
#: the beginning of a client's id, of which a status shows 8 digits, and the client's number
_CLIENT = re.compile("([0-9a-f]{8,32})(?:-([0-9]{1,15}))?")


def control(core: Context, fan_out: FanOut, holding: GroupHolding, e: ev.ControlAsked) -> None:
    """Give the command to the workers that are ready. Needs no hello, like `status`."""
    message = e.message
    group = core.group_of(message.group)
    if message.command == "abort" and message.client and not (message.group or message.worker):
        _abort_of_client(core, holding, e, None)
        return
    if group is None:
        core.unknown_group(e.link, message.id, message.group)
        return
    if fan_out.is_open(e.link, message.id) or _refused(core, group, e):
        return
    # No worker is asked: it needs no room, of which others may leave none.
    if message.command == "abort" and message.client:
        _abort_of_client(core, holding, e, group)
        return
    if message.command == "abort":
        aborted = holding.abort(list(group.live), f"all requests of group {group.name!r} were aborted")
        core.effects.append(ToClient(e.link, ControlReport(message.id, group.name, message.command, aborted=aborted)))
        return
    if not fan_out.make_room(e.link, message.id):
        return
    if message.command == "save" and not message.worker:
        # One is enough: all have the same weights. Which one it is shows in the answer.
        ready = [worker for worker in ready_workers(group) if worker.holds and not worker.weights_asleep]
        if not ready:
            text = f"group {group.name!r}: no worker is ready with the committed weights"
            core.refuse(e.link, message.id, "pool_down", text, field="group")
            return
        message = replace(message, worker=min(ready, key=lambda worker: worker.busy).name)
    earlier = (one.question for one in reversed(fan_out.open))
    pause = next((one for one in earlier if isinstance(one, Commands) and one.pauses(group)), None)
    commands = Commands(group, message, holding, pause)
    unwritten = _hold(holding, group, message)
    seconds = SAVE_S if message.command == "save" else core.config.timing.update_inspect_s
    fan_out.begin(e.link, commands, commands.ready, e.now + seconds, unwritten)


def _abort_of_client(core: Context, holding: GroupHolding, e: ev.ControlAsked, group: Group | None) -> None:
    """End the requests of one client, or one of them, in `group` or in all."""
    asked = e.message
    named = _CLIENT.fullmatch(asked.client)
    found = [client for client in core.clients.values() if named is not None and _is_named(client, *named.groups())]
    if named is None or len(found) > 1:
        got = f"{asked.client[:40]!r}{f', with which {len(found)} ids begin' if len(found) > 1 else ''}"
        text = f"client: expected the first 8 or more of the 32 hex digits of its id, or its id in the status, got {got}"
        core.refuse(e.link, asked.id, "bad_request", text, field="client")
        return
    live = [request for client in found for request in client.live.values()]
    if asked.request is not None:
        live = [client.live[asked.request] for client in found if asked.request in client.live]
    chosen = [request for request in live if group is None or request.group is group]
    what = "all requests of this client were" if asked.request is None else "this request was"
    aborted = holding.abort(chosen, f"{what} aborted by an operator")
    name = "" if group is None else group.name
    core.effects.append(ToClient(e.link, ControlReport(asked.id, name, asked.command, aborted=aborted)))


def _is_named(client: Client, begin: str, number: str | None) -> bool:
    return client.id.hex().startswith(begin) and number in (None, str(client.number))


def _hold(holding: GroupHolding, group: Group, asked: Control) -> int:
    """Hold what the command stops, or let it go on. Returns the number of the `KeepHolds` that says so, or 0."""
    tags = frozenset[MemoryTag](asked.tags or get_args(MemoryTag))
    if asked.command == "sleep":
        return holding.sleep(group, asked.worker, tags)
    if asked.command == "wake":
        return holding.wake(group, asked.worker, tags)
    if asked.command == "pause":
        return holding.pause(group, asked.mode)
    return holding.resume(group) if asked.command == "resume" else 0


def _refused(core: Context, group: Group, e: ev.ControlAsked) -> bool:
    """Refuse what cannot be done at all."""
    asked = e.message
    names = [*(slot.name for slot in group.slots), *(w.name for w in group.workers.values() if w.slot is None)]
    if asked.worker and asked.worker not in names:
        listed = f"{', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}" or "no worker"
        text = f"worker: {asked.worker!r} is not a worker of group {group.name!r}, which has {listed}"
        core.refuse(e.link, asked.id, "bad_request", text, field="worker")
        return True
    if asked.worker and asked.command in ("pause", "resume", "abort"):
        core.refuse(e.link, asked.id, "bad_request", f"worker: {asked.command} is for a whole group", field="worker")
        return True
    if asked.mode != "abort" and asked.command != "pause":
        core.refuse(e.link, asked.id, "bad_request", f"mode: {asked.mode} goes with pause, got {asked.command}", field="mode")
        return True
    for name, given in (("client", bool(asked.client)), ("request", asked.request is not None)):
        if given and (asked.command != "abort" or not asked.client):
            needs = "abort" if asked.command != "abort" else "a client, whose id it is"
            core.refuse(e.link, asked.id, "bad_request", f"{name}: goes with {needs}, got {asked.command}", field=name)
            return True
    update = core.update_of(group)
    roots = group.config.save_roots
    if asked.command == "save" and (text := outside(asked.path, roots, "save_roots")):
        core.refuse(e.link, asked.id, "bad_request", text, field="path", limit=", ".join(roots) or "none")
        return True
    if asked.command in ("sleep", "save") and update is not None:
        cannot = "cannot sleep" if asked.command == "sleep" else "are not saved"
        text = f"group {group.name!r} takes weight version {update.offer.version}, and its engines {cannot} meanwhile"
        core.refuse(e.link, asked.id, "publishing", text, field="group")
        return True
    if asked.command == "wake" and asked.worker and ALL in group.holds.asleep:
        text = f"worker: all of group {group.name!r} sleeps; wake the group, or none of its workers"
        core.refuse(e.link, asked.id, "bad_request", text, field="worker")
        return True
    return False


class Commands:
    """One command, and the outcome of each worker of the group."""

    answer: type[Message] = Commanded

    def __init__(self, group: Group, message: Control, holding: GroupHolding, earlier: "Commands | None") -> None:
        """`earlier`: the last pause of engines of the group that has no outcome yet."""
        self.id = message.id
        self._message = message
        #: what was held before the command, and how many pauses had been undone
        self._group, self._holding, self._before = group, holding, group.holds
        self._undone = holding.undone[group.name]
        self._earlier, self._failed = earlier, False
        self.settles = self.pauses(group)
        #: the workers that are given the command
        self.ready = [worker for worker in ready_workers(group) if message.worker in (ALL, worker.name)]
        self._report = ControlReport(message.id, group.name, message.command, [])
        for worker in group.workers.values():
            if worker not in set(self.ready):
                self._not_ready(worker.name, worker.stage, works=worker.busy, may_work=not worker.epoch_confirmed)
        for slot in group.slots:
            if slot.worker is None and slot.state is not SlotState.RETIRED:
                stage = "starting" if slot.state is SlotState.UP else slot.state.value
                adopted = slot.state is SlotState.UP and slot.adopted
                self._not_ready(slot.name, stage, runs=slot.state is not SlotState.BACKOFF, may_work=adopted)

    def _not_ready(self, name: str, stage: str, *, runs: bool = True, works: bool = False, may_work: bool = False) -> None:
        """The outcome of a worker that is given no command. `runs`: its process may have memory. `works`: it has work.
        `may_work`: it may have work of an earlier coordinator, which it drops when it hears of this one."""
        asked = self._message
        if asked.worker not in (ALL, name):
            return
        row = WorkerOutcome(name, "pool_down", f"not ready: {stage}")
        if asked.command == "sleep" and not runs:
            row = WorkerOutcome(name, message="no process runs; it is started when it is woken")
        elif asked.command == "sleep":
            row.message += "; it sleeps once it is"
        elif asked.command == "wake":
            row.message += "; it takes its memory back once it is"
        elif (asked.command == "pause" and not (works or may_work)) or (asked.command == "resume" and not works):
            row.code = ""  # that is true of it already, or will be
        self._report.workers.append(row)

    def ask(self, task: TaskId, worker: Worker) -> Message:
        """The command to one worker."""
        asked = self._message
        tags = list(dict.fromkeys(asked.tags))
        return Command(task, asked.command, tags, asked.seconds, asked.steps, asked.path, asked.mode)

    def take(self, worker: Worker, answer: Commanded, frames: Sequence[Buffer]) -> None:
        """It is done, or failed."""
        code = answer.code if answer.code in CODES or not answer.code else "engine_error"
        self._report.workers.append(WorkerOutcome(worker.name, code, answer.message))

    def give_up(self, worker: Worker, code: str, message: str) -> None:
        """It is not known whether it was done."""
        self._report.workers.append(WorkerOutcome(worker.name, code, message))

    def pauses(self, group: Group) -> bool:
        """Whether it pauses the engines of this group: all of them or none."""
        return self._group is group and self._message.command == "pause" and self._message.mode != "abort"

    def settle(self) -> int:
        """Engines pause for a group or none does."""
        asked, rows = self._message, self._report.workers
        if not self.pauses(self._group):
            return 0
        if self._undone != self._holding.undone[self._group.name] and not self._group.holds.paused:
            # The engines were told to go on after they had answered this one.
            why = "another pause failed at a worker, and was undone with this one; ask again"
            self._report.workers = [row if row.code else WorkerOutcome(row.name, "busy", why) for row in rows]
            return 0
        if not any(row.code for row in rows):
            return 0
        self._failed = True
        while self._earlier is not None and self._earlier._failed:  # what it found was that pause, which does not hold either
            self._before, self._earlier = self._earlier._before, self._earlier._earlier
        number = self._holding.undo_pause(self._group, asked.mode, self._before)
        self._undone = self._holding.undone[self._group.name]
        return number

    def report(self) -> tuple[Message, Sequence[Buffer]]:
        """The rows in the order of the workers' names."""
        self._report.workers.sort(key=lambda outcome: outcome.name)
        return self._report, ()
